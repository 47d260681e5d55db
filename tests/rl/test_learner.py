"""The learner on a tiny Qwen3: exact log-probs, gradients free of batching, and a bandit solved end to end."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3ForCausalLM

sys.path.append(str(Path(__file__).parent))

from tiny import config, random_rows, tiny_model, weights_of

from rl import seeding
from rl.advantages import advantages
from rl.batch import Row, rows_of
from rl.learner import Learner, plain_copy
from rl.policy import Policy
from rl.records import Trajectory, Turn

pytestmark = pytest.mark.budget(50)


def gradient(learner, rows, old=None):
    learner.gradient(rows, old)
    return torch.cat([p.grad.flatten() for p in learner.model.parameters()])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropies_match_the_models_own_logits_row_by_row(temperature):
    learner = Learner(tiny_model(), config(rollout__temperature=temperature, train__micro_batch_tokens=40))
    rows = random_rows(9, seed=1)
    stats = learner.evaluate(rows)
    for row, logprobs, entropies in zip(rows, stats.logprobs, stats.entropies, strict=True):
        with torch.no_grad():
            logits = learner.model(input_ids=torch.tensor([row.ids])).logits[0].double() / temperature
        full = logits.log_softmax(-1)
        expected = [full[p - 1, row.ids[p]].item() for p in range(row.start, len(row.ids))]
        spread = [-(full[p - 1].exp() * full[p - 1]).sum().item() for p in range(row.start, len(row.ids))]
        assert logprobs.tolist() == pytest.approx(expected, abs=1e-5)
        assert entropies.tolist() == pytest.approx(spread, abs=1e-5)
    everything = [value for row in stats.entropies for value in row.tolist()]
    assert stats.entropy() == pytest.approx(sum(everything) / len(everything), rel=1e-6)
    assert learner.evaluate([]).entropy() is None and learner.logprobs([]) == []


def test_importance_weights_multiply_each_tokens_gradient():
    rows = random_rows(4, seed=12)
    by_row = [torch.tensor(float(i)) for i in range(4)]
    by_token = [value.expand(len(row.rollout_logprobs)) for value, row in zip(by_row, rows)]
    learner = Learner(tiny_model(), config())
    learner.gradient(rows, None, by_row)
    got = torch.cat([p.grad.flatten() for p in learner.model.parameters()])
    scaled = [Row(r.ids, r.start, r.rollout_logprobs, i * r.advantage) for i, r in enumerate(rows)]
    expected = gradient(Learner(tiny_model(), config()), scaled)
    assert expected.norm() > 0.1
    assert torch.allclose(got, expected, rtol=0, atol=1e-6 * expected.norm().item())
    learner.gradient(rows, None, by_token)
    assert torch.equal(got, torch.cat([p.grad.flatten() for p in learner.model.parameters()]))


@pytest.mark.parametrize("with_old", [False, True])
def test_the_gradient_depends_on_neither_micro_batches_nor_order(with_old):
    rows = random_rows(12, seed=2)
    rows[3].masks.append("mrs")
    rows[5].advantage = None
    old = Learner(tiny_model(seed=9), config()).logprobs(rows) if with_old else None
    whole = gradient(Learner(tiny_model(), config(train__micro_batch_tokens=100000)), rows, old)
    assert whole.norm() > 0.1
    for limit in (1, 25, 60):
        parts = gradient(Learner(tiny_model(), config(train__micro_batch_tokens=limit)), rows, old)
        assert torch.allclose(parts, whole, rtol=0, atol=1e-5 * whole.norm().item())
    backwards = gradient(Learner(tiny_model(), config()), rows[::-1], old[::-1] if old else None)
    assert torch.allclose(backwards, whole, rtol=0, atol=1e-5 * whole.norm().item())


def test_the_gradient_is_the_policy_gradient_over_rows_counted_before_rejection():
    rows = random_rows(6, seed=3)
    rows[1].masks.append("prs")  # counts in the denominator, adds no gradient
    rows[2].advantage = None  # nobody's fault: doesn't count at all
    rows[4].advantage = 0.0  # counts, adds nothing
    got = gradient(Learner(tiny_model(), config(loss__scale=10.0)), rows)
    model = tiny_model()
    total = 0.0
    for row in (rows[0], rows[3], rows[5]):
        logprobs = model(input_ids=torch.tensor([row.ids])).logits[0].log_softmax(-1)
        total = total - row.advantage * sum(logprobs[p - 1, row.ids[p]] for p in range(row.start, len(row.ids)))
    (total / 5 / 10.0).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.allclose(got, expected, rtol=0, atol=1e-5 * expected.norm().item())


def test_the_loss_and_the_share_that_is_clipped_come_from_the_old_policy_token_by_token():
    """A second update on the same rows: ratios around 1, some beyond the clip; rows that don't train have no token."""
    rows = random_rows(7, seed=13)
    rows[2].masks.append("mrs")
    rows[4].advantage = 0.0
    learner = Learner(tiny_model(), config(loss__scale=10.0, train__micro_batch_tokens=30))
    rng = seeding.rng(0, "moved")
    moved = [[rng.gauss(0, 0.3) for _ in row.rollout_logprobs] for row in rows]
    new = learner.logprobs(rows)
    old = [logprobs - torch.tensor(shifts) for logprobs, shifts in zip(new, moved)]
    total, clipped, tokens = 0.0, 0, 0
    for row, shifts in zip(rows, moved):
        for shift in shifts if row.advantage and not row.masks else []:
            ratio = math.exp(shift)
            kept = min(ratio * row.advantage, min(max(ratio, 0.8), 1.28) * row.advantage)
            total, clipped, tokens = total - kept, clipped + (kept != ratio * row.advantage), tokens + 1
    assert 0 < clipped < tokens / 2
    metrics = learner.gradient(rows, old)
    assert metrics["policy/loss"] == pytest.approx(total / 7 / 10.0, rel=1e-4)
    assert metrics["policy/clip_share"] == pytest.approx(clipped / tokens)


