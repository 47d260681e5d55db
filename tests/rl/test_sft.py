"""SFT: what is trained on, in which order, at which rate; and that a killed run ends in the same bytes."""

import json
import math

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl import checkpoint, seeding, sft
from rl.config import Config, load_recipe

pytestmark = pytest.mark.budget(30)


def tiny_model():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
            initializer_range=0.1,
        )
    )


def config(**overrides) -> Config:
    pairs = [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
    return load_recipe("mini-cpu", ["sft.epochs=3", "sft.batch_tokens=60", "sft.lr=3e-3", *pairs])


def copies(count):
    """Prompt of three random tokens, then the same three: learnable, and only by reading the prompt."""
    rng = seeding.rng(0, "copies")
    prompts = [[rng.randrange(1, 31) for _ in range(3)] for _ in range(count)]
    return [sft.Example([*prompt, 0, *prompt, 31], [4, 5, 6, 7]) for prompt in prompts]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_examples_keep_completion_tokens_and_cut_at_the_context():
    ids, mask = [1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1]
    assert sft.example(ids, mask, 100) == sft.Example(ids, [2, 3, 5])
    assert sft.example(ids, mask, 4) == sft.Example([1, 2, 3, 4], [2, 3])
    assert sft.example(ids, mask, 2) is None
    assert sft.example([1, 2], [1, 0], 100) is None  # nothing predicts the first token
    with pytest.raises(ValueError, match="2 ids and 1 mask"):
        sft.example([1, 2], [1], 100)


def test_epochs_hold_every_example_once_within_the_budget_and_differ():
    rng = seeding.rng(0, "lengths")
    lengths = [rng.randint(1, 40) for _ in range(60)]
    first, again = (sft.epoch_batches(lengths, 64, seed=1, epoch=0) for _ in range(2))
    second = sft.epoch_batches(lengths, 64, seed=1, epoch=1)
    assert first == again
    assert first != second
    for batches in (first, second):
        assert sorted(i for batch in batches for i in batch) == list(range(60))
        assert all(sum(lengths[i] for i in batch) <= 64 for batch in batches)
    assert sft.epoch_batches([100, 100], 64, 1, 0) in ([[0], [1]], [[1], [0]])


def test_the_learning_rate_rises_linearly_and_falls_as_a_cosine():
    rates = [sft.learning_rate(step, 100, 2.0, 0.1) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert rates[10] == 2.0
    assert rates[55] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.01
    assert sft.learning_rate(0, 1, 2.0, 0.0) == 2.0


def test_a_step_reports_the_mean_loss_over_trained_tokens_whatever_the_micro_batches():
    examples = copies(6)
    model = tiny_model().eval()
    with torch.no_grad():
        total, right = 0.0, 0
        for e in examples:
            logprobs = model(input_ids=torch.tensor([e.ids])).logits[0].double().log_softmax(-1)
            total -= sum(logprobs[p - 1, e.ids[p]].item() for p in e.target_positions)
            right += sum(int(logprobs[p - 1].argmax()) == e.ids[p] for p in e.target_positions)
    for limit in (1, 24, 4096):
        model = tiny_model().eval()
        settings = config(train__micro_batch_tokens=limit)
        optimizer = sft.make_optimizer(model, settings.optim, 1e-3)
        values = sft.train_step(model, optimizer, examples, settings, 1e-3)
        assert values["sft/loss"] == pytest.approx(total / 24, rel=1e-5)
        assert values["sft/accuracy"] == pytest.approx(right / 24)


def test_prompts_are_not_trained_on(tmp_path):
    """Two data sets that differ in the tokens after which nothing is trained give the same weights."""
    weights = []
    for last in (5, 9):
        model = tiny_model()
        sft.train(model, [sft.Example([1, 2, 3, last], [2])], config(), tmp_path / str(last))
        weights.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert torch.equal(*weights)


def test_training_learns_to_copy(tmp_path):
    examples = copies(60)
    sft.train(tiny_model(), examples, config(sft__epochs=25, sft__batch_tokens=120, sft__lr=1e-2), tmp_path)
    metrics = lines(tmp_path / "metrics.jsonl")
    assert [entry["step"] for entry in metrics] == list(range(1, len(metrics) + 1))
    assert metrics[0]["sft/loss"] > 3
    assert metrics[-1]["sft/loss"] < 1.5
    assert metrics[-1]["sft/accuracy"] > 0.5
    assert len(lines(tmp_path / "wall.jsonl")) == len(metrics)


def test_a_run_killed_within_an_epoch_ends_in_the_same_bytes(tmp_path, monkeypatch):
    examples = copies(20)
    whole = tiny_model()
    sft.train(whole, examples, config(), tmp_path / "whole")

    steps, plain = [], sft.train_step

    def killed(*args):
        steps.append(1)
        if len(steps) > 5:  # three steps an epoch: in the second
            raise KeyboardInterrupt
        return plain(*args)

    monkeypatch.setattr(sft, "train_step", killed)
    with pytest.raises(KeyboardInterrupt):
        sft.train(tiny_model(), examples, config(), tmp_path / "broken")
    monkeypatch.setattr(sft, "train_step", plain)
    assert checkpoint.load_newest(tmp_path / "broken" / "checkpoints")[0] == 1
    resumed = tiny_model()
    sft.train(resumed, examples, config(), tmp_path / "broken")
    for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes()
    names = [tmp_path / run / "metrics.jsonl" for run in ("whole", "broken")]
    assert names[0].read_bytes() == names[1].read_bytes()


def test_a_gradient_that_is_not_finite_says_what_to_do():
    model = tiny_model()
    model.model.embed_tokens.weight.data[0] = math.inf
    settings = config()
    with pytest.raises(FloatingPointError, match=r"lower sft\.lr"):
        sft.train_step(model, sft.make_optimizer(model, settings.optim, 1e-3), copies(2), settings, 1e-3)


def test_no_examples_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no example"):
        sft.train(tiny_model(), [], config(), tmp_path)


def test_a_finished_stage_returns_at_once(tmp_path, capsys):
    (tmp_path / "sft").mkdir()
    checkpoint.mark_done(tmp_path / "sft")
    sft.main(tmp_path)
    assert "done before" in capsys.readouterr().out
