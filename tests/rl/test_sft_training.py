"""SFT step by step: at which rate, in which order, under which distribution; each against what is worked out here."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

from tiny import VOCABULARY, tiny_model

from rl import seeding, sft
from rl.config import load_recipe
from rl.learner import Learner

pytestmark = pytest.mark.budget(25)


def examples(count, seed=0):
    rng = seeding.rng(seed, "examples")
    found = []
    for _ in range(count):
        ids = [rng.randrange(VOCABULARY) for _ in range(rng.randint(3, 12))]
        found.append(sft.Example(ids, sorted(rng.sample(range(1, len(ids)), rng.randint(1, len(ids) - 1)))))
    return found


def trained(folder, given, monkeypatch=None, **overrides):
    """Train on the examples; (metrics by step, the examples of every step, the learner)."""
    pairs = [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
    config = load_recipe("mini-cpu", ["sft.epochs=3", "sft.batch_tokens=40", "sft.lr=1e-3", *pairs])
    steps, plain = [], sft.train_step
    if monkeypatch:
        monkeypatch.setattr(sft, "train_step", lambda *args: (steps.append(args[1]), plain(*args))[1])
    learner = sft.train(tiny_model(), given, config, folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return lines, steps, learner


def naive_loss(model, given):
    """Mean over all trained tokens of - log softmax(logits), in float64, sequence by sequence."""
    total, count = 0.0, 0
    for e in given:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([e.ids])).logits[0].double().tolist()
        for place in e.target_positions:
            row = logits[place - 1]
            total += math.log(sum(math.exp(x) for x in row)) - row[e.ids[place]]
            count += 1
    return total / count


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_the_loss_is_the_plain_cross_entropy_whatever_the_rollouts_temperature(tmp_path, temperature):
    """The data was not sampled from this model: its own distribution is what has to learn them."""
    given = examples(6)
    lines, _, _ = trained(tmp_path, given, rollout__temperature=temperature, sft__batch_tokens=10000, sft__epochs=1)
    assert [line["sft/loss"] for line in lines] == [pytest.approx(naive_loss(tiny_model().eval(), given), rel=1e-5)]


def test_trained_weights_are_the_same_whatever_the_rollouts_temperature(tmp_path):
    weights = []
    for temperature in (0.4, 1.0):
        learner = trained(tmp_path / str(temperature), examples(4), rollout__temperature=temperature)[2]
        weights.append(torch.cat([p.detach().flatten() for p in learner.model.parameters()]))
    assert torch.equal(*weights)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_rates_rise_over_the_warm_up_and_then_follow_the_schedule(tmp_path, schedule):
    """Every step of every epoch counts, and the first ceil(share * steps) of them are the warm-up."""
    lines, _, _ = trained(tmp_path, examples(20), sft__schedule=schedule, sft__warmup_share=0.22, sft__lr=2e-3)
    total = len(lines)
    warm = math.ceil(0.22 * total)
    assert total > 9 and 0.22 * total % 1 > 0  # so that rounding down would be another number
    expected = [2e-3 * (step + 1) / warm for step in range(warm)]
    for step in range(warm, total):
        done = (step - warm) / (total - warm)
        left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[schedule]
        expected.append(2e-3 * left)
    assert [line["sft/lr"] for line in lines] == pytest.approx(expected)


def test_the_rate_that_is_said_is_the_one_that_weights_move_at(tmp_path):
    """One step without a warm-up: AdamW's first is +-lr, wherever the gradient isn't tiny."""
    before = torch.cat([p.detach().flatten() for p in tiny_model().parameters()])
    _, _, learner = trained(tmp_path, examples(3), sft__epochs=1, sft__batch_tokens=10000, sft__warmup_share=0.0)
    moved = (torch.cat([p.detach().flatten() for p in learner.model.parameters()]) - before).abs()
    assert moved.median().item() == pytest.approx(1e-3, rel=0.01)


def test_the_first_token_that_something_predicts_is_trained_on():
    assert sft.example([7, 8, 9], [0, 1, 1], 10) == sft.Example([7, 8, 9], [1, 2])
    assert sft.example([7, 8, 9], [1, 1, 0], 10) == sft.Example([7, 8, 9], [1])


@pytest.mark.parametrize("kept", [1, 2, 5])
def test_a_checkpoint_an_epoch_of_which_the_last_ones_are_kept(tmp_path, kept):
    trained(tmp_path, examples(3), train__keep_checkpoints=kept)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_00001", "step_00002", "step_00003"][-kept:]


def test_a_step_leaves_no_gradient_to_the_next():
    """A step at a rate of 0 moves nothing: the second on the same examples says the same."""
    learner = Learner(tiny_model(), load_recipe("mini-cpu"), temperature=1.0)
    first, second = (sft.train_step(learner, examples(4), 0.0) for _ in range(2))
    assert first == second and first["sft/grad_norm"] > 0.1 and learner.version == 2


def test_every_epoch_has_each_example_once_in_an_order_of_its_own(tmp_path, monkeypatch):
    """The order is the seed's and the epoch's: the same again, another one for another seed."""
    given = [sft.Example([1 + i, 2, 3, 4], [1, 2, 3]) for i in range(20)]

    def orders(name, seed):
        lines, steps, _ = trained(tmp_path / name, given, monkeypatch, seed=seed, sft__batch_tokens=40)
        assert [line["step"] for line in lines] == list(range(1, 7)) and {len(batch) for batch in steps} == {10}
        first = [[e.ids[0] for e in batch] for batch in steps]
        return [first[i] + first[i + 1] for i in (0, 2, 4)]

    one = orders("one", seed=1)
    for order in one:
        assert sorted(order) == list(range(1, 21)) and order != sorted(order)
    assert one[0] != one[1] != one[2] != one[0]
    assert orders("again", seed=1) == one
    assert not any(a == b for a, b in zip(orders("other", seed=2), one))


def test_a_step_is_on_the_mean_over_tokens_not_over_sequences_or_micro_batches():
    """The gradient of one step, packed one by one, against the naive mean's."""
    given = examples(5, seed=4)
    config = load_recipe("mini-cpu", ["train.micro_batch_tokens=1", "optim.max_grad_norm=1e9"])
    learner = Learner(tiny_model(), config, temperature=1.0)
    norms = []
    learner.step = lambda lr: (norms.append(lr), (0.0, True))[1]
    sft.train_step(learner, given, 0.5)
    assert norms == [0.5]
    model = tiny_model().eval()
    total = 0.0
    for e in given:
        logprobs = model(input_ids=torch.tensor([e.ids])).logits[0].log_softmax(-1)
        total = total - sum(logprobs[p - 1, e.ids[p]] for p in e.target_positions)
    (total / sum(len(e.target_positions) for e in given)).backward()
    for mine, own in zip(learner.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(mine.grad, own.grad, rtol=0, atol=1e-5 * own.grad.norm().item() + 1e-8)