@pytest.mark.parametrize(("most", "clips"), [(0.05, True), (1e6, False)])
def test_the_gradients_norm_is_clipped_to_the_settings_and_reported_as_it_was(most, clips):
    learner = Learner(tiny_model(), config(optim__max_grad_norm=most))
    rows = random_rows(6, seed=14)
    whole = gradient(learner, rows)
    stepped, step = [], learner.optimizer.step
    learner.optimizer.step = lambda: stepped.append(torch.cat([w.grad.flatten() for w in learner.weights])) or step()
    metrics = learner.update(rows)
    assert metrics["policy/grad_norm"] == pytest.approx(whole.norm().item(), rel=1e-5) and whole.norm() > 0.1
    assert stepped[0].norm().item() == pytest.approx(most if clips else whole.norm().item(), rel=1e-4)
    assert torch.nn.functional.cosine_similarity(stepped[0], whole, 0).item() == pytest.approx(1.0, abs=1e-5)
    assert all(weight.grad is None for weight in learner.weights)


def test_a_forward_pass_holds_as_many_tokens_as_are_allowed_and_every_row_once():
    learner = Learner(tiny_model(), config(train__micro_batch_tokens=30))
    rows = random_rows(12, seed=15)
    packs = list(
        learner.packs([row.ids for row in rows], [row.target_positions for row in rows], [0, 2, *range(4, 12)])
    )
    assert sorted(member for pack in packs for member in pack.members) == [0, 2, *range(4, 12)]
    assert 1 < len(packs) < 10 and all(pack.input_ids.shape == (1, pack.starts[-1]) for pack in packs)
    assert all(pack.input_ids.shape[1] <= 30 for pack in packs)
    (pack,) = learner.packs([[1, 2], [3, 4, 5]], [[], [1]], [0, 1])  # a row without a target costs nothing
    assert pack.members == [1] and pack.input_ids.tolist() == [[3, 4, 5]]


