"""How sure we are of the ratio of two times: the estimator, its interval, and when enough was measured.

Runs in the judge, on times that the workers claim (`env.bench`) and the judge's clock bounds (`env.measure`).
"""

from __future__ import annotations

from collections.abc import Callable

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


def lower_mean(times: np.ndarray) -> np.ndarray:
    """Mean of the calls between the 5th and the 35th percentile along the last axis.

    Where the host's time counts, noise only ever adds (another process on the core, a cold cache), sometimes to most
    calls of a block: what the program needs is what the better calls take.
    """
    ordered = np.sort(times, axis=-1)
    count = ordered.shape[-1]
    low = count // 20
    return ordered[..., low : max(low + 1, round(0.35 * count))].mean(axis=-1)


CENTERS = {"middle": middle_mean, "lower": lower_mean, "mean": lambda times: times.mean(axis=-1)}
KIND = {"eager": "lower", "device": "lower"}


def interval(
    reference_us: list[list[float]], candidate_us: list[list[float]], seed: int, kind: str = "middle"
) -> dict[str, float]:
    """Speedup = reference / candidate, with a 95 % bootstrap interval.

    reference_us, candidate_us: times by block, in microseconds; block i of both was measured next to each other, so
    that blocks are drawn in pairs (a drift of the clock then cancels) and calls within a block with replacement.
    kind: what stands for many calls: `middle` (mean of the middle half), `lower` (mean of the better third), or the
    plain `mean`, as other evaluators report it. Raises ValueError where the blocks don't pair up.
    """
    if len(reference_us) != len(candidate_us) or not reference_us:
        raise ValueError("the reference and the candidate need the same number of blocks, at least one")
    center = CENTERS[kind]
    rng = np.random.default_rng(seed)
    reference = [np.asarray(block, dtype=np.float64) for block in reference_us]
    candidate = [np.asarray(block, dtype=np.float64) for block in candidate_us]
    chosen = rng.integers(len(reference), size=(BOOTSTRAP_DRAWS, len(reference)))
    ratios = _resampled(reference, chosen, rng, center) / _resampled(candidate, chosen, rng, center)
    reference_time = float(center(np.concatenate(reference)))
    candidate_time = float(center(np.concatenate(candidate)))
    low, high = np.quantile(ratios, [0.025, 0.975])
    speedup = reference_time / candidate_time
    return {
        "reference_us": reference_time,
        "candidate_us": candidate_time,
        "speedup": speedup,
        "speedup_low": min(float(low), speedup),
        "speedup_high": max(float(high), speedup),
    }


def _resampled(
    blocks: list[np.ndarray], chosen: np.ndarray, rng: np.random.Generator, center: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Centres of resampled calls [draws]; `chosen` [draws, blocks] names the blocks of each draw."""
    if len({len(block) for block in blocks}) == 1:
        table = np.stack(blocks)
        calls = rng.integers(table.shape[1], size=(*chosen.shape, table.shape[1]))
        return center(table[chosen[..., None], calls].reshape(len(chosen), -1))
    draws = [np.concatenate([rng.choice(blocks[i], size=len(blocks[i])) for i in row]) for row in chosen]
    return np.array([center(draw) for draw in draws])


def relative_error(blocks: list[list[float]], kind: str = "middle") -> float:
    """Standard error of a centre over its value: cheap enough to ask while the GPU is held.

    From the scatter of the calls that enter it and from that of the blocks, whichever is larger: a drift shows between
    blocks only.
    """
    center = CENTERS[kind]
    times = np.concatenate([np.asarray(block, dtype=np.float64) for block in blocks])
    value = float(center(times))
    # The middle half's spread estimates a normal distribution's: sigma = IQR / 1.35; the efficiency of the mean of the
    # middle half against the mean is 0.84, that of the better third about half.
    low, high = np.quantile(times, [0.25, 0.75] if kind == "middle" else [0.05, 0.35])
    sigma = (high - low) / (1.35 if kind == "middle" else 1.26)
    within = sigma / np.sqrt((0.84 if kind == "middle" else 0.5) * len(times))
    if len(blocks) < 2:
        return float(within / value)
    between = np.array([center(np.asarray(block, dtype=np.float64)) for block in blocks]).std(ddof=1)
    # A block of the host's bad luck doesn't move the better third.
    return float(max(within, between / np.sqrt(len(blocks)) if kind == "middle" else 0.0) / value)
