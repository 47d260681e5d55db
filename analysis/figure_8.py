"""Figure 8: the hacking ratio over steps. `python -m analysis.figure_8 --runs ROOT --out DIR`.

The judge records a hack whether or not the reward punishes it, so the run without the check can be drawn too.
"""

from __future__ import annotations

import sys

from analysis.looks import legend, panels, styled
from analysis.plots import Drawing, draw_metric, main, method
from analysis.runs import Variant

VARIANTS = {"trloo": "with the check", "no_hack_check": "without the check"}


@styled
def draw(variants: list[Variant], window: int) -> Drawing:
    """Hacks over judged turns of training."""
    figure, (axes,) = panels(1)
    drawing = Drawing(figure)
    title = "Hacking ratio in training"
    draw_metric(drawing, axes, variants, "hack/ratio", title, "judged turns (%)", window, share=True)
    legend(figure)
    drawing.caption = [
        "Hacks over judged turns of each training step. Quoted from the paper: from about 20 % to about 3 % with the "
        "check.",
        method(window),
    ]
    return drawing


if __name__ == "__main__":
    sys.exit(main("figure_8", "Figure 8: hacking ratio.", VARIANTS, draw))