def test_computing_in_bf16_trains_saves_and_exports_fp32_weights(tmp_path):
    """A CPU does what the settings allow on a GPU only: small steps, lost in bf16, add up behind the model's copies."""
    settings = config(optim__lr=1e-5, optim__max_grad_norm=1e9)
    settings = replace(settings, train=replace(settings.train, autocast=True))
    learner, plain = Learner(tiny_model(), settings), tiny_model()
    before = torch.cat([w.detach().flatten() for w in learner.weights])
    assert torch.equal(before, weights_of(plain)) and {p.dtype for p in learner.model.parameters()} == {torch.bfloat16}
    for step in range(3):
        assert learner.update(random_rows(4, seed=step))["policy/skipped"] == 0
    after = torch.cat([w.detach().flatten() for w in learner.weights])
    assert after.dtype == torch.float32 and 1e-6 < (after - before).abs().max() < 1e-4
    assert torch.equal(weights_of(learner.model), after.bfloat16())
    learner.export(SimpleNamespace(save_pretrained=lambda folder: None), tmp_path / "model")
    assert torch.equal(weights_of(Qwen3ForCausalLM.from_pretrained(tmp_path / "model")), after)
    other = Learner(tiny_model(seed=1), settings)
    for name, value in other.tensors().items():
        value.copy_(learner.tensors()[name])
    other.restored(learner.state())
    assert torch.equal(weights_of(other.model), weights_of(learner.model)) and other.version == 3


def test_a_plain_copy_is_apart_in_the_dtype_asked_for_with_exact_buffers():
    """The rotary frequencies in bf16 would blur positions."""
    model = tiny_model()
    before, buffers = weights_of(model).clone(), [buffer.clone() for buffer in model.buffers()]
    twin = plain_copy(model, torch.bfloat16)
    assert {p.dtype for p in twin.parameters()} == {torch.bfloat16} and {p.dtype for p in model.parameters()} == {
        torch.float32
    }
    assert buffers and all(
        torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(twin.buffers(), buffers, strict=True)
    )
    assert torch.equal(weights_of(twin), before.bfloat16())
    with torch.no_grad():
        next(twin.parameters()).add_(1.0)
    assert torch.equal(weights_of(model), before)


def test_an_update_moves_weights_reports_and_counts_versions():
    learner = Learner(tiny_model(), config(optim__lr=1e-3, optim__warmup_steps=2))
    rows = random_rows(6, seed=4)
    before = {name: value.clone() for name, value in learner.model.state_dict().items()}
    first = learner.update(rows, learner.logprobs(rows))
    assert first["policy/lr"] == pytest.approx(5e-4)
    assert first["policy/clip_share"] == 0
    assert first["policy/skipped"] == 0
    assert first["policy/grad_norm"] > 0
    expected = -sum(row.advantage * (len(row.ids) - row.start) for row in rows) / len(rows)
    assert first["policy/loss"] == pytest.approx(expected, rel=1e-4)
    assert any(not torch.equal(before[name], value) for name, value in learner.model.state_dict().items())
    assert learner.update(rows)["policy/lr"] == pytest.approx(1e-3)
    assert learner.version == 2


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.5, 1.0, 1.0, 0.2 + 0.8 * (2 + 2**0.5) / 4, 0.6, 0.2 + 0.8 * (2 - 2**0.5) / 4, 0.2]),
    ],
)
def test_every_update_moves_at_the_rate_of_its_schedule(schedule, expected):
    """Warm-up, shape and final share as set. The rate is the one at which weights move: AdamW's steps are +-lr at most,
    and its first is +-lr wherever the gradient isn't tiny."""
    peak = 2e-3
    learner = Learner(
        tiny_model(),
        config(
            optim__lr=peak, optim__schedule=schedule, optim__final_lr_share=0.2, optim__warmup_steps=2,
            optim__beta1=0.0, optim__beta2=0.0, train__steps=6,
        ),
    )  # fmt: skip
    for version, share in enumerate(expected):  # with neither momentum nor memory every step is +-lr
        before = weights_of(learner.model)
        metrics = learner.update(random_rows(4, seed=version))
        assert metrics["policy/lr"] == pytest.approx(share * peak)
        moved = (weights_of(learner.model) - before).abs()
        assert moved.median().item() == pytest.approx(share * peak, rel=0.01)


