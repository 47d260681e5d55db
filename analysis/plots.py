"""Drawing and saving a paper figure: curves with bands, marked gaps; PDF, PNG, the drawn numbers as CSV, a caption.

Every figure module uses this, looks.py and style.mplstyle, and nothing else decides how a figure looks.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from analysis import series
from analysis.looks import alone, draw_band, look, mark_gaps, name_axes, note, share_axis, styled
from analysis.runs import AnalysisError, Variant, find, setting_notes
from env.files import write_atomic

WINDOW = 5
COLUMNS = ("panel", "curve", "x", "mean", "low", "high", "runs")


@dataclass
class Drawing:
    """A figure, what its caption says, and the numbers drawn: rows (panel, curve, x, mean, low, high, runs)."""

    figure: plt.Figure
    caption: list[str] = field(default_factory=list)
    rows: list[tuple] = field(default_factory=list)


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


def draw_metric(
    drawing: Drawing,
    axes: plt.Axes,
    variants: Sequence[Variant],
    name: str | None,
    title: str,
    y: str,
    window: int,
    share: bool = False,
    labels: Sequence[str] = (),
    names: Sequence[str] = (),
) -> None:
    """One panel: a curve with its band for every variant. y: the axis's label, with the unit. share: values are
    fractions of 1, shown in percent. names: a metric for each variant in place of `name`.

    Part of a curve over fewer seeds than its best step has is drawn thin.
    """
    name_axes(axes, title, "step", y)
    drawn, silent = [], []
    for index, variant in enumerate(variants):
        metric = names[index] if names else name
        label = labels[index] if labels else variant.label
        # Held-out points are few and averages already: smoothing would hide where they were measured.
        width = 1 if metric and metric.startswith("eval/") else window
        found = series.curve([run.rows for run in variant.runs], metric, width) if metric else None
        if found is None or not np.isfinite(found.mean).any():
            silent.append(label)
            continue
        drawn.append((variant, metric, label))
        seeds = int(found.count.max())
        whole = np.where(found.count == seeds, found.mean, np.nan)
        style = look(index, points=len(found.steps))
        text = f"{label} ({seeds} seed{'s' * (seeds > 1)})"
        axes.plot(found.steps, whole, label=text, gid=variant.key, **style)
        if ((found.count > 0) & (found.count < seeds)).any():
            thin = style | {"linewidth": 0.8, "markersize": 3}
            axes.plot(found.steps, found.mean, gid=f"{variant.key}:partial", **thin)
        if (single := alone(np.isfinite(found.mean))).any():  # no line goes there, and perhaps no marker
            dots = look(index) | {"linestyle": "none"}
            axes.plot(found.steps[single], found.mean[single], gid=f"{variant.key}:alone", **dots)
        draw_band(axes, found.steps, found.low, found.high, style["color"], variant.key)
        for step, *values, count in zip(found.steps, found.mean, found.low, found.high, found.count):
            drawing.rows.append((title, label, int(step), *values, int(count)))
    missing = mark_gaps(axes, drawn)
    if share:
        share_axis(axes)
    note(axes, missing, silent, len(drawn))


def method(window: int) -> str:
    """The sentence on smoothing and bands that every caption has."""
    smoothing = (
        "Nothing is smoothed."
        if window == 1
        else f"Training curves: each run smoothed by a centred moving mean of {window} steps (fewer at the ends); "
        "held-out points are not smoothed."
    )
    return (
        f"{smoothing} Lines: mean over seeds, thin where some seeds are missing. Bands, and bars at single points: "
        "95 % t-interval of the mean over seeds; none for one seed."
    )


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
