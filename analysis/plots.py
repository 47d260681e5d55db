"""Drawing and saving a paper figure: curves with bands, marked gaps; PDF, PNG, the drawn numbers as CSV, a caption.

Every figure module uses this and style.mplstyle, and nothing else decides how a figure looks.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator, PercentFormatter

from analysis import series
from analysis.runs import AnalysisError, Variant, find, setting_notes
from env.files import write_atomic

STYLE = Path(__file__).with_name("style.mplstyle")
MARKERS = "osD^vPX*"
WINDOW = 5
COLUMNS = ("panel", "curve", "x", "mean", "low", "high", "runs")
styled = plt.style.context(STYLE)  # decorates every function that draws: text takes its looks when it is made


@dataclass
class Drawing:
    """A figure, what its caption says, and the numbers drawn: rows (panel, curve, x, mean, low, high, runs)."""

    figure: plt.Figure
    caption: list[str] = field(default_factory=list)
    rows: list[tuple] = field(default_factory=list)


def panels(count: int, columns: int = 2) -> tuple[plt.Figure, list[plt.Axes]]:
    """`count` axes in a grid, in the common style."""
    columns = min(columns, count)
    lines = -(-count // columns)
    size = (max(4.6 * columns, 5.2), 2.7 * lines + 0.5)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    flat = list(axes.flat)
    for spare in flat[count:]:
        spare.remove()
    return figure, flat[:count]


def first_metric(variants: Sequence[Variant], names: Sequence[str]) -> str | None:
    """The first of the metrics that any run has a number for."""
    for name in names:
        for variant in variants:
            if any(isinstance(row.get(name), int | float) for run in variant.runs for row in run.rows):
                return name
    return None


def last_turn(variants: Sequence[Variant], prefix: str) -> int:
    """The last turn for which a metric <prefix><turn> is there; 0 where there is none."""
    names = {name for v in variants for run in v.runs for row in run.rows for name in row if name.startswith(prefix)}
    return max((int(name[len(prefix) :]) for name in names if name[len(prefix) :].isdigit()), default=0)


def fast_metric(variants: Sequence[Variant], p: str) -> tuple[str | None, str]:
    """(metric, what it is) of Fast@p at the last turn: on held-out problems where it was measured, else in training."""
    for prefix, words in (("eval/", "held-out problems"), ("", "problems trained on")):
        if turn := last_turn(variants, f"{prefix}fast/{p}_turn"):
            return f"{prefix}fast/{p}_turn{turn}", f"Fast@{p.removesuffix('.0')} at turn {turn}, {words}"
    return None, f"Fast@{p.removesuffix('.0')}"


def _ranges(steps: Sequence[int]) -> list[tuple[int, int]]:
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    return [(a, b) for a, b in ranges]


def mark_gaps(axes: plt.Axes, variants: Sequence[Variant]) -> None:
    """Hatch the steps that a run lost, and those that are asked for and not there yet in any variant's runs."""
    lost = sorted({step for variant in variants for run in variant.runs for step in run.gaps})
    for begin, end in _ranges(lost):
        axes.axvspan(begin - 0.5, end + 0.5, facecolor="#F2F2F2", edgecolor="#BBBBBB", hatch="///", lw=0, gid="gap")
    wanted = max(variant.wanted for variant in variants)
    shortest = min(run.last for variant in variants for run in variant.runs)
    if shortest < wanted:
        axes.axvspan(shortest + 0.5, wanted + 0.5, facecolor="none", edgecolor="#DDDDDD", hatch="..", lw=0, gid="gap")
        text = f"not all runs are here\n(the shortest ends at {shortest} of {wanted})"
        axes.text(wanted, 0.02, text, transform=axes.get_xaxis_transform(), ha="right", fontsize=7, color="#777777")


