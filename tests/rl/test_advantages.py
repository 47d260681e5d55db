"""Advantages: formulas against naive loops, and what the paper claims of them as statistics."""

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.advantages import ESTIMATORS, advantages

pytestmark = pytest.mark.budget(45)

MAYBE = st.one_of(st.none(), st.floats(-4, 4).map(lambda x: round(x, 3)))
BATCH = st.lists(st.tuples(st.sampled_from("abc"), st.lists(MAYBE, max_size=4)), max_size=12)


def naive(returns, groups, estimator, apart=()):
    """Row by row from the definitions: the others of the group are looked up anew for every row."""
    result = []
    for i, turns in enumerate(returns):
        row = []
        for t, own in enumerate(turns):
            at = 0 if estimator == "rloo" else t
            others = [
                returns[j][at]
                for j in range(len(returns))
                if j != i and groups[j] == groups[i] and len(returns[j]) > at and returns[j][at] is not None
                and (j, at) not in apart
            ]  # fmt: skip
            if own is None or (estimator == "rloo" and turns[0] is None):
                row.append(None)
                continue
            value = turns[at]
            everyone = [*others, value]
            if estimator == "reinforce" or (not others and estimator in ("trloo", "rloo")):
                row.append(value)
            elif estimator in ("trloo", "rloo"):
                row.append(value - sum(others) / len(others))
            elif estimator == "grpo":
                row.append(value - sum(everyone) / len(everyone))
            else:
                deviation = statistics.stdev(everyone) if len(everyone) > 1 else 0.0
                row.append((value - sum(everyone) / len(everyone)) / (deviation + 1e-6))
        result.append(row)
    return result


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(batch=BATCH)
def test_estimators_match_their_definition_on_ragged_groups(estimator, batch):
    groups, returns = [group for group, _ in batch], [turns for _, turns in batch]
    got, expected = advantages(returns, groups, estimator), naive(returns, groups, estimator)
    for got_turns, expected_turns in zip(got, expected, strict=True):
        for value, wanted in zip(got_turns, expected_turns, strict=True):
            assert value == (None if wanted is None else pytest.approx(wanted, rel=1e-9, abs=1e-9))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(batch=BATCH, left_out=st.sets(st.tuples(st.integers(0, 11), st.integers(0, 3))))
def test_rows_set_apart_are_in_nobody_elses_baseline(estimator, batch, left_out):
    groups, returns = [group for group, _ in batch], [turns for _, turns in batch]
    got, expected = advantages(returns, groups, estimator, left_out), naive(returns, groups, estimator, left_out)
    for got_turns, expected_turns in zip(got, expected, strict=True):
        for value, wanted in zip(got_turns, expected_turns, strict=True):
            assert value == (None if wanted is None else pytest.approx(wanted, rel=1e-9, abs=1e-9))


def test_one_left_in_the_baseline_is_alone():
    assert advantages([[4.0], [1.0], [2.0]], ["p"] * 3, "trloo", {(1, 0), (2, 0)}) == [[4.0], [-3.0], [-2.0]]


@given(batch=BATCH, seed=st.integers(0, 1000))
def test_the_order_of_the_batch_changes_no_bit(batch, seed):
    order = list(range(len(batch)))
    random.Random(seed).shuffle(order)
    groups, returns = [group for group, _ in batch], [turns for _, turns in batch]
    plain = advantages(returns, groups, "trloo")
    shuffled = advantages([returns[i] for i in order], [groups[i] for i in order], "trloo")
    assert shuffled == [plain[i] for i in order]


@pytest.mark.parametrize("estimator", ["trloo", "grpo", "grpo_std", "rloo"])
def test_returns_whose_sum_hangs_on_its_order_change_no_bit(estimator):
    """0.1 + 0.2 + 0.3 is another number than 0.3 + 0.2 + 0.1, and 1e16 swallows a 1 that comes after it."""
    for returns in ([0.1, 0.2, 0.3], [1e16, 1.0, -1e16, 1.0]):
        found = {
            tuple(
                sorted(
                    zip(order, (value for (value,) in advantages([[x] for x in order], ["p"] * len(order), estimator)))
                )
            )
            for order in itertools.permutations(returns)
        }
        assert len(found) == 1


def test_one_rollout_keeps_its_return_without_a_baseline():
    assert advantages([[2.0, 1.0]], ["p"], "trloo") == [[2.0, 1.0]]
    assert advantages([[2.0, 1.0]], ["p"], "rloo") == [[2.0, 2.0]]
    assert advantages([[2.0, 1.0]], ["p"], "grpo") == [[0.0, 0.0]]


def test_equal_returns_give_exact_zeros():
    for estimator in ("trloo", "grpo", "grpo_std", "rloo"):
        assert advantages([[0.1]] * 7, ["p"] * 7, estimator) == [[0.0]] * 7


def test_groups_are_the_same_step_and_turn():
    returns = [[1.0, 5.0], [3.0], [10.0, 7.0]]
    groups = [("p", 1), ("p", 1), ("p", 2)]
    assert advantages(returns, groups, "trloo") == [[-2.0, 5.0], [2.0], [10.0, 7.0]]


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="known: trloo"):
        advantages([[1.0]], ["p"], "ppo")
    with pytest.raises(ValueError, match="2 group keys"):
        advantages([[1.0]], ["p", "q"], "trloo")


# A bandit with two arms: pi(1) = sigmoid(theta), reward `REWARDS[arm]`. The true gradient of the expected reward is
# p (1 - p) (r1 - r0); an estimator's is the mean over the group of A_i * d log pi(a_i) / d theta.
THETA, REWARDS = 0.4, (1.0, 3.5)
P = 1 / (1 + math.exp(-THETA))
TRUE_GRADIENT = P * (1 - P) * (REWARDS[1] - REWARDS[0])


def bandit_gradient(estimator, count, batches, seed):
    """Mean and standard error of the estimated gradient over independent groups of `count` rollouts."""
    rng = random.Random(seed)
    estimates = []
    for _ in range(batches):
        arms = [int(rng.random() < P) for _ in range(count)]
        values = advantages([[REWARDS[arm]] for arm in arms], ["p"] * count, estimator)
        estimates.append(sum(a[0] * (arm - P) for a, arm in zip(values, arms)) / count)
    return statistics.fmean(estimates), statistics.stdev(estimates) / math.sqrt(batches)


@pytest.mark.parametrize("estimator", ["trloo", "rloo", "reinforce"])
def test_leave_one_out_and_reinforce_are_unbiased(estimator):
    mean, error = bandit_gradient(estimator, 4, 20_000, seed=1)
    assert error < 0.02 * TRUE_GRADIENT
    assert abs(mean - TRUE_GRADIENT) < 4 * error


@pytest.mark.parametrize("count", [2, 4])
def test_grpo_shrinks_the_gradient_by_one_minus_one_over_n(count):
    mean, error = bandit_gradient("grpo", count, 20_000, seed=2)
    assert abs(mean - (1 - 1 / count) * TRUE_GRADIENT) < 4 * error
    assert abs(mean - TRUE_GRADIENT) > 10 * error


def test_a_baseline_lowers_the_variance():
    _, with_baseline = bandit_gradient("trloo", 8, 5_000, seed=3)
    _, without = bandit_gradient("reinforce", 8, 5_000, seed=3)
    assert with_baseline < 0.7 * without
