"""Fast@p, hack ratio and the like from trajectories, with bootstrap intervals. Pure functions; runs in the driver.

A statistic is a ratio of counts: for each problem a numerator (say, fast samples) and a denominator (samples that
count). The estimate is the ratio of the sums; its interval resamples *problems*, since samples of one problem are not
independent. Turns that are nobody's fault (infra_error, problem_error) are in no denominator; `excluded_counts` says
how many there were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from env.records import BLAMELESS_STATUSES, CANDIDATE_STATUSES
from rl.outcomes import best_fast, fast_at, is_judged
from rl.records import Trajectory, Turn

RESAMPLES = 2000
# problem id -> (numerator, denominator)
Tally = dict[str, tuple[float, float]]
Interval = dict[str, float | None]


def _tally(items: Iterable[tuple[str, float | None]]) -> Tally:
    """Adds up (problem id, value) pairs; a value of None adds the problem but no count."""
    sums: dict[str, list[float]] = {}
    for problem_id, value in items:
        entry = sums.setdefault(problem_id, [0.0, 0.0])
        if value is not None:
            entry[0] += float(value)
            entry[1] += 1.0
    return {problem_id: (entry[0], entry[1]) for problem_id, entry in sorted(sums.items())}


def fast_tally(trajectories: list[Trajectory], p: float, turn: int, best_of_history: bool = False) -> Tally:
    """Fast@p at `turn` (from 1), or at the best turn up to it: fast samples over samples that count, by problem."""
    outcome = best_fast if best_of_history else fast_at
    return _tally((trajectory.problem_id, outcome(trajectory, p, turn)) for trajectory in trajectories)


def _turn_tally(trajectories: list[Trajectory], value: Callable[[Turn], float | None]) -> Tally:
    return _tally((trajectory.problem_id, value(turn)) for trajectory in trajectories for turn in trajectory.turns)


def status_tally(trajectories: list[Trajectory], status: str) -> Tally:
    """Turns with this status over judged turns, by problem. Raises ValueError for a status that is nobody's fault."""
    if status not in CANDIDATE_STATUSES:
        raise ValueError(f"no share of {status!r}: it is in no denominator; known: {', '.join(CANDIDATE_STATUSES)}")
    return _turn_tally(trajectories, lambda turn: turn.verdict["status"] == status if is_judged(turn) else None)


def hack_tally(trajectories: list[Trajectory]) -> Tally:
    """Hack ratio: hacks over judged turns, by problem."""
    return status_tally(trajectories, "hack")


def reward_tally(trajectories: list[Trajectory]) -> Tally:
    """Mean reward over the turns that have one, by problem."""
    return _turn_tally(trajectories, lambda turn: turn.reward if is_judged(turn) else None)


def excluded_counts(trajectories: list[Trajectory]) -> dict[str, int]:
    """How many turns are in no denominator, by reason (`unjudged`: no verdict at all)."""
    counts = dict.fromkeys((*BLAMELESS_STATUSES, "unjudged"), 0)
    for trajectory in trajectories:
        for turn in trajectory.turns:
            if not is_judged(turn):
                counts[turn.verdict["status"] if turn.verdict is not None else "unjudged"] += 1
    return counts


def _resampled_ratios(numerators: np.ndarray, denominators: np.ndarray, picks: np.ndarray) -> np.ndarray:
    """Ratios of sums for each row of `picks` [resamples, problems]; NaN where no sample counts."""
    below = denominators[picks].sum(axis=1)
    return np.divide(numerators[picks].sum(axis=1), below, out=np.full(below.shape, np.nan), where=below > 0)


def _interval(value: float, draws: np.ndarray) -> Interval:
    draws = draws[~np.isnan(draws)]
    low, high = np.percentile(draws, [2.5, 97.5])
    return {"value": float(value), "low": float(low), "high": float(high)}


NOTHING: Interval = {"value": None, "low": None, "high": None}


