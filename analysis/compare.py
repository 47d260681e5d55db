"""Runs side by side: `python -m analysis.compare RUN RUN … [--out DIR]`. Files only.

A RUN is a run's folder, an evaluation's, or a variant's with seed<N>/ below it. The first is what the others are held
against: paired differences on the same problems (of the same seed, where there are several), what differs in the
settings, and what each cost.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from analysis import cost, evaluations
from analysis.evaluations import Evaluation
from analysis.plots import as_csv
from analysis.runs import AnalysisError, different, seed_folders
from analysis.statistics import Interval, paired, ratio
from env.files import write_atomic
from rl.records import Trajectory

FILE = "trajectories.jsonl"


@dataclass
class Side:
    """One column: a variant's evaluations and run folders."""

    label: str
    evaluations: list[Evaluation]
    folders: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def turns(self) -> int:
        return max((evaluation.turns for evaluation in self.evaluations), default=0)


@dataclass(frozen=True)
class Measure:
    """A statistic of samples. percent: shown in percent, and its difference in points."""

    name: str
    outcome: Callable[[Trajectory], float | None]
    percent: bool = True


def open_side(path: Path, label: str = "", which: str = "rl") -> Side:
    """The evaluation(s) of a folder. Raises AnalysisError, naming the files looked for, where there is none."""
    label = label or path.name
    if (path / FILE).is_file():
        return Side(label, [evaluations.read(path / FILE, "run")], [path])
    folders = seed_folders(path)
    found, notes = [], []
    for folder in folders:
        file = folder / "eval" / which / FILE
        if file.is_file():
            # By its seed also where there is one only: the other side may have more.
            found.append(evaluations.read(file, "run" if folder == path else folder.name))
        else:
            notes.append(f"{file} is missing: not evaluated yet")
    found_notes = [note for evaluation in found for note in evaluation.notes]
    found = [evaluation for evaluation in found if evaluation.trajectories]
    if not found:
        looked = f"{path}/{FILE}, {path}/eval/{which}/{FILE}, {path}/seed*/eval/{which}/{FILE}"
        raise AnalysisError(f"{path}: no evaluated sample in {looked}. {' '.join(found_notes)}".strip())
    return Side(label, found, folders, notes + found_notes)


def measures(turn: int) -> list[Measure]:
    """What is compared, at `turn` where it is a matter of turns."""
    fast = evaluations.fast
    return [
        *(Measure(f"Fast@{p:g}, turn {turn}", fast(p, turn)) for p in (1.0, 1.2, 1.5, 2.0)),
        *(Measure(f"Fast@{p:g}, best of {turn} turns", fast(p, turn, best=True)) for p in (1.0, 1.2)),
        Measure("hacking ratio", evaluations.mean_over_turns(evaluations.is_hack)),
        Measure("reward by one measure", evaluations.mean_over_turns(evaluations.common_reward), percent=False),
    ]


@dataclass
class Comparison:
    """rows: (measure, per side: value, and against the first side: paired difference or None)."""

    sides: list[Side]
    turn: int
    rows: list[tuple[Measure, list[Interval], list[Interval | None]]]


def compare(sides: Sequence[Side]) -> Comparison:
    """All measures of all sides at the last turn that every side has."""
    turn = min(side.turns for side in sides)
    rows = []
    for measure in measures(turn):
        tallies = [evaluations.tallies(side.evaluations, measure.outcome) for side in sides]
        values = [ratio(tally) for tally in tallies]
        rows.append((measure, values, [None, *(paired(tallies[0], tally) for tally in tallies[1:])]))
    return Comparison(list(sides), turn, rows)


def _number(value: float, percent: bool, sign: bool = False) -> str:
    return f"{value * (100 if percent else 1):{'+' if sign else ''}.{1 if percent else 3}f}"


def show(value: Interval | None, percent: bool, sign: bool = False) -> str:
    """A value with its interval, "—" where there is none."""
    if value is None or value.value is None:
        return "—"
    low, high = _number(value.low, percent, sign), _number(value.high, percent, sign)
    return f"{_number(value.value, percent, sign)} [{low}, {high}]"


def verdict(difference: Interval | None) -> str:
    """What the interval allows to say."""
    if difference is None or difference.value is None:
        return ""
    if difference.low > 0 or difference.high < 0:
        return "higher" if difference.low > 0 else "lower"
    return "no clear difference"


