"""Intervals against naive code; tables, figure 6 and comparisons from made-up evaluations with known answers."""

from __future__ import annotations

import csv
import io
import json
import random
from pathlib import Path

import numpy as np
import pytest

from analysis import compare, evaluations, figure_6, paper, statistics, tables
from analysis.runs import AnalysisError
from env.records import Verdict
from rl.config import load_recipe
from rl.records import Trajectory, Turn, append_trajectories

pytestmark = pytest.mark.budget(45)


def a_turn(speedup: float | None, status: str = "correct", ratio: float = 0.5, problem: str = "") -> Turn:
    low, high = (speedup * 0.95, speedup * 1.05) if speedup else (None, None)
    verdict = Verdict(
        status, speedup=speedup, speedup_low=low, speedup_high=high, profiling_ratio=ratio if speedup else None,
        time_kind="modelled" if speedup else "", problem_sha256=problem,
    ).to_json()  # fmt: skip
    return Turn([1], [2], [-0.1], 3, "stop", "", "", verdict, 0.0)


def write_evaluation(folder: Path, rows: dict[str, list[list[Turn]]], seed: int = 1, turns: int = 2, level: int = 1):
    """rows: problem -> samples -> turns."""
    folder.mkdir(parents=True)
    config = load_recipe("mini-cpu", [f"seed={seed}", f"eval.turns={turns}"]).to_json()
    (folder / "settings.json").write_text(json.dumps({"config": config}))
    problems = [{"id": name, "level": level, "origin": "folder"} for name in rows]
    (folder / "problems.jsonl").write_text("".join(json.dumps(one) + "\n" for one in problems))
    several = [Trajectory(name, i, turns) for name, samples in rows.items() for i, turns in enumerate(samples)]
    append_trajectories(folder / "trajectories.jsonl", several)
    (folder / "DONE").touch()


# ---- statistics


def naive_bootstrap(tallies, resamples: int) -> tuple[float, float]:
    rng, draws = random.Random(5), []
    runs = [list(problems.values()) for problems in tallies.values()]
    for _ in range(resamples):
        above = below = 0.0
        for _ in runs:
            table = rng.choice(runs)
            for _ in table:
                numerator, denominator = rng.choice(table)
                above, below = above + numerator, below + denominator
        draws.append(above / below)
    draws.sort()
    return draws[int(0.025 * resamples)], draws[int(0.975 * resamples)]


def test_the_interval_equals_a_naive_bootstrap_over_runs_and_problems():
    rng = random.Random(3)
    tallies = {f"seed{s}": {f"p{p}": (float(rng.randint(0, 4) + s), 8.0) for p in range(20)} for s in range(3)}
    found = statistics.ratio(tallies, resamples=6000)
    above = sum(n for table in tallies.values() for n, _ in table.values())
    assert found.value == pytest.approx(above / (60 * 8)) and (found.problems, found.runs) == (60, 3)
    low, high = naive_bootstrap(tallies, 6000)
    assert (found.low, found.high) == (pytest.approx(low, abs=0.01), pytest.approx(high, abs=0.01))


def test_one_run_gives_the_standard_error_over_problems():
    rng = np.random.default_rng(0)
    values = rng.normal(0.5, 0.1, 400)
    found = statistics.ratio({"run": {str(i): (v, 1.0) for i, v in enumerate(values)}}, resamples=4000)
    half = 1.96 * values.std() / 20
    assert (found.value - found.low, found.high - found.value) == (pytest.approx(half, rel=0.08),) * 2


def test_paired_differences_use_pairs_only_and_are_tighter_than_the_spread_of_problems():
    a = {"seed1": {f"p{i}": (float(i), 10.0) for i in range(10)} | {"only a": (9.0, 10.0), "none": (0.0, 0.0)}}
    b = {"seed1": {f"p{i}": (i + 1.0, 10.0) for i in range(10)} | {"only b": (0.0, 10.0), "none": (1.0, 1.0)}}
    found = statistics.paired(a, b)
    assert found.problems == 10 and found.value == pytest.approx(0.1)
    assert (found.low, found.high) == (pytest.approx(0.1), pytest.approx(0.1))
    assert statistics.paired(a, {"seed2": b["seed1"]}).value is None
    assert statistics.ratio({}).value is None


# ---- tables


