"""What counts as fast, as judged, as a hack: one definition for training's curves and for evaluation.

Runs in the driver and in readers of run folders. Standard library only.
"""

from __future__ import annotations

import math

from env.records import CANDIDATE_STATUSES
from rl.records import Trajectory, Turn


def is_judged(turn: Turn) -> bool:
    """True where the verdict says something about the candidate."""
    return turn.verdict is not None and turn.verdict["status"] in CANDIDATE_STATUSES


def is_fast(turn: Turn, p: float) -> bool:
    """True if the turn's candidate is correct (so: no hack) and at least `p` times as fast as the reference.

    A correct candidate whose speed could not be measured is not fast: missing evidence is never a pass.
    """
    if turn.verdict is None or turn.verdict["status"] != "correct":
        return False
    speedup = turn.verdict.get("speedup")
    return speedup is not None and math.isfinite(speedup) and speedup >= p


def fast_at(trajectory: Trajectory, p: float, turn: int) -> bool | None:
    """Whether the sample is fast at a turn (from 1); None where it doesn't count.

    A sample that ended earlier (no room left in the context) has no answer at this turn and counts as not fast, unless
    what ended it is nobody's fault.
    """
    if len(trajectory.turns) >= turn:
        row = trajectory.turns[turn - 1]
        return is_fast(row, p) if is_judged(row) else None
    if trajectory.turns and not is_judged(trajectory.turns[-1]):
        return None
    return False


def best_fast(trajectory: Trajectory, p: float, turn: int) -> bool | None:
    """Whether the sample was fast at any of its first `turn` turns; None if none of them counts.

    One that never got to answer (its first prompt left no room) counts as not fast, as in `fast_at`.
    """
    if not trajectory.turns:
        return False
    rows = [row for row in trajectory.turns[:turn] if is_judged(row)]
    return any(is_fast(row, p) for row in rows) if rows else None
