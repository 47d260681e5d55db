"""Two evaluations of the same problems, problem by problem: `python -m eval.compare A B`. Runs in the driver.

Every statistic as B minus A, averaged over problems, with an interval that resamples problems; a problem that either
side lacks, or has no verdict on, is left out and counted. Prints a table, and with --out writes the whole as JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from env.problems import ProblemError, load_jsonl
from eval import estimators, metrics, scores
from eval.settings import RunError, read, write_json
from rl.checkpoint import changed_settings
from rl.records import Trajectory, read_trajectories

Values = dict[str, float | None]


def statistics(trajectories: Sequence[Trajectory], turns: int) -> dict[str, Values]:
    """statistic -> problem id -> value, all at the last turn but those named best."""
    rows = list(trajectories)
    tallies = {f"fast@{p:g}": metrics.fast_tally(rows, p, turns) for p in scores.THRESHOLDS}
    tallies |= {f"fast@{p:g} best": scores.best_tally(rows, p, turns) for p in scores.THRESHOLDS}
    tallies["log speedup"] = estimators.log_speedup_tally(rows, turns)
    tallies["hack ratio"] = metrics.hack_tally(rows)
    tallies["reward"] = metrics.reward_tally(rows)
    return {name: metrics.per_problem(tally) for name, tally in tallies.items()}


def compare(a: Sequence[Trajectory], b: Sequence[Trajectory], turns_a: int, turns_b: int, seed: int = 0) -> dict:
    """{differences: statistic -> paired difference, per_problem: id -> statistic -> [a, b], left_out: ids}."""
    left, right = statistics(a, turns_a), statistics(b, turns_b)
    ids = sorted({*left["reward"]} & {*right["reward"]})
    return {
        "differences": {name: metrics.paired_difference(left[name], right[name], seed) for name in left},
        "per_problem": {id: {name: [left[name].get(id), right[name].get(id)] for name in left} for id in ids},
        "left_out": sorted({*left["reward"]} ^ {*right["reward"]}),
    }


def load(folder: Path) -> tuple[dict[str, Any], list[Trajectory], dict[str, str]]:
    """(settings, trajectories, problem id -> sha256) of an evaluation. Raises RunError."""
    settings = read(folder)
    try:
        problems = {problem.id: problem.sha256 for problem in load_jsonl(folder / "problems.jsonl")}
        return settings, list(read_trajectories(folder / "trajectories.jsonl")), problems
    except (OSError, ProblemError) as error:
        raise RunError(f"{folder}: not evaluated yet ({error}); run eval.run first") from error


def of_runs(a: Path, b: Path, seed: int = 0) -> dict[str, Any]:
    """The comparison of two folders, with the settings in which they differ. Raises RunError where they have no problem
    in common, or where an id means two different problems."""
    (settings_a, rows_a, known_a), (settings_b, rows_b, known_b) = load(a), load(b)
    common = known_a.keys() & known_b.keys()
    if not common:
        raise RunError(f"{a} and {b} have no problem in common: nothing to compare")
    if other := sorted(id for id in common if known_a[id] != known_b[id]):
        raise RunError(f"{other[0]!r} is another problem in {b} than in {a} (and {len(other) - 1} more ids)")
    result = compare(rows_a, rows_b, settings_a["config"].eval.turns, settings_b["config"].eval.turns, seed)
    plain = [{**settings, "config": settings["config"].to_json()} for settings in (settings_a, settings_b)]
    return {"a": str(a), "b": str(b), "settings": changed_settings(*plain), **result}


def tables(result: dict[str, Any]) -> str:
    """Differences, then a line a problem, those that changed most at Fast@1 first."""
    lines = [f"A = {result['a']}", f"B = {result['b']}"]
    lines += [f"  differs: {line}" for line in result["settings"]]
    if result["left_out"]:
        lines.append(f"  left out, on one side only: {len(result['left_out'])} problems")
    lines.append(f"\n{'B - A':<16} {'mean over problems':>30} {'problems':>9} {'better':>7} {'worse':>6}")
    for name, found in result["differences"].items():
        shown = "not measured"
        if found["value"] is not None:
            shown = f"{found['value']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"
        lines.append(f"{name:<16} {shown:>30} {found['problems']:>9} {found['better']:>7} {found['worse']:>6}")
    columns = ("fast@1", "fast@1 best", "log speedup", "hack ratio", "reward")
    width = max((len(id) for id in result["per_problem"]), default=7)
    lines.append("\n" + "problem".ljust(width) + "".join(f"{f'{name} (A, B)':>24}" for name in columns))

    def change(pair: list[float | None]) -> float:
        return -abs(pair[1] - pair[0]) if None not in pair else 0.0

    for id, row in sorted(result["per_problem"].items(), key=lambda item: (change(item[1]["fast@1"]), item[0])):
        lines.append(id.ljust(width) + "".join(f"{_pair(row[name]):>24}" for name in columns))
    return "\n".join(lines)


def _pair(pair: list[float | None]) -> str:
    return "  ".join("   -  " if value is None else f"{value:6.3f}" for value in pair)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="eval.compare", description="Compare two evaluations, problem by problem.")
    parser.add_argument("a", type=Path, help="folder of eval.run: before")
    parser.add_argument("b", type=Path, help="folder of eval.run: after")
    parser.add_argument("--out", type=Path, help="write everything as JSON there")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    arguments = parser.parse_args()
    try:
        found = of_runs(arguments.a, arguments.b, arguments.seed)
    except (RunError, ValueError) as error:
        sys.exit(f"eval.compare: {error}")
    print(tables(found))
    if arguments.out:
        write_json(arguments.out, found)