@pytest.mark.parametrize("why", ["masked", "no advantage", "zero advantage", "no completion", "no rows"])
def test_a_batch_with_nothing_to_train_on_takes_no_step(why):
    learner = Learner(tiny_model(), config())
    learner.update(random_rows(4, seed=5))  # so that AdamW has momentum which a careless step would follow
    rows = random_rows(4, seed=6)
    if why == "no rows":
        rows = []
    for row in rows:
        if why == "masked":
            row.masks.append("mrs")
        elif why == "no completion":
            row.ids, row.rollout_logprobs = row.ids[: row.start], []
        else:
            row.advantage = 0.0 if why == "zero advantage" else None
    before = {name: value.clone() for name, value in learner.model.state_dict().items()}
    metrics = learner.update(rows, learner.logprobs(rows))
    assert metrics["policy/skipped"] == 1
    assert learner.version == 1
    assert all(torch.equal(before[name], value) for name, value in learner.model.state_dict().items())


def test_a_gradient_that_is_not_finite_takes_no_step():
    learner = Learner(tiny_model(), config())
    rows = random_rows(3, seed=7)
    rows[0].advantage = math.inf
    before = {name: value.clone() for name, value in learner.model.state_dict().items()}
    assert learner.update(rows)["policy/skipped"] == 1
    assert all(torch.equal(before[name], value) for name, value in learner.model.state_dict().items())


def test_equal_seeds_give_equal_bytes_and_a_restored_learner_goes_on_the_same():
    def train(learner, steps):
        for step in steps:
            rows = random_rows(6, seed=step)
            learner.update(rows, learner.logprobs(rows))
        return [value.numpy().tobytes() for value in learner.model.state_dict().values()]

    straight = train(Learner(tiny_model(), config()), range(4))
    assert straight == train(Learner(tiny_model(), config()), range(4))
    first = Learner(tiny_model(), config())
    train(first, range(2))
    second = Learner(tiny_model(seed=1), config())
    for name, value in second.tensors().items():
        value.copy_(first.tensors()[name])
    second.restored(first.state())
    assert second.version == 2
    assert train(second, range(2, 4)) == straight


def test_rows_refuse_missing_logprobs_and_empty_prompts():
    with pytest.raises(ValueError, match="2 completion tokens but 1 log-probs"):
        Row([1, 2, 3], 1, [-0.1])
    with pytest.raises(ValueError, match="not finite"):
        Row([1, 2], 1, [math.nan])
    with pytest.raises(ValueError, match="prompt is empty"):
        Row([1, 2], 0, [-1.0, -1.0])


def test_rows_of_a_trajectory_are_its_turns_as_sampled():
    turns = [
        Turn([1, 2], [3], [-0.5], 0, "stop", advantage=1.5),
        Turn([1, 2, 3, 4], [5, 6], [-0.1, -0.2], 0, "length"),
    ]
    rows = rows_of(Trajectory("p", 3, turns, step=7))
    assert [(row.ids, row.start, row.turn, row.advantage) for row in rows] == [
        ([1, 2, 3], 2, 0, 1.5),
        ([1, 2, 3, 4, 5, 6], 4, 1, None),
    ]
    assert rows[0].trajectory == rows[1].trajectory == ("p", 7, 3)
    rows[1].masks.append("mrs")
    assert turns[1].masks == ["mrs"]


def test_a_model_that_does_more_than_its_head_is_refused():
    model = tiny_model()
    plain = model.forward

    def capped(*args, **kwargs):
        output = plain(*args, **kwargs)
        output.logits = 0.5 * output.logits.tanh()
        return output

    model.forward = capped
    with pytest.raises(ValueError, match="plain head"):
        Policy(model)