def test_a_table_has_our_numbers_with_intervals_and_the_papers_marked_quoted(tmp_path):
    fast, slow, hack = a_turn(1.3), a_turn(0.8), a_turn(5.0, "hack")
    rows = {"p1": [[slow, fast], [slow, hack]], "p2": [[fast, slow], [slow, a_turn(2.5)]]}
    write_evaluation(tmp_path / "eval/trloo/level1/seed1", rows)
    ours = {"TRLOO": evaluations.find(tmp_path, "trloo", "rl"), "never run": []}
    table = tables.build("A table", ours, paper.TABLE_1)
    label, source, values = table.rows[0]
    assert (label, source) == ("TRLOO", "ours")
    assert [values["L1", p].value for p in tables.THRESHOLDS] == [0.5, 0.5, 0.25, 0.25]
    assert values["L1", 1.0].low <= 0.5 <= values["L1", 1.0].high
    text = tables.markdown(table)
    assert "| Dr. Kernel 14B | quoted | 20.3 | 16.9 |" in text and "never run: left out" in text
    assert "| TRLOO | ours | 50.0 [50.0, 50.0]" in text and "turn 2, 1 seed" in text
    latex = tables.latex(table)
    assert "Dr. Kernel 14B (quoted) & 20.3" in latex and latex.count("\\midrule") == 2
    assert all(line.count("&") == latex.splitlines()[3].count("&") for line in latex.splitlines() if "&" in line)
    lines = list(csv.DictReader(io.StringIO(tables.rows_csv(table))))
    quoted = next(one for one in lines if one["model"] == "GPT-5" and one["problems_of"] == "L2" and one["p"] == "1.2")
    assert quoted["source"] == "quoted" and float(quoted["value"]) == pytest.approx(0.286) and quoted["low"] == ""


def test_rows_at_different_turns_are_said(tmp_path):
    for name, turns in (("a", 2), ("b", 3)):
        write_evaluation(tmp_path / f"eval/{name}/x/seed1", {"p": [[a_turn(1.5)] * turns]}, turns=turns)
    two = {name: evaluations.find(tmp_path, name, "rl") for name in "ab"}
    assert tables.build("T", two, {}).notes[-1] == "Not at the same turn, so not like for like: a: 2, b: 3"
    assert not any("like for like" in note for note in tables.build("T", {"a": two["a"]}, {}).notes)


def test_the_miniature_is_never_in_kernelbenchs_columns(tmp_path):
    write_evaluation(tmp_path / "eval/trloo/x/seed1", {"p": [[a_turn(1.5), a_turn(1.5)]]}, level=2)
    path = tmp_path / "eval/trloo/x/seed1/problems.jsonl"
    path.write_text(json.dumps({"id": "p", "level": 2, "origin": "generator"}) + "\n")
    table = tables.build("T", {"ours": evaluations.find(tmp_path, "trloo", "rl")}, {})
    assert {chosen for chosen, _ in table.rows[0][2]} == {"miniature"}


def test_tables_without_evaluations_or_of_different_ones_name_the_files(tmp_path, capsys):
    arguments = ["--runs", str(tmp_path), "--out", str(tmp_path / "out")]
    assert tables.main("table_1", "T", {"TRLOO": ("trloo", "rl")}, "trajectories.jsonl", {}, arguments) == 2
    assert str(tmp_path) in capsys.readouterr().err
    for seed, turns in ((1, 2), (2, 3)):
        write_evaluation(tmp_path / f"eval/trloo/x/seed{seed}", {"p": [[a_turn(1.5)]]}, seed, turns)
    with pytest.raises(AnalysisError, match=r"seed1.*seed2.*eval\.turns: 2 -> 3"):
        tables.build("T", {"TRLOO": evaluations.find(tmp_path, "trloo", "rl")}, {})


# ---- figure 6


