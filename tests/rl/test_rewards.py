"""Rewards and returns against naive loops."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env.records import BLAMELESS_STATUSES, CANDIDATE_STATUSES, Verdict
from rl.config import Reward
from rl.rewards import returns_to_go, reward

pytestmark = pytest.mark.budget(10)


def verdict(status, **fields):
    return Verdict(status, **fields).to_json()


def test_a_correct_candidate_earns_one_plus_capped_speedup_plus_pr():
    fast = verdict("correct", speedup=7.0, profiling_ratio=0.75, values_match=True)
    assert reward(fast, Reward()) == (4.75, {"correct": 1.0, "speedup": 3.0, "profiling_ratio": 0.75})
    assert reward(fast, Reward(profiling_ratio=False))[0] == 4.0
    assert reward(fast, Reward(speedup_cap=5.0))[0] == 6.75
    slow = verdict("correct", speedup=0.4, profiling_ratio=0.0)
    assert reward(slow, Reward())[0] == pytest.approx(1.4)


def test_what_was_not_measured_adds_nothing():
    assert reward(verdict("correct"), Reward())[0] == 1.0
    assert reward(verdict("correct", speedup=2.0), Reward())[0] == 3.0


@pytest.mark.parametrize("status", [s for s in CANDIDATE_STATUSES if s != "correct"])
def test_a_candidate_that_fails_earns_nothing_whatever_it_measured(status):
    value, parts = reward(verdict(status, speedup=3.0, profiling_ratio=1.0, values_match=True), Reward())
    assert value == 0.0
    assert set(parts.values()) == {0.0}


@pytest.mark.parametrize("status", BLAMELESS_STATUSES)
def test_nobodys_fault_has_no_reward(status):
    assert reward(verdict(status), Reward()) == (None, {})


def test_without_the_hack_check_a_right_hack_earns():
    ablation = Reward(hack_check=False)
    assert reward(verdict("hack", speedup=2.0, profiling_ratio=0.0, values_match=True), ablation)[0] == 3.0
    assert reward(verdict("hack", speedup=2.0, values_match=False), ablation)[0] == 0.0
    assert reward(verdict("hack", speedup=2.0, values_match=None), ablation)[0] == 0.0
    assert reward(verdict("incorrect", speedup=2.0, values_match=True), ablation)[0] == 0.0


@pytest.mark.parametrize("fields", [{"speedup": float("nan")}, {"speedup": -1.0}, {"profiling_ratio": float("nan")}])
def test_measurements_that_cannot_be_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        reward(verdict("correct", **fields), Reward())


def test_unknown_status_is_refused():
    with pytest.raises(ValueError, match="splendid"):
        reward({**verdict("correct"), "status": "splendid"}, Reward())


def naive_returns(rewards, gamma):
    result = []
    for t in range(len(rewards)):
        total = 0.0
        for later in range(t, len(rewards)):
            weight = gamma ** (later - t)
            if weight == 0.0:
                continue
            if rewards[later] is None:
                total = None
                break
            total += weight * rewards[later]
        result.append(total)
    return result


@given(st.lists(st.one_of(st.none(), st.floats(-5, 5)), max_size=8), st.sampled_from([0.0, 0.3, 0.9, 1.0]))
def test_returns_match_the_sum(rewards, gamma):
    for value, expected in zip(returns_to_go(rewards, gamma), naive_returns(rewards, gamma), strict=True):
        assert value == (None if expected is None else pytest.approx(expected, abs=1e-12))


def test_a_turn_without_reward_masks_itself_and_all_before():
    assert returns_to_go([1.0, None, 2.0, 3.0], 1.0) == [None, None, 5.0, 3.0]
    assert returns_to_go([1.0, None, 2.0], 0.0) == [1.0, None, 2.0]
    assert returns_to_go([], 1.0) == []
