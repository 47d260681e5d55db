"""Figures 5 and 7: what MRS, PR and PRS add, and what they do to training. `python -m analysis.figure_5_7 ...`."""

from __future__ import annotations

import sys

from analysis.looks import FAST_UNIT, legend, panels, styled
from analysis.plots import Drawing, draw_metric, fast_metric, main, method
from analysis.runs import Variant

VARIANTS = {"trloo": "TRLOO", "mrs": "+ MRS", "mrs_pr": "+ PR", "mrs_pr_prs": "+ PRS"}
PANELS = (
    ("policy/entropy", "Entropy", "nats a token"),
    ("policy/grad_norm", "Gradient norm before clipping", "L2 norm of the loss's gradient"),
    ("policy/ppl_rollout", "Perplexity under the engine", "perplexity a token"),
    ("policy/ppl_learner", "Perplexity under the learner", "perplexity a token"),
)


@styled
def draw(variants: list[Variant], window: int) -> Drawing:
    """Fast@1.2, entropy, gradient norm and both perplexities over steps."""
    figure, axes = panels(5)
    drawing = Drawing(figure)
    name, words = fast_metric(variants, "1.2")
    draw_metric(drawing, axes[0], variants, name, words, FAST_UNIT, window, share=True)
    for place, (metric, title, unit) in zip(axes[1:], PANELS):
        draw_metric(drawing, place, variants, metric, title, unit, window)
    legend(figure)
    drawing.caption = [f"{words}; entropy, gradient norm and perplexities of the sampled answers.", method(window)]
    return drawing


if __name__ == "__main__":
    sys.exit(main("figure_5_7", "Figures 5 and 7: TRLOO, + MRS, + PR, + PRS.", VARIANTS, draw))
