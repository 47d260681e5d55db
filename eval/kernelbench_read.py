"""Other people's kernels: a run folder of KernelBench judged again under our rules, and where verdicts differ and why.

Runs in the driver. Reads level_L_problem_P_sample_S_kernel.py and, where it is there, eval_results.json.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from env.records import Problem
from eval.kernelbench_write import places
from eval.settings import RunError
from rl.outcomes import is_judged
from rl.records import Trajectory, Turn

KERNEL = re.compile(r"level_(\d+)_problem_(\d+)_sample_(\d+)_kernel\.py")


def read_kernels(folder: Path, problems: Sequence[Problem]) -> tuple[list[Trajectory], list[str]]:
    """(a trajectory of one turn for each kernel, in the order of level, problem, sample; notes on what was left out).

    Raises RunError where there is no kernel for any of the problems.
    """
    by_place = {(place.level, place.number): id for id, place in places(problems).items()}
    found, notes = [], []
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    keys = sorted(tuple(map(int, match.groups())) for name in names if (match := KERNEL.fullmatch(name)))
    for level, number, sample in keys:
        path = folder / f"level_{level}_problem_{number}_sample_{sample}_kernel.py"
        id = by_place.get((level, number))
        if id is None:
            notes.append(f"{path.name}: no problem {number} of level {level} among those given")
            continue
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            notes.append(f"{path.name}: can't be read ({error})")
            continue
        found.append(Trajectory(id, sample, [Turn([], [], [], 0, "stop", completion_text=source)]))
    if not found:
        raise RunError(
            f"{folder}: no kernel to judge; level_L_problem_P_sample_S_kernel.py is expected, for the problems given "
            f"({len(names)} files found{f'; {notes[0]}' if notes else ''})"
        )
    return found, notes


def read_results(folder: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """(problem number, sample) -> their result; {} where the folder was never evaluated. Raises RunError."""
    path = folder / "eval_results.json"
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {
            (int(number), int(row["sample_id"])): {
                "compiled": bool(row["compiled"]),
                "correctness": bool(row["correctness"]),
                "runtime": float(row.get("runtime", -1.0)),
                "metadata": row.get("metadata") or {},
            }
            for number, rows in data.items()
            # One sample a problem was once written without the list around it.
            for row in (rows if isinstance(rows, list) else [rows])
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path}: not KernelBench's results ({type(error).__name__}: {error})") from error


def differences(
    trajectories: Sequence[Trajectory],
    problems: Sequence[Problem],
    theirs: dict[tuple[int, int], dict[str, Any]],
    baseline: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """{counts: "their verdict -> ours" -> how many, kernels: one entry a kernel, those that differ first}.

    baseline: their timing file, for their speedup; a pair of speedups is given where both sides have one.
    """
    table = places(problems)
    entries = []
    for trajectory in trajectories:
        place, verdict = table[trajectory.problem_id], trajectory.turns[0].verdict
        their = theirs.get((place.number, trajectory.sample_index))
        said = _their_status(their)
        ours = verdict["status"]
        told_apart = said != "not evaluated" and is_judged(trajectory.turns[0])
        entry = {
            "problem": trajectory.problem_id,
            "sample": trajectory.sample_index,
            "theirs": said,
            "ours": ours,
            "differs": told_apart and (said == "correct") != (ours == "correct"),
            "why": _why(verdict, their) if (said == "correct") != (ours == "correct") else "",
        }
        mean = ((baseline or {}).get(f"level{place.level}", {}).get(place.file) or {}).get("mean")
        if said == ours == "correct":
            entry["our_speedup"] = verdict["speedup"]
            if mean and their["runtime"] > 0:
                entry["their_speedup"] = mean / their["runtime"]
        entries.append(entry)
    counts = Counter(f"{entry['theirs']} -> {entry['ours']}" for entry in entries)
    entries.sort(key=lambda entry: (not entry["differs"], entry["problem"], entry["sample"]))
    return {"counts": dict(sorted(counts.items())), "kernels": entries}


def _their_status(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not evaluated"
    if result["correctness"]:
        return "correct"
    return "incorrect" if result["compiled"] else "not compiled"


def _why(verdict: dict[str, Any], their: dict[str, Any] | None) -> str:
    """The reason in words: ours where we refuse, theirs where they do."""
    if verdict["status"] != "correct":
        rule = verdict["evidence"].get("rule")
        own = " (CUDA sources aren't Triton)" if rule == "no_own_launch" else ""
        return f"{f'{rule}: ' if rule else ''}{verdict['message']}{own}"[:400]
    if their is None:
        return ""
    said = "; ".join(
        f"{name}: {value}" for name, value in their["metadata"].items() if "error" in name or "issue" in name
    )
    return (said or "it gives no reason")[:400]


def table(found: dict[str, Any]) -> str:
    """Counts, then each kernel whose verdict differs."""
    lines = [f"  {count:>5}  {pair}" for pair, count in found["counts"].items()]
    different = [entry for entry in found["kernels"] if entry["differs"]]
    lines.insert(0, f"{len(found['kernels'])} kernels, {len(different)} verdicts differ (theirs -> ours):")
    for entry in different:
        head = f"{entry['problem']} sample {entry['sample']}: {entry['theirs']} -> {entry['ours']}"
        lines.append(f"  {head}: {entry['why'].splitlines()[0] if entry['why'] else ''}")
    return "\n".join(lines)
