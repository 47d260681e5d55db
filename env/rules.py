"""What a verdict rests on: how many trials, how much time. Runs everywhere; the paper's values where it names them."""

from __future__ import annotations

from dataclasses import dataclass


def spares_for(device: str) -> int:
    """Workers to keep warm a lane: on a GPU one takes seconds to get ready, and a verdict needs two."""
    return 2 if device == "cuda" else 1


@dataclass(frozen=True)
class Rules:
    """trials: correctness trials in train mode (eval mode and gradients on come on top). spares: workers kept warm a
    lane.
    """

    trials: int = 5
    compile_timeout_s: float = 60.0
    run_timeout_s: float = 30.0
    spares: int = 1
