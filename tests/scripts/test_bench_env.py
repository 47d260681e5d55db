"""scripts/bench_env.py: its arithmetic, its candidates (judged on the CPU), what its report says.

One pool serves all candidates that are judged here.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from env.pool import Pool
from env.records import Verdict
from env.rules import rules_for
from scripts import bench_env
from scripts.bench import arithmetic, candidates, hostile, kernelbench, machine, ratio, report, soak, stream, verdicts

pytestmark = pytest.mark.budget(40)

SPECS = candidates.specs("cpu")


# Arithmetic ---------------------------------------------------------------------------------------------------------


def test_percentiles_are_those_of_numpy_and_of_nothing_there_is_none():
    import numpy as np

    rng = random.Random(1)
    for size in (1, 2, 7, 100):
        values = [rng.gauss(0, 1) for _ in range(size)]
        for share in (0.0, 0.5, 0.95, 1.0):
            assert arithmetic.percentile(values, share) == pytest.approx(float(np.quantile(values, share)))
    assert arithmetic.percentile([], 0.5) is None
    assert arithmetic.spread([])["p95"] is None


def test_the_rate_counts_neither_the_cold_start_nor_the_queue_that_runs_dry():
    cold = [5.0, 9.0]
    steady = [10.0 + 0.25 * step for step in range(41)]
    dry = [25.0, 30.0]
    found = arithmetic.steady_rate(cold + steady + dry, skip=2, until_s=20.0)
    assert found["rate"] == pytest.approx(4.0) and found["verdicts"] == 41
    assert arithmetic.steady_rate([1.0, 2.0], skip=2, until_s=9.0)["rate"] is None


def test_a_slope_is_found_under_noise_and_means_ignore_missing_keys():
    rng = random.Random(2)
    points = [(x, 3.0 * x + 5.0 + rng.gauss(0, 0.1)) for x in range(50)]
    assert arithmetic.slope(points) == pytest.approx(3.0, abs=0.02)
    assert arithmetic.slope(points[:2]) is None and arithmetic.slope([(1.0, 2.0)] * 5) is None
    assert arithmetic.mean_by_key([{"a": 1.0, "b": 4.0}, {"a": 3.0}]) == {"a": 2.0, "b": 4.0}


def test_what_bounds_the_rate_is_named():
    stages = {"timing_s": 0.5, "effect_s": 0.2, "total_s": 1.0, "exclusive_s": 0.2}
    assert arithmetic.bound(3.0, 10, 0.95, 0.2, stages).startswith("the CPU cores")
    assert arithmetic.bound(4.0, 10, 0.50, 0.2, stages).startswith("the time that a verdict has the GPU alone")
    waiting = arithmetic.bound(1.0, 10, 0.50, None, stages)
    assert waiting.startswith("waiting") and "timing_s 0.50 of 1.00 s" in waiting


def test_errors_of_a_program_against_itself_are_kept_by_problem_and_kind():
    rows = [
        {"problem": "a", "speedups": {"device": 1.01, "eager": 0.9}},
        {"problem": "b", "speedups": {"device": 0.98}},
    ]
    found = arithmetic.errors_of_self(rows)
    assert found["device"]["all"]["max"] == pytest.approx(0.02) and found["device"]["a"]["p50"] == pytest.approx(0.01)
    assert found["eager"]["all"]["count"] == 1


def test_both_kinds_of_time_are_read_where_a_verdict_has_them():
    both = {"times": {"eager": {"speedup": 1.1}, "device": {"speedup": 1.2}}}
    assert verdicts.measured_speedups(Verdict("correct", evidence=both)) == {"eager": 1.1, "device": 1.2}
    assert verdicts.measured_speedups(Verdict("correct", speedup=2.0, time_kind="modelled")) == {"modelled": 2.0}


# Candidates ---------------------------------------------------------------------------------------------------------


def test_answers_are_distinct_and_come_in_groups():
    drawn = list(itertools.islice(candidates.honest("cuda"), 200))
    assert len({text for _, _, text in drawn}) == 200
    kernels = {text[text.index("@triton.jit") : text.index("class ModelNew")] for _, _, text in drawn}
    assert len(kernels) == 200
    assert [spec.name for spec, _, _ in drawn[:9]] == [drawn[0][0].name] * candidates.GROUP + [drawn[8][0].name]
    assert drawn[0][0] != drawn[8][0]
    for _, _, text in drawn[::8]:
        compile(text, "answer", "exec")


def test_the_mix_is_a_third_bad_distinct_and_the_same_for_the_same_seed():
    drawn = list(itertools.islice(soak.mixed("cpu", 3), 120))
    kinds = [(item.facts["kind"], item.name.split(":")[1][0]) for item in drawn]
    assert sum(kind in ("own", "hang") or (kind == "case" and letter in "acd") for kind, letter in kinds) == 40
    again = list(itertools.islice(soak.mixed("cpu", 3), 120))
    other = list(itertools.islice(soak.mixed("cpu", 3, first=60_000), 120))
    texts = [item.source for item in drawn]
    assert texts == [item.source for item in again] and not set(texts) & {item.source for item in other}
    assert len(set(texts)) == 120 and all(item.expected for item in drawn)


TINY = '''import torch
import torch.nn as nn

NOTE = "class Model is named here, and Models too"


class Models(nn.Module):
    pass


class Model(nn.Module):
    """class Model: the one that counts."""

    def __init__(self):
        super(Model, self).__init__()

    def forward(self, x):
        return torch.relu(x) + 1.0


def get_inputs():
    return [torch.randn(16, 64)]


def get_init_inputs():
    return []
'''


def test_a_reference_becomes_its_own_candidate_by_its_syntax_tree():
    text = kernelbench.own_candidate(TINY)
    space: dict = {}
    exec(compile(text, "own", "exec"), space)
    assert space["ModelNew"] is space["Model"] and space["ModelNew"].__name__ == "ModelNew"
    space["ModelNew"]()
    assert space["NOTE"] == "class Model is named here, and Models too" and "Models" in space
    with pytest.raises(ValueError, match="no class Model"):
        kernelbench.own_candidate("class Modelling:\n    pass\n")


@pytest.fixture(scope="module")
def judged():
    """{name: (item, verdict)} of one candidate of every kind, judged by a pool like the benchmark's."""
    items = [
        stream.Item(f"honest {spec.name}", candidates.problem(spec), candidates.answer(spec, 17 + number))
        for number, spec in enumerate(SPECS)
    ]
    items += [ratio.lazy_item(lazy, "cpu") for lazy in ratio.LAZY]
    items += list(verdicts.self_items("cpu", 3))
    for spec in (SPECS[3], SPECS[-1]):
        items.append(stream.Item(f"cheat {spec.name}", candidates.problem(spec), hostile.cheat(spec, 5)))
        items.append(stream.Item(f"wrong {spec.name}", candidates.problem(spec), hostile.wrong(spec, 5)))
    crash = next(fault for fault in hostile.FAULTS if fault.name == "segmentation fault")
    items.append(stream.Item("crash", candidates.problem(SPECS[0]), hostile.faulty(SPECS[0], 5, crash)))
    tiny = candidates.problem(SPECS[0])
    tiny = type(tiny)(id="tiny", source=TINY)
    items.append(stream.Item("itself", tiny, kernelbench.own_candidate(TINY)))
    with Pool("cpu", slots=2, seed=3, rules=rules_for("default", "cpu", trials=2)) as pool:
        asked = [(item, pool.submit(item.problem, item.source, raw=item.raw)) for item in items]
        return {item.name: (item, future.result()) for item, future in asked}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_honest_answers_are_correct_and_all_triton(judged, spec):
    _, verdict = judged[f"honest {spec.name}"]
    assert verdict.status == "correct", verdict.message
    assert verdict.profiling_ratio == pytest.approx(1.0)


