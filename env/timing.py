"""How long a forward pass takes, and how sure we are of the ratio of two.

`timed_calls` runs in the workers (a claim), `interval` in the judge. On a GPU: CUDA events around each call, host
launch included, with a cold L2. On the CPU: modelled times (`env.modelled`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from env.launches import LaunchLog

BOOTSTRAP_DRAWS = 400


def timed_calls(
    model: Any, arguments: list, log: LaunchLog, calls: int, flush: torch.Tensor | None
) -> tuple[Any, dict[str, Any]]:
    """Run `calls` forward passes. Returns the last outputs and {"times_us": [...]} or {"rows": modelled table}."""
    if flush is None:
        from env.modelled import TrafficCounter, interpreter_traffic

        counter = TrafficCounter()
        log.around = counter.kernel
        try:
            with interpreter_traffic(counter), counter:
                outputs = model(*arguments)
        finally:
            log.around = None
        return outputs, {"rows": counter.table()}
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
    outputs = None
    for start, end in events:
        flush.zero_()
        start.record()
        outputs = model(*arguments)
        end.record()
    torch.cuda.synchronize()
    return outputs, {"times_us": [start.elapsed_time(end) * 1000.0 for start, end in events]}


def interval(reference_us: list[list[float]], candidate_us: list[list[float]], seed: int) -> dict[str, float]:
    """Speedup = median reference / median candidate over paired blocks, with a 95 % bootstrap interval.

    reference_us, candidate_us: times by block, in microseconds; block i of both was measured next to each other, so
    that blocks are drawn in pairs (a drift of the clock then cancels) and calls within a block with replacement.
    """
    if len(reference_us) != len(candidate_us) or not reference_us:
        raise ValueError("the reference and the candidate need the same number of blocks, at least one")
    rng = np.random.default_rng(seed)
    reference = [np.asarray(block, dtype=np.float64) for block in reference_us]
    candidate = [np.asarray(block, dtype=np.float64) for block in candidate_us]

    def resample(blocks: list[np.ndarray], chosen: np.ndarray) -> float:
        return float(np.median(np.concatenate([rng.choice(blocks[i], size=len(blocks[i])) for i in chosen])))

    ratios = []
    for _ in range(BOOTSTRAP_DRAWS):
        chosen = rng.integers(len(reference), size=len(reference))
        ratios.append(resample(reference, chosen) / resample(candidate, chosen))
    reference_median, candidate_median = (
        float(np.median(np.concatenate(reference))),
        float(np.median(np.concatenate(candidate))),
    )
    low, high = np.quantile(ratios, [0.025, 0.975])
    speedup = reference_median / candidate_median
    return {
        "reference_us": reference_median,
        "candidate_us": candidate_median,
        "speedup": speedup,
        "speedup_low": min(float(low), speedup),
        "speedup_high": max(float(high), speedup),
    }
