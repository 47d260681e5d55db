"""Figure 4: advantages and turns. `python -m analysis.figure_4 --runs ROOT --out DIR`.

Left: Fast@1 over steps. Right: Fast@1 over the turns of the last evaluation (of the last steps in training, where none
was made).
"""

from __future__ import annotations

import math
import sys

import numpy as np

from analysis import series
from analysis.looks import FAST_UNIT, legend, look, name_axes, panels, share_axis, styled
from analysis.plots import Drawing, draw_metric, fast_metric, last_turn, main, method
from analysis.runs import RunData, Variant

VARIANTS = {
    "trloo": "TRLOO",
    "grpo": "GRPO",
    "single_turn": "single turn",
    "gamma_0": "gamma = 0",
    "no_hack_check": "no hacking check",
}


def last_value(run: RunData, name: str) -> float:
    """The metric in the last line that has a number for it; NaN where none has."""
    values = [row[name] for row in run.rows if isinstance(row.get(name), int | float)]
    return float(values[-1]) if values else math.nan


def over_turns(drawing: Drawing, axes, variants: list[Variant]) -> None:
    """Fast@1 by turn at the end of the runs: mean over seeds with its interval."""
    prefix = "eval/fast/1.0_turn" if last_turn(variants, "eval/fast/1.0_turn") else "fast/1.0_turn"
    turns = np.arange(1, last_turn(variants, prefix) + 1)
    title = "Fast@1 over turns, last evaluation" if prefix.startswith("eval") else "Fast@1 over turns, last step"
    for index, variant in enumerate(variants):
        values = np.array([[last_value(run, f"{prefix}{turn}") for turn in turns] for run in variant.runs])
        found = series.band(turns, values.reshape(len(variant.runs), len(turns)))
        shift = 0.05 * (index - (len(variants) - 1) / 2)
        half = found.high - found.mean
        axes.errorbar(turns + shift, found.mean, yerr=half, capsize=2, gid=variant.key, **look(index))
        for turn, *numbers, count in zip(turns, found.mean, found.low, found.high, found.count):
            drawing.rows.append((title, variant.label, int(turn), *numbers, int(count)))
    name_axes(axes, title, "turn", FAST_UNIT)
    share_axis(axes)


@styled
def draw(variants: list[Variant], window: int) -> Drawing:
    """Two panels: over steps, over turns."""
    figure, (steps, turns) = panels(2)
    drawing = Drawing(figure)
    name, words = fast_metric(variants, "1.0")
    draw_metric(drawing, steps, variants, name, words, FAST_UNIT, window, share=True)
    over_turns(drawing, turns, variants)
    legend(figure)
    drawing.caption = [f"Left: {words}, over steps. Right: by turn at the end of training.", method(window)]
    return drawing


if __name__ == "__main__":
    sys.exit(main("figure_4", "Figure 4: TRLOO, GRPO, single turn, gamma = 0, no hacking check.", VARIANTS, draw))
