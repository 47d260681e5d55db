"""eval/estimators.py and eval/scores.py: closed forms, naive loops, and enumeration of all draws."""

from __future__ import annotations

import itertools
import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env.records import STATUSES, Problem, Verdict
from eval import estimators, metrics, scores
from rl.records import Trajectory, Turn

pytestmark = pytest.mark.budget(40)


def turn(status: str, speedup: float | None = None, low: float | None = None, high: float | None = None) -> Turn:
    verdict = Verdict(status=status, speedup=speedup, speedup_low=low, speedup_high=high).to_json()
    return Turn([], [], [], 0, "stop", verdict=verdict, reward=0.0)


def trajectory(problem: str, *turns: Turn, ended: str = "") -> Trajectory:
    return Trajectory(problem, 0, list(turns), ended=ended)


HAND_MADE = [
    trajectory("a", turn("incorrect"), turn("correct", 1.5, 1.4, 1.6)),
    trajectory("a", turn("correct", 1.0, 0.9, 1.1), turn("hack", 9.0)),
    trajectory("a", turn("correct", 2.0, 1.9, 2.1), turn("correct", 0.5, 0.4, 0.6)),
    trajectory("a", turn("timeout"), turn("infra_error")),
    trajectory("b", turn("correct", 4.0), turn("correct", 1.2, 1.1, 1.3)),
    trajectory("b", turn("correct", 1.0), turn("compile_error")),
    trajectory("b", ended="context"),
]


def test_the_hand_made_set_has_its_closed_form():
    result = scores.score(HAND_MADE, samples=4, turns=2)

    def value(p: float, at: str) -> float:
        return result["fast"][str(p)][at]["value"]

    # Turn 1: seven samples count. Turn 2: six, the infrastructure error is out, the sample without an answer is in.
    assert [value(p, "turn1") for p in scores.THRESHOLDS] == [4 / 7, 4 / 7, 2 / 7, 2 / 7, 2 / 7]
    assert [value(p, "turn2") for p in scores.THRESHOLDS] == [3 / 6, 2 / 6, 2 / 6, 1 / 6, 0 / 6]
    # Best: the timed-out sample counts by its first turn.
    assert [value(p, "best") for p in scores.THRESHOLDS] == [5 / 7, 5 / 7, 3 / 7, 3 / 7, 2 / 7]
    assert result["best"]["1.0"]["turn1"]["value"] == 4 / 7
    assert result["hack_ratio"]["value"] == 1 / 11 and result["without_an_answer"] == 1
    assert result["status_by_turn"]["turn2"]["correct"]["value"] == 3 / 5


def test_pass_at_k_closed_form_and_its_population():
    result = scores.score(HAND_MADE, samples=4, turns=2)
    # Turn 2, correct: a has 2 of 3, b has 1 of 3. k = 2: 1 - C(1,2)/C(3,2) = 1 and 1 - C(2,2)/C(3,2) = 2/3.
    at = result["at_k"]["0.0"]["k2"]["last"]
    assert (at["value"], at["problems"]) == (pytest.approx((1 + 2 / 3) / 2), 2)
    assert result["at_k"]["0.0"]["k4"]["last"] == {"value": None, "low": None, "high": None, "problems": 0}
    assert result["at_k"]["0.0"]["k4"]["best"]["problems"] == 1
    assert result["at_k"]["1.0"]["k1"]["last"]["value"] == pytest.approx((1 / 3 + 1 / 3) / 2)


def test_geometric_mean_says_of_what():
    means = scores.score(HAND_MADE, samples=4, turns=2)["geometric_mean"]
    last = means["last"]["turn2"]
    assert last["samples"]["value"] == pytest.approx((1.5 * 0.5 * 1.2) ** (1 / 3)) and last["samples"]["count"] == 3
    assert last["problems"]["value"] == pytest.approx(((1.5 * 0.5) ** 0.5 * 1.2) ** 0.5)
    assert last["problems"]["count"] == 2 and set(means["of"]) == {"samples", "problems"}
    assert means["best"]["turn2"]["samples"]["value"] == pytest.approx((1.5 * 1.0 * 2.0 * 4.0 * 1.0) ** (1 / 5))
    nothing = scores.score([trajectory("a", turn("hack", 5.0))], 1, 1)["geometric_mean"]["last"]["turn1"]["samples"]
    assert nothing == {"value": None, "low": None, "high": None, "count": 0}


def test_ties_are_apart():
    assert estimators.certainty(turn("correct", 1.0, 0.9, 1.1), 1.0) == "tie"
    assert estimators.certainty(turn("correct", 1.0, 1.0, 1.1), 1.0) == "fast"
    assert estimators.certainty(turn("correct", 0.99, 0.9, 0.99), 1.0) == "slow"
    assert estimators.certainty(turn("correct", 1.0), 1.0) == "fast"  # modelled: no interval
    assert estimators.certainty(turn("hack", 5.0, 4.0, 6.0), 1.0) == "slow"
    ties = scores.score(HAND_MADE, samples=4, turns=2)["ties"]
    assert ties["1.0"]["turn1"]["tied"] == 1 and ties["1.0"]["turn1"]["tie"]["value"] == 1 / 7
    assert ties["1.0"]["turn1"]["surely_fast"]["value"] == 3 / 7
    assert ties["1.2"]["turn2"]["tied"] == 1 and ties["1.2"]["turn2"]["tie"]["value"] == 1 / 6


