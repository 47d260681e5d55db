"""What an evaluation costs: by turn from its records, and beforehand from the cost of a verdict. In the driver.

Tokens and verdicts follow from trajectories and are the same in every run; seconds come from wall.jsonl.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from eval.watch import answer_key, read_wall
from rl.records import Trajectory


def by_turn(trajectories: Sequence[Trajectory], turns: int) -> dict[str, dict[str, Any]]:
    """turn -> what a sample costs up to and with it, on average over samples.

    prompt_tokens are counted again in each turn, as an engine without a prefix cache computes them. From a server there
    are no token counts: None, and characters stand in.
    """
    known = any(turn.completion_ids for trajectory in trajectories for turn in trajectory.turns)
    count = max(1, len(trajectories))
    table = {}
    for last in range(1, turns + 1):
        rows = [turn for trajectory in trajectories for turn in trajectory.turns[:last]]
        asked, new = sum(len(turn.prompt_ids) for turn in rows), sum(len(turn.completion_ids) for turn in rows)
        table[f"turn{last}"] = {
            "prompt_tokens": asked / count if known else None,
            "new_tokens": new / count if known else None,
            "all_tokens": (asked + new) / count if known else None,
            "new_characters": sum(len(turn.completion_text) for turn in rows) / count,
            "verdicts": sum(turn.verdict is not None for turn in rows) / count,
        }
    return table


def seconds_by_turn(trajectories: Sequence[Trajectory], turns: int, wall: Path) -> dict[str, dict[str, float | None]]:
    """turn -> seconds up to and with it, a sample on average. Sampling's total is shared out by new tokens (by
    characters from a server), since samples are decoded together; the judge's are each verdict's own, whether several
    answers were the same or not."""
    sampled, judged = read_wall(wall)
    count = max(1, len(trajectories))
    rows = [[(t.problem_id, turn) for t in trajectories for turn in t.turns[:last]] for last in range(1, turns + 1)]
    lengths = [sum(len(turn.completion_ids) or len(turn.completion_text) for _, turn in part) for part in rows]
    table = {}
    for last, part in enumerate(rows, 1):
        costs = [judged.get(answer_key(id, turn.completion_text)) for id, turn in part]
        found = [cost for cost in costs if cost is not None]
        table[f"turn{last}"] = {
            "sampling_s": sampled * lengths[last - 1] / lengths[-1] / count if lengths[-1] else None,
            "judge_s": sum(found) * len(part) / len(found) / count if found else None,
        }
    return table


def plan(
    problems: int,
    samples: int,
    turns: int,
    verdict_s: float,
    evaluators: int,
    lanes: int,
    source: str,
    best_of: int = 0,
) -> tuple[float, str]:
    """(hours, the arithmetic in words) of judging an evaluation, from a verdict's seconds.

    verdict_s: from submission to verdict with nobody beside; lanes: candidates that an evaluator has in work at once.
    """
    answers = problems * (samples * turns + best_of)
    hours = answers * verdict_s / (evaluators * lanes) / 3600
    beside = f" + {problems} problems x {best_of} single answers" if best_of else ""
    text = (
        f"{problems} problems x {samples} samples x {turns} turns{beside} = {answers} verdicts\n"
        f"{answers} verdicts x {verdict_s:g} s ({source}) / ({evaluators} evaluators x {lanes} at once) = "
        f"{hours * 3600:.0f} s = {hours:.2f} h\n"
        "Equal answers to a problem are judged once, and a sample that ends early has fewer turns: this is the most. "
        "Sampling overlaps where the judge has devices of its own, else its time comes on top."
    )
    return hours, text


def measured_verdict(wall: Path) -> tuple[float, str]:
    """(mean seconds a verdict, where from) of an earlier evaluation. Raises ValueError where it has none."""
    seconds = list(read_wall(wall)[1].values())
    if not seconds:
        raise ValueError(f"{wall}: no verdict's cost in it; give --plan the seconds of a verdict instead")
    return fmean(seconds), f"mean of {len(seconds)} verdicts in {wall}"
