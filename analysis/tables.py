"""Tables of Fast@p by problem set, as Markdown, CSV and LaTeX: ours with intervals, the paper's beside, marked quoted.

`analysis.table_1` and `analysis.table_2` call `main`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from analysis import evaluations, paper
from analysis.evaluations import Evaluation
from analysis.plots import as_csv
from analysis.runs import AnalysisError, different
from analysis.statistics import Interval, ratio
from env.files import write_atomic

THRESHOLDS = (1.0, 1.2, 1.5, 2.0)
KERNELBENCH = ("L1", "L2", "L3")


@dataclass
class Table:
    """rows: (model, source "ours" | "quoted", {(set, p): Interval}), in percent of samples as shares in [0, 1]."""

    title: str
    sets: list[str]
    rows: list[tuple[str, str, dict[tuple[str, float], Interval]]]
    notes: list[str] = field(default_factory=list)


def build(title: str, ours: dict[str, Sequence[Evaluation]], quoted: dict[str, paper.Row]) -> Table:
    """The table of our evaluations (label -> folders of its seeds) over the quoted rows.

    Raises AnalysisError where a label's folders were evaluated in different ways.
    """
    rows, notes, sets, turns = [], [], set(), {}
    for label, folders in ours.items():
        notes += [note for folder in folders for note in folder.notes]
        folders = [folder for folder in folders if folder.trajectories]
        if not folders:
            notes.append(f"{label}: left out, no sample of it is there")
            continue
        _same_question(label, folders)
        turn = turns[label] = max(folder.turns for folder in folders)
        here = sorted({folder.sets.get(t.problem_id, "all") for folder in folders for t in folder.trajectories})
        sets |= set(here)
        values = {
            (chosen, p): ratio(evaluations.tallies(folders, evaluations.fast(p, turn), chosen))
            for chosen in here
            for p in THRESHOLDS
        }
        rows.append((label, "ours", values))
        seeds = len({folder.seed for folder in folders})
        ties = sum(evaluations.tied(folders, p, turn) for p in (1.0, 1.2))
        kinds = sorted(set().union(*(folder.time_kinds for folder in folders)))
        notes.append(
            f"{label}: turn {turn}, {seeds} seed{'s' * (seeds > 1)}, times: {', '.join(kinds) or 'none measured'}; "
            f"{ties} correct samples whose speedup's interval spans 1 or 1.2"
        )
    if len(set(turns.values())) > 1:
        notes.append(f"Not at the same turn, so not like for like: {', '.join(f'{k}: {n}' for k, n in turns.items())}")
    if not rows:
        raise AnalysisError(f"no table: {'; '.join(notes)}")
    for label, by_set in quoted.items():
        values = {}
        for chosen, numbers in by_set.items():
            for p, number in zip(THRESHOLDS, numbers):
                values[chosen, p] = Interval(number / 100, None, None, 0, 0)
        rows.append((label, "quoted", values))
    order = [name for name in ("miniature", "all") if name in sets] + sorted(
        sets - {"miniature", "all"} - set(KERNELBENCH)
    )
    return Table(title, [*order, *KERNELBENCH], rows, notes)


def _same_question(label: str, folders: Sequence[Evaluation]) -> None:
    known = [folder for folder in folders if folder.config]
    for folder in known[1:]:
        lines = [line for line in different(known[0].config, folder.config) if line.startswith(("eval.", "env."))]
        if lines:
            raise AnalysisError(
                f"{label}: {known[0].path} and {folder.path} were evaluated in different ways: {'; '.join(lines)}"
            )


def cell(value: Interval | None, latex: bool = False) -> str:
    """Percent with the interval, or a dash for what isn't there."""
    if value is None or value.value is None:
        return "--" if latex else "—"
    text = f"{100 * value.value:.1f}"
    return text if value.low is None else f"{text} [{100 * value.low:.1f}, {100 * value.high:.1f}]"


def _columns(table: Table) -> list[tuple[str, float]]:
    """Columns in which some row has a value."""
    return [
        (chosen, p)
        for chosen in table.sets
        for p in THRESHOLDS
        if any((chosen, p) in values for _, _, values in table.rows)
    ]


def head(column: tuple[str, float]) -> str:
    return f"{column[0]} Fast@{column[1]:g}"


METHOD = (
    "Percent of samples. Brackets: 95 % bootstrap interval over seeds and problems (over problems only, for one seed). "
    "Quoted: the paper's own numbers (arXiv 2602.05885), other problems, models and GPUs than ours; the miniature's "
    "problems are not KernelBench's."
)


def markdown(table: Table) -> str:
    columns = _columns(table)
    lines = [f"**{table.title}**", "", f"| model | source | {' | '.join(map(head, columns))} |"]
    lines.append(f"| --- | --- |{' ---: |' * len(columns)}")
    for label, source, values in table.rows:
        lines.append(f"| {label} | {source} | {' | '.join(cell(values.get(column)) for column in columns)} |")
    return "\n".join([*lines, "", METHOD, "", *(f"- {note}" for note in table.notes)]) + "\n"


def _escaped(text: str) -> str:
    for character in "&%_#$":
        text = text.replace(character, f"\\{character}")
    return text


def latex(table: Table) -> str:
    """A tabular for booktabs."""
    columns = _columns(table)
    lines = [f"% {table.title}. {METHOD}", f"\\begin{{tabular}}{{l{'r' * len(columns)}}}", "\\toprule"]
    lines.append(f"model & {' & '.join(_escaped(head(column)) for column in columns)} \\\\")
    before = ""
    for label, source, values in table.rows:
        lines += ["\\midrule"] * (source != before)
        before = source
        name = _escaped(label) + (" (quoted)" if source == "quoted" else "")
        lines.append(f"{name} & {' & '.join(cell(values.get(column), latex=True) for column in columns)} \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def rows_csv(table: Table) -> str:
    """One line a number: model, source, set, p, value, low, high, problems, runs; shares in [0, 1]."""
    rows = [
        (label, source, chosen, p, value.value, value.low, value.high, value.problems, value.runs)
        for label, source, values in table.rows
        for (chosen, p), value in values.items()
    ]
    return as_csv(("model", "source", "problems_of", "p", "value", "low", "high", "problems", "runs"), rows)


def save(table: Table, out: Path, stem: str) -> list[Path]:
    for kind, text in (("md", markdown(table)), ("csv", rows_csv(table)), ("tex", latex(table))):
        write_atomic(out / f"{stem}.{kind}", text)
    return [out / f"{stem}.{kind}" for kind in ("md", "csv", "tex")]


def main(stem: str, title: str, wanted: dict[str, tuple[str, str]], file: str, quoted: dict, arguments=None) -> int:
    """The command line of a table module: --runs ROOT --out DIR. wanted: label -> (variant, "sft" | "rl")."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the ablations' runs and evaluations")
    parser.add_argument("--out", type=Path, required=True, help="where the table goes")
    options = parser.parse_args(arguments)
    ours = {label: evaluations.find(options.runs, *place, file) for label, place in wanted.items()}
    try:
        table = build(title, ours, quoted)
    except AnalysisError as error:
        print(f"analysis.{stem}: {error} (looked for {file} below {options.runs})", file=sys.stderr)
        return 2
    print(markdown(table))
    print("\n".join(map(str, save(table, options.out, stem))))
    return 0