def test_the_exported_folder_is_the_model(tmp_path):
    class Tokenizer:
        def save_pretrained(self, folder):
            (folder / "tokenizer.json").write_text("{}")

    learner = Learner(tiny_model(), config(optim__lr=1e-2))
    learner.update(random_rows(4, seed=5))
    learner.export(Tokenizer(), tmp_path / "model")
    again = type(learner.model).from_pretrained(tmp_path / "model")
    for (name, value), (own_name, own) in zip(again.named_parameters(), learner.model.named_parameters(), strict=True):
        assert name == own_name and torch.equal(value, own)
    assert again.dtype == torch.float32
    assert again.get_input_embeddings().weight is again.get_output_embeddings().weight


CONTEXTS, ARMS = 4, 6


def bandit_reward(context, arm):
    """In [0, 3]; the best arm of a context earns 3."""
    return 3.0 - 0.5 * ((arm - 2 * context) % ARMS)


def test_a_contextual_bandit_is_learned_to_95_percent_of_its_optimum():
    """The prompt is a context token, the completion one token; learner, loss and trloo are the real ones."""
    settings = config(optim__lr=5e-3, optim__warmup_steps=0)
    learner = Learner(tiny_model(layers=1, vocabulary=CONTEXTS + ARMS), settings)
    prompts = [[context] for context in range(CONTEXTS)]

    def policy():
        with torch.no_grad():
            return learner.model(input_ids=torch.tensor(prompts)).logits[:, -1].log_softmax(-1)

    def expected_reward():
        """Closed form: sum over arms of pi(arm | context) * reward, mean over contexts; other tokens earn 0."""
        return (
            sum(
                policy()[c, CONTEXTS + a].exp().item() * bandit_reward(c, a)
                for c in range(CONTEXTS)
                for a in range(ARMS)
            )
            / CONTEXTS
        )

    generator = seeding.generator(0, "bandit")
    start = expected_reward()
    for step in range(80):
        logprobs = policy()
        rows, returns, groups = [], [], []
        for context in range(CONTEXTS):
            tokens = torch.multinomial(logprobs[context].exp(), 16, replacement=True, generator=generator).tolist()
            for sample, token in enumerate(tokens):
                rows.append(
                    Row(
                        [context, token],
                        1,
                        [logprobs[context, token].item()],
                        problem_id=str(context),
                        sample_index=sample,
                    )
                )
                returns.append([bandit_reward(context, token - CONTEXTS) if token >= CONTEXTS else 0.0])
                groups.append((context, step))
        for row, value in zip(rows, advantages(returns, groups, "trloo")):
            row.advantage = value[0]
        learner.update(rows, learner.logprobs(rows))
    assert start < 0.7 * 3.0
    assert expected_reward() > 0.95 * 3.0


@pytest.mark.gpu
def test_on_a_gpu_bf16_stays_close_to_fp32_and_weights_stay_fp32():
    rows = random_rows(40, seed=8)
    expected = Learner(tiny_model(), config()).logprobs(rows)
    settings = config(device="cuda", train__autocast="true")
    learner = Learner(tiny_model(), settings)
    got = learner.logprobs(rows)
    gap = (torch.cat(got) - torch.cat(expected)).abs()
    assert gap.mean() < 0.02
    assert gap.max() < 0.2
    metrics = learner.update(rows, got)
    assert metrics["policy/skipped"] == 0
    assert metrics["policy/clip_share"] < 0.01
    assert {p.dtype for p in learner.model.parameters()} == {torch.bfloat16}
    assert {w.dtype for w in learner.weights} == {torch.float32}


def test_the_export_keeps_the_folders_generation_settings(tmp_path):
    """A server that loads it must stop at all of the model's end tokens."""
    from transformers import GenerationConfig

    from rl.modeling import train_tokenizer

    kept = {"eos_token_id": [2, 0], "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    for name, settings in (("whole", kept), ("contradictory", {**kept, "do_sample": False})):
        model = tiny_model()
        model.generation_config = GenerationConfig(**settings)
        Learner(model, config()).export(train_tokenizer(["return x\n"], 300), tmp_path / name)
    written = json.loads((tmp_path / "whole" / "generation_config.json").read_text())
    assert {key: written[key] for key in kept} == kept
    assert (tmp_path / "contradictory" / "model.safetensors").is_file()