def draw_metric(
    drawing: Drawing,
    axes: plt.Axes,
    variants: Sequence[Variant],
    name: str | None,
    title: str,
    window: int,
    percent: bool = False,
    labels: Sequence[str] = (),
    names: Sequence[str] = (),
) -> None:
    """One panel: a curve with its band for every variant. names: a metric for each variant in place of `name`.

    Part of a curve over fewer seeds than its best step has is drawn thin and dashed.
    """
    axes.set(title=title, xlabel="step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    drawn, silent = 0, []
    for index, variant in enumerate(variants):
        metric = names[index] if names else name
        colour = f"C{index}"
        label = labels[index] if labels else variant.label
        # Held-out points are few and averages already: smoothing would hide where they were measured.
        width = 1 if metric and metric.startswith("eval/") else window
        found = series.curve([run.rows for run in variant.runs], metric, width) if metric else None
        if found is None or not np.isfinite(found.mean).any():
            silent.append(label)
            continue
        drawn += 1
        seeds = int(found.count.max())
        whole = np.where(found.count == seeds, found.mean, np.nan)
        few = np.isfinite(found.mean).sum() <= 40
        marker = MARKERS[index % len(MARKERS)] if few else None
        text = f"{label} ({seeds} seed{'s' * (seeds > 1)})"
        axes.plot(found.steps, whole, color=colour, marker=marker, label=text, gid=variant.key)
        if (found.count < seeds).any():
            axes.plot(found.steps, found.mean, color=colour, lw=0.8, ls="--", gid=f"{variant.key}:partial")
        axes.fill_between(found.steps, found.low, found.high, color=colour, alpha=0.18, lw=0)
        for step, *values, count in zip(found.steps, found.mean, found.low, found.high, found.count):
            drawing.rows.append((title, label, int(step), *values, int(count)))
    mark_gaps(axes, variants)
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        axes.set_ylim(bottom=0)
    if silent:
        text = f"no data: {', '.join(silent)}" if drawn else "not measured in these runs"
        axes.text(0.02, 0.96, text, transform=axes.transAxes, va="top", fontsize=7, color="#777777")


def legend(figure: plt.Figure) -> None:
    """One legend for all panels, below them: it hides no curve."""
    by_label = {}
    for axes in figure.axes:
        by_label |= {text: handle for handle, text in zip(*axes.get_legend_handles_labels())}
    if by_label:
        figure.legend(by_label.values(), by_label.keys(), loc="outside lower center", ncols=min(len(by_label), 3))


def method(window: int) -> str:
    """The sentence on smoothing and bands that every caption has."""
    smoothing = (
        "Nothing is smoothed."
        if window == 1
        else f"Training curves: each run smoothed by a centred moving mean of {window} steps (fewer at the ends); "
        "held-out points are not smoothed."
    )
    return f"{smoothing} Lines: mean over seeds. Bands: 95 % t-interval of the mean over seeds; none for one seed."


def as_csv(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows as CSV text; NaN and None are empty cells."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow(["" if cell is None or cell != cell else cell for cell in row])
    return buffer.getvalue()


@styled
def save(drawing: Drawing, out: Path, stem: str) -> list[Path]:
    """Write <stem>.pdf, .png, .csv and .md (the caption) atomically; equal data give equal bytes. Closes the figure."""
    for kind in ("pdf", "png"):
        buffer = io.BytesIO()
        plain = {"CreationDate": None, "Producer": None, "Creator": None} if kind == "pdf" else {"Software": None}
        drawing.figure.savefig(buffer, format=kind, dpi=160, metadata=plain)
        write_atomic(out / f"{stem}.{kind}", buffer.getvalue())
    plt.close(drawing.figure)
    write_atomic(out / f"{stem}.csv", as_csv(COLUMNS, drawing.rows))
    write_atomic(out / f"{stem}.md", "".join(f"- {line}\n" for line in drawing.caption))
    return [out / f"{stem}.{kind}" for kind in ("pdf", "png", "csv", "md")]


def times_note(variants: Sequence[Variant]) -> list[str]:
    """The sentence that a figure of CPU runs must carry."""
    modelled = any(run.config.get("device") == "cpu" for variant in variants for run in variant.runs)
    return ["Times are modelled on the CPU, not measured: speedups here say nothing about any GPU."] if modelled else []


def main(
    stem: str, about: str, wanted: dict[str, str], draw: Callable[[list[Variant], int], Drawing], arguments=None
) -> int:
    """The command line of a figure module: --runs ROOT --out DIR [--smooth N]. Returns the exit status."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--runs", type=Path, required=True, help=f"folder with {', '.join(wanted)}, each with seed<N>/")
    parser.add_argument("--out", type=Path, required=True, help="where the figure goes")
    parser.add_argument("--smooth", type=int, default=WINDOW, help="points of the moving mean (odd; 1: none)")
    options = parser.parse_args(arguments)
    try:
        series.smooth(np.zeros(1), options.smooth)
        variants, notes = find(options.runs, wanted)
        drawing = draw(variants, options.smooth)
    except (AnalysisError, ValueError) as error:
        print(f"analysis.{stem}: {error}", file=sys.stderr)
        return 2
    drawing.caption += [*times_note(variants), *setting_notes(variants), *notes]
    print("\n".join(map(str, save(drawing, options.out, stem))))
    return 0
