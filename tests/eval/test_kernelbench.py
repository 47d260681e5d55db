"""KernelBench's files: written so that its own analysis agrees with us, read so that its kernels are judged again.

KERNELBENCH_REPO names a checkout of that project; without it the test that runs its script is skipped.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent))
from made_up import MadeUpJudge

from env.problems import load, load_folder, write_jsonl
from env.records import Problem
from eval import kernelbench, kernelbench_read, kernelbench_write, metrics
from eval.settings import RunError, Settings, claim, problem_identity
from rl.config import load_recipe
from rl.records import Trajectory, Turn, append_trajectories, read_trajectories

pytestmark = pytest.mark.budget(60)

REFERENCE = "class Model: pass\ndef get_inputs(): pass\ndef get_init_inputs(): pass\n# {}\n"
ANSWER = "Here it is:\n```python\nclass ModelNew:\n    pass  # {}\n```\n"
REPO = os.environ.get("KERNELBENCH_REPO")


def folder_of(path: Path, levels=(1,), count: int = 12) -> list[Problem]:
    for level in levels:
        (path / f"level{level}").mkdir(parents=True)
        for number in range(1, count + 1):
            (path / f"level{level}" / f"{number}_Problem_.py").write_text(REFERENCE.format((level, number)))
    return load_folder(path)


def sampled(problems: list[Problem], samples: int, turns: int) -> list[Trajectory]:
    """Made-up verdicts on made-up answers; some without code."""
    judge, trajectories = MadeUpJudge(), []
    for problem in problems:
        for sample in range(samples):
            rows = []
            for number in range(turns):
                text = ANSWER.format((sample, number)) if (sample + number) % 5 != 4 else "No code today."
                verdict = judge.verdict(problem, text)
                verdict.device = "made up"
                if verdict.status == "hack":
                    verdict.evidence = {"rule": "no_effect"}
                rows.append(Turn([], [], [], 0, "stop", "", text, verdict.to_json(), 0.0))
            trajectories.append(Trajectory(problem.id, sample, rows))
    return trajectories


def evaluation(folder: Path, problems: list[Problem], samples: int = 3, turns: int = 2) -> list[Trajectory]:
    """A finished evaluation's folder."""
    config = load_recipe("mini-cpu", [f"eval.samples={samples}", f"eval.turns={turns}"])
    identity = problem_identity("made up", problems)
    folder.mkdir()
    claim(folder, Settings({"kind": "made up"}, identity, ("eager",), "vanilla", 4, 0, 8, config=config.to_json()))
    write_jsonl(problems, folder / "problems.jsonl")
    trajectories = sampled(problems, samples, turns)
    append_trajectories(folder / "trajectories.jsonl", trajectories)
    return trajectories


def write(folder: Path, runs: Path, *more: str) -> None:
    kernelbench.write(
        kernelbench.parser().parse_args(["write", str(folder), "--runs", str(runs), "--name", "r", *more])
    )


def fast_p(results: dict, baseline: dict, files: dict[int, str], p: float) -> float:
    """Our own few lines of what KernelBench's page defines: correct samples faster than p, over problems (sample 0)."""
    fast = 0
    for number, file in files.items():
        (entry,) = [row for row in results[str(number)] if row["sample_id"] == 0]
        fast += entry["correctness"] and baseline[file]["mean"] / entry["runtime"] > p
    return fast / len(files)


