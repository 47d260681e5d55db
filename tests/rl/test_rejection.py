"""Rejection masks: MRS, veto and PRS against naive float64 loops, at their bounds, and as statistics."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl import seeding
from rl.config import Rejection
from rl.rejection import (
    geometric_weight,
    importance_metrics,
    importance_weights,
    mismatch_masks,
    mismatch_metrics,
    prs_probability,
    prs_rejects,
)

pytestmark = pytest.mark.budget(30)


def rows_from(log_ratios):
    """Learner and rollout log-probs whose differences are `log_ratios`."""
    rollout = [torch.full((len(row),), -2.0, dtype=torch.float64) for row in log_ratios]
    return [old + torch.tensor(row, dtype=torch.float64) for old, row in zip(rollout, log_ratios)], rollout


def naive_masks(log_ratios, trajectories, config):
    masks = []
    for i in range(len(log_ratios)):
        tokens = []
        for j in range(len(log_ratios)):
            if i == j or (config.mrs == "trajectory" and trajectories[i] == trajectories[j]):
                tokens += log_ratios[j]
        weight = math.exp(sum(tokens) / len(tokens)) if tokens else 1.0
        reasons = []
        if config.mrs != "off" and (weight < config.mrs_low or weight > config.mrs_high):
            reasons.append("mrs")
        if any(math.exp(token) < config.token_veto for token in tokens):
            reasons.append("veto")
        masks.append(reasons)
    return masks


RATIO = st.one_of(st.floats(-0.003, 0.003), st.sampled_from([-12.0, -9.0, 3.0])).map(lambda x: round(x, 5))


@pytest.mark.parametrize("mrs", ["sample", "trajectory", "off"])
@given(batch=st.lists(st.tuples(st.integers(0, 2), st.lists(RATIO, max_size=5)), max_size=8))
def test_masks_match_their_definition(mrs, batch):
    config = Rejection(mrs=mrs, mrs_low=0.99901, mrs_high=1.00101)  # off the grid, so that no case sits on a bound
    trajectories, ratios = [t for t, _ in batch], [row for _, row in batch]
    learner, rollout = rows_from(ratios)
    assert mismatch_masks(learner, rollout, trajectories, config) == naive_masks(ratios, trajectories, config)


def test_the_weight_is_a_mean_over_tokens_not_a_sum():
    # 1000 tokens, each 0.0005 off: a product of ratios would be 1.65.
    assert geometric_weight(torch.full((1000,), 0.0005)) == pytest.approx(math.exp(0.0005))
    learner, rollout = rows_from([[0.0005] * 1000, [0.0015] * 1000, [-0.0015] * 2])
    assert mismatch_masks(learner, rollout, [0, 1, 2], Rejection()) == [[], ["mrs"], ["mrs"]]


def test_per_trajectory_the_turns_go_together():
    learner, rollout = rows_from([[0.0015], [-0.0015], [0.0015]])
    assert mismatch_masks(learner, rollout, ["a", "a", "b"], Rejection(mrs="trajectory")) == [[], [], ["mrs"]]
    assert mismatch_masks(learner, rollout, ["a", "a", "b"], Rejection()) == [["mrs"]] * 3


def test_the_veto_sees_one_token_that_the_mean_hides():
    ratios = [[-9.3] + [9.3 / 9999] * 9999, [0.0], [math.log(1.1e-4)] + [0.0] * 99999]
    learner, rollout = rows_from(ratios)
    assert mismatch_masks(learner, rollout, [0, 1, 2], Rejection()) == [["veto"], [], []]
    assert mismatch_masks(learner, rollout, [0, 1, 2], Rejection(token_veto=0.0)) == [[], [], []]


def test_what_lies_on_a_bound_is_kept():
    low, high = math.exp(-0.25), math.exp(0.25)
    config = Rejection(mrs_low=low, mrs_high=high, token_veto=math.exp(-0.25))
    for ratio, reasons in ((-0.25, []), (0.25, []), (-0.2500001, ["mrs", "veto"]), (0.2500001, ["mrs"])):
        learner = [torch.tensor([ratio], dtype=torch.float64)]
        assert mismatch_masks(learner, [torch.zeros(1)], [0], config) == [reasons], ratio


def test_numbers_that_are_none_are_rejected_not_trained_on():
    assert mismatch_masks([torch.tensor([math.nan])], [torch.tensor([-1.0])], [0], Rejection()) == [["mrs"]]


def test_prs_probability():
    soft, hard, off = Rejection(), Rejection(prs="hard"), Rejection(prs="off")
    assert [prs_probability(x, soft) for x in (0.0, 0.3, 0.4, 1.0)] == [0.0, 0.0, pytest.approx(1.0), 1.0]
    assert prs_probability(0.35, soft) == pytest.approx(0.5)
    assert [prs_probability(x, hard) for x in (0.299, 0.3, 1.0)] == [0.0, 1.0, 1.0]
    assert prs_probability(0.0, off) == 1.0


def test_prs_touches_correct_rows_with_a_measured_ratio_only():
    assert prs_rejects(True, 0.0, 0.0, Rejection())
    assert not prs_rejects(False, 0.0, 0.999, Rejection())
    assert not prs_rejects(True, None, 0.999, Rejection())
    assert not prs_rejects(True, 1.0, 1 - 2**-53, Rejection())


def test_prs_keeps_the_share_it_should():
    count = 20_000
    draws = [seeding.uniform(3, "prs", 0, "p", i, 0) for i in range(count)]
    kept = sum(not prs_rejects(True, 0.37, draw, Rejection()) for draw in draws) / count
    assert abs(kept - 0.7) < 4 * math.sqrt(0.7 * 0.3 / count)


def test_prs_does_not_depend_on_the_order_of_the_batch():
    rows = [("p", i, t) for i in range(20) for t in range(3)]

    def fate(ordered):
        return {row: prs_rejects(True, 0.35, seeding.uniform(1, "prs", 5, *row), Rejection()) for row in ordered}

    shuffled = rows[:]
    random.Random(0).shuffle(shuffled)
    assert fate(rows) == fate(shuffled)
    assert 0 < sum(fate(rows).values()) < len(rows)


def test_mismatch_metrics():
    learner, rollout = (
        [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])],
        [torch.tensor([-1.5, -2.0]), torch.tensor([-2.0])],
    )
    metrics = mismatch_metrics(learner, rollout)
    assert metrics["policy/ppl_learner"] == pytest.approx(math.exp(2.0))
    assert metrics["policy/ppl_rollout"] == pytest.approx(math.exp(5.5 / 3))
    assert metrics["policy/logprob_gap"] == pytest.approx(0.5)
    assert mismatch_metrics([torch.empty(0)], [torch.empty(0)]) == {}


@pytest.mark.parametrize("kind", ["token", "sequence"])
@given(
    ratios=st.lists(st.lists(st.floats(-2, 2).map(lambda x: round(x, 4)), max_size=5), max_size=6),
    cap=st.floats(1.0, 5.0),
)
def test_importance_weights_match_their_definition(kind, ratios, cap):
    config = Rejection(importance=kind, importance_cap=cap)
    learner, rollout = rows_from(ratios)
    got = importance_weights(learner, rollout, config)
    for weights, row in zip(got, ratios, strict=True):
        product = 1.0
        for value in row:
            product *= math.exp(value)
        expected = [min(math.exp(value) if kind == "token" else product, cap) for value in row]
        assert weights.tolist() == pytest.approx(expected, rel=1e-9)


def test_weights_below_the_cap_make_the_estimate_unbiased():
    """The mean under the engine's distribution, weighed, is the mean under the learner's."""
    engine, learner, value = [0.5, 0.3, 0.2], [0.25, 0.55, 0.2], [1.0, 5.0, -2.0]
    tokens = random.Random(1).choices(range(3), engine, k=20_000)
    rows = [[torch.tensor([math.log(table[t])]) for t in tokens] for table in (learner, engine)]
    weights = importance_weights(*rows, Rejection(importance="token", importance_cap=2.0))
    estimates = [w.item() * value[t] for w, t in zip(weights, tokens)]
    mean, plain = (sum(values) / len(tokens) for values in (estimates, [value[t] for t in tokens]))
    expected = sum(p * v for p, v in zip(learner, value))
    error = torch.tensor(estimates).std().item() / math.sqrt(len(tokens))
    assert abs(mean - expected) < 4 * error < abs(plain - expected) / 4, (mean, plain, error)


def test_without_the_option_there_are_no_weights():
    learner, rollout = rows_from([[0.5], [0.1, 0.2]])
    assert importance_weights(learner, rollout, Rejection()) is None and importance_metrics(None, Rejection()) == {}
    config = Rejection(importance="token", importance_cap=1.2)
    metrics = importance_metrics(importance_weights(learner, rollout, config), config)
    assert metrics["policy/importance_capped"] == pytest.approx(2 / 3)
    assert metrics["policy/importance_mean"] == pytest.approx((1.2 + math.exp(0.1) + 1.2) / 3)