@pytest.mark.parametrize("lazy", ratio.LAZY, ids=lambda lazy: lazy.name)
def test_the_counted_share_of_a_lazy_answer_is_the_modelled_one(judged, lazy):
    _, verdict = judged[lazy.name]
    assert verdict.status == "correct", verdict.message
    assert verdict.profiling_ratio == pytest.approx(ratio.modelled_share(lazy, "cpu"), abs=1e-6)


def test_the_others_get_what_they_earn(judged):
    for run, name in enumerate(("affine_relu", "softmax", "affine_relu")):
        _, verdict = judged[f"self_{name}_{run}"]
        assert verdict.status == "correct" and verdict.speedup == 1.0, verdict.message
    for spec in (SPECS[3], SPECS[-1]):
        assert judged[f"cheat {spec.name}"][1].status == "hack"
        assert judged[f"wrong {spec.name}"][1].status == "incorrect"
    assert judged["crash"][1].status == "runtime_error"
    item, verdict = judged["itself"]
    row = stream.row_of(item, verdict, 0.0, 1.0)
    assert kernelbench.sort_of({**row, "values_match": verdict.values_match}) == "as_it_must_be", verdict.message


def test_kernelbench_rows_are_sorted_by_whose_fault_they_are():
    big = {"status": "infra_error", "message": "too big here: needs 300 GB", "speedup": None}
    assert kernelbench.sort_of(big) == "too_big"
    assert kernelbench.sort_of({"status": "infra_error", "message": "the profiler saw nothing"}) == "exception"
    assert kernelbench.sort_of({"status": "hack", "rule": "no_own_launch", "values_match": False}) == "exception"
    rows = [{**big, "sort": "too_big"}, {"sort": "as_it_must_be", "speedup": 1.3}]
    assert kernelbench.counts(rows) == {
        "as_it_must_be": 1, "too_big": 1, "exception": 0, "timed": 1, "timed_beyond_10_percent": 1,
    }  # fmt: skip


