"""How sure we are of the ratio of two times: the estimator, its interval, and when enough was measured.

Runs in the judge, on times that the workers claim (`env.bench`) and the judge's clock bounds (`env.measure`).
"""

from __future__ import annotations

import numpy as np

BOOTSTRAP_DRAWS = 400


def middle_mean(times: np.ndarray) -> np.ndarray:
    """Mean of the middle half along the last axis: as robust as the median, but not stuck on a timer's steps.

    CUDA events step by 0.03 to 0.5 us: the median of a 3.5 us kernel moves in jumps of 5 %.
    """
    ordered = np.sort(times, axis=-1)
    count = ordered.shape[-1]
    cut = count // 4
    return ordered[..., cut : count - cut].mean(axis=-1)


def _center(times: np.ndarray, mean: bool) -> np.ndarray:
    return times.mean(axis=-1) if mean else middle_mean(times)


def interval(
    reference_us: list[list[float]], candidate_us: list[list[float]], seed: int, mean: bool = False
) -> dict[str, float]:
    """Speedup = reference / candidate (mean of the middle half of all calls), with a 95 % bootstrap interval.

    reference_us, candidate_us: times by block, in microseconds; block i of both was measured next to each other, so
    that blocks are drawn in pairs (a drift of the clock then cancels) and calls within a block with replacement.
    mean: the plain mean instead, as other evaluators report it. Raises ValueError where the blocks don't pair up.
    """
    if len(reference_us) != len(candidate_us) or not reference_us:
        raise ValueError("the reference and the candidate need the same number of blocks, at least one")
    rng = np.random.default_rng(seed)
    reference = [np.asarray(block, dtype=np.float64) for block in reference_us]
    candidate = [np.asarray(block, dtype=np.float64) for block in candidate_us]
    chosen = rng.integers(len(reference), size=(BOOTSTRAP_DRAWS, len(reference)))
    ratios = _resampled(reference, chosen, rng, mean) / _resampled(candidate, chosen, rng, mean)
    reference_time = float(_center(np.concatenate(reference), mean))
    candidate_time = float(_center(np.concatenate(candidate), mean))
    low, high = np.quantile(ratios, [0.025, 0.975])
    speedup = reference_time / candidate_time
    return {
        "reference_us": reference_time,
        "candidate_us": candidate_time,
        "speedup": speedup,
        "speedup_low": min(float(low), speedup),
        "speedup_high": max(float(high), speedup),
    }


def _resampled(blocks: list[np.ndarray], chosen: np.ndarray, rng: np.random.Generator, mean: bool) -> np.ndarray:
    """Centres of resampled calls [draws]; `chosen` [draws, blocks] names the blocks of each draw."""
    if len({len(block) for block in blocks}) == 1:
        table = np.stack(blocks)
        calls = rng.integers(table.shape[1], size=(*chosen.shape, table.shape[1]))
        return _center(table[chosen[..., None], calls].reshape(len(chosen), -1), mean)
    draws = [np.concatenate([rng.choice(blocks[i], size=len(blocks[i])) for i in row]) for row in chosen]
    return np.array([_center(draw, mean) for draw in draws])


def relative_error(blocks: list[list[float]]) -> float:
    """Standard error of the mean of the middle half over its value: cheap enough to ask while the GPU is held.

    From the scatter of the calls and from that of the blocks, whichever is larger: a drift shows between blocks only.
    """
    times = np.concatenate([np.asarray(block, dtype=np.float64) for block in blocks])
    center = float(middle_mean(times))
    # The middle half's spread estimates a normal distribution's: sigma = IQR / 1.35; efficiency of the mean of the
    # middle half against the mean is 0.84.
    low, high = np.quantile(times, [0.25, 0.75])
    within = (high - low) / 1.35 / np.sqrt(0.84 * len(times))
    if len(blocks) < 2:
        return float(within / center)
    means = np.array([middle_mean(np.asarray(block, dtype=np.float64)) for block in blocks])
    between = means.std(ddof=1) / np.sqrt(len(blocks))
    return float(max(within, between) / center)