def _settings(comparison: Comparison) -> list[str]:
    first = comparison.sides[0]
    lines = []
    for side in comparison.sides[1:]:
        a, b = first.evaluations[0].config, side.evaluations[0].config
        if not a or not b:
            lines.append(f"- {side.label}: settings can't be compared (no readable config.json or settings.json)")
            continue
        changes = different(a, b)
        lines.append(f"- {side.label}, other than {first.label}: {'; '.join(changes) or 'nothing'}")
        if any(change.startswith(("eval.", "env.")) for change in changes):
            lines.append(
                f"  **{side.label} was evaluated in another way: the differences are not the training's alone.**"
            )
    return lines or ["- nothing to compare with"]


def markdown(comparison: Comparison) -> str:
    """The whole comparison as text."""
    sides = comparison.sides
    kinds = sorted(set().union(*(e.time_kinds for side in sides for e in side.evaluations)))
    lines = ["| | " + " | ".join(side.label for side in sides) + " |", f"| --- |{' ---: |' * len(sides)}"]
    for measure, values, _ in comparison.rows:
        unit = " (%)" if measure.percent else ""
        lines.append(f"| {measure.name}{unit} | {' | '.join(show(value, measure.percent) for value in values)} |")
    for index, side in enumerate(sides[1:], 1):
        lines += [
            "",
            f"{side.label} minus {sides[0].label}",
            "",
            "| | difference | problems | |",
            "| --- | ---: | ---: | --- |",
        ]
        for measure, _, differences in comparison.rows:
            d = differences[index]
            unit = " (points)" if measure.percent else ""
            text = show(d, measure.percent, sign=True)
            lines.append(f"| {measure.name}{unit} | {text} | {d.problems} | {verdict(d)} |")
    lines += [
        "",
        f"Held-out samples; times: {', '.join(kinds) or 'none measured'}. Brackets: 95 % bootstrap intervals over ",
    ]
    lines[-1] += "seeds and problems (problems only, for one run). Differences: same problem, same seed. Reward by one "
    lines[-1] += "measure: C + C min(speedup, 3) + C PR, whatever a run's own reward was."
    lines += ["", "Settings", "", *_settings(comparison), "", "Cost", ""]
    lines += cost.table([(side.label, side.folders) for side in sides])
    if notes := [note for side in sides for note in side.notes]:
        lines += ["", "Not whole", "", *(f"- {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def rows_csv(comparison: Comparison) -> str:
    """One line a number, shares in [0, 1]; `kind` is "value" or "difference" (against the first run)."""
    rows = []
    for measure, values, differences in comparison.rows:
        for side, value, difference in zip(comparison.sides, values, differences):
            for kind, one in (("value", value), ("difference", difference)):
                if one is not None:
                    rows.append((measure.name, side.label, kind, one.value, one.low, one.high, one.problems, one.runs))
    return as_csv(("measure", "run", "kind", "value", "low", "high", "problems", "runs"), rows)


def labels(paths: Sequence[Path]) -> list[str]:
    """Short names that tell the folders apart."""
    for parts in (1, 2, 3):
        names = ["/".join(path.resolve().parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def write(sides: Sequence[Side], out: Path | None, stem: str) -> None:
    """Print the comparison, and write it as Markdown and CSV where a folder is given."""
    comparison = compare(sides)
    print(markdown(comparison))
    if out is not None:
        write_atomic(out / f"{stem}.md", markdown(comparison))
        write_atomic(out / f"{stem}.csv", rows_csv(comparison))
        print(f"{out / stem}.md\n{out / stem}.csv")


def main_of_variants(stem: str, about: str, wanted: dict[str, str], arguments=None) -> int:
    """The command line of a comparison of ROOT/<variant>/seed<N>, held against the first of `wanted`."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--runs", type=Path, required=True, help=f"folder with {', '.join(wanted)}")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    sides, missing = [], []
    for key, label in wanted.items():
        try:
            sides.append(open_side(options.runs / key, label))
        except AnalysisError as error:
            missing.append(str(error))
    print("\n".join(f"left out: {message}" for message in missing), file=sys.stderr)
    if len(sides) < 2 or sides[0].label != next(iter(wanted.values())):
        print(f"analysis.{stem}: nothing to hold against each other below {options.runs}", file=sys.stderr)
        return 2
    write(sides, options.out, stem)
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare runs; the first is the baseline.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--which", choices=("sft", "rl", "server"), default="rl", help="whose evaluation (run folders)")
    parser.add_argument("--out", type=Path, help="also write compare.md and compare.csv here")
    options = parser.parse_args(arguments)
    try:
        if len(options.runs) < 2:
            raise AnalysisError("give two runs or more")
        sides = [open_side(path, name, options.which) for path, name in zip(options.runs, labels(options.runs))]
        write(sides, options.out, "compare")
    except AnalysisError as error:
        print(f"analysis.compare: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
