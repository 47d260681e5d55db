"""How a paper figure's panels look: curves told apart, axes of shares, a legend that fits, gaps with their reason.

Pure drawing on axes that somebody else fills (plots.py); colours and fonts are style.mplstyle's.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator, PercentFormatter

from analysis.runs import Variant

STYLE = Path(__file__).with_name("style.mplstyle")
styled = plt.style.context(STYLE)  # decorates every function that draws: text takes its looks when it is made
MARKERS = "osD^vPX*"
MARKED = 20  # curves of at most so many points have a marker at each
# Later curves lie on earlier ones, and leave more out.
DASHES = ("-", (0, (5, 2)), (0, (3, 3)), (0, (2, 4)), (0, (1, 5)), (0, (5, 2, 1, 2)), (0, (3, 3, 1, 3)), (0, (1, 2)))
LEAST_TOP = 0.1  # an axis of shares goes up to 10 % at least: where all are 0, it would end anywhere
MOST_COLUMNS = 3
FAST_UNIT = "samples (%)"  # Fast@p: share of samples that are right and fast enough
NOTE = {"fontsize": 7, "color": "#777777"}


def look(index: int, points: int = 0) -> dict[str, object]:
    """Line and marker of the index-th curve, which has so many points.

    Where curves coincide all show: hollow markers get smaller, so that one is seen inside the other; a curve of more
    than MARKED points has six or so, each curve's at other points.
    """
    place = index % len(MARKERS)
    every = 1 if points <= MARKED else points // 6
    shape = {"marker": MARKERS[place], "markersize": max(8.0 - 1.3 * place, 2.5), "markerfacecolor": "none"}
    shape["markevery"] = (place * every // len(MARKERS), every)
    return {"color": f"C{index}", "linestyle": DASHES[place]} | shape


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


def name_axes(axes: plt.Axes, title: str, x: str, y: str) -> None:
    """Title and both labels; ticks of x at whole numbers only. y: the quantity with its unit."""
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def share_axis(axes: plt.Axes) -> None:
    """Ticks in percent; from 0 to what is drawn, to 10 % at least and 100 % at most. Call it when all is drawn.

    An interval may reach beyond 0 and 100 %, where no share is: it is cut off there.
    """
    top = min(max(axes.get_ylim()[1], LEAST_TOP), 1.03)
    axes.set_ylim(-0.035 * top, top)  # room for a curve at 0
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=None))


def alone(there: np.ndarray) -> np.ndarray:
    """Which of the points [n] that are there have a gap on either side: a line or a band through them has no length."""
    before = np.concatenate([[False], there[:-1]])
    after = np.concatenate([there[1:], [False]])
    return there & ~before & ~after


def draw_band(axes: plt.Axes, x: np.ndarray, low: np.ndarray, high: np.ndarray, colour: object, name: str) -> None:
    """A band between low and high [points], and a bar where a point with an interval stands alone."""
    axes.fill_between(x, low, high, color=colour, alpha=0.18, lw=0)
    if (single := alone(np.isfinite(low) & np.isfinite(high))).any():
        middle, half = (low[single] + high[single]) / 2, (high[single] - low[single]) / 2
        bars = axes.errorbar(x[single], middle, yerr=half, fmt="none", ecolor=colour, elinewidth=1.2, capsize=3)
        bars.lines[2][0].set_gid(f"{name}:bar")


def _ranges(steps: Sequence[int]) -> list[tuple[int, int]]:
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    return [(a, b) for a, b in ranges]


def mark_gaps(axes: plt.Axes, drawn: Sequence[tuple[Variant, str, str]]) -> list[str]:
    """Hatch what is missing of the curves in this panel: steps whose line a run lost, and steps not reached yet.

    drawn: (variant, its metric, label) of each curve. A held-out metric misses a step only where it would have been
    measured. Returns a line for each run that lacks something.
    """
    lost, ends, said = set(), [], []
    for variant, metric, label in drawn:
        for run in variant.runs:
            every = run.config.get("eval", {}).get("every") if metric.startswith("eval/") else 1
            steps = [step for step in run.gaps if not every or step % every == 0]
            lost |= set(steps)
            if steps:
                shown = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in _ranges(steps))
                said.append(f"{label}, {run.folder.name}: no line for step {shown}")
            if run.last < variant.wanted:
                ends.append((run.last, variant.wanted))
                said.append(f"{label}, {run.folder.name}: {run.last} of {variant.wanted} steps")
    for begin, end in _ranges(sorted(lost)):
        axes.axvspan(begin - 0.5, end + 0.5, facecolor="#F2F2F2", edgecolor="#BBBBBB", hatch="///", lw=0, gid="gap")
    if ends:
        shortest, wanted = min(last for last, _ in ends), max(wanted for _, wanted in ends)
        axes.axvspan(shortest + 0.5, wanted + 0.5, facecolor="none", edgecolor="#DDDDDD", hatch="..", lw=0, gid="gap")
    return said


def note(axes: plt.Axes, missing: Sequence[str], silent: Sequence[str], drawn: int) -> None:
    """What the panel lacks, in small print below it, where it covers no curve. missing: `mark_gaps`; silent: labels of
    curves without data; drawn: how many have some."""
    if silent and not drawn:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "not measured in these runs", transform=axes.transAxes, ha="center", gid="note", **NOTE)
        return
    lines = [f"no data: {', '.join(silent)}"] if silent else []
    lines += missing[:3] + ([f"and {len(missing) - 3} more, see the caption"] if len(missing) > 3 else [])
    if lines:
        text = "\n".join(part for line in lines for part in textwrap.wrap(line, 75))
        place = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "right", "va": "top"}
        axes.annotate(text, (1, 0), (0, -32), gid="note", **place, **NOTE)  # ticks and the axis's label are above


def legend(figure: plt.Figure) -> None:
    """One legend for all panels, below them: it hides no curve. In as many columns as fit; call it when all is drawn.

    Labels too long even for one column are wrapped; the figure grows by the lines that a legend of two has not.
    """
    by_label = {}
    for axes in figure.axes:
        by_label |= {text: handle for handle, text in zip(*axes.get_legend_handles_labels())}
    if not by_label:
        return
    limit, count = 0.96 * figure.bbox.width, len(by_label)
    renderer = figure.canvas.get_renderer()

    def place(columns: int, width: int = 0):
        texts = [textwrap.fill(text, width) if width else text for text in by_label]
        made = figure.legend(by_label.values(), texts, loc="outside lower center", ncols=columns)
        return made, made.get_window_extent(renderer)

    for columns, width in [*((n, 0) for n in range(min(count, MOST_COLUMNS), 0, -1)), (1, 70), (1, 50), (1, 30)]:
        balanced = -(-count // -(-count // columns))  # 4 entries in 3 columns are 2 rows, as in 2 columns
        made, extent = place(balanced, width)
        if extent.width <= limit:
            break
        made.remove()
    else:
        made, extent = place(1, 30)
    figure.set_figheight(figure.get_figheight() + max(0.0, extent.height / figure.dpi - 0.4))