# The machine --------------------------------------------------------------------------------------------------------


def test_descendants_are_found_down_to_grandchildren_and_gone_ones_are_not():
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        end = time.monotonic() + 10
        while len(below := machine.descendants(process.pid)) < 1:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert [found.parent for found in below] == [process.pid]
        assert process.pid in [found.pid for found in machine.descendants()]
        assert machine.descriptors(process.pid) >= 3 and machine.resident_mb(process.pid) > 0.5
    finally:
        for found in below:
            subprocess.run(["kill", "-9", str(found.pid)], check=False)
        process.kill()
        process.wait()
    assert process.pid not in [found.pid for found in machine.descendants()]
    assert machine.descriptors(process.pid) == 0


def test_the_judges_processes_are_told_apart_by_command_and_parent(monkeypatch):
    def process(pid, parent, command):
        return machine.Process(pid, parent, "S", command, pid)

    tree = [
        process(10, 1, "python -m env.evaluator 5"),
        process(20, 10, "python -m env.forkserver 7 cpu"),
        *(process(pid, 20, "python -m env.forkserver 7 cpu") for pid in (30, 31)),
        *(process(pid, pid - 10, "python -m env.forkserver 7 cpu") for pid in (40, 41)),
        process(50, 1, "nvidia-smi"),
    ]
    monkeypatch.setattr(machine, "descendants", lambda: tree)
    judge = machine.judge_processes()
    assert [p.pid for p in judge.evaluators] == [10] and [p.pid for p in judge.fork_servers] == [20]
    assert [p.pid for p in judge.workers] == [40, 41]


def test_memory_is_watched_and_its_growth_measured():
    with machine.MemoryWatch() as watch:
        time.sleep(0.1)
    assert len(watch.samples) > 3
    # 10 GB/s for 0.2 s, then still.
    watch.samples = [(0.005 * step, min(0.05 * step, 2.0)) for step in range(100)]
    assert watch.peak_gb() == pytest.approx(2.0) and watch.fastest_gb_s() == pytest.approx(10.0, rel=0.05)
    assert 0.0 <= machine.CpuMeter().busy_share() <= 1.0


# Streams and time boxes -----------------------------------------------------------------------------------------------


class SlowPool:
    """Answers each candidate at once, or never."""

    def __init__(self, lanes: int, answers: bool = True):
        self.lanes, self.answers, self.asked = lanes, answers, []

    def __len__(self) -> int:
        return self.lanes

    def submit(self, problem, source, raw):
        self.asked.append(source)
        future: Future = Future()
        if self.answers:
            future.set_result(Verdict("correct" if "good" in source else "incorrect", speedup=1.0))
        return future