def test_what_is_written_says_the_same_as_our_scores(tmp_path):
    problems = folder_of(tmp_path / "problems")
    trajectories = evaluation(tmp_path / "run", problems)
    write(tmp_path / "run", tmp_path / "runs")
    results = json.loads((tmp_path / "runs/r/eval_results.json").read_text())
    baseline = json.loads((tmp_path / "runs/r_baseline.json").read_text())["level1"]
    assert list(baseline) == sorted(f"{n}_Problem_.py" for n in range(1, 13))
    judged = {t.problem_id: t for t in trajectories if t.sample_index == 0}
    files = {}
    for problem in problems:
        turn = judged[problem.id].turns[-1]
        number = int(problem.name.split("_")[0])
        entries = {row["sample_id"]: row for row in results.get(str(number), [])}
        path = tmp_path / f"runs/r/level_1_problem_{number}_sample_0_kernel.py"
        assert ("class ModelNew" in path.read_text()) == ("ModelNew" in turn.completion_text)
        assert "```" not in path.read_text()
        if turn.verdict["status"] == "infra_error":
            assert 0 not in entries
            continue
        files[number] = f"{number}_Problem_.py"
        entry = entries[0]
        assert entry["correctness"] == (turn.verdict["status"] == "correct")
        assert entry["compiled"] == (turn.verdict["status"] != "compile_error")
        if turn.verdict["status"] == "hack":
            assert entry["metadata"]["hack"] == "no_effect"
        if entry["correctness"]:
            assert baseline[files[number]]["mean"] / entry["runtime"] == pytest.approx(
                turn.verdict["speedup"], rel=1e-14
            )
        else:
            assert entry["runtime"] == -1.0
    first = [t for t in trajectories if t.sample_index == 0]
    for p in (0.0, 1.0, 1.5, 2.0):
        above = math.nextafter(p, math.inf)  # theirs asks for more than p
        ours = metrics.ratio(metrics.fast_tally(first, above, 2), resamples=10)["value"]
        assert fast_p(results, baseline, files, p) == ours
    rates = json.loads((tmp_path / "runs/r/pass_at_k_results.json").read_text())
    assert set(rates["averages"]) == {"avg_pass@1", "avg_pass@2"} or "avg_pass@1" in rates["averages"]


@given(st.floats(1e-3, 1e4), st.one_of(st.floats(0.01, 50), st.sampled_from([0.5, 1.0, 1.2, 1.5, 2.0])))
def test_rounding_lifts_no_speedup_over_a_threshold(baseline, speedup):
    quotient = baseline / kernelbench_write.runtime_of(baseline, speedup)
    assert quotient <= speedup and quotient == pytest.approx(speedup, rel=1e-15, abs=0)


def test_levels_get_folders_of_their_own_and_any_turn_can_stand_for_a_sample(tmp_path):
    problems = folder_of(tmp_path / "problems", levels=(1, 2), count=3)
    trajectories = evaluation(tmp_path / "run", problems)
    for turn in ("1", "best"):
        write(tmp_path / "run", tmp_path / f"runs{turn}", "--turn", turn)
        results = json.loads((tmp_path / f"runs{turn}/r_level2/eval_results.json").read_text())
        for trajectory in (t for t in trajectories if t.problem_id.startswith("level2")):
            rows = results.get(trajectory.problem_id.split("/")[1].split("_")[0], [])
            entry = next((row for row in rows if row["sample_id"] == trajectory.sample_index), None)
            statuses = [row.verdict["status"] for row in trajectory.turns]
            good = statuses[0] == "correct" if turn == "1" else "correct" in statuses
            assert (entry or {"correctness": False})["correctness"] == good
    with pytest.raises(RunError, match="--turn 7"):
        write(tmp_path / "run", tmp_path / "no", "--turn", "7")


def test_problems_without_a_level_and_number_are_refused_by_name():
    with pytest.raises(RunError, match=r"held_3.*level and a number"):
        kernelbench_write.place_of(Problem("held_3", REFERENCE, name="held_3"))
    twice = [Problem(id, id, level=1, name="3_Same") for id in ("a", "b")]
    with pytest.raises(RunError, match="both problem 3 of level 1"):
        kernelbench_write.places(twice)


def standins(folder: Path) -> Path:
    """Packages that KernelBench's script imports and that aren't installed, as empty as they can be."""
    made = {
        "pydra": """
            import sys
            REQUIRED = None
            class Config:
                def to_dict(self):
                    return vars(self)
            def main(base):
                def wrap(function):
                    def run():
                        config = base()
                        for text in sys.argv[1:]:
                            name, _, value = text.partition("=")
                            assert hasattr(config, name), name
                            setattr(config, name, int(value) if value.isdigit() else value)
                        return function(config)
                    return run
                return wrap
        """,
        "tabulate": """
            def tabulate(rows, headers=(), tablefmt=""):
                return "\\n".join(" | ".join(map(str, row)) for row in [headers, *rows])
        """,
        "dotenv": "load_dotenv = lambda *a, **k: None",
        "openai": "OpenAI = None",
        "litellm": "completion = None",
    }
    folder.mkdir()
    for name, text in made.items():
        if find_spec(name) is None:
            (folder / f"{name}.py").write_text(textwrap.dedent(text))
    return folder


