"""Baselines: from returns to advantages. Runs in the driver. Pure functions on float64.

The group of a row is the rollouts of the same problem, in the same step, at the same turn, whose return is known. It
may hold fewer than K rollouts (a context ran out, a judge broke): N is the number really there.

| estimator | A_i,t | |
| --- | --- | --- |
| trloo | G_i,t - mean of the group without i = N/(N-1) * (G_i,t - mean); N = 1: G | unbiased, per turn |
| grpo | G_i,t - mean | the mean contains i itself: the gradient shrinks by 1 - 1/N |
| grpo_std | (G_i,t - mean) / (sample standard deviation + 1e-6) | as in the GRPO paper |
| rloo | G_i,1 - mean of G_j,1 over the other trajectories; N = 1: G_i,1 | one advantage for all turns of a trajectory |
| reinforce | G_i,t | no baseline |
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence

ESTIMATORS = ("trloo", "grpo", "grpo_std", "rloo", "reinforce")


def advantages(
    returns: Sequence[Sequence[float | None]],
    groups: Sequence[Hashable],
    estimator: str,
    apart: Collection[tuple[int, int]] = (),
) -> list[list[float | None]]:
    """Advantage of every turn of every trajectory, in the shape of `returns`.

    returns: [trajectories][turns], ragged; None where a turn has no return, and then it has no advantage and is no part
        of N. groups: [trajectories], e.g. (problem_id, step).
    apart: (trajectory, turn) of rows that are in nobody else's baseline. Each of them still gets an advantage, as if it
        alone were added to those that are.
    Raises ValueError for an unknown estimator and for lengths that differ.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown advantage estimator {estimator!r}; known: {', '.join(ESTIMATORS)}")
    if len(returns) != len(groups):
        raise ValueError(f"{len(returns)} trajectories and {len(groups)} group keys")
    if estimator == "rloo":
        totals = advantages([turns[:1] for turns in returns], groups, "trloo", apart)
        return [[None if g is None else total[0] for g in turns] for total, turns in zip(totals, returns)]
    members: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    for i, turns in enumerate(returns):
        for t, value in enumerate(turns):
            if value is not None:
                members[groups[i], t].append((i, t))
    result: list[list[float | None]] = [[None] * len(turns) for turns in returns]
    for rows in members.values():
        inside = [row for row in rows if row not in apart]
        counted = [returns[i][t] for i, t in inside]
        for (i, t), value in zip(inside, group_advantages(counted, estimator)):
            result[i][t] = value
        for i, t in (row for row in rows if row in apart):
            result[i][t] = group_advantages([*counted, returns[i][t]], estimator)[-1]
    return result


def group_advantages(returns: Sequence[float], estimator: str) -> list[float]:
    """Advantages of one group, [rollouts] -> [rollouts]; estimator: trloo, grpo, grpo_std or reinforce."""
    count = len(returns)
    if not count:
        return []
    if estimator == "reinforce" or (estimator == "trloo" and count == 1):
        return list(returns)
    # fsum is exactly rounded, so the order in which rollouts came back can't change a bit of the result.
    mean = math.fsum(returns) / count
    if len(set(returns)) == 1:
        return [0.0] * count  # exactly 0, where rounding of the mean would leave 1e-17 to be scaled up
    centred = [value - mean for value in returns]
    if estimator == "trloo":
        return [count / (count - 1) * value for value in centred]
    if estimator == "grpo":
        return centred
    deviation = math.sqrt(math.fsum(value * value for value in centred) / (count - 1))
    return [value / (deviation + 1e-6) for value in centred]
