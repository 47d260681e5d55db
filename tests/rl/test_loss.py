"""The policy loss against a naive float64 loop; its clip, its denominator, its gradient."""

import math
import random

import pytest
import torch

from rl.config import Loss
from rl.loss import LossInput, policy_loss

pytestmark = pytest.mark.budget(10)


def naive_loss(rows, denominator, config):
    """rows: [(new log-probs, old log-probs, advantage)]; sum over tokens, mean over `denominator` rows."""
    total, clipped = 0.0, 0
    for new, old, advantage in rows:
        for a, b in zip(new, old):
            ratio = math.exp(a - b)
            inside = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            total -= min(ratio * advantage, inside * advantage)
            clipped += inside * advantage < ratio * advantage
    return total / denominator / config.scale, clipped


def flat(rows, denominator, requires_grad=False):
    new = torch.tensor([x for row in rows for x in row[0]], dtype=torch.float64, requires_grad=requires_grad)
    old = torch.tensor([x for row in rows for x in row[1]], dtype=torch.float64)
    advantages = torch.tensor([row[2] for row in rows for _ in row[0]], dtype=torch.float64)
    return LossInput(new, old, advantages, denominator)


def random_rows(seed):
    rng = random.Random(seed)
    rows = []
    for _ in range(rng.randint(1, 6)):
        old = [rng.uniform(-4, 0) for _ in range(rng.randint(1, 9))]
        rows.append(([x + rng.gauss(0, 0.4) for x in old], old, rng.gauss(0, 2)))
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_the_loss_is_what_the_loop_says(seed):
    rows, config = random_rows(seed), Loss(scale=7.0)
    output = policy_loss(flat(rows, len(rows) + 3), config)
    expected, clipped = naive_loss(rows, len(rows) + 3, config)
    assert output.loss.item() == pytest.approx(expected, rel=1e-12)
    assert (output.clipped, output.tokens) == (clipped, sum(len(row[0]) for row in rows))


def test_parts_of_micro_batches_add_up():
    rows, config = random_rows(1) + random_rows(2), Loss()
    whole = policy_loss(flat(rows, len(rows)), config).loss
    parts = sum(policy_loss(flat([row], len(rows)), config).loss for row in rows)
    assert parts.item() == pytest.approx(whole.item(), rel=1e-12)


def test_at_ratio_one_the_gradient_is_the_policy_gradient():
    rows = [([-1.0, -2.0], [-1.0, -2.0], 3.0), ([-0.5], [-0.5], -2.0)]
    inputs = flat(rows, 4, requires_grad=True)
    policy_loss(inputs, Loss(scale=10.0)).loss.backward()
    assert inputs.logprobs.grad.tolist() == pytest.approx([-3 / 40, -3 / 40, 2 / 40])


@pytest.mark.parametrize(
    ("ratio", "advantage", "flows"),
    [
        (1.29, 1.0, False),
        (1.27, 1.0, True),
        (0.5, 1.0, True),
        (0.79, -1.0, False),
        (0.81, -1.0, True),
        (2.0, -1.0, True),
    ],
)
def test_the_clip_stops_the_gradient_only_where_the_policy_already_moved_that_way(ratio, advantage, flows):
    inputs = flat([([math.log(ratio)], [0.0], advantage)], 1, requires_grad=True)
    output = policy_loss(inputs, Loss())
    output.loss.backward()
    assert (inputs.logprobs.grad.item() != 0) == flows
    assert output.clipped == (not flows)
