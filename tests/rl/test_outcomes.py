"""What counts as judged, as fast, at a turn and over turns: case by case."""

from __future__ import annotations

import pytest

from env.records import BLAMELESS_STATUSES, CANDIDATE_STATUSES, Verdict
from rl.outcomes import best_fast, fast_at, is_fast, is_judged
from rl.records import Trajectory, Turn

pytestmark = pytest.mark.budget(10)


def turn(status, speedup=None):
    verdict = Verdict(status, speedup=speedup).to_json() if status else None
    return Turn([1], [2], [-1.0], 0, "stop", verdict=verdict)


def sample(*turns):
    return Trajectory("p", 0, [turn(*given) for given in turns])


FAST, SLOW, INFRA = ("correct", 2.0), ("correct", 0.5), ("infra_error", None)


@pytest.mark.parametrize("status", CANDIDATE_STATUSES)
def test_a_verdict_on_the_candidate_is_a_judgement(status):
    assert is_judged(turn(status))


@pytest.mark.parametrize("status", [*BLAMELESS_STATUSES, None])
def test_no_verdict_or_one_that_is_nobodys_fault_is_none(status):
    assert not is_judged(turn(status)) and not is_fast(turn(status), 0.0)


def test_only_what_is_correct_and_measured_is_fast():
    assert is_fast(turn("correct", 1.2), 1.2) and not is_fast(turn("correct", 1.1999), 1.2)
    assert not any(is_fast(turn(status, 9.0), 1.0) for status in CANDIDATE_STATUSES if status != "correct")
    for speedup in (None, float("nan"), float("inf")):
        assert not is_fast(turn("correct", speedup), 1.0)


def test_at_a_turn_only_that_turn_counts():
    trajectory = sample(FAST, SLOW, FAST)
    assert [fast_at(trajectory, 1.0, number) for number in (1, 2, 3)] == [True, False, True]


def test_a_sample_that_ended_early_is_not_fast_unless_its_end_is_nobodys_fault():
    assert fast_at(sample(FAST), 1.0, 2) is False and fast_at(sample(), 1.0, 1) is False
    assert fast_at(sample(FAST, INFRA), 1.0, 3) is None and fast_at(sample(FAST, INFRA), 1.0, 2) is None
    assert fast_at(sample(INFRA, FAST), 1.0, 3) is False  # the last verdict decides
    assert fast_at(sample(FAST, INFRA), 1.0, 1) is True


def test_the_best_of_the_first_turns():
    assert [best_fast(sample(SLOW, FAST, SLOW), 1.0, number) for number in (1, 2, 3)] == [False, True, True]
    assert best_fast(sample(SLOW, ("hack", 9.0)), 1.0, 2) is False
    assert best_fast(sample(FAST, INFRA), 1.0, 2) is True and best_fast(sample(INFRA, SLOW), 1.0, 2) is False
    assert best_fast(sample(INFRA, FAST), 1.0, 1) is None  # nothing counts yet
    assert best_fast(sample(), 1.0, 1) is False
