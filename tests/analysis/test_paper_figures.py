"""The paper's figures from made-up run folders: what is drawn, not what it looks like; and every kind of bad input."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

from analysis import figure_2, figure_4, figure_5_7, figure_8, figure_9, plots, runs, series

pytestmark = pytest.mark.budget(60)
CURVES = {"figure_2": figure_2, "figure_4": figure_4, "figure_5_7": figure_5_7, "figure_8": figure_8}
CURVES["figure_9"] = figure_9

_spec = importlib.util.spec_from_file_location("made_up", Path(__file__).with_name("conftest.py"))
made_up = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made_up)


def variants_of(module) -> dict[str, list[str]]:
    return {key: ["rollout.turns=1"] if key == "single_turn" else [] for key in module.VARIANTS}


@pytest.fixture(autouse=True)
def no_figure_left():
    yield
    plt.close("all")


# ---- statistics against naive code


def test_quantiles_of_t_are_those_of_the_density():
    for degrees in (1, 2, 4, 9, 30, 60):
        scale = math.gamma((degrees + 1) / 2) / math.sqrt(degrees * math.pi) / math.gamma(degrees / 2)
        x = np.linspace(0, series.t_975(degrees), 200_001)
        y = scale * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
        inside = 2 * float(np.sum((y[1:] + y[:-1]) / 2 * np.diff(x)))
        assert inside == pytest.approx(0.95, abs=2e-4), degrees
    with pytest.raises(ValueError, match="two values"):
        series.t_975(0)


def naive_band(columns: list[list[float]]) -> list[tuple[float, float, float, int]]:
    result = []
    for column in columns:
        there = [value for value in column if not math.isnan(value)]
        n = len(there)
        if not n:
            result.append((math.nan, math.nan, math.nan, 0))
            continue
        mean = sum(there) / n
        half = math.nan
        if n > 1:
            variance = sum((value - mean) ** 2 for value in there) / (n - 1)
            half = series.t_975(n - 1) * math.sqrt(variance / n)
        result.append((mean, mean - half, mean + half, n))
    return result


def test_band_equals_the_naive_loop_with_ragged_seeds():
    rng = np.random.default_rng(1)
    values = rng.normal(size=(4, 30))
    values[rng.random(values.shape) < 0.4] = np.nan
    found = series.band(np.arange(30), values)
    for i, (mean, low, high, n) in enumerate(naive_band(values.T.tolist())):
        np.testing.assert_allclose([found.mean[i], found.low[i], found.high[i]], [mean, low, high], rtol=1e-12)
        assert found.count[i] == n


def test_smoothing_equals_the_naive_loop_and_fills_no_gap():
    rng = np.random.default_rng(2)
    values = rng.normal(size=(2, 15))
    values[0, 4] = values[1, 14] = np.nan
    smoothed = series.smooth(values, 5)
    for run in range(2):
        for i in range(15):
            near = [v for v in values[run, max(0, i - 2) : i + 3] if not math.isnan(v)]
            expected = math.nan if math.isnan(values[run, i]) else sum(near) / len(near)
            assert smoothed[run, i] == pytest.approx(expected, nan_ok=True)
    with pytest.raises(ValueError, match="odd"):
        series.smooth(values, 4)


def test_a_step_that_all_seeds_lost_breaks_the_curve_and_sparse_metrics_are_no_gaps():
    rows = [[{"step": s, "x": 1.0} | ({"eval/y": 2.0} if s % 2 == 0 else {}) for s in (1, 2, 4, 6)]]
    steps, values = series.align(rows, "x")
    assert steps.tolist() == [1, 2, 3, 4, 5, 6] and np.isnan(values[0, [2, 4]]).all()
    steps, values = series.align(rows, "eval/y")
    assert steps.tolist() == [2, 4, 6] and np.isfinite(values).all()
    assert series.align([[]], "x")[1].shape == (1, 0)


# ---- what is drawn


@pytest.mark.parametrize("stem", CURVES)
def test_every_curve_is_the_mean_over_seeds_of_its_metric(make_ablation, stem, tmp_path):
    module = CURVES[stem]
    root = make_ablation(variants_of(module))
    arguments = ["--runs", str(root), "--out", str(tmp_path / "out"), "--smooth", "1"]
    assert plots.main(stem, "x", module.VARIANTS, module.draw, arguments) == 0
    assert (tmp_path / f"out/{stem}.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / f"out/{stem}.png").read_bytes().startswith(b"\x89PNG")
    caption = (tmp_path / f"out/{stem}.md").read_text()
    assert "Nothing is smoothed." in caption and "95 % t-interval" in caption and "modelled on the CPU" in caption
    with open(tmp_path / f"out/{stem}.csv") as file:
        drawn = list(csv.DictReader(file))
    assert {row["runs"] for row in drawn} == {"3"}
    metrics = {
        "Hacking ratio in training": "hack/ratio",
        "Rejected by PRS": "mask/prs",
        **{title: name for name, title, _ in figure_5_7.PANELS},
    }
    labels = {label: key for key, label in module.VARIANTS.items()}
    checked = 0
    for row in drawn:
        p = "1.2" if "Fast@1.2" in row["panel"] + row["curve"] else "1.0"
        name = metrics.get(row["panel"], f"eval/fast/{p}_turn2")
        variant = labels[row["curve"].removeprefix("Fast@1.2, ").removeprefix("Fast@1, ")]
        step = int(row["x"])
        if row["panel"].startswith("Fast@1 over turns"):
            name, step = f"eval/fast/1.0_turn{row['x']}", 8
        values = [made_up.value_of(variant, seed, step, name) for seed in (1, 2, 3)]
        (mean, low, high, _), *_ = naive_band([values])
        np.testing.assert_allclose([float(row[k]) for k in ("mean", "low", "high")], [mean, low, high], rtol=1e-9)
        checked += 1
    assert checked == len(drawn) > 8


def test_lines_on_the_axes_are_the_numbers_and_bands_are_there(make_ablation):
    variants, notes = runs.find(make_ablation(variants_of(figure_8)), figure_8.VARIANTS)
    assert notes == []
    drawing = figure_8.draw(variants, 1)
    (axes,) = drawing.figure.axes
    line = next(line for line in axes.get_lines() if line.get_gid() == "trloo")
    expected = [np.mean([made_up.value_of("trloo", s, step, "hack/ratio") for s in (1, 2, 3)]) for step in range(1, 9)]
    np.testing.assert_allclose(line.get_ydata(), expected)
    assert len([c for c in axes.collections if c.get_gid() != "gap"]) == 2
    assert [text.get_text() for text in drawing.figure.legends[0].get_texts()] == [
        "with the check (3 seeds)",
        "without the check (3 seeds)",
    ]


def test_figure_4_shows_both_turns_and_five_variants(make_ablation):
    variants, _ = runs.find(make_ablation(variants_of(figure_4)), figure_4.VARIANTS)
    figure = figure_4.draw(variants, 5).figure
    steps, turns = figure.axes
    assert len(figure.legends[0].get_texts()) == 5
    assert len({line.get_color() for line in steps.get_lines() if line.get_gid()}) == 5
    assert all(len(bars.lines[0].get_xdata()) == 2 for bars in turns.containers)


def test_without_held_out_points_training_curves_are_drawn_and_said(make_ablation):
    variants, _ = runs.find(make_ablation(variants_of(figure_9), heldout=0), figure_9.VARIANTS)
    drawing = figure_9.draw(variants, 3)
    assert "problems trained on" in drawing.figure.axes[0].get_title("left")
    assert "moving mean of 3 steps" in " ".join(drawing.caption)


# ---- bad input


def rows_of(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


def test_an_unfinished_a_damaged_and_a_missing_run_are_drawn_with_their_gaps_marked(make_ablation, tmp_path):
    root = make_ablation({"trloo": []})
    short, damaged = root / "trloo/seed2/rl/metrics.jsonl", root / "trloo/seed3/rl/metrics.jsonl"
    short.write_text("".join(rows_of(short)[:5]))
    lines = rows_of(damaged)
    damaged.write_text("".join(lines[:3] + lines[4:-1]) + lines[-1][:40])
    variants, notes = runs.find(root, figure_8.VARIANTS)
    said = "\n".join(notes)
    assert "trloo/seed2: unfinished: ends at step 4 of 8" in said
    assert "trloo/seed3: rl/metrics.jsonl: 1 damaged line left out" in said
    assert "trloo/seed3: steps without a line: 3" in said
    assert "without the check: left out" in said and "no_hack_check/seed*" in said
    drawing = figure_8.draw(variants, 1)
    (axes,) = drawing.figure.axes
    gaps = sorted(patch.get_x() for patch in axes.patches if patch.get_gid() == "gap")
    assert gaps == [2.5, 4.5]
    (said,) = (text.get_text() for text in axes.texts if text.get_gid() == "note")
    assert said.splitlines() == [
        "with the check, seed2: 4 of 8 steps",
        "with the check, seed3: no line for step 3",
        "with the check, seed3: 7 of 8 steps",
    ]
    whole = next(line for line in axes.get_lines() if line.get_gid() == "trloo")
    partial = next(line for line in axes.get_lines() if line.get_gid() == "trloo:partial")
    assert np.isnan(whole.get_ydata()).tolist() == [False, False, True, False, True, True, True, True]
    assert np.isfinite(partial.get_ydata()).all()
    assert [row[-1] for row in drawing.rows] == [3, 3, 2, 3, 2, 2, 2, 1]


def test_runs_of_different_settings_are_refused_and_both_files_named(make_ablation, tmp_path, capsys):
    root = make_ablation({"trloo": []})
    path = root / "trloo/seed2/config.json"
    config = json.loads(path.read_text())
    config["optim"]["lr"] = 0.5
    path.write_text(json.dumps(config))
    assert plots.main("figure_8", "x", figure_8.VARIANTS, figure_8.draw, ["--runs", str(root), "--out", "x"]) == 2
    said = capsys.readouterr().err
    assert str(path) in said and "seed1/config.json" in said and "optim.lr: 0.0003 -> 0.5" in said


@pytest.mark.parametrize("what", ["nothing", "empty_folder", "empty_file"])
def test_nothing_to_draw_names_the_files(tmp_path, what, capsys):
    if what != "nothing":
        (tmp_path / "trloo/seed1/rl").mkdir(parents=True)
    if what == "empty_file":
        (tmp_path / "trloo/seed1/rl/metrics.jsonl").touch()
    arguments = ["--runs", str(tmp_path), "--out", str(tmp_path / "out")]
    assert plots.main("figure_8", "x", figure_8.VARIANTS, figure_8.draw, arguments) == 2
    assert str(tmp_path / "trloo/seed*/rl/metrics.jsonl") in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_damaged_config_is_said_and_the_run_still_drawn(make_ablation):
    root = make_ablation({"trloo": []}, seeds=(1,))
    (root / "trloo/seed1/config.json").write_text("{")
    variants, notes = runs.find(root, {"trloo": "TRLOO"})
    assert "config.json" in notes[0] and "can't be read" in notes[0]
    assert figure_8.draw(variants, 1).rows


def test_settings_that_variants_differ_in_are_in_the_caption(make_ablation):
    root = make_ablation({"trloo": [], "no_hack_check": ["reward.hack_check=false"]})
    variants, _ = runs.find(root, figure_8.VARIANTS)
    assert runs.setting_notes(variants) == [
        "without the check, other than with the check: reward.hack_check: True -> False"
    ]


def test_equal_runs_give_equal_bytes(make_ablation, tmp_path):
    root = make_ablation({"trloo": []}, seeds=(1,))
    variants, _ = runs.find(root, {"trloo": "TRLOO"})
    paths = [plots.save(figure_8.draw(variants, 1), tmp_path / name, "f") for name in "ab"]
    assert [p.read_bytes() for p in paths[0]] == [p.read_bytes() for p in paths[1]]
