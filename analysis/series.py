"""Several seeds as one curve: aligning by step, smoothing, mean with band. Pure functions on numpy arrays.

The band is the 95 % t-interval of the mean over seeds, step by step. With one seed there is no band. A step that a seed
lacks counts with the others (`count` says how many), and a step that all lack breaks the curve: nothing is bridged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# 97.5 % quantiles of Student's t for 1, 2, … degrees of freedom; the normal distribution's beyond.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
T_975 += (2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)


def t_975(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t. Raises ValueError below one degree of freedom."""
    if degrees < 1:
        raise ValueError("an interval needs two values")
    return T_975[degrees - 1] if degrees <= len(T_975) else 1.96 + 2.5 / degrees


@dataclass
class Band:
    """A curve: all arrays are [steps]. low, high are NaN where fewer than two seeds have the step."""

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    count: np.ndarray


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def align(runs: Sequence[Sequence[dict[str, Any]]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps [steps] at which any run has the metric, with those between at which all lost their line (NaN), and values
    [runs, steps].

    Where lines of all steps are expected (the metric is in every line), a missing step stays in the grid, so that the
    curve breaks there; a metric that is measured every few steps has only those.
    """
    by_step = [{row["step"]: _number(row.get(name)) for row in rows if name in row} for rows in runs]
    steps = {step for values in by_step for step in values}
    dense = all(name in row for rows in runs for row in rows if row["step"] > 0) and bool(steps)
    if dense:
        steps |= set(range(min(steps), max(steps) + 1))
    grid = np.array(sorted(steps), dtype=int)
    values = np.array([[one.get(step, math.nan) for step in grid] for one in by_step], dtype=float)
    return grid, values.reshape(len(runs), len(grid))


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred moving mean over `window` (odd) points along the last axis; fewer at the ends and around NaN.

    NaN stays NaN: smoothing fills no gap. Raises ValueError for an even window.
    """
    if window < 1 or window % 2 == 0:
        raise ValueError(f"smoothing over {window} points has no centre; use an odd number")
    if window == 1:
        return values.copy()
    half, out = window // 2, np.full(values.shape, np.nan)
    for i in range(values.shape[-1]):
        part = values[..., max(0, i - half) : i + half + 1]
        there = np.isfinite(part)
        total = np.where(there, part, 0.0).sum(axis=-1)
        out[..., i] = total / np.maximum(there.sum(axis=-1), 1)
    return np.where(np.isfinite(values), out, np.nan)


def band(steps: np.ndarray, values: np.ndarray) -> Band:
    """Mean and 95 % t-interval over runs of values [runs, steps]."""
    there = np.isfinite(values)
    count = there.sum(axis=0)
    some = np.maximum(count, 1)
    mean = np.where(count > 0, np.where(there, values, 0.0).sum(axis=0) / some, np.nan)
    squares = np.where(there, (values - mean) ** 2, 0.0).sum(axis=0)
    half = np.full(len(steps), np.nan)
    for i, n in enumerate(count):
        if n > 1:
            half[i] = t_975(int(n) - 1) * math.sqrt(squares[i] / (n - 1) / n)
    return Band(steps, mean, mean - half, mean + half, count)


def curve(runs: Sequence[Sequence[dict[str, Any]]], name: str, window: int = 1) -> Band:
    """The band of one metric: each run is smoothed by itself, then mean and interval are taken over runs."""
    steps, values = align(runs, name)
    return band(steps, smooth(values, window))
