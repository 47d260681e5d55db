"""The report's curves, each an SVG text. matplotlib without a display; equal data give equal bytes."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import PercentFormatter

from analysis.looks import FAST_UNIT, STYLE, look, name_axes, share_axis
from env.records import STATUSES

Rows = Sequence[dict[str, Any]]
STATUS_COLOURS = dict(
    zip(
        STATUSES,
        ("#009E73", "#E69F00", "#D55E00", "#0072B2", "#56B4E9", "#CC79A7", "#000000", "#BBBBBB", "#DDDDDD"),
        strict=True,
    )
)


def column(rows: Rows, name: str) -> np.ndarray:
    """Values of one metric over the rows [steps]; NaN where a row lacks it or holds null."""
    values = [row.get(name) for row in rows]
    return np.array([value if isinstance(value, int | float) else np.nan for value in values], dtype=float)


def present(rows: Rows, pattern: str) -> list[str]:
    """Names of metrics that match the whole pattern and have a number in some row, sorted."""
    names = {name for row in rows for name, value in row.items() if re.fullmatch(pattern, name) and value is not None}
    return sorted(names)


def as_svg(figure: plt.Figure) -> str:
    """The figure as SVG text without date and links, then closed."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    plt.close(figure)
    return buffer.getvalue()


def legend_beside(axes: plt.Axes) -> None:
    """A legend to the right of the panel, where it covers no curve."""
    axes.figure.subplots_adjust(right=0.72)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def lines(title: str, rows: Rows, series: dict[str, str], y: str, share: bool = False, log: bool = False) -> str | None:
    """Curves over steps. series: metric name -> legend text. y: the axis's label, with the unit. share: values are
    fractions of 1, shown in percent. None where no row has any of them."""
    drawn = {name: text for name, text in series.items() if np.isfinite(column(rows, name)).any()}
    if not drawn:
        return None
    with plt.style.context(STYLE):
        figure, axes = plt.subplots()
        steps = column(rows, "step")
        few = len(rows) <= 60
        for index, (name, text) in enumerate(drawn.items()):
            values = column(rows, name)
            there = np.isfinite(values)
            style = look(index, points=int(there.sum())) if len(drawn) > 1 else {"marker": "o" if few else None}
            axes.plot(steps[there], values[there], label=text, **style)
        name_axes(axes, title, "step", y)
        if share:
            share_axis(axes)
        if log and all((column(rows, name)[np.isfinite(column(rows, name))] > 0).all() for name in drawn):
            axes.set_yscale("log")
        if len(drawn) > 1:
            legend_beside(axes)
        return as_svg(figure)


def stacked(
    title: str, rows: Rows, series: dict[str, str], colours: dict[str, str], y: str, share: bool = False
) -> str | None:
    """Bars of parts on top of each other, one a step. y, share: as for `lines`. None where all is zero or absent."""
    drawn = [name for name in series if np.nansum(column(rows, name)) > 0]
    if not drawn:
        return None
    with plt.style.context(STYLE):
        figure, axes = plt.subplots()
        steps = column(rows, "step")
        below = np.zeros(len(rows))
        width = 0.8 * min(np.diff(steps), default=1.0)
        for name in drawn:
            values = np.nan_to_num(column(rows, name))
            axes.bar(steps, values, width, bottom=below, label=series[name], color=colours.get(name), linewidth=0)
            below += values
        name_axes(axes, title, "step", y)
        if share:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=None))
            axes.set_ylim(0, 1)
        legend_beside(axes)
        return as_svg(figure)


def _turns(rows: Rows, prefix: str) -> dict[str, str]:
    names = present(rows, re.escape(prefix) + r"\d+")
    return {name: f"turn {name[len(prefix) :]}" for name in sorted(names, key=lambda name: int(name[len(prefix) :]))}