def share_text(interval: Interval, width: int = 0) -> str:
    """An interval of shares for the console, its value `width` characters wide."""
    if interval["value"] is None:
        return "not measured"
    return f"{interval['value']:.1%}".rjust(width) + f" [{interval['low']:.1%}, {interval['high']:.1%}]"


def ratio(tally: Tally, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """The ratio of sums with its 95 % percentile-bootstrap interval over problems; all None where nothing counts."""
    numerators, denominators = (np.array(column, dtype=float) for column in zip(*tally.values())) if tally else ([], [])
    if not np.sum(denominators):
        return dict(NOTHING)
    picks = np.random.default_rng(seed).integers(len(numerators), size=(resamples, len(numerators)))
    return _interval(numerators.sum() / denominators.sum(), _resampled_ratios(numerators, denominators, picks))


def paired_difference(
    a: Mapping[str, float | None], b: Mapping[str, float | None], seed: int = 0, resamples: int = RESAMPLES
) -> dict[str, Any]:
    """Mean over problems of b - a, with a 95 % interval that resamples the problems' differences.

    a, b: problem id -> value; a problem that either side lacks, or whose value is None, is left out. `problems` says
    how many are compared, `better` and `worse` on how many b is above or below a.
    """
    common = sorted(id for id in a if a[id] is not None and b.get(id) is not None)
    if not common:
        return {**NOTHING, "problems": 0, "better": 0, "worse": 0}
    differences = np.array([b[id] - a[id] for id in common])
    picks = np.random.default_rng(seed).integers(len(common), size=(resamples, len(common)))
    return {
        **_interval(differences.mean(), differences[picks].mean(axis=1)),
        "problems": len(common),
        "better": int((differences > 0).sum()),
        "worse": int((differences < 0).sum()),
    }


def per_problem(tally: Tally) -> dict[str, float | None]:
    """problem id -> its own ratio; None where nothing of it counts."""
    return {id: numerator / denominator if denominator else None for id, (numerator, denominator) in tally.items()}


def summarise(
    trajectories: list[Trajectory], samples: int, turns: int, thresholds: tuple[float, ...] = (1.0, 1.2), seed: int = 0
) -> dict[str, Any]:
    """The evaluation's summary: every statistic with its interval, and each problem's own values at the last turn.

    `fast[p]` has `turn1` … `turn<T>` and `best` (any turn). `per_problem` fast values are those of turn T.
    """
    reward = reward_tally(trajectories)
    last = {p: fast_tally(trajectories, p, turns) for p in thresholds}
    rows: dict[str, dict[str, float | None]] = {id: {"reward_mean": value} for id, value in per_problem(reward).items()}
    for p in thresholds:
        for id, value in per_problem(last[p]).items():
            rows[id][f"fast_{p}"] = value
    for id, value in per_problem(hack_tally(trajectories)).items():
        rows[id]["hack_ratio"] = value
    return {
        "problems": len(reward),
        "samples": samples,
        "turns": turns,
        "reward_mean": ratio(reward, seed),
        "fast": {
            str(p): {f"turn{t}": ratio(fast_tally(trajectories, p, t), seed) for t in range(1, turns + 1)}
            | {"best": ratio(fast_tally(trajectories, p, turns, best_of_history=True), seed)}
            for p in thresholds
        },
        "hack_ratio": ratio(hack_tally(trajectories), seed),
        "status": {status: ratio(status_tally(trajectories, status), seed) for status in CANDIDATE_STATUSES},
        "excluded": excluded_counts(trajectories),
        "per_problem": rows,
    }


def compare(before: dict[str, Any], after: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """Paired differences (after - before) of two summaries on the same problems, for each per-problem statistic."""
    names = sorted({name for row in after["per_problem"].values() for name in row})
    return {
        name: paired_difference(
            {id: row.get(name) for id, row in before["per_problem"].items()},
            {id: row.get(name) for id, row in after["per_problem"].items()},
            seed,
        )
        for name in names
    }
