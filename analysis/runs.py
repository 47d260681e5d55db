"""Finds the runs of an ablation: ROOT/<variant>/seed<N>, or run folders named one by one. Files only.

Runs of one variant are drawn as one curve with a band, so they must differ in nothing but the seed. What is missing,
unfinished or damaged becomes a note, which every caption carries; a figure is refused only where nothing is left.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.load import read_json, read_steps
from rl.settings import differing

SEED_KEYS = ("seed", "name")


class AnalysisError(Exception):
    """Why there is nothing to draw or compare; names the files."""


@dataclass
class RunData:
    """A run's settings and RL metrics. `gaps`: steps between the first and the last that no readable line has."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def last(self) -> int:
        """The last step with a line; 0 where there is none."""
        return self.rows[-1]["step"] if self.rows else 0

    @property
    def wanted(self) -> int:
        """Steps that the settings ask for; what is there, where they can't be read."""
        steps = self.config.get("train", {}).get("steps")
        return steps if isinstance(steps, int) else self.last

    @property
    def gaps(self) -> list[int]:
        seen = {row["step"] for row in self.rows}
        return [step for step in range(min(seen, default=0), self.last) if step not in seen]


@dataclass
class Variant:
    """Runs that differ in the seed only; `label` is the legend's text."""

    key: str
    label: str
    runs: list[RunData]

    @property
    def wanted(self) -> int:
        return max((run.wanted for run in self.runs), default=0)


def different(a: dict[str, Any], b: dict[str, Any], ignored: Sequence[str] = SEED_KEYS) -> list[str]:
    """Lines "key: value in a -> value in b" of two nested settings; a key that one lacks reads (absent)."""
    return [f"{key}: {mine} -> {theirs}" for key, mine, theirs in differing(a, b) if key not in ignored]


def read_run(folder: Path) -> RunData:
    """A run folder in any state. What is wrong with it is in `notes`, with the file's name."""
    run = RunData(folder)
    run.config = read_json(folder / "config.json", run.notes)
    run.rows = read_steps(folder / "rl" / "metrics.jsonl", run.notes)
    if not run.config and not run.notes:
        run.notes.append("config.json is missing: its settings are not compared with the others'")
    if not run.rows:
        run.notes.append(f"no step in {folder / 'rl' / 'metrics.jsonl'}")
    elif run.last < run.wanted:
        run.notes.append(f"unfinished: ends at step {run.last} of {run.wanted}")
    if run.gaps:
        run.notes.append(f"steps without a line: {', '.join(map(str, run.gaps[:8]))}{' …' * (len(run.gaps) > 8)}")
    run.notes = [f"{run.name}: {note}" for note in run.notes]
    return run


def _same_settings(variant: str, runs: list[RunData]) -> None:
    known = [run for run in runs if run.config]
    for run in known[1:]:
        if lines := different(known[0].config, run.config):
            raise AnalysisError(
                f"the runs of {variant} are of different settings, and a mean over them would say nothing: "
                f"{known[0].folder / 'config.json'} -> {run.folder / 'config.json'}: {'; '.join(lines[:6])}. Move one "
                "of them to a variant of its own"
            )


def seed_folders(folder: Path) -> list[Path]:
    """The run folders of a variant: its seed<N> below it, by number, or itself where it is a run's folder."""
    found = [path for path in folder.glob("seed*") if path.is_dir() and re.fullmatch(r"seed\d+", path.name)]
    if found:
        return sorted(found, key=lambda path: int(path.name[4:]))
    return [folder] if (folder / "config.json").is_file() or (folder / "rl").is_dir() else []


def variant_of(key: str, label: str, folders: Sequence[Path]) -> Variant:
    """Raises AnalysisError where the runs' settings differ in more than the seed."""
    runs = [read_run(folder) for folder in folders]
    _same_settings(label, runs)
    return Variant(key, label, runs)


def find(root: Path, wanted: dict[str, str]) -> tuple[list[Variant], list[str]]:
    """The variants {folder name: label} below `root` that there are, and notes on all that is not whole.

    Raises AnalysisError, naming the files looked for, where no variant has any step.
    """
    variants, notes = [], []
    for key, label in wanted.items():
        variant = variant_of(key, label, seed_folders(root / key))
        if not variant.runs:
            notes.append(f"{label}: left out, no run in {root / key}/seed*")
            continue
        notes += [note for run in variant.runs for note in run.notes]
        variant.runs = [run for run in variant.runs if run.rows]
        if variant.runs:
            variants.append(variant)
    if not variants:
        looked = ", ".join(str(root / key / "seed*/rl/metrics.jsonl") for key in wanted)
        raise AnalysisError(f"nothing to draw: no step in any of {looked}. {' '.join(notes)}")
    return variants, notes


def setting_notes(variants: Sequence[Variant]) -> list[str]:
    """What each variant's settings have otherwise than the first one's, to see that it is the ablation only."""
    lines = []
    for variant in variants[1:]:
        a, b = variants[0].runs[0].config, variant.runs[0].config
        if a and b:
            lines.append(f"{variant.label}, other than {variants[0].label}: {'; '.join(different(a, b)) or 'nothing'}")
    return lines
