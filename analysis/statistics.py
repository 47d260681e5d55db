"""Intervals for ratios and paired differences over runs and problems. Pure functions.

Samples of one problem are not independent, and problems of one run share its training: intervals resample runs (seeds)
first and problems within them. With one run only problems are resampled, and the interval says nothing about another
seed. Three seeds are few for a bootstrap: it is then too narrow rather than too wide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
# run -> problem -> (numerator, denominator)
Tallies = Mapping[str, Mapping[str, tuple[float, float]]]


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval; None where nothing counts. problems, runs: behind the estimate."""

    value: float | None
    low: float | None
    high: float | None
    problems: int
    runs: int


def _resampled(tables: list[np.ndarray], resamples: int, seed: int) -> np.ndarray:
    """Sums [resamples, 2] of tables [problems, 2], drawn with replacement: runs first, problems within."""
    rng = np.random.default_rng(seed)
    sums = np.zeros((resamples, 2))
    runs = rng.integers(len(tables), size=(resamples, len(tables)))
    for slot in range(len(tables)):
        for run, table in enumerate(tables):
            rows = np.flatnonzero(runs[:, slot] == run)
            picks = rng.integers(len(table), size=(len(rows), len(table)))
            sums[rows] += table[picks].sum(axis=1)
    return sums


def ratio(tallies: Tallies, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """The ratio of sums over all runs and problems, with its percentile-bootstrap interval."""
    tables = [np.array(sorted(problems.values()), dtype=float) for problems in tallies.values() if problems]
    tables = [table for table in tables if table[:, 1].sum() > 0]
    problems = sum(int((table[:, 1] > 0).sum()) for table in tables)
    if not tables:
        return Interval(None, None, None, 0, 0)
    total = sum(table.sum(axis=0) for table in tables)
    sums = _resampled(tables, resamples, seed)
    draws = sums[sums[:, 1] > 0]
    low, high = np.percentile(draws[:, 0] / draws[:, 1], [2.5, 97.5])
    return Interval(float(total[0] / total[1]), float(low), float(high), problems, len(tables))


def paired(a: Tallies, b: Tallies, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Mean over problems of b's ratio minus a's, of the same run (seed) and problem, with its interval.

    What only one side has, or where nothing of it counts, is left out; `problems` says how many pairs are left.
    """
    pairs: dict[str, dict[str, tuple[float, float]]] = {}
    for run in a:
        for problem, (numerator, denominator) in a[run].items():
            other = b.get(run, {}).get(problem)
            if other is not None and denominator and other[1]:
                pairs.setdefault(run, {})[problem] = (other[0] / other[1] - numerator / denominator, 1.0)
    return ratio(pairs, resamples, seed)