def test_degenerate_problems_are_left_out_of_a_second_summary():
    result = scores.score(HAND_MADE, samples=4, turns=2, degenerate=["a", "unheard of"])
    assert result["degenerate"] == ["a"] and result["problems"] == 2
    assert result["without_degenerate"]["fast"]["1.0"]["turn1"]["value"] == 2 / 3
    assert "without_degenerate" not in scores.score(HAND_MADE, 4, 2)
    assert scores.score(HAND_MADE, 4, 2, degenerate=["a", "b"])["without_degenerate"] is None


@given(st.integers(1, 7), st.data())
@settings(max_examples=40, deadline=None)
def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_good_one(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(itertools.combinations([i < c for i in range(n)], k))
    assert estimators.pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize("arguments", [(3, 4, 1), (3, 1, 0), (3, 1, 4), (3, -1, 1)])
def test_pass_at_k_refuses_what_has_no_answer(arguments):
    with pytest.raises(ValueError, match="must hold"):
        estimators.pass_at_k(*arguments)


def test_pass_at_k_is_unbiased():
    rng, rate, k, n = random.Random(0), 0.3, 3, 6
    estimates = [estimators.pass_at_k(n, sum(rng.random() < rate for _ in range(n)), k) for _ in range(4000)]
    error = 3 * math.sqrt(0.25 / 4000)
    assert sum(estimates) / len(estimates) == pytest.approx(1 - (1 - rate) ** k, abs=error)
    naive = [1 - (1 - sum(rng.random() < rate for _ in range(n)) / n) ** k for _ in range(4000)]
    assert sum(naive) / len(naive) < 1 - (1 - rate) ** k - error  # what the estimator is there to avoid


TURNS = st.builds(
    lambda status, speedup, width: turn(status, speedup, speedup and speedup - width, speedup and speedup + width),
    st.sampled_from(STATUSES),
    st.sampled_from([None, 0.5, 1.0, 1.1, 1.2, 1.5, 2.0]),
    st.sampled_from([0.0, 0.1, 0.3]),
)
TRAJECTORIES = st.lists(
    st.builds(Trajectory, st.sampled_from("abc"), st.just(0), st.lists(TURNS, min_size=1, max_size=3)), max_size=10
)


@settings(max_examples=80, deadline=None)
@given(TRAJECTORIES, st.sampled_from(scores.THRESHOLDS), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_against_naive_loops(trajectories, p, at, k, best):
    bad = ("infra_error", "problem_error")
    groups: dict[str, list[bool]] = {}
    logs, tied = [], 0
    for item in trajectories:
        seen = [(t.verdict["status"], t.verdict["speedup"], t.verdict["speedup_high"]) for t in item.turns]
        win = [s == "correct" and v is not None and v >= p for s, v, _ in seen]
        if best:
            counts = any(s not in bad for s, _, _ in seen[:at])
            good = any(win[:at])
        elif len(seen) >= at:
            counts, good = seen[at - 1][0] not in bad, win[at - 1]
        else:
            counts, good = seen[-1][0] not in bad, False
        if counts:
            groups.setdefault(item.problem_id, []).append(good)
        speeds = [v if s == "correct" else None for s, v, _ in seen]
        chosen = max((v for v in speeds[:at] if v), default=None) if best else (speeds + [None] * 3)[at - 1]
        if chosen:
            logs.append(math.log(chosen))
        if not best and len(seen) >= at and speeds[at - 1]:
            row = item.turns[at - 1].verdict
            tied += row["speedup_low"] < p <= row["speedup_high"]
    naive = []
    for goods in groups.values():
        if len(goods) >= k:
            draws = list(itertools.combinations(goods, k))
            naive.append(sum(map(any, draws)) / len(draws))
    value = metrics.ratio(estimators.fast_at_k_tally(trajectories, p, k, at, best), resamples=10)["value"]
    assert value == (pytest.approx(sum(naive) / len(naive)) if naive else None)
    mean = estimators.geometric_mean(estimators.log_speedup_tally(trajectories, at, best), resamples=10)["value"]
    assert mean == (pytest.approx(math.exp(sum(logs) / len(logs))) if logs else None)
    if not best:
        ties = estimators.tie_tallies(trajectories, p, at)["tie"]
        assert sum(number for number, _ in ties.values()) == tied


def test_a_list_knows_problems_by_what_they_compute_and_says_what_is_stale(tmp_path):
    same, changed = Problem("level1/1_a", "one"), Problem("level1/2_b", "new text")
    reasons = [{"kind": "constant", "detail": "all ones"}]
    entries = {
        "other/name": {"sha256": same.sha256, "reasons": reasons},
        "level1/2_b": {"sha256": Problem("x", "old text").sha256, "reasons": reasons},
    }
    path = tmp_path / "list.json"
    path.write_text(json.dumps({"version": scores.LIST_VERSION, "problems": entries}))
    assert scores.listed(scores.read_list(path), [same, changed]) == (["level1/1_a"], ["level1/2_b"])


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 1, "problems": {"a": {}}}', '{"version": 9, "problems": {}}']
)
def test_a_damaged_list_is_refused_by_name(tmp_path, text):
    (tmp_path / "list.json").write_text(text)
    with pytest.raises(ValueError, match=r"list\.json"):
        scores.read_list(tmp_path / "list.json")