def items(count: int) -> list[stream.Item]:
    problem = candidates.problem(SPECS[0])
    return [stream.Item(str(n), problem, f"{'good' if n % 2 else 'bad'} {n}", ("correct",)) for n in range(count)]


def context(**data) -> stream.Context:
    options = SimpleNamespace(limit=0, only="")
    return stream.Context("cpu", 1.0, 7, 0, data, lambda: None, options, {})


def test_all_items_come_back_as_rows_that_say_whether_they_are_right():
    rows, facts = stream.run_items(context(), SlowPool(2), items(9), time.monotonic() + 30, "test")
    assert sorted(row["name"] for row in rows) == sorted(map(str, range(9))) and facts["unfinished"] == 0
    assert sum(row["right"] for row in rows) == 4
    assert all("message" in row for row in rows if not row["right"])


def test_a_pool_that_never_answers_ends_with_the_time_box_and_few_are_asked(monkeypatch):
    monkeypatch.setattr(stream, "GRACE_S", 0.1)
    pool = SlowPool(3, answers=False)
    rows, facts = stream.run_items(context(), pool, items(50), time.monotonic() + 0.2, "test")
    assert rows == [] and facts["unfinished"] == len(pool.asked) == 3 + 2


# The report -----------------------------------------------------------------------------------------------------------


def snapshot(**changes) -> dict:
    names = ("processes", "workers", "driver_fds", "evaluator_fds", "fork_server_fds", "driver_mb", "evaluator_mb")
    empty = dict.fromkeys([*names, "fork_server_mb", "judge_folders", "worker_folders", "files"], 0)
    return {**empty, "gpu_mb": None, **changes}


def test_leaks_are_named_and_kept_references_are_none():
    idle = snapshot(processes=16, workers=6, evaluator_fds=40, judge_folders=2, worker_folders=6, gpu_mb=9000)
    start = snapshot(gpu_mb=500)
    assert soak.leaks(idle, idle, start, start, {"evaluator_mb": 0.5}, 2) == []
    later = {**idle, "processes": 40, "worker_folders": 30}
    found = soak.leaks(idle, later, snapshot(files=3, gpu_mb=2000), start, {"evaluator_mb": 20.0}, 2)
    text = "; ".join(found)
    for part in ("processes grew from 16 to 40", "worker_folders", "3 files are left", "20.0 for 100", "1500 MB"):
        assert part in text, found


def sections(good: bool) -> dict:
    bad_row = {"name": "x", "status": "hack", "category": "honest", "right": good}
    return {
        "cases": {"rows": [{**bad_row, "status": "correct" if good else "hack"}], "asked": 1},
        "throughput": {"rate": 3.5 if good else 2.0, "verdicts": 90, "not_correct": []},
        "exclusive": {"exclusive_ms": arithmetic.spread([50.0, 60.0 if good else 300.0])},
        "self": {
            "errors": arithmetic.errors_of_self(
                [{"problem": "a", "speedups": {"device": 1.005 if good else 1.05, "eager": 1.02 if good else 1.2}}]
            ),
            "not_correct": [],
            "asked": 1,
        },
        "ratio": {
            "rows": [
                {"name": "w", "all": True, "profiling_ratio": 0.99 if good else None},
                {"name": "l", "truth": 0.5, "points_off": 1.0 if good else -3.0, "profiling_ratio": 0.51},
            ],
            "asked": 2,
        },
        "recovery": {
            "rows": [
                {"name": "hang", "recovery_s": 1.0, "right": True},
                {"name": "kill", "recovery_s": 2.0 if good else None},
            ],
            "asked": 2,
        },
        "soak": {
            "rows": [bad_row] * 3, "asked": 3, "leaks": [] if good else ["files are left"], "growth_per_100": {},
            "before": {}, "after": {}, "closed": {},
            "alone": {"judged": 2, "asked": 2, "differ": [] if good else [{"name": "x"}]},
        },
        "hog": {
            "status": "oom" if good else "timeout", "peak_gb": 17.0, "fastest_gb_s": 9.0, "max_host_gb": 16.0,
            "next_status": "correct", "next_after_s": 0.5,
        },
        "kernelbench": {
            "rows": [bad_row], "asked": 1, "exception": [],
            "counts": {"as_it_must_be": int(good), "exception": int(not good), "too_big": 0},
        },
    }  # fmt: skip


