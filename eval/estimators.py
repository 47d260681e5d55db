"""Per-problem estimators behind the scores: pass@k, Fast@p@k, geometric means, ties. Pure functions; in the driver.

Each gives a tally (problem id -> numerator and denominator) that eval.metrics.ratio turns into a value with an interval
over problems. What is correct, fast or nobody's fault is said in rl/outcomes.py and nowhere else.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from env.records import CANDIDATE_STATUSES
from eval.metrics import RESAMPLES, Interval, Tally, ratio
from rl.outcomes import best_fast, fast_at, is_fast, is_judged
from rl.records import Trajectory, Turn

CORRECT = 0.0  # Fast@0: correct, at any measured speed


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the chance that k of n samples, drawn without replacement, hold one of c good ones.

    Unbiased for 1 - (1 - rate)^k. Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} good in {n} samples: 0 <= c <= n and 1 <= k <= n must hold")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def outcome(trajectory: Trajectory, p: float, turn: int, best: bool = False) -> bool | None:
    """Fast at `turn` (best: at any turn up to it), None where the sample doesn't count."""
    if best and not trajectory.turns and trajectory.ended == "context":
        return False  # its first prompt left no room for an answer: no success, like any later turn that it lacks
    return (best_fast if best else fast_at)(trajectory, p, turn)


def fast_at_k_tally(trajectories: Sequence[Trajectory], p: float, k: int, turn: int, best: bool = False) -> Tally:
    """Fast@p@k by problem: (estimate, 1), or (0, 0) where fewer than k samples count. p = 0: pass@k."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for trajectory in trajectories:
        entry, value = counts[trajectory.problem_id], outcome(trajectory, p, turn, best)
        if value is not None:
            entry[0] += 1
            entry[1] += value
    return {id: (pass_at_k(n, c, k), 1.0) if n >= k else (0.0, 0.0) for id, (n, c) in sorted(counts.items())}


def speedup_of(turn: Turn) -> float | None:
    """The turn's measured speedup; None where it isn't correct or has none above 0."""
    value = turn.verdict["speedup"] if is_fast(turn, CORRECT) else None
    return value if value else None


def best_turn(trajectory: Trajectory, turns: int) -> Turn | None:
    """The fastest correct turn among the first `turns`, the earlier of equals; None where none is correct."""
    rows = [turn for turn in trajectory.turns[:turns] if speedup_of(turn) is not None]
    return max(rows, key=lambda turn: speedup_of(turn), default=None)


def turn_at(trajectory: Trajectory, turn: int, best: bool = False) -> Turn | None:
    """The turn that a score at `turn` looks at: that one, or the fastest correct one up to it."""
    if best:
        return best_turn(trajectory, turn)
    return trajectory.turns[turn - 1] if len(trajectory.turns) >= turn else None


def log_speedup_tally(trajectories: Sequence[Trajectory], turn: int, best: bool = False) -> Tally:
    """Sum of log speedups over correct samples, and how many, by problem."""
    tally = {trajectory.problem_id: (0.0, 0.0) for trajectory in trajectories}
    for trajectory in trajectories:
        row = turn_at(trajectory, turn, best)
        value = speedup_of(row) if row is not None else None
        if value is not None:
            total, count = tally[trajectory.problem_id]
            tally[trajectory.problem_id] = (total + math.log(value), count + 1.0)
    return dict(sorted(tally.items()))


def geometric_mean(tally: Tally, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """exp(mean log speedup) with its interval, from `log_speedup_tally`; all None where nothing is correct."""
    logs = ratio(tally, seed, resamples)
    return {name: None if value is None else math.exp(value) for name, value in logs.items()}


def by_problem_mean(tally: Tally) -> Tally:
    """Every problem with anything that counts weighs the same, however many of its samples count."""
    return {id: (total / count, 1.0) if count else (0.0, 0.0) for id, (total, count) in tally.items()}


def certainty(turn: Turn, p: float) -> str:
    """ "fast", "tie" or "slow": whether the 95 % interval of the speedup lies at or above p, spans it, or lies below.

    A speedup without an interval (modelled times have none) is its own.
    """
    value = speedup_of(turn)
    if value is None:
        return "slow"
    low, high = (turn.verdict.get(name) for name in ("speedup_low", "speedup_high"))
    low, high = value if low is None else low, value if high is None else high
    if low >= p:
        return "fast"
    return "tie" if high >= p else "slow"


def tie_tallies(trajectories: Sequence[Trajectory], p: float, turn: int) -> Mapping[str, Tally]:
    """{"fast", "tie"}: surely fast and undecided samples at `turn`, over those that count, by problem."""
    found: dict[str, dict[str, tuple[float, float]]] = {"fast": {}, "tie": {}}
    for trajectory in trajectories:
        counts = outcome(trajectory, p, turn) is not None
        row = turn_at(trajectory, turn)
        kind = certainty(row, p) if row is not None and counts else "slow"
        for name, tally in found.items():
            number, below = tally.get(trajectory.problem_id, (0.0, 0.0))
            tally[trajectory.problem_id] = (number + (kind == name), below + counts)
    return {name: dict(sorted(tally.items())) for name, tally in found.items()}


def status_at_tally(trajectories: Sequence[Trajectory], status: str, turn: int) -> Tally:
    """Samples with this status at `turn` over those judged there, by problem."""
    if status not in CANDIDATE_STATUSES:
        raise ValueError(f"no share of {status!r}: it is in no denominator; known: {', '.join(CANDIDATE_STATUSES)}")
    tally = {trajectory.problem_id: (0.0, 0.0) for trajectory in trajectories}
    for trajectory in trajectories:
        row = turn_at(trajectory, turn)
        if row is not None and is_judged(row):
            number, below = tally[trajectory.problem_id]
            tally[trajectory.problem_id] = (number + (row.verdict["status"] == status), below + 1.0)
    return dict(sorted(tally.items()))
