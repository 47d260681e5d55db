"""Rewards and returns against naive loops."""

import math
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env.records import BLAMELESS_STATUSES, CANDIDATE_STATUSES, STATUSES, Verdict
from rl.config import Earns, Reward
from rl.records import Trajectory, Turn
from rl.rewards import BadVerdict, TrainingPaused, refuse_broken_step, returns_to_go, reward

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


@pytest.mark.parametrize(
    "fields",
    [
        *[{name: value} for name in ("speedup", "profiling_ratio") for value in (math.nan, math.inf, -1.0, "1")],
        {"profiling_ratio": 1.01},
    ],
)
def test_measurements_that_cannot_be_are_refused(fields):
    with pytest.raises(BadVerdict, match=next(iter(fields))):
        reward(verdict("correct", **{"speedup": 2.0, "profiling_ratio": 1.0} | fields), Reward())


def test_a_ratio_that_rounding_left_above_one_is_one_and_more_is_refused():
    right = {"speedup": 0.0, "values_match": True}
    assert reward(verdict("correct", profiling_ratio=1.0, **right), Reward())[0] == 2.0
    assert reward(verdict("correct", profiling_ratio=1 + 5e-7, **right), Reward())[0] == 2.0
    with pytest.raises(BadVerdict, match=r"profiling_ratio = 1\.0000015; .* from 0 to 1,"):
        reward(verdict("correct", profiling_ratio=1.0000015, **right), Reward())
    with pytest.raises(BadVerdict, match=r"speedup = -1; .* >= 0,"):
        reward(verdict("correct", **right | {"speedup": -1}), Reward())


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


def test_what_a_status_earns_is_a_table_of_the_known_ones():
    assert [spec.name for spec in fields(Earns)] == [s for s in CANDIDATE_STATUSES if s != "correct"]
    config = Reward(earns=Earns(hack=-1.0, incorrect=0.1))
    assert reward(verdict("hack", speedup=3.0), config) == (
        -1.0,
        {"correct": 0.0, "speedup": 0.0, "profiling_ratio": 0.0},
    )
    assert reward(verdict("incorrect"), config)[0] == 0.1 and reward(verdict("timeout"), config)[0] == 0.0
    assert reward(verdict("correct", speedup=2.0), config)[0] == 3.0
    ablation = Reward(hack_check=False, earns=Earns(hack=-1.0))
    assert reward(verdict("hack", speedup=2.0, values_match=True), ablation)[0] == 3.0
    assert reward(verdict("hack", speedup=2.0, values_match=False), ablation)[0] == -1.0


def naive_reward(v, config):
    """Equation 1 with the profiling ratio, spelled out in float64."""
    if v["status"] in BLAMELESS_STATUSES:
        return None
    right = v["status"] == "correct"
    if v["status"] == "hack" and not config.hack_check and v["values_match"] is True:
        right = True
    if not right:
        return getattr(config.earns, v["status"])
    total = 1.0
    if v["speedup"] is not None:
        total += v["speedup"] if v["speedup"] < config.speedup_cap else config.speedup_cap
    if config.profiling_ratio and v["profiling_ratio"] is not None:
        total += v["profiling_ratio"]
    return total


MEASURED = st.one_of(st.none(), st.floats(0, 10))


@given(
    st.sampled_from(STATUSES), MEASURED, st.one_of(st.none(), st.floats(0, 1)), st.sampled_from([None, True, False]),
    st.booleans(), st.booleans(), st.floats(0.5, 5), st.floats(-1, 1),
)  # fmt: skip
def test_rewards_match_the_formula(status, speedup, ratio, match, with_ratio, check, cap, earned):
    config = Reward(cap, with_ratio, check, Earns(incorrect=earned, oom=-earned))
    v = verdict(status, speedup=speedup, profiling_ratio=ratio, values_match=match)
    value, parts = reward(v, config)
    expected = naive_reward(v, config)
    assert value == (None if expected is None else pytest.approx(expected, abs=1e-12))
    if parts and parts["correct"]:
        assert sum(parts.values()) == value


def judged(*statuses):
    return Trajectory("p", 0, [Turn([], [], [], 0, "stop", verdict=verdict(s, message=f"no {s}")) for s in statuses])


def test_a_step_that_could_not_be_judged_pauses_training():
    step = [judged("correct", "infra_error"), judged("hack", "infra_error"), judged("problem_error")]
    refuse_broken_step(step, 0.6)
    with pytest.raises(TrainingPaused) as pause:
        refuse_broken_step(step, 0.59)
    for words in ("3 of 5", "rollout.max_infra_share = 0.59", "2 times: infra_error: no infra_error", "same command"):
        assert words in str(pause.value)
    refuse_broken_step([judged("timeout", "oom")], 0.0)
    with pytest.raises(TrainingPaused, match=r"model\.context"):
        refuse_broken_step([Trajectory("p", 0, [], ended="context")], 1.0)
    with pytest.raises(TrainingPaused):
        refuse_broken_step([judged(*["correct"] * 99, "infra_error")], 0.0)
