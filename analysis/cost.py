"""What runs cost: seconds, tokens and device of run folders, as a table for comparisons. Files only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.load import read_json, read_lines, read_steps

OWN = "seconds, the run's own stages"
SHARED = "seconds, cold start and SFT, shared"
MADE_BEFORE = ("Cold start", "SFT")


def of_run(folder: Path) -> dict[str, float | str]:
    """Seconds of the stages, RL's tokens and the judge's seconds, device; what a folder has of them.

    An ablation's variants share the cold start and SFT of a seed, whose stages are in shared_stages.jsonl of each.
    """
    notes: list[str] = []
    found: dict[str, float | str] = {}
    for name, file in ((OWN, "stages.jsonl"), (SHARED, "shared_stages.jsonl")):
        for line in read_lines(folder / file, notes):
            if isinstance(line.get("seconds"), int | float):
                found[name] = found.get(name, 0) + line["seconds"]
    sums: dict[str, list[Any]] = {
        "seconds, RL steps": [row.get("seconds/step") for row in read_steps(folder / "rl" / "wall.jsonl", notes)],
        "seconds, judge's work in RL": [
            row.get("seconds/judge_work") for row in read_steps(folder / "rl" / "wall.jsonl", notes)
        ],
        "tokens, RL": [row.get("tokens/total") for row in read_steps(folder / "rl" / "metrics.jsonl", notes)],
    }
    for name, values in sums.items():
        numbers = [value for value in values if isinstance(value, int | float)]
        if numbers:
            found[name] = sum(numbers)
    device = read_json(folder / "versions.json", notes).get("device")
    return found | ({"device": str(device)} if device else {})


def not_noted(folder: Path) -> list[str]:
    """Which of cold start and SFT were made for this run and have no seconds in its files."""
    stages = [line for file in ("stages.jsonl", "shared_stages.jsonl") for line in read_lines(folder / file, [])]
    noted = {line.get("stage") for line in stages}
    made = [name for name, where in zip(MADE_BEFORE, ("collect", "sft")) if (folder / where).is_dir()]
    return [name for name in made if name not in noted]


def table(sides: Sequence[tuple[str, Sequence[Path]]]) -> list[str]:
    """Lines of Markdown: a column for each label, the sum over its run folders, and what is not in it."""
    columns = []
    for _, folders in sides:
        costs = [of_run(folder) for folder in folders]
        merged: dict[str, str] = {}
        for name in dict.fromkeys(name for one in costs for name in one):
            values = [one[name] for one in costs if name in one]
            numbers = [value for value in values if isinstance(value, int | float)]
            merged[name] = f"{sum(numbers):,.0f}" if numbers else ", ".join(sorted(set(map(str, values))))
            if numbers and len(numbers) < len(costs):
                merged[name] += f" ({len(numbers)} of {len(costs)} runs)"
        columns.append(merged)
    names = list(dict.fromkeys(name for column in columns for name in column))
    if not names:
        return ["Not noted in these folders."]
    lines = [f"| sum over runs | {' | '.join(label for label, _ in sides)} |", f"| --- |{' ---: |' * len(columns)}"]
    lines += [f"| {name} | {' | '.join(column.get(name, '—') for column in columns)} |" for name in names]
    if OWN in names:
        lines += ["", "Seconds are of the calls that completed a stage; what a stopped call spent before is not noted."]
    if SHARED in names:
        lines += ["", "Shared: made once a seed for all variants, and counted in full in each one's column."]
    for label, folders in sides:
        if missing := [f"{' and '.join(made)} of {folder}" for folder in folders if (made := not_noted(folder))]:
            lines += ["", f"Not counted for {label}, since no file notes their time: {'; '.join(missing)}."]
    return lines
