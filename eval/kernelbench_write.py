"""An evaluation as KernelBench's own run folder and baseline file, for that project's scripts. Runs in the driver.

RUNS/<name>/level_L_problem_P_sample_S_kernel.py    the code of each sample at the chosen turn
RUNS/<name>/eval_results.json                       problem number -> [{sample_id, compiled, correctness, runtime, …}]
RUNS/<name>/pass_at_k_results.json                  where there are several samples
RUNS/<name>_baseline.json                           level -> file name -> times of the reference in ms

What these files can't say is said in `metadata`. A hack is no success: correctness false. What was nobody's fault is
left out, and KernelBench counts a problem without a result as failed. Its speedup is baseline / runtime, with one
baseline for all candidates of a problem; ours is measured in pairs, so `runtime` is baseline / speedup, and what was
measured is in `metadata`. Its fast_p asks for more than p, Fast@p for at least p: they differ at exactly p.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from env.extract import candidate_source
from env.files import write_atomic
from env.records import Problem
from eval import estimators
from eval.settings import RunError
from rl.outcomes import is_fast, is_judged
from rl.records import Trajectory, Turn


@dataclass(frozen=True)
class Place:
    """Where KernelBench keeps a problem: level2/14_Name.py is level 2, number 14."""

    level: int
    number: int
    file: str


def place_of(problem: Problem) -> Place:
    """Raises RunError for a problem that has no level and number in KernelBench's way."""
    stem = problem.name.rpartition("/")[2].removesuffix(".py")
    found = re.match(r"(\d+)_", stem)
    if not found or problem.level < 1:
        raise RunError(
            f"{problem.id}: KernelBench's files need a level and a number (level1/23_Softmax.py); this problem has "
            f"level {problem.level} and the name {problem.name!r}"
        )
    return Place(problem.level, int(found[1]), f"{stem}.py")


def places(problems: Sequence[Problem]) -> dict[str, Place]:
    """problem id -> place. Raises RunError, also where two problems have the same."""
    table, taken = {}, {}
    for problem in problems:
        place = table[problem.id] = place_of(problem)
        if (other := taken.setdefault((place.level, place.number), problem.id)) != problem.id:
            raise RunError(f"{problem.id} and {other} are both problem {place.number} of level {place.level}")
    return table


def write(
    trajectories: Sequence[Trajectory],
    problems: Sequence[Problem],
    turns: int,
    runs: Path,
    name: str,
    turn: str = "last",
) -> list[Path]:
    """The run folders, one a level (`name`, or `name_level<L>` where there are several), with their baseline file.

    turn: "last" (of `turns`), "best" (the fastest correct one; of none, the last) or a number.
    """
    table = places(problems)
    by_id = {problem.id: problem for problem in problems}
    baseline = baselines(trajectories, problems, table)
    write_atomic(runs / f"{name}_baseline.json", json.dumps(baseline, indent=1, sort_keys=True) + "\n")
    levels = sorted({place.level for place in table.values()})
    folders = []
    for level in levels:
        folder = runs / (name if len(levels) == 1 else f"{name}_level{level}")
        chosen = [t for t in trajectories if table[t.problem_id].level == level]
        _write_level(chosen, by_id, table, baseline[f"level{level}"], folder, turns, turn)
        folders.append(folder)
    return folders


def _write_level(
    trajectories: Sequence[Trajectory],
    problems: dict[str, Problem],
    table: dict[str, Place],
    baseline: dict[str, Any],
    folder: Path,
    turns: int,
    turn: str,
) -> None:
    results: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for trajectory in trajectories:
        row, place = chosen_turn(trajectory, turns, turn), table[trajectory.problem_id]
        if row is None:
            source = ""
        else:
            source = candidate_source(row.completion_text, True, problems[trajectory.problem_id].entry_point) or ""
        file = f"level_{place.level}_problem_{place.number}_sample_{trajectory.sample_index}_kernel.py"
        write_atomic(folder / file, source)
        if row is None or is_judged(row):
            mean = baseline[place.file]["mean"]
            results[place.number].append(result(trajectory.sample_index, row, mean))
    ordered = {str(number): results[number] for number in sorted(results)}
    write_atomic(folder / "eval_results.json", json.dumps(ordered, indent=4) + "\n")
    if any(len(entries) > 1 for entries in results.values()):
        write_atomic(folder / "pass_at_k_results.json", json.dumps(pass_at_k(ordered), indent=2) + "\n")


