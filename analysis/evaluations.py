"""Evaluations as files: a run's eval/<which>/ or a folder of its own with settings.json. Only what statistics need.

Trajectories are streamed, and token ids and texts dropped at once; damaged lines are left out and noted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.load import read_json, read_lines
from analysis.statistics import Tallies
from rl.outcomes import best_fast, fast_at, is_judged
from rl.records import Trajectory, Turn

MINIATURE = "generator"


@dataclass
class Evaluation:
    """One folder's samples. `seed` pairs runs; `sets`: problem id -> "L1", … or "miniature" or "all"."""

    path: Path
    seed: str
    trajectories: list[Trajectory] = field(default_factory=list)
    sets: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    time_kinds: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    @property
    def turns(self) -> int:
        """Turns asked for; the most that a sample has, where the settings can't be read."""
        asked = self.config.get("eval", {}).get("turns")
        there = max((len(trajectory.turns) for trajectory in self.trajectories), default=0)
        return asked if isinstance(asked, int) else there


def slim(line: dict[str, Any]) -> Trajectory:
    """A trajectory of a file without ids, texts and profiles. Raises TypeError, KeyError or AttributeError where the
    record is of another version."""
    kept = Trajectory.from_json(line)
    for turn in kept.turns:
        turn.prompt_ids, turn.logprobs, turn.prompt_text, turn.completion_text = [], [], "", ""
        turn.completion_ids = []
        if turn.verdict is not None:
            names = ("status", "speedup", "speedup_low", "speedup_high", "profiling_ratio", "time_kind", "values_match")
            turn.verdict = {name: turn.verdict.get(name) for name in (*names, "problem_sha256")}
    return kept


def problem_set(problem: dict[str, Any]) -> str:
    """What a problem is counted with: the generator's apart, since its levels are not KernelBench's."""
    if problem.get("origin") == MINIATURE:
        return "miniature"
    level = problem.get("level")
    return f"L{level}" if isinstance(level, int) and level > 0 else "all"


def read(path: Path, seed: str) -> Evaluation:
    """The evaluation in a file of trajectories; the settings and problems are looked for beside it and above."""
    found = Evaluation(path, seed)
    folder = path.parent
    settings = read_json(folder / "settings.json", found.notes)
    run = folder.parent.parent  # <run>/eval/<which>/trajectories.jsonl
    found.config = settings.get("config") or (read_json(run / "config.json", found.notes) if not settings else {})
    for problems in (folder / "problems.jsonl", run / "problems" / "heldout.jsonl"):
        for problem in read_lines(problems, found.notes):
            found.sets.setdefault(str(problem.get("id")), problem_set(problem))
    bad = 0
    for line in read_lines(path, found.notes):
        try:
            trajectory = slim(line)
        except (TypeError, KeyError, AttributeError):
            bad += 1
            continue
        found.trajectories.append(trajectory)
        found.time_kinds |= {turn.verdict["time_kind"] for turn in trajectory.turns if turn.verdict} - {"", None}
    if bad:
        found.notes.append(f"{bad} records of another version left out")
    if not found.trajectories:
        found.notes.append("no sample in it")
    if not (folder / "DONE").exists():
        found.notes.append("the evaluation is unfinished: shares are of what is there")
    found.notes = [f"{path}: {note}" for note in found.notes]
    return found


def find(root: Path, variant: str, which: str, file: str = "trajectories.jsonl") -> list[Evaluation]:
    """Evaluations of a variant's runs: ROOT/eval/<variant>/<set>/seed<N>/ where scripts/eval.sh wrote them, else the
    runs' own, ROOT/<variant>/seed<N>/eval/<which>/."""
    paths = sorted(root.glob(f"eval/{variant}/*/seed*/{file}")) if which == "rl" else []
    paths = paths or sorted(root.glob(f"{variant}/seed*/eval/{which}/{file}"))
    return [read(path, re.search(r"seed\d+", str(path.relative_to(root)))[0]) for path in paths]


def tallies(
    evaluations: Iterable[Evaluation], outcome: Callable[[Trajectory], float | None], chosen: str = ""
) -> Tallies:
    """seed -> problem -> (sum of outcomes, number of samples that count). chosen: only problems of this set."""
    sums: dict[str, dict[str, tuple[float, float]]] = {}
    for evaluation in evaluations:
        run = sums.setdefault(evaluation.seed, {})
        for trajectory in evaluation.trajectories:
            if chosen and evaluation.sets.get(trajectory.problem_id, "all") != chosen:
                continue
            value = outcome(trajectory)
            key = identity(trajectory)
            before = run.get(key, (0.0, 0.0))
            run[key] = before if value is None else (before[0] + float(value), before[1] + 1.0)
    return sums


def identity(trajectory: Trajectory) -> str:
    """A problem by what it computes where the verdict says so: two problems of one name are never paired."""
    digests = [turn.verdict.get("problem_sha256") for turn in trajectory.turns if turn.verdict]
    return f"{trajectory.problem_id} {next(filter(None, digests), '')}".strip()


def fast(p: float, turn: int, best: bool = False) -> Callable[[Trajectory], bool | None]:
    """Outcome Fast@p at a turn, or at the best turn up to it."""
    chosen = best_fast if best else fast_at
    return lambda trajectory: chosen(trajectory, p, turn)


def mean_over_turns(value: Callable[[Turn], float]) -> Callable[[Trajectory], float | None]:
    """Outcome: mean of a value over a sample's judged turns."""

    def outcome(trajectory: Trajectory) -> float | None:
        values = [value(turn) for turn in trajectory.turns if is_judged(turn)]
        return sum(values) / len(values) if values else None

    return outcome


def is_hack(turn: Turn) -> float:
    return float(turn.verdict["status"] == "hack")


def common_reward(turn: Turn) -> float:
    """C + C * min(speedup, 3) + C * PR, whatever the run's own settings rewarded: runs are compared by one measure."""
    verdict = turn.verdict
    if verdict["status"] != "correct":
        return 0.0
    return 1.0 + min(verdict.get("speedup") or 0.0, 3.0) + (verdict.get("profiling_ratio") or 0.0)


def tied(evaluations: Sequence[Evaluation], p: float, turn: int) -> int:
    """Samples whose speedup's interval spans p: noise decides on which side they fall."""
    rows = [t.turns[turn - 1].verdict for e in evaluations for t in e.trajectories if len(t.turns) >= turn]
    return sum(
        1
        for verdict in rows
        if verdict
        and verdict["status"] == "correct"
        and isinstance(verdict.get("speedup_low"), int | float)
        and isinstance(verdict.get("speedup_high"), int | float)
        and verdict["speedup_low"] < p <= verdict["speedup_high"]
    )