def rl_figures(metrics: Rows, wall: Rows) -> list[tuple[str, str]]:
    """(caption, SVG) of every RL curve that there are data for."""
    statuses = {f"status/{status}": status.replace("_", " ") for status in STATUSES}
    seconds = {
        name: name.removeprefix("seconds/").replace("_", " ")
        # The step's total contains the others, and the judge's work goes on beside them.
        for name in present(wall, r"seconds/\w+")
        if name not in ("seconds/step", "seconds/judge_work")
    }
    rewards = {"reward/mean": "all turns"} | _turns(metrics, "reward/mean_turn")
    figures = [
        (
            "Mean reward a turn.",
            lines("Reward", metrics, rewards, "reward a turn"),
        ),
        (
            "What the reward is made of; speedup (capped) and profiling ratio over correct turns.",
            lines(
                "Reward parts",
                metrics,
                {
                    "reward/correct": "correct",
                    "reward/speedup": "speedup",
                    "reward/profiling_ratio": "profiling ratio",
                },
                "share; for speedup, times as fast",
            ),
        ),
        *(
            (
                f"Share of judged samples that are correct, no hack, and at least {p} times as fast.",
                lines(
                    f"Fast@{p.removesuffix('.0')}", metrics, _turns(metrics, f"fast/{p}_turn"), FAST_UNIT, share=True
                ),
            )
            for p in ("1.0", "1.2")
        ),
        (
            "Every turn's verdict.",
            stacked(
                "Status of turns",
                metrics,
                statuses,
                {f"status/{status}": colour for status, colour in STATUS_COLOURS.items()},
                "turns (%)",
                share=True,
            ),
        ),
        (
            "Hacks over judged turns.",
            lines("Hacking ratio", metrics, {"hack/ratio": "hacks"}, "judged turns (%)", share=True),
        ),
        (
            "Entropy of the sampling distribution, in nats a token.",
            lines("Entropy", metrics, {"policy/entropy": "entropy"}, "nats a token"),
        ),
        ("Before clipping.", lines("Gradient norm", metrics, {"policy/grad_norm": "gradient norm"}, "L2 norm")),
        (
            "Of sampled tokens, under the engine that sampled them and under the learner.",
            lines(
                "Perplexity",
                metrics,
                {"policy/ppl_rollout": "rollout", "policy/ppl_learner": "learner"},
                "perplexity a token",
            ),
        ),
        (
            "Mean absolute difference of the two log-probabilities.",
            lines("Log-prob gap", metrics, {"policy/logprob_gap": "gap"}, "nats a token", log=True),
        ),
        (
            "Share of rows that don't enter the loss, by reason.",
            lines(
                "Masked rows",
                metrics,
                {"mask/mrs": "MRS", "mask/veto": "token veto", "mask/prs": "PRS", "mask/infra": "infrastructure"},
                "rows (%)",
                share=True,
            ),
        ),
        (
            "Length of answers.",
            lines("Completion tokens", metrics, {"tokens/completion_mean": "tokens"}, "tokens an answer"),
        ),
        ("Wall-clock of a step's phases.", stacked("Seconds a phase", wall, seconds, {}, "seconds")),
    ]
    return [(caption, svg) for caption, svg in figures if svg is not None]


def sft_figures(metrics: Rows) -> list[tuple[str, str]]:
    """(caption, SVG) of the supervised stage's curves."""
    figures = [
        (
            "Cross-entropy of the teacher's answers, in nats a token.",
            lines("SFT loss", metrics, {"sft/loss": "loss"}, "nats a token"),
        ),
        (
            "Share of the answers' tokens that the model would have chosen.",
            lines("SFT accuracy", metrics, {"sft/accuracy": "accuracy"}, "tokens (%)", share=True),
        ),
        ("Before clipping.", lines("SFT gradient norm", metrics, {"sft/grad_norm": "gradient norm"}, "L2 norm")),
    ]
    return [(caption, svg) for caption, svg in figures if svg is not None]