def chosen_turn(trajectory: Trajectory, turns: int, turn: str) -> Turn | None:
    """The turn that stands for a sample; None where it has none there."""
    if turn == "best":
        best = estimators.best_turn(trajectory, turns)
        return best or (trajectory.turns[-1] if trajectory.turns else None)
    number = turns if turn == "last" else int(turn)
    if len(trajectory.turns) >= number:
        return trajectory.turns[number - 1]
    # Ended earlier: by nobody's fault, that is its verdict; for want of room, it has no answer here.
    return trajectory.turns[-1] if trajectory.turns and not is_judged(trajectory.turns[-1]) else None


def result(sample: int, turn: Turn | None, baseline_ms: float | None) -> dict[str, Any]:
    """An entry of eval_results.json."""
    entry = {"sample_id": sample, "compiled": False, "correctness": False, "metadata": {}, "runtime": -1.0}
    entry["runtime_stats"] = {}
    if turn is None:
        return {**entry, "metadata": {"status": "no answer: the context was full"}}
    verdict = turn.verdict
    entry["compiled"] = verdict["status"] != "compile_error"
    entry["metadata"] = {
        "status": verdict["status"],
        "message": verdict["message"],
        "hardware": verdict["device"],
        "rules": verdict["evidence"].get("rules", ""),
        "versions": verdict["versions"],
        "speedup": verdict["speedup"],
        "speedup_interval": [verdict["speedup_low"], verdict["speedup_high"]],
        "measured_us": {"reference": verdict["reference_us"], "candidate": verdict["candidate_us"]},
        "time_kind": verdict["time_kind"],
    }
    if verdict["status"] == "hack":
        entry["metadata"]["hack"] = verdict["evidence"].get("rule", "")
    if is_fast(turn, 0.0):
        if not verdict["speedup"] or baseline_ms is None:
            raise RunError("a correct verdict without times: it can't be written as KernelBench has it")
        entry["correctness"] = True
        entry["runtime"] = runtime_of(baseline_ms, verdict["speedup"])
        entry["runtime_stats"] = {"mean": entry["runtime"], "num_trials": 0, "note": "baseline / speedup"}
    return entry


def runtime_of(baseline_ms: float, speedup: float) -> float:
    """The runtime whose quotient is the speedup: to the last bit where a float can be found, else just not above it, so
    that rounding lifts nothing over a threshold."""
    near = baseline_ms / speedup
    around = [near, math.nextafter(near, 0), math.nextafter(near, math.inf)]
    return min(around, key=lambda runtime: (baseline_ms / runtime > speedup, abs(baseline_ms / runtime - speedup)))


def baselines(
    trajectories: Sequence[Trajectory], problems: Sequence[Problem], table: dict[str, Place]
) -> dict[str, dict[str, Any]]:
    """Times of the references in ms, over all verdicts that timed one; the median stands as `mean`.

    A reference that no verdict timed has null: KernelBench then looks at no speedup of it, since nothing of it is
    correct.
    """
    seen: dict[str, list[float]] = defaultdict(list)
    devices: dict[str, str] = {}
    for trajectory in trajectories:
        for turn in trajectory.turns:
            if turn.verdict is not None and turn.verdict["reference_us"]:
                seen[trajectory.problem_id].append(turn.verdict["reference_us"] / 1000)
                devices[trajectory.problem_id] = f"{turn.verdict['device']} ({turn.verdict['time_kind']})"
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for problem in problems:
        place, times = table[problem.id], seen[problem.id]
        entry: dict[str, Any] = {"mean": None, "std": None, "min": None, "max": None, "num_trials": 0}
        if times:
            entry = {"mean": median(times), "std": pstdev(times), "min": min(times), "max": max(times)}
            entry |= {"num_trials": len(times), "arithmetic_mean": fmean(times)}
        found[f"level{place.level}"][place.file] = {**entry, "hardware": devices.get(problem.id, "not measured")}
    return dict(found)


def pass_at_k(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """pass_at_k_results.json: averages over problems, for k that every problem has samples for."""
    counts = {number: (len(rows), sum(row["correctness"] for row in rows)) for number, rows in results.items()}
    ks = [k for k in (1, 2, 4, 8, 16, 32) if k <= min(n for n, _ in counts.values())]
    problems = {
        number: {
            "total_samples": n,
            "correct_samples": c,
            **{f"pass@{k}": estimators.pass_at_k(n, c, k) for k in ks},
        }
        for number, (n, c) in counts.items()
    }
    averages = {f"avg_pass@{k}": fmean(entry[f"pass@{k}"] for entry in problems.values()) for k in ks}
    metadata = {
        "total_problems": len(counts),
        "problems_with_samples": len(counts),
        "total_evaluated_samples": sum(n for n, _ in counts.values()),
        "total_correct_samples": sum(c for _, c in counts.values()),
        **{f"pass@{k}_count": len(counts) for k in ks},
    }
    return {"averages": averages, "metadata": metadata, "problems": problems}