def test_figure_6_draws_last_turn_and_best_of_history(tmp_path, capsys):
    samples = [[a_turn(1.5), a_turn(0.5), a_turn(1.3)], [a_turn(0.5), a_turn(1.4)]]  # the second ended early
    write_evaluation(tmp_path / "eval/scaling_vanilla/x/seed1", {"p": samples, "q": samples}, turns=3)
    with open(tmp_path / "eval/scaling_vanilla/x/seed1/trajectories.jsonl", "a") as file:
        file.write('{"problem')
    assert figure_6.main(["--runs", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out/figure_6.csv").read_text())))
    drawn = {(row["curve"], int(row["x"])): float(row["mean"]) for row in rows}
    assert [drawn["vanilla, last turn", turn] for turn in (1, 2, 3)] == [0.5, 0.5, 0.5]
    assert [drawn["vanilla, best of history", turn] for turn in (1, 2, 3)] == [0.5, 1.0, 1.0]
    caption = (tmp_path / "out/figure_6.md").read_text()
    assert "context management: left out" in caption and "1 damaged line left out" in caption and "modelled" in caption
    assert figure_6.main(["--runs", str(tmp_path / "none"), "--out", str(tmp_path)]) == 2


# ---- comparison


def test_a_comparison_has_paired_intervals_settings_and_cost(tmp_path, capsys):
    for name, speedup, gamma in (("a", 1.05, 1.0), ("b", 1.6, 0.0)):
        run = tmp_path / name
        rows = {f"p{i}": [[a_turn(0.5), a_turn(speedup)], [a_turn(0.5, "hack"), a_turn(speedup)]] for i in range(6)}
        write_evaluation(run / "eval/rl", rows)
        (run / "eval/rl/settings.json").unlink()
        config = load_recipe("mini-cpu", [f"advantage.gamma={gamma}"]).to_json()
        (run / "config.json").write_text(json.dumps(config))
        (run / "stages.jsonl").write_text('{"stage": "RL", "seconds": 300}\n{"stage": "RL", "seconds": 60}\n')
        (run / "rl").mkdir()
        (run / "rl/metrics.jsonl").write_text(
            '{"step": 1, "tokens/total": 500}\n{"step": 2, "tokens/total": 700}\n{"st'
        )
    assert compare.main([str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out/compare.md").read_text()
    assert "| Fast@1.2, turn 2 (%) | 0.0 [0.0, 0.0] | 100.0 [100.0, 100.0] |" in text
    assert "| Fast@1.2, turn 2 (points) | +100.0 [+100.0, +100.0] | 6 | higher |" in text
    assert "| hacking ratio (points) | +0.0 [+0.0, +0.0] | 6 | no clear difference |" in text
    assert "advantage.gamma: 1.0 -> 0.0" in text
    assert "| seconds, the run's own stages | 360 | 360 |" in text and "hared" not in text
    assert "| tokens, RL | 1,200 | 1,200 |" in text
    reward = [0.25 * (1 + 0.5 + 0.5) + 0.5 * (1 + s + 0.5) for s in (1.05, 1.6)]
    lines = csv.DictReader(io.StringIO((tmp_path / "out/compare.csv").read_text()))
    found = next(row for row in lines if "one measure" in row["measure"])
    assert float(found["value"]) == pytest.approx(reward[0])


def test_shared_cold_start_and_sft_are_in_the_cost_and_what_nobody_noted_is_named(tmp_path):
    for name in "ab":
        for seed in (1, 2):
            run = tmp_path / name / f"seed{seed}"
            write_evaluation(run / "eval/rl", {"p": [[a_turn(1.5)] * 2]}, seed)
            for part in ("collect", "sft"):
                (run / part).mkdir()
            (run / "stages.jsonl").write_text('{"stage": "RL", "seconds": 100}\n')
            if (name, seed) != ("b", 2):
                lines = '{"stage": "Cold start", "seconds": 30}\n{"stage": "SFT", "seconds": 7}\n'
                (run / "shared_stages.jsonl").write_text(lines)
    text = compare.markdown(compare.compare([compare.open_side(tmp_path / name) for name in "ab"]))
    assert "| seconds, the run's own stages | 200 | 200 |" in text
    assert "| seconds, cold start and SFT, shared | 74 | 37 (1 of 2 runs) |" in text
    assert "Shared: made once a seed" in text and "what a stopped call spent before is not noted" in text
    missing = [line for line in text.splitlines() if line.startswith("Not counted")]
    assert missing == [
        f"Not counted for b, since no file notes their time: Cold start and SFT of {tmp_path / 'b/seed2'}."
    ]


def test_variants_are_paired_by_seed_and_what_is_missing_is_named(tmp_path, capsys):
    for name, speedup in (("a", 1.1), ("b", 1.1)):
        for seed in (1, 2):
            rows = {f"p{i}": [[a_turn(0.5), a_turn(speedup + 0.2 * seed, problem=f"{seed}{i}")]] for i in range(3)}
            write_evaluation(tmp_path / name / f"seed{seed}" / "eval/rl", rows, seed)
    sides = [compare.open_side(tmp_path / name) for name in "ab"]
    comparison = compare.compare(sides)
    measure, _, differences = comparison.rows[0]
    assert measure.name == "Fast@1, turn 2" and (differences[1].value, differences[1].problems) == (0.0, 6)
    assert differences[1].runs == 2
    assert compare.main([str(tmp_path / "a"), str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none/eval/rl/trajectories.jsonl") in capsys.readouterr().err
    assert compare.main([str(tmp_path / "a")]) == 2


def test_one_seed_is_paired_with_the_same_one_of_several(tmp_path):
    for name, seeds in (("a", (1, 2, 3)), ("b", (2,))):
        for seed in seeds:
            last = a_turn(0.5 + (name == "a" and seed == 2), problem=str(seed))
            rows = {"p": [[a_turn(0.5, problem=str(seed)), last]]}
            write_evaluation(tmp_path / name / f"seed{seed}" / "eval/rl", rows, seed)
    comparison = compare.compare([compare.open_side(tmp_path / name) for name in "ab"])
    difference = comparison.rows[0][2][1]
    assert (difference.value, difference.runs, difference.problems) == (-1.0, 1, 1)


def test_problems_of_one_name_that_differ_are_not_paired(tmp_path):
    for name, digest in (("a", "x"), ("b", "y")):
        write_evaluation(tmp_path / name, {"p": [[a_turn(1.5, problem=digest)] * 2]})
    comparison = compare.compare([compare.open_side(tmp_path / name) for name in "ab"])
    assert comparison.rows[0][2][1].value is None