@pytest.mark.skipif(not REPO, reason="KERNELBENCH_REPO names no checkout of KernelBench")
def test_kernelbench_s_own_analysis_runs_on_our_files_and_agrees_to_the_last_digit(tmp_path):
    problems = load_folder(Path(REPO) / "KernelBench" / "level1")
    # Nobody's faults are out of our denominators and in theirs: where definitions agree there are none.
    trajectories = [
        Trajectory(t.problem_id, t.sample_index, [r for r in t.turns if r.verdict["status"] != "infra_error"][:1])
        for t in sampled(problems, 2, 5)
    ]
    kernelbench_write.write(trajectories, problems, 1, tmp_path / "runs", "ours")
    runs = tmp_path / "runs"
    options = ["run_name=ours", "level=1", "hardware=none", "baseline=none", f"eval_results_dir={runs}"]
    options += [f"baseline_file={runs / 'ours_baseline.json'}", f"output_file={tmp_path / 'out.json'}"]
    paths = [str(Path(REPO) / "src"), str(standins(tmp_path / "standins"))]
    done = subprocess.run(
        [sys.executable, str(Path(REPO) / "scripts/benchmark_eval_analysis.py"), *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, cwd=REPO, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    theirs = json.loads((tmp_path / "out.json").read_text())
    first = [t for t in trajectories if t.sample_index == 0]
    at_threshold = 0
    for p, value in theirs["fast_p"].items():
        # More than p is at least the next number after p: the one thing in which the definitions differ.
        above, at_least = (
            metrics.ratio(metrics.fast_tally(first, bound, 1), resamples=10)["value"]
            for bound in (math.nextafter(float(p), math.inf), float(p))
        )
        assert value == above
        at_threshold += above != at_least
    assert at_threshold < len(theirs["fast_p"])
    assert theirs["total_count"] == theirs["total_eval"] == 100
    speeds = [t.turns[0].verdict["speedup"] for t in first if t.turns[0].verdict["status"] == "correct"]
    assert theirs["correct_count"] == len(speeds)
    assert theirs["geo_mean_speedup"] == pytest.approx(math.exp(sum(map(math.log, speeds)) / len(speeds)))
    assert 0 < theirs["fast_p"]["1.0"] < theirs["fast_p"]["0.0"] < 1


# Reading -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def their_run(tmp_path) -> Path:
    """Three kernels of somebody else's, results of theirs, and things that don't belong there."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    rows = {}
    for number in range(1, 7):
        name = f"level_1_problem_{number}_sample_0_kernel.py"
        (folder / name).write_text(f"class ModelNew: pass  # {number}\n")
        rows[str(number)] = [
            {"sample_id": 0, "compiled": True, "correctness": number < 5, "metadata": {}, "runtime": 2.0}
        ]
    rows["6"][0]["metadata"] = {"correctness_issue": "Output mismatch"}
    del rows["5"]
    (folder / "level_1_problem_99_sample_0_kernel.py").write_text("class ModelNew: pass\n")
    (folder / "notes.txt").write_text("nothing")
    (folder / "eval_results.json").write_text(json.dumps(rows))
    return folder


def test_their_kernels_are_judged_again_and_differences_have_reasons(tmp_path, their_run, monkeypatch, capsys):
    problems = folder_of(tmp_path / "problems")
    monkeypatch.setattr(kernelbench, "make_pool", lambda config: MadeUpJudge())
    baseline = {"level1": {f"{n}_Problem_.py": {"mean": 3.0} for n in range(1, 13)}}
    (tmp_path / "base.json").write_text(json.dumps(baseline))
    command = ["rejudge", str(their_run), "--problems", str(tmp_path / "problems"), "--out", str(tmp_path / "out"),
               "--device", "cpu", "--baseline", str(tmp_path / "base.json")]  # fmt: skip
    kernelbench.judge_again(kernelbench.parser().parse_args(command))
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "out/differences.json").read_text())
    judge, by_id = MadeUpJudge(), {problem.id: problem for problem in problems}
    assert len(found["kernels"]) == 6 and sum(found["counts"].values()) == 6
    for entry in found["kernels"]:
        number = int(entry["problem"].split("/")[1].split("_")[0])
        verdict = judge.verdict(by_id[entry["problem"]], f"class ModelNew: pass  # {number}\n")
        assert entry["ours"] == verdict.status
        expected = {5: "not evaluated", 6: "incorrect"}.get(number, "correct")
        assert entry["theirs"] == expected
        if expected == verdict.status == "correct":
            assert entry["their_speedup"] == 1.5 and entry["our_speedup"] == verdict.speedup
    assert "level_1_problem_99" in found["left_out"][0] and "verdicts differ" in printed
    whole = (tmp_path / "out/trajectories.jsonl").read_bytes()
    (tmp_path / "out/trajectories.jsonl").unlink()
    kernelbench.judge_again(kernelbench.parser().parse_args(command))
    assert whole == (tmp_path / "out/trajectories.jsonl").read_bytes()
    (their_run / "level_1_problem_1_sample_0_kernel.py").write_text("class ModelNew: pass  # other\n")
    with pytest.raises(RunError, match=r"model\.sha256"):
        kernelbench.judge_again(kernelbench.parser().parse_args(command))


def test_reasons_are_ours_where_we_refuse_and_theirs_where_they_do(tmp_path):
    problems = folder_of(tmp_path / "problems", count=3)

    def judged(problem, status, **more):
        verdict = MadeUpJudge().verdict(problem, "").to_json() | {"status": status, "message": "said", **more}
        return Trajectory(problem.id, 0, [Turn([], [], [], 0, "stop", verdict=verdict)])

    rows = [
        judged(problems[0], "hack", evidence={"rule": "no_own_launch"}),
        judged(problems[1], "correct", speedup=1.2),
        judged(problems[2], "incorrect"),
    ]
    theirs = {
        (1, 0): {"compiled": True, "correctness": True, "runtime": 1.0, "metadata": {}},
        (2, 0): {"compiled": False, "correctness": False, "runtime": -1, "metadata": {"runtime_error": "boom"}},
        (3, 0): {"compiled": True, "correctness": False, "runtime": -1, "metadata": {}},
    }
    found = kernelbench_read.differences(rows, problems, theirs)
    whys = {entry["problem"]: (entry["differs"], entry["why"]) for entry in found["kernels"]}
    assert whys["level1/1_Problem_"] == (True, "no_own_launch: said (CUDA sources aren't Triton)")
    assert whys["level1/2_Problem_"] == (True, "runtime_error: boom")
    assert whys["level1/3_Problem_"] == (False, "")
    assert found["counts"] == {"correct -> hack": 1, "incorrect -> incorrect": 1, "not compiled -> correct": 1}


@pytest.mark.parametrize("text", ["", "[1]", '{"x": [{"sample_id": 0}]}', '{"1": [{"sample_id": 0}]}'])
def test_damaged_results_are_refused_by_name(tmp_path, text):
    (tmp_path / "eval_results.json").write_text(text)
    with pytest.raises(RunError, match=r"eval_results\.json"):
        kernelbench_read.read_results(tmp_path)


def test_a_folder_without_kernels_is_refused(tmp_path):
    problems = folder_of(tmp_path / "problems", count=1)
    for folder in (tmp_path / "nowhere", tmp_path / "problems"):
        with pytest.raises(RunError, match="no kernel to judge"):
            kernelbench_read.read_kernels(folder, problems)


def test_what_we_write_we_read_back(tmp_path):
    problems = folder_of(tmp_path / "problems", count=4)
    evaluation(tmp_path / "run", problems, samples=2)
    write(tmp_path / "run", tmp_path / "runs")
    kernels, notes = kernelbench_read.read_kernels(tmp_path / "runs/r", problems)
    assert notes == [] and [(t.problem_id, t.sample_index) for t in kernels] == [
        (problem.id, sample) for problem in problems for sample in range(2)
    ]
    assert load(tmp_path / "run/problems.jsonl") == problems
    assert len(kernelbench_read.read_results(tmp_path / "runs/r")) <= 8
    assert len(list(read_trajectories(tmp_path / "run/trajectories.jsonl"))) == 8
