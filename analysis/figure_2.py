"""Figure 2, left: what the hacking check is for. `python -m analysis.figure_2 --runs ROOT --out DIR`.

Both models are evaluated with the check: a hack is never fast, whatever its training rewarded.
"""

from __future__ import annotations

import sys

from analysis.looks import FAST_UNIT, legend, panels, styled
from analysis.plots import Drawing, draw_metric, fast_metric, main, method
from analysis.runs import Variant

VARIANTS = {"no_hack_check": "without the check", "trloo": "with the check"}


@styled
def draw(variants: list[Variant], window: int) -> Drawing:
    """Fast@1 of both, and Fast@1.2 of the one trained with the check, over steps."""
    figure, (axes,) = panels(1)
    drawing = Drawing(figure)
    one, words = fast_metric(variants, "1.0")
    more, _ = fast_metric(variants, "1.2")
    shown = [(variant, one, f"Fast@1, {variant.label}") for variant in variants]
    shown += [(variant, more, f"Fast@1.2, {variant.label}") for variant in variants if variant.key == "trloo"]
    title = words.replace("Fast@1 at", "Fast@p at")
    chosen, names, labels = zip(*shown)
    draw_metric(drawing, axes, chosen, None, title, FAST_UNIT, window, share=True, labels=labels, names=names)
    legend(figure)
    drawing.caption = [
        f"Fast@1 and Fast@1.2 of models trained with and without the hacking check; both evaluated with it. {words}.",
        method(window),
    ]
    return drawing


if __name__ == "__main__":
    sys.exit(main("figure_2", "Figure 2, left: with and without the hacking check.", VARIANTS, draw))
