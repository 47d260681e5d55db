"""Reads a run folder, whatever state it is in: unfinished, resumed, cut short by a kill. Files only; no torch, no GPU.

Nothing here raises for a missing or damaged file: what can't be read is said in `Run.notes`, for the report to show.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.records import Trajectory

# Stage, the file that says it is complete, the files that say it has begun (any of them), and what it makes.
STAGES = (
    ("prepare", "problems/heldout.jsonl", ("config.json",), "settings and problems"),
    ("cold start", "collect/DONE", ("collect/trajectories.jsonl",), "the teacher's trajectories"),
    ("SFT", "sft/DONE", ("sft/metrics.jsonl",), "the cold-start model"),
    ("RL", "rl/DONE", ("rl/metrics.jsonl", "rl/trajectories"), "the trained model"),
    ("evaluate SFT", "eval/sft/DONE", ("eval/sft/trajectories.jsonl",), "held-out figures before RL"),
    ("evaluate RL", "eval/rl/DONE", ("eval/rl/trajectories.jsonl",), "held-out figures after RL"),
)
# A GPU run's step files together are gigabytes; the examples come from the last ones.
STEP_FILES_READ = 20


@dataclass
class Run:
    """A run folder's content; empty dicts and lists stand for what isn't there (yet)."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    sft_metrics: list[dict[str, Any]] = field(default_factory=list)
    rl_metrics: list[dict[str, Any]] = field(default_factory=list)
    rl_wall: list[dict[str, Any]] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)
    shared_stages: list[dict[str, Any]] = field(default_factory=list)  # made once for all variants of an ablation
    summaries: dict[str, dict[str, Any]] = field(default_factory=dict)
    comparison: dict[str, Any] = field(default_factory=dict)
    states: list[tuple[str, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_json(path: Path, notes: list[str]) -> dict[str, Any]:
    """The object in a JSON file; {} with a note where it is damaged, {} where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} in {path.parent.name}/ can't be read ({error}); left out")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{path.name} in {path.parent.name}/ holds no JSON object; left out")
        return {}
    return value


def read_lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file, one at a time; damaged lines are skipped and counted in a note."""
    bad = 0
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    value = json.loads(line)
                except ValueError:
                    value = None
                if isinstance(value, dict):
                    yield value
                elif line.strip():
                    bad += 1
    except FileNotFoundError:
        return
    except OSError as error:
        notes.append(f"{path.parent.name}/{path.name} can't be read ({error}); left out")
    if bad:
        notes.append(f"{path.parent.name}/{path.name}: {bad} damaged line{'s' * (bad > 1)} left out")


def read_steps(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Lines with a "step", in the order of steps; of a step that was written twice (a resumed run) the later one."""
    by_step = {line["step"]: line for line in read_lines(path, notes) if isinstance(line.get("step"), int)}
    return [by_step[step] for step in sorted(by_step)]


def stage_states(folder: Path) -> list[tuple[str, str, str]]:
    """(stage, "done" | "unfinished" | "missing", what it makes) in the order in which they run."""
    states = []
    for name, done, begun, makes in STAGES:
        state = "done" if (folder / done).exists() else "missing"
        if state == "missing" and any((folder / path).exists() for path in begun):
            state = "unfinished"
        states.append((name, state, makes))
    return states


def load(folder: Path) -> Run:
    """Everything but the trajectories of a run folder, which are streamed (`trajectories`)."""
    run = Run(folder, states=stage_states(folder))
    run.config = read_json(folder / "config.json", run.notes)
    run.versions = read_json(folder / "versions.json", run.notes)
    run.sft_metrics = read_steps(folder / "sft" / "metrics.jsonl", run.notes)
    run.rl_metrics = read_steps(folder / "rl" / "metrics.jsonl", run.notes)
    run.rl_wall = read_steps(folder / "rl" / "wall.jsonl", run.notes)
    run.stages = list(read_lines(folder / "stages.jsonl", run.notes))
    run.shared_stages = list(read_lines(folder / "shared_stages.jsonl", run.notes))
    for which in ("sft", "rl"):
        if summary := read_json(folder / "eval" / which / "summary.json", run.notes):
            run.summaries[which] = summary
    run.comparison = read_json(folder / "eval" / "comparison.json", run.notes)
    return run


def trajectory_files(folder: Path) -> list[tuple[str, Path]]:
    """(where from, file), those that tell most first: the last RL steps, the evaluations, the cold start."""
    steps = sorted((folder / "rl" / "trajectories").glob("step_*.jsonl"), reverse=True)[:STEP_FILES_READ]
    files = [(f"RL step {int(path.stem.rpartition('_')[2])}", path) for path in steps]
    files += [
        (f"evaluation of {which.upper()}", folder / "eval" / which / "trajectories.jsonl") for which in ("rl", "sft")
    ]
    files.append(("cold start", folder / "collect" / "trajectories.jsonl"))
    return [(source, path) for source, path in files if path.is_file()]


def trajectories(folder: Path, notes: list[str]) -> Iterator[tuple[str, Trajectory]]:
    """(where from, trajectory), streamed; records that don't fit this program's are skipped and counted in a note."""
    for source, path in trajectory_files(folder):
        bad = 0
        for line in read_lines(path, notes):
            try:
                trajectory = Trajectory.from_json(line)
            except (TypeError, KeyError, AttributeError):
                bad += 1
                continue
            if trajectory.turns:
                yield source, trajectory
        if bad:
            notes.append(f"{path.parent.name}/{path.name}: {bad} records of another version left out")
