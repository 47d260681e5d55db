"""Figure 9: rejection by profiling ratio, soft, hard and not at all. `python -m analysis.figure_9 ...`."""

from __future__ import annotations

import sys

from analysis.looks import FAST_UNIT, legend, panels, styled
from analysis.plots import Drawing, draw_metric, fast_metric, main, method
from analysis.runs import Variant

VARIANTS = {"mrs_pr_prs": "PR and soft PRS", "prs_hard": "PR and hard PRS", "mrs": "neither PR nor PRS"}


@styled
def draw(variants: list[Variant], window: int) -> Drawing:
    """Fast@1.2 over steps, and the share of rows that PRS rejects."""
    figure, (fast, rejected) = panels(2)
    drawing = Drawing(figure)
    name, words = fast_metric(variants, "1.2")
    draw_metric(drawing, fast, variants, name, words, FAST_UNIT, window, share=True)
    draw_metric(drawing, rejected, variants, "mask/prs", "Rejected by PRS", "rows, one a turn (%)", window, share=True)
    legend(figure)
    drawing.caption = [f"{words}, and the share of rows that PRS rejects.", method(window)]
    return drawing


if __name__ == "__main__":
    sys.exit(main("figure_9", "Figure 9: PRS with and without softness, and without PR and PRS.", VARIANTS, draw))
