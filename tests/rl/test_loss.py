"""The policy loss against a naive float64 loop; its clip, its denominator, its gradient."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl.batch import Row
from rl.config import Loss
from rl.loss import LossInput, count_rows, kl_k3, policy_loss

pytestmark = pytest.mark.budget(15)


def naive_loss(rows, denominator, config):
    """rows: [(new log-probs, old log-probs, advantage, weights)]; sum over tokens, mean over `denominator` rows."""
    total, clipped = 0.0, 0
    for new, old, advantage, weights in rows:
        for a, b, weight in zip(new, old, weights, strict=True):
            ratio = math.exp(a - b)
            inside = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            objective = min(ratio * advantage, inside * advantage)
            if config.dual_clip > 0 and advantage < 0 and objective < config.dual_clip * advantage:
                objective = config.dual_clip * advantage
            total -= weight * objective
            clipped += objective != ratio * advantage
    return total / denominator / config.scale, clipped


def flat(rows, denominator, requires_grad=False):
    def joined(values):
        return torch.tensor([x for row in values for x in row], dtype=torch.float64)

    rows = [row if len(row) == 4 else (*row, None) for row in rows]
    new = joined([row[0] for row in rows]).requires_grad_(requires_grad)
    advantages = joined([[row[2]] * len(row[0]) for row in rows])
    weights = None if any(row[3] is None for row in rows) else joined([row[3] for row in rows])
    return LossInput(new, joined([row[1] for row in rows]), advantages, denominator, weights)


TOKEN = st.tuples(st.floats(-4, 0), st.floats(-1.5, 1.5), st.floats(0, 2))
ROWS = st.lists(st.tuples(st.lists(TOKEN, max_size=6), st.floats(-3, 3)), max_size=6)
RAGGED = ROWS.map(
    lambda rows: [([a + d for a, d, _ in row], [a for a, _, _ in row], v, [w for *_, w in row]) for row, v in rows]
)


def random_rows(seed):
    rng = random.Random(seed)
    rows = []
    for _ in range(rng.randint(1, 6)):
        old = [rng.uniform(-4, 0) for _ in range(rng.randint(1, 9))]
        rows.append(([x + rng.gauss(0, 0.4) for x in old], old, rng.gauss(0, 2)))
    return rows


@given(rows=RAGGED, dual_clip=st.sampled_from([0.0, 1.5, 3.0]), more=st.integers(1, 4))
def test_the_loss_is_what_the_loop_says(rows, dual_clip, more):
    config = Loss(scale=7.0, dual_clip=dual_clip)
    output = policy_loss(flat(rows, len(rows) + more), config)
    expected, clipped = naive_loss(rows, len(rows) + more, config)
    assert output.loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert (output.clipped.item(), output.tokens) == (clipped, sum(len(row[0]) for row in rows))


def test_weights_of_one_are_no_weights():
    rows = random_rows(3)
    ones = [(*row, [1.0] * len(row[0])) for row in rows]
    losses = [policy_loss(flat(given_rows, 5), Loss()).loss for given_rows in (rows, ones)]
    assert torch.equal(*losses)


def test_the_dual_clip_stops_a_loss_without_bound():
    """A token that should not have become a thousand times likelier: bounded at 3 |A|, and then without gradient."""
    rows = [([math.log(1000.0)], [0.0], -2.0)]
    for dual_clip, loss, flows in ((0.0, 2000.0, True), (3.0, 6.0, False)):
        inputs = flat(rows, 1, requires_grad=True)
        output = policy_loss(inputs, Loss(scale=1.0, dual_clip=dual_clip))
        output.loss.backward()
        assert output.loss.item() == pytest.approx(loss)
        assert (inputs.logprobs.grad.item() != 0) == flows


def test_rows_are_counted_before_or_after_rejection():
    def row(advantage, *masks):
        return Row([1, 2], 1, [-1.0], advantage, list(masks))

    rows = [row(1.0), row(0.0), row(-2.0, "mrs"), row(1.0, "prs"), row(None, "infra")]
    assert count_rows(rows, Loss(rows="valid")) == 4
    assert count_rows(rows, Loss(rows="kept")) == 2


@given(rows=RAGGED)
def test_k3_is_what_the_loop_says(rows):
    new, old = ([torch.tensor(row[i], dtype=torch.float64) for row in rows] for i in (0, 1))
    terms = [math.exp(a - b) - 1 - (a - b) for row in rows for a, b in zip(row[0], row[1])]
    got = kl_k3(new, old)
    assert got is None if not terms else got == pytest.approx(sum(terms) / len(terms), abs=1e-12)
    assert got is None or got >= 0


def test_k3_estimates_the_divergence():
    """Two known distributions over three tokens; tokens drawn from the rollout's."""
    rollout, learner = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.3, 0.4, 0.3]).double()
    tokens = torch.multinomial(rollout, 40_000, True, generator=torch.Generator().manual_seed(0))
    exact = (rollout * (rollout / learner).log()).sum().item()
    assert kl_k3([learner.log()[tokens]], [rollout.log()[tokens]]) == pytest.approx(exact, rel=0.03)


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
