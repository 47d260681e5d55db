"""All that an evaluation reports, from its trajectories; with and without degenerate problems. Pure; in the driver.

`score` adds to metrics.summarise: best of history by turn, pass@k and Fast@p@k, geometric means, ties, status shares by
turn, and the same again without the problems of a list (eval/audit.py makes such lists).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from env.records import CANDIDATE_STATUSES, Problem
from eval import estimators, metrics
from eval.metrics import ratio
from rl.records import Trajectory

THRESHOLDS = (0.0, 1.0, 1.2, 1.5, 2.0)
LIST_VERSION = 1
GEOMETRIC_MEAN_OF = {
    "samples": "correct samples with a measured speedup at the turn; every sample weighs the same",
    "problems": "problems with such a sample; each is the geometric mean of its own samples, and all weigh the same",
}


def score(
    trajectories: list[Trajectory], samples: int, turns: int, seed: int = 0, degenerate: Sequence[str] = ()
) -> dict[str, Any]:
    """The whole summary. `degenerate`: ids of problems that a second summary, `without_degenerate`, leaves out."""
    summary = _summary(trajectories, samples, turns, seed)
    left_out = sorted({trajectory.problem_id for trajectory in trajectories} & set(degenerate))
    summary["degenerate"] = left_out
    if left_out:
        kept = [trajectory for trajectory in trajectories if trajectory.problem_id not in left_out]
        summary["without_degenerate"] = _summary(kept, samples, turns, seed) if kept else None
    return summary


def _summary(trajectories: list[Trajectory], samples: int, turns: int, seed: int) -> dict[str, Any]:
    summary = metrics.summarise(trajectories, samples, turns, THRESHOLDS, seed)
    every_turn = range(1, turns + 1)

    def by_turn(make: Any) -> dict[str, Any]:
        return {f"turn{turn}": make(turn) for turn in every_turn}

    def best_fast(p: float) -> dict[str, Any]:
        return by_turn(lambda turn: ratio(best_tally(trajectories, p, turn), seed))

    summary["best"] = {str(p): best_fast(p) for p in THRESHOLDS}
    for p in THRESHOLDS:
        summary["fast"][str(p)]["best"] = summary["best"][str(p)][f"turn{turns}"]
    summary["at_k"] = {
        str(p): {
            f"k{k}": {
                name: _counted(estimators.fast_at_k_tally(trajectories, p, k, turns, best), seed)
                for name, best in (("last", False), ("best", True))
            }
            for k in powers(samples)
        }
        for p in THRESHOLDS
    }
    summary["geometric_mean"] = {
        "of": GEOMETRIC_MEAN_OF,
        **{
            name: by_turn(lambda turn, best=best: _geometric(trajectories, turn, best, seed))
            for name, best in (("last", False), ("best", True))
        },
    }
    summary["ties"] = {str(p): by_turn(lambda turn, p=p: _ties(trajectories, p, turn, seed)) for p in THRESHOLDS}
    summary["status_by_turn"] = by_turn(
        lambda turn: {
            status: ratio(estimators.status_at_tally(trajectories, status, turn), seed) for status in CANDIDATE_STATUSES
        }
    )
    summary["without_an_answer"] = sum(not trajectory.turns for trajectory in trajectories)
    return summary


def best_tally(trajectories: Sequence[Trajectory], p: float, turn: int) -> metrics.Tally:
    """Best-of-history Fast@p up to `turn`, by problem."""
    return metrics._tally((t.problem_id, estimators.outcome(t, p, turn, best=True)) for t in trajectories)


def powers(samples: int) -> list[int]:
    """1, 2, 4, … up to the number of samples, which is always among them."""
    return sorted({2**i for i in range(samples.bit_length()) if 2**i <= samples} | {samples})


def _counted(tally: metrics.Tally, seed: int) -> dict[str, Any]:
    return {**ratio(tally, seed), "problems": int(sum(below for _, below in tally.values()))}


def _geometric(trajectories: Sequence[Trajectory], turn: int, best: bool, seed: int) -> dict[str, Any]:
    tally = estimators.log_speedup_tally(trajectories, turn, best)
    equal = estimators.by_problem_mean(tally)
    return {
        "samples": {**estimators.geometric_mean(tally, seed), "count": int(sum(n for _, n in tally.values()))},
        "problems": {**estimators.geometric_mean(equal, seed), "count": int(sum(n for _, n in equal.values()))},
    }


def _ties(trajectories: Sequence[Trajectory], p: float, turn: int, seed: int) -> dict[str, Any]:
    tallies = estimators.tie_tallies(trajectories, p, turn)
    counts = {name: int(sum(number for number, _ in tally.values())) for name, tally in tallies.items()}
    return {"surely_fast": ratio(tallies["fast"], seed), "tie": ratio(tallies["tie"], seed), "tied": counts["tie"]}


# The list of degenerate problems -------------------------------------------------------------------------------------


def read_list(path: Path) -> dict[str, Any]:
    """A list as eval/audit.py writes it. Raises ValueError naming the file and its fault."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        problems = data["problems"]
        for id, entry in problems.items():
            if not (isinstance(entry["sha256"], str) and entry["reasons"] and all(r["kind"] for r in entry["reasons"])):
                raise ValueError(f"problem {id!r} has no sha256 or no reasons")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: not a list of degenerate problems ({type(error).__name__}: {error}); python -m eval.audit writes "
            "such files"
        ) from error
    if data.get("version") != LIST_VERSION:
        raise ValueError(f"{path}: a list of version {data.get('version')}; this program knows {LIST_VERSION}")
    return data


def listed(data: Mapping[str, Any], problems: Sequence[Problem]) -> tuple[list[str], list[str]]:
    """(ids that the list names for these very sources, ids that it names for other sources of the same name).

    A source is recognised wherever it is and whatever it is called; one that changed since the audit is not left out.
    """
    known = {entry["sha256"] for entry in data["problems"].values()}
    found = [problem.id for problem in problems if problem.sha256 in known]
    stale = [problem.id for problem in problems if problem.id in data["problems"] and problem.sha256 not in known]
    return found, stale
