"""What a reader must be able to see: nothing cut off, nothing on top of something else, every curve, every unit.

Measured on the figure as the canvas draws it, with the longest labels there are.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from analysis import figure_2, figure_4, figure_5_7, figure_6, figure_8, figure_9, looks, plots, runs
from analysis.evaluations import Evaluation
from analysis.runs import RunData, Variant
from env.records import Verdict
from rl.records import Trajectory, Turn

pytestmark = pytest.mark.budget(60)
CURVES = {m.__name__.rpartition(".")[2]: m for m in (figure_2, figure_4, figure_5_7, figure_8, figure_9)}
FAST = [f"{where}fast/{p}_turn{turn}" for where in ("", "eval/") for p in ("1.0", "1.2") for turn in (1, 14)]
METRICS = [*FAST, "hack/ratio", "mask/prs", *(name for name, _, _ in figure_5_7.PANELS)]


@pytest.fixture(autouse=True)
def no_figure_left():
    yield
    plt.close("all")


def a_run(seed: int, value: float = 0.3, steps: int = 6, wanted: int = 6, names=METRICS, every: int = 2) -> RunData:
    """Metrics `value`, held-out ones every `every` steps."""
    config = {"train": {"steps": wanted}, "eval": {"every": every}}
    rows = [
        {"step": step} | {name: value for name in names if not (name.startswith("eval/") and step % every)}
        for step in range(1, steps + 1)
    ]
    return RunData(Path(f"v/seed{seed}"), config, rows)


def all_of(module, seeds: int = 10, label=lambda text: text, **about) -> list[Variant]:
    return [
        Variant(key, label(text), [a_run(seed, **about) for seed in range(1, seeds + 1)])
        for key, text in module.VARIANTS.items()
    ]


def scaling(label=lambda text: text, turns=(14, 14)) -> plots.Drawing:
    verdict = Verdict("correct", speedup=1.5, time_kind="modelled").to_json()
    found = {}
    for text, number in zip(figure_6.VARIANTS.values(), turns):
        several = [Turn([1], [2], [-0.1], 0, "stop", "", "", verdict, 0.0) for _ in range(number)]
        found[label(text)] = [Evaluation(Path("x"), "seed1", [Trajectory("p", 0, several)])]
    return figure_6.draw(found)


def check_layout(figure: plt.Figure) -> None:
    """Everything lies inside the figure; panels with their titles and labels, and the legend, don't touch; notes
    cover no panel."""
    figure.set_dpi(160)  # as saved
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    parts = {f"panel {axes.get_title('left')!r}": axes.get_tightbbox(renderer) for axes in figure.axes}
    parts |= {f"legend {i}": made.get_window_extent(renderer) for i, made in enumerate(figure.legends)}
    for name, box in parts.items():
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1, f"{name} is cut off at a side: {box} of {figure.bbox}"
        assert box.y0 >= 0 and box.y1 <= figure.bbox.y1, f"{name} is cut off above or below: {box} of {figure.bbox}"
    for (a, one), (b, other) in itertools.combinations(parts.items(), 2):
        across = min(one.x1, other.x1) - max(one.x0, other.x0)
        along = min(one.y1, other.y1) - max(one.y0, other.y0)
        assert across <= 1 or along <= 1, f"{a} and {b} overlap"
    for axes in figure.axes:
        assert axes.get_window_extent(renderer).height > 100, "the legend leaves no room to the panel"
        label = axes.xaxis.label.get_window_extent(renderer)
        for text in axes.texts:  # a note covers neither a curve nor the axis's label
            box = text.get_window_extent(renderer)
            assert text.get_text() == "not measured in these runs" or box.y1 <= label.y0, (box, label)


LONG = {"as it is": lambda text: text, "very long": lambda text: f"{text}, as measured on the other machine, " * 3}


@pytest.mark.parametrize("label", LONG.values(), ids=LONG)
@pytest.mark.parametrize("stem", CURVES)
def test_nothing_is_cut_off_or_covered(stem, label):
    module = CURVES[stem]
    figure = module.draw(all_of(module, label=label), 1).figure
    assert figure.legends
    check_layout(figure)
    # The same with every note there is: unfinished runs, a variant without data, no held-out points.
    variants = all_of(module, seeds=2, label=label, names=METRICS[:4], steps=3)
    check_layout(module.draw(variants, 1).figure)


@pytest.mark.parametrize("label", LONG.values(), ids=LONG)
def test_nothing_is_cut_off_in_figure_6(label):
    check_layout(scaling(label).figure)
    check_layout(scaling(label, turns=(9, 14)).figure)


def test_figure_6_hatches_the_turns_that_one_of_them_lacks_and_says_which():
    drawing = scaling(turns=(9, 14))
    (axes,) = drawing.figure.axes
    assert gaps_of(axes) == [(9.5, 14.5)] and notes_of(axes) == ["vanilla: 9 of 14 turns"]
    assert drawing.caption[0].startswith("Fast@1.2 at a turn") and drawing.caption[1:] == notes_of(axes)
    assert gaps_of(scaling().figure.axes[0]) == []


def test_a_legend_that_is_too_wide_is_what_the_check_finds():
    """The check itself: a legend of three columns in a narrow figure, as it once was."""
    with plt.style.context(looks.STYLE):
        figure, (axes,) = looks.panels(1)
        for number in range(3):
            axes.plot([0, 1], [number, 1], label=f"Fast@1.2, without the check (3 seeds) {number}")
        figure.legend(loc="outside lower center", ncols=3)
        with pytest.raises(AssertionError, match="legend 0 is cut off"):
            check_layout(figure)
        figure.legends[0].remove()
        looks.legend(figure)
        check_layout(figure)


@pytest.mark.parametrize("stem", [*CURVES, "figure_6"])
def test_every_axis_says_what_it_shows_and_in_which_unit(stem):
    figure = scaling().figure if stem == "figure_6" else CURVES[stem].draw(all_of(CURVES[stem], seeds=1), 1).figure
    for axes in figure.axes:
        assert axes.get_xlabel() in ("step", "turn") and axes.get_ylabel()
        assert len(axes.get_title("left")) <= 45 and "%" not in axes.get_title("left")
        shares = any(word in axes.get_title("left") for word in ("Fast@", "Hacking", "Rejected"))
        assert ("(%)" in axes.get_ylabel()) == shares


# ---- what can be seen


def seen(axes: plt.Axes, colours: list[str]) -> list[int]:
    """Pixels of each colour within the panel, as drawn."""
    figure = axes.figure
    figure.canvas.draw()
    image = np.asarray(figure.canvas.buffer_rgba())[..., :3].astype(float) / 255
    height = image.shape[0]
    x0, x1, y0, y1 = (round(v) for v in (axes.bbox.x0, axes.bbox.x1, height - axes.bbox.y1, height - axes.bbox.y0))
    part = image[y0 : y1 + 1, x0 : x1 + 1]
    return [int((np.abs(part - to_rgb(colour)).max(axis=-1) < 0.12).sum()) for colour in colours]


@pytest.mark.parametrize("value", [0.0, 0.3])
@pytest.mark.parametrize("steps", [6, 80], ids=["few points", "many points"])
def test_curves_that_coincide_all_show(value, steps):
    variants = all_of(figure_4, seeds=1, value=value, steps=steps, wanted=steps)
    for axes in figure_4.draw(variants, 1).figure.axes[:1]:
        with plt.style.context(looks.STYLE):
            counts = seen(axes, [f"C{i}" for i in range(5)])
        assert min(counts) > 40, counts


def test_a_panel_of_zeros_ends_at_ten_percent_and_no_share_goes_beyond_a_hundred():
    for value, low, high in ((0.0, 0.1, 0.1), (0.03, 0.1, 0.1), (1.0, 1.0, 1.03)):
        (axes,) = figure_8.draw(all_of(figure_8, value=value), 1).figure.axes
        bottom, top = axes.get_ylim()
        assert low <= top <= high and -0.05 < bottom < 0
    spread = [Variant("trloo", "TRLOO", [a_run(1, 0.1), a_run(2, 0.9)])]  # a t-interval from -500 % to 600 %
    (axes,) = figure_8.draw(spread, 1).figure.axes
    assert axes.get_ylim()[1] <= 1.03


def test_a_point_between_gaps_has_its_interval_as_a_bar_and_its_mean_as_a_marker():
    several = [a_run(1, 0.2, 90, 90), a_run(2, 0.4, 90, 90)]
    for run in several:
        run.rows = [row for row in run.rows if row["step"] not in (49, 51)]
    (axes,) = figure_8.draw([Variant("trloo", "TRLOO", several)], 1).figure.axes
    (bars,) = (c for c in axes.collections if c.get_gid() == "trloo:bar")
    ((bottom, top),) = bars.get_segments()
    half = 12.706 * math.sqrt(0.02 / 2)  # two seeds: standard deviation sqrt(0.02)
    assert bottom == pytest.approx([50, 0.3 - half]) and top == pytest.approx([50, 0.3 + half])
    (point,) = (line for line in axes.get_lines() if line.get_gid() == "trloo:alone")
    assert point.get_xdata().tolist() == [50] and point.get_marker() != "None"
    assert looks.alone(np.array([True, False, True, True, False, True])).tolist() == [1, 0, 0, 0, 0, 1]


# ---- gaps: of the curves that this panel shows


def gaps_of(axes: plt.Axes) -> list[tuple[float, float]]:
    return sorted((p.get_x(), p.get_x() + p.get_width()) for p in axes.patches if p.get_gid() == "gap")


def notes_of(axes: plt.Axes) -> list[str]:
    return [text.get_text() for text in axes.texts if text.get_gid() == "note"]


def test_only_what_a_drawn_curve_lacks_is_hatched_and_the_run_is_named():
    there = Variant("trloo", "with the check", [a_run(1), a_run(2, steps=5)])
    absent = Variant("no_hack_check", "without the check", [a_run(1, steps=2, names=["policy/entropy"])])
    (axes,) = figure_8.draw([there, absent], 1).figure.axes
    assert gaps_of(axes) == [(5.5, 6.5)]
    assert notes_of(axes) == ["no data: without the check\nwith the check, seed2: 5 of 6 steps"]
    whole = figure_8.draw([there.__class__("trloo", "with the check", there.runs[:1]), absent], 1).figure.axes[0]
    assert gaps_of(whole) == [] and notes_of(whole) == ["no data: without the check"]


def test_a_held_out_curve_lacks_only_steps_at_which_it_is_measured():
    run = a_run(1)
    run.rows = [row for row in run.rows if row["step"] not in (3, 4)]
    figure = figure_9.draw([Variant("mrs", "neither", [run])], 1).figure
    held_out, rejected = figure.axes
    assert not [line for line in rejected.get_lines() if line.get_gid() == "mrs:partial"]  # no seed has more
    assert gaps_of(held_out) == [(3.5, 4.5)] and gaps_of(rejected) == [(2.5, 4.5)]
    assert notes_of(held_out) == ["neither, seed1: no line for step 4"]
    assert notes_of(rejected) == ["neither, seed1: no line for step 3 to 4"]


def test_a_panel_without_data_says_so_and_has_no_numbers_on_its_axes():
    variants = all_of(figure_9, seeds=1, names=FAST)
    fast, rejected = figure_9.draw(variants, 1).figure.axes
    assert notes_of(fast) == [] and notes_of(rejected) == ["not measured in these runs"]
    assert list(rejected.get_yticks()) == [] == list(rejected.get_xticks()) and len(fast.get_yticks()) > 2


def test_many_unfinished_runs_are_counted_where_the_caption_names_them_all(make_ablation):
    root = make_ablation({"trloo": []}, seeds=(1, 2, 3, 4, 5))
    for seed in range(1, 6):
        path = root / f"trloo/seed{seed}/rl/metrics.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))
    assert json.loads((root / "trloo/seed1/config.json").read_text())["train"]["steps"] == 8
    variants, notes = runs.find(root, figure_8.VARIANTS)
    (axes,) = figure_8.draw(variants, 1).figure.axes
    (said,) = notes_of(axes)
    assert said.splitlines()[-1] == "and 2 more, see the caption"
    assert sum("unfinished: ends at step 4 of 8" in note for note in notes) == 5
    assert plots.method(1).count("Nothing is smoothed") == 1
