"""eval/metrics.py: closed forms on hand-made verdicts, and against naive loops on random ragged ones."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env.records import STATUSES, Verdict
from eval import metrics
from rl.outcomes import is_fast
from rl.records import Trajectory, Turn

pytestmark = pytest.mark.budget(20)


def turn(status: str | None, speedup: float | None = None, reward: float | None = 0.0) -> Turn:
    verdict = None if status is None else Verdict(status=status, speedup=speedup).to_json()
    return Turn([], [], [], 0, "stop", verdict=verdict, reward=reward)


def trajectory(problem: str, *turns: Turn, sample: int = 0) -> Trajectory:
    return Trajectory(problem, sample, list(turns))


HAND_MADE = [
    trajectory("a", turn("incorrect"), turn("correct", 1.5, 2.5)),
    trajectory("a", turn("correct", 1.0, 2.0), turn("hack", 9.0, 0.0)),
    trajectory("b", turn("correct", 3.0, 4.0), turn("infra_error", None, None)),
    trajectory("b", turn("correct", None, 1.0), turn("correct", 1.1, 2.1)),
]


def test_fast_by_turn_closed_form():
    # Turn 1: two of four (the unmeasured one is not fast). Turn 2: two of three (the infrastructure error is out).
    assert metrics.ratio(metrics.fast_tally(HAND_MADE, 1.0, 1))["value"] == 2 / 4
    assert metrics.ratio(metrics.fast_tally(HAND_MADE, 1.0, 2))["value"] == 2 / 3
    assert metrics.ratio(metrics.fast_tally(HAND_MADE, 1.2, 2))["value"] == 1 / 3


def test_a_hack_is_never_fast_however_fast():
    assert not is_fast(turn("hack", 100.0), 1.0)


def test_boundary_is_inclusive_and_unmeasured_or_broken_speedups_are_not_fast():
    assert is_fast(turn("correct", 1.2), 1.2)
    assert not is_fast(turn("correct", math.nextafter(1.2, 0)), 1.2)
    for broken in (None, math.nan, math.inf):
        assert not is_fast(turn("correct", broken), 1.0)


def test_best_of_history_closed_form():
    assert metrics.ratio(metrics.fast_tally(HAND_MADE, 1.0, 2, best_of_history=True))["value"] == 4 / 4
    assert metrics.ratio(metrics.fast_tally(HAND_MADE, 1.2, 2, best_of_history=True))["value"] == 2 / 4


def test_a_sample_that_ended_early_counts_as_not_fast_unless_it_is_nobodys_fault():
    early = [trajectory("a", turn("correct", 2.0)), trajectory("a", turn("infra_error", None, None))]
    assert metrics.fast_tally(early, 1.0, 2) == {"a": (0.0, 1.0)}
    assert metrics.fast_tally(early, 1.0, 2, best_of_history=True) == {"a": (1.0, 1.0)}


def test_hack_ratio_status_shares_and_reward_leave_out_what_is_nobodys_fault():
    assert metrics.ratio(metrics.hack_tally(HAND_MADE))["value"] == 1 / 7
    assert metrics.ratio(metrics.status_tally(HAND_MADE, "correct"))["value"] == 5 / 7
    assert metrics.ratio(metrics.reward_tally(HAND_MADE))["value"] == pytest.approx((2.5 + 2 + 4 + 1 + 2.1) / 7)
    assert metrics.excluded_counts(HAND_MADE) == {"problem_error": 0, "infra_error": 1, "unjudged": 0}
    with pytest.raises(ValueError, match="infra_error"):
        metrics.status_tally(HAND_MADE, "infra_error")


def test_nothing_that_counts_gives_no_number():
    assert metrics.ratio({}) == {"value": None, "low": None, "high": None}
    only_infra = [trajectory("a", turn("infra_error", None, None))]
    assert metrics.ratio(metrics.fast_tally(only_infra, 1.0, 1))["value"] is None
    assert metrics.per_problem(metrics.fast_tally(only_infra, 1.0, 1)) == {"a": None}


def test_interval_of_identical_problems_is_a_point_and_is_seeded():
    same = {str(i): (1.0, 4.0) for i in range(10)}
    assert metrics.ratio(same) == {"value": 0.25, "low": 0.25, "high": 0.25}
    mixed = {str(i): (math.sqrt(i), 4.0) for i in range(10)}
    assert metrics.ratio(mixed, seed=3) == metrics.ratio(mixed, seed=3)
    assert metrics.ratio(mixed, seed=3) != metrics.ratio(mixed, seed=4)


def test_interval_covers_the_truth_about_95_times_in_100():
    # Problems' own rates vary, so the samples of one are alike: an interval over samples would be far too narrow.
    rng = random.Random(0)
    covered = widths = 0
    for repeat in range(300):
        tally = {}
        for problem in range(60):
            rate = rng.choice([0.0, 0.25, 0.75, 1.0])
            tally[str(problem)] = (float(sum(rng.random() < rate for _ in range(8))), 8.0)
        interval = metrics.ratio(tally, seed=repeat, resamples=400)
        covered += interval["low"] <= 0.5 <= interval["high"]
        widths += interval["high"] - interval["low"]
    assert 0.90 <= covered / 300 <= 0.985
    assert 0.15 < widths / 300 < 0.25  # 2 * 1.96 * sqrt((0.156 + 0.094 / 8) / 60) = 0.207


def test_paired_difference_closed_form():
    a = {"x": 0.0, "y": 1.0, "z": 2.0, "only_a": 5.0, "unmeasured": None}
    b = {"x": 1.0, "y": 1.0, "z": 1.5, "unmeasured": 3.0}
    result = metrics.paired_difference(a, b)
    assert result["value"] == pytest.approx((1.0 + 0.0 - 0.5) / 3)
    assert (result["problems"], result["better"], result["worse"]) == (3, 1, 1)
    assert result["low"] <= result["value"] <= result["high"]
    assert metrics.paired_difference(a, {})["value"] is None


def test_pairing_removes_what_the_problems_have_in_common():
    hard_to_easy = {str(i): i / 50 for i in range(50)}
    slightly_better = {id: value + 0.1 for id, value in hard_to_easy.items()}
    result = metrics.paired_difference(hard_to_easy, slightly_better)
    assert result["low"] == pytest.approx(0.1) and result["high"] == pytest.approx(0.1)


TURNS = st.builds(
    turn,
    st.sampled_from([*STATUSES, None]),
    st.sampled_from([None, 0.5, 1.0, 1.1, 1.2, 2.0]),
    st.floats(-1, 5),
)
TRAJECTORIES = st.lists(
    st.builds(Trajectory, st.sampled_from("abc"), st.just(0), st.lists(TURNS, min_size=1, max_size=3)), max_size=12
)


@settings(max_examples=100, deadline=None)
@given(TRAJECTORIES, st.sampled_from([1.0, 1.2]), st.integers(1, 3))
def test_against_a_naive_loop(trajectories, p, at):
    good = ("correct", "incorrect", "hack", "compile_error", "runtime_error", "timeout", "oom")
    fast = count = best = best_count = judged = hacks = 0
    for item in trajectories:
        statuses = [t.verdict["status"] if t.verdict else None for t in item.turns]
        speeds = [t.verdict["speedup"] if t.verdict else None for t in item.turns]
        wins = [s == "correct" and v is not None and v >= p for s, v in zip(statuses, speeds)]
        if len(wins) >= at:
            if statuses[at - 1] in good:
                count += 1
                fast += wins[at - 1]
        elif statuses[-1] in good:
            count += 1
        if any(s in good for s in statuses[:at]):
            best_count += 1
            best += any(wins[:at])
        judged += sum(s in good for s in statuses)
        hacks += statuses.count("hack")
    expected = [
        (metrics.fast_tally(trajectories, p, at), fast, count),
        (metrics.fast_tally(trajectories, p, at, best_of_history=True), best, best_count),
        (metrics.hack_tally(trajectories), hacks, judged),
    ]
    for tally, numerator, denominator in expected:
        value = metrics.ratio(tally, resamples=10)["value"]
        assert value == (pytest.approx(numerator / denominator) if denominator else None)


def test_summary_has_the_agreed_shape_and_compare_pairs_it():
    summary = metrics.summarise(HAND_MADE, samples=2, turns=2)
    assert (summary["problems"], summary["samples"], summary["turns"]) == (2, 2, 2)
    assert set(summary["fast"]["1.2"]) == {"turn1", "turn2", "best"}
    assert summary["per_problem"]["a"] == {
        "reward_mean": pytest.approx(4.5 / 4),
        "fast_1.0": 0.5,
        "fast_1.2": 0.5,
        "hack_ratio": 0.25,
    }
    assert sum(share["value"] for share in summary["status"].values()) == pytest.approx(1.0)
    better = metrics.summarise([trajectory("a", turn("correct", 3.0, 4.0), turn("correct", 3.0, 4.0))], 1, 2)
    difference = metrics.compare(summary, better)
    assert difference["fast_1.0"]["value"] == 0.5 and difference["fast_1.0"]["problems"] == 1
    assert difference["hack_ratio"]["value"] == -0.25