def test_figures_are_ok_where_all_is_reached_and_not_where_it_is_missed():
    good = report.figures(sections(True), "cuda")
    assert {figure["figure"]: figure["ok"] for figure in good if figure["ok"] is not True} == {}
    bad = report.figures(sections(False), "cuda")
    assert {figure["figure"]: figure["ok"] for figure in bad if figure["ok"] is not False} == {}
    assert len(good) == len(bad) == 12
    lines = report.table(bad).splitlines()
    assert len(lines) == 13 and all(line.endswith("NO") for line in lines[1:])
    assert "never after kill; else at most 1.00 s (hang)" in report.table(bad)


def test_on_the_cpu_no_speed_is_claimed_and_a_failed_section_is_not_ok():
    found = {f["figure"]: f for f in report.figures({**sections(True), "hog": {"error": "a\nRuntimeError: no"}}, "cpu")}
    assert found["verdicts a second"]["ok"] is None and found["exclusive GPU time"]["ok"] is None
    assert found["memory hog"]["ok"] is False and "RuntimeError: no" in found["memory hog"]["measured"]


def test_what_was_cut_short_is_not_ok_and_says_so():
    cut = sections(True)
    for name in ("cases", "self", "ratio", "recovery", "soak", "kernelbench"):
        cut[name]["asked"] = 10
        cut[name]["stopped"] = True
    cut["soak"]["alone"]["asked"] = 10
    found = {figure["figure"]: figure for figure in report.figures(cut, "cuda")}
    complete = {"verdicts a second", "exclusive GPU time", "memory hog"}
    assert {name for name, figure in found.items() if figure["ok"]} == complete
    assert {name for name, figure in found.items() if not figure["measured"].endswith("(stopped)")} == complete


def test_empty_sections_make_figures_too():
    found = report.figures({name: {} for name in bench_env.SECTIONS}, "cuda")
    assert found and not any(figure["ok"] for figure in found)


def test_other_sections_stay_in_the_file_and_another_machine_is_refused(tmp_path, monkeypatch):
    here = {"device": "cpu (x)", "cores": 2, "versions": {"torch": "1"}}
    out = tmp_path / "a" / "env.json"
    first = bench_env.Report(out, here)
    first.sections["cases"] = sections(True)["cases"]
    first.save()

    def fails(context):
        context.data["rows"] = [1]
        raise RuntimeError("half way")

    monkeypatch.setitem(bench_env.SECTIONS, "hog", fails)
    second = bench_env.Report(out, here)
    bench_env.run_section("hog", second, bench_env.parse(["--sections", "hog", "--minutes", "1"]))
    kept = json.loads(out.read_text())
    assert kept["sections"].keys() == {"cases", "hog"} and kept["sections"]["hog"]["rows"] == [1]
    assert "half way" in kept["sections"]["hog"]["error"]
    assert kept["summary"]["figures"]["cases right"]["ok"] is True and kept["summary"]["versions"] == {"torch": "1"}
    with pytest.raises(SystemExit, match="another device"):
        bench_env.Report(out, {**here, "device": "NVIDIA H200"})


def test_time_boxes_and_sections_are_checked_before_anything_runs(tmp_path, monkeypatch):
    found = bench_env.minutes_by_section("soak=8,2.5")
    assert set(found.values()) == {2.5} and bench_env.minutes_by_section("2.5,soak=8")["soak"] == 8.0
    for text in ("soka=1", "soak=x", "nan minutes"):
        with pytest.raises(ValueError, match="--minutes"):
            bench_env.minutes_by_section(text)
    assert all(math.isfinite(value) for value in bench_env.MINUTES.values())
    assert bench_env.MINUTES.keys() == bench_env.SECTIONS.keys()
    monkeypatch.delenv("KERNELBENCH_DIR", raising=False)
    assert "kernelbench" not in bench_env.parse([]).sections
    with pytest.raises(SystemExit, match="KERNELBENCH_DIR is not set"):
        bench_env.parse(["--sections", "kernelbench"])
    with pytest.raises(SystemExit):
        bench_env.parse(["--sections", "soka"])
