"""scripts/ablations: every setting of every run is known to rl/config.py, at every size; the queue with fake stages."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl.config import load_recipe

pytestmark = pytest.mark.budget(90)
ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path for path in (ROOT / "scripts/ablations").glob("*.sh") if path.stem not in ("common", "variants"))
FULL = {"MODEL": "/models/m", "PROBLEMS": "/p", "TEACHER_URL": "http://t/v1", "TEACHER_MODEL": "t"}
MACHINES = {
    "cpu": {"SIZE": "mini", "GPUS": ""},
    "gpu": {"SIZE": "mini", "GPUS": "0 1"},
    "full": {"SIZE": "full", "GPUS": "0 1 2 3 4 5 6 7", "KERNELBENCH_DIR": "/kb", **FULL},
}


def bash(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    kept = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "RUNS", "SET")}
    return subprocess.run(
        ["bash", str(script), *arguments],
        env={**kept, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_there_is_a_script_for_every_figure_and_table_and_its_module():
    names = {path.stem for path in SCRIPTS}
    assert names >= {"figure_2", "figure_4", "figure_5_7", "figure_6", "figure_8", "figure_9", "table_1", "table_2"}
    assert all((ROOT / f"analysis/{name}.py").is_file() for name in names)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_override_of_every_run_is_accepted(script, machine):
    done = bash(script, "--dry-run", **MACHINES[machine], SEEDS="7")  # three would be the same three times
    if script.stem == "table_2" and machine == "cpu":
        assert done.returncode == 2 and "needs a GPU" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert "known to rl/config.py" in done.stdout and f"analysis.{script.stem}" in done.stdout
    commands = re.findall(r"^bash scripts/train\.sh (\S+) --run (\S+) (.*)$", done.stdout, re.MULTILINE)
    assert len({run for _, run, _ in commands}) == len(commands) > 0
    seen = {}
    for recipe, run, rest in commands:
        config = load_recipe(recipe, re.findall(r"--set (\S+)", rest))
        assert f"/{config.name}/seed{config.seed}" in run
        settings = config.to_json() | {"name": ""}
        assert settings not in seen.values(), f"{run} is the same as another run"
        seen[run] = settings


def test_variants_mean_what_they_are_called():
    done = bash(ROOT / "scripts/ablations/leave_one_out.sh", "--dry-run", **MACHINES["gpu"], SEEDS="1")
    commands = re.findall(r"^bash scripts/train\.sh (\S+) --run \S+ (.*)$", done.stdout, re.MULTILINE)
    configs = [load_recipe(recipe, re.findall(r"--set (\S+)", rest)) for recipe, rest in commands]
    by_name = {config.name: config for config in configs}
    whole = by_name["mrs_pr_prs"]
    assert (whole.rejection.mrs, whole.rejection.prs, whole.reward.profiling_ratio) == ("sample", "soft", True)
    assert (whole.rejection.prs_tau, whole.rejection.prs_s, whole.rejection.token_veto) == (0.3, 0.1, 1e-4)
    assert (by_name["no_mrs"].rejection.mrs, by_name["no_mrs"].rejection.token_veto) == ("off", 0.0)
    assert by_name["no_pr"].reward.profiling_ratio is False and by_name["mrs_pr"].rejection.prs == "off"
    assert by_name["no_cap"].reward.speedup_cap > 1e6 and by_name["compile_reference"].env.reference == "compile"
    assert {by_name[n].advantage.estimator for n in ("grpo", "grpo_std", "rloo")} == {"grpo", "grpo_std", "rloo"}


def test_a_misspelt_setting_and_a_missing_model_are_refused_before_anything_runs():
    figure = ROOT / "scripts/ablations/figure_2.sh"
    done = bash(figure, "--dry-run", **MACHINES["cpu"], SET="train.stepz=2")
    assert done.returncode == 2 and "train.stepz" in done.stdout and "did you mean" in done.stdout
    done = bash(figure, "--dry-run", **{**MACHINES["full"], "MODEL": ""})
    assert done.returncode == 2 and "needs MODEL" in done.stderr
    done = bash(figure, "--dry-run", **MACHINES["gpu"], GPUS_PER_RUN="3")
    assert done.returncode == 2 and "only 2 are visible" in done.stderr
    assert bash(figure, "--now").returncode == 2 and bash(figure, "--help").returncode == 0


def test_evaluations_can_be_cut_down_and_what_is_no_number_is_refused():
    cut = {"EVAL_PROBLEMS": "5", "EVAL_SAMPLES": "2", "EVAL_TURNS": "6", "SEEDS": "1"}
    for name, words in (("figure_6", "--scaling"), ("table_1", "--samples 2")):
        script = ROOT / f"scripts/ablations/{name}.sh"
        done = bash(script, "--dry-run", **MACHINES["cpu"], **cut)
        lines = [line for line in done.stdout.splitlines() if line.startswith("bash scripts/eval.sh")]
        assert len(lines) == (3 if name == "table_1" else 2) and done.returncode == 0
        for line in lines:
            assert " generator:heldout:5:1 " in line and "--turns 6 --samples 2" in line and words in line
        # KernelBench's sets are folders: the first so many of each.
        done = bash(script, "--dry-run", **MACHINES["full"], **cut)
        lines = [line for line in done.stdout.splitlines() if line.startswith("bash scripts/eval.sh")]
        assert len(lines) in (6, 9) and all("--limit 5" in line and "--turns 6" in line for line in lines)
        for key, value in (("EVAL_PROBLEMS", "few"), ("EVAL_SAMPLES", "0"), ("EVAL_TURNS", "-1")):
            done = bash(script, "--dry-run", **MACHINES["cpu"], **{key: value})
            assert done.returncode == 2 and f"{key}={value} is no number" in done.stderr
        said = bash(script, "--help").stdout
        assert all(key in said for key in ("EVAL_PROBLEMS=N", "EVAL_SAMPLES=N", "EVAL_TURNS=N"))


def test_the_cold_start_is_evaluated_as_the_trained_models_are():
    done = bash(ROOT / "scripts/ablations/table_1.sh", "--dry-run", **MACHINES["full"], SEEDS="4", RUNS="r/x")
    lines = re.findall(r"^bash scripts/eval\.sh (\S+) (\S+) --run \S+ (.*)$", done.stdout, re.MULTILINE)
    asked = {}
    for model, problems, options in lines:
        asked.setdefault(model, []).append((problems, options))
    assert set(asked) == {"r/x/base/seed4/sft/model", "r/x/trloo/seed4", "r/x/mrs_pr_prs/seed4"}
    assert len({tuple(one) for one in asked.values()}) == 1 and len(lines) == 9


def test_full_evaluations_without_kernelbench_are_refused_before_anything_runs():
    done = bash(ROOT / "scripts/ablations/table_1.sh", "--dry-run", **MACHINES["full"] | {"KERNELBENCH_DIR": ""})
    assert done.returncode == 2 and "need KERNELBENCH_DIR" in done.stderr and "bash scripts" not in done.stdout


# ---- the queue, with stand-ins for training and evaluation

TRAIN = """#!/usr/bin/env bash
while (($#)); do if [[ "$1" == --run ]]; then run="$2"; fi; shift; done
echo "$run on ${CUDA_VISIBLE_DEVICES:-cpu}" >>"$LOG"
[[ -d "$run/sft/model" && -d "$run/problems" && ! -e "$run/sft/checkpoints" ]] || exit 9
if [[ -n "${FAILS:-}" && "$run" == *"$FAILS"* ]]; then echo "no luck"; exit 3; fi
if [[ -n "${HANGS:-}" ]]; then # as train.sh: its stage has a process group of its own, which goes when it is stopped
    set -m
    sleep 100 &
    trap 'kill -KILL %1; exit 130' INT TERM
    echo $! >"$HANGS"
    wait
fi
sleep 0.3
mkdir -p "$run/eval/rl" && touch "$run/eval/rl/DONE"
"""
PYTHON = """#!/usr/bin/env bash
if [[ "$1" != -m ]]; then exec {python} "$@"; fi
case "$2" in
    scripts.prepare | rl.collect | rl.sft)
        while (($#)); do if [[ "$1" == --run ]]; then run="$2"; fi; [[ "$1" == rl.sft ]] && sft=1; shift; done
        mkdir -p "$run/problems" "$run/collect"
        if [[ -n "${{sft:-}}" ]]; then
            echo "base $run" >>"$LOG"
            mkdir -p "$run/sft/model" "$run/sft/checkpoints" && touch "$run/sft/DONE"
        fi ;;
    *) echo "drawn $2" >>"$LOG" ;;
esac
"""


@pytest.fixture
def copy(tmp_path) -> Path:
    """A project that has the ablations, and stand-ins for the rest."""
    shutil.copytree(ROOT / "scripts/ablations", tmp_path / "scripts/ablations")
    (tmp_path / "scripts/setup.sh").write_text("")
    (tmp_path / "scripts/train.sh").write_text(TRAIN)
    (tmp_path / "python").write_text(PYTHON.format(python=sys.executable))
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def run(copy: Path, script: str = "figure_2", **environment: str) -> tuple[subprocess.CompletedProcess, list[str]]:
    log = copy / "log"
    log.write_text("")
    done = bash(
        copy / f"scripts/ablations/{script}.sh",
        **{"PYTHON": str(copy / "python"), "LOG": str(log), "RUNS": "runs/x", "SEEDS": "1 2", **environment},
    )
    return done, log.read_text().splitlines()


def test_runs_are_spread_over_the_gpus_the_base_is_made_once_and_done_runs_are_skipped(copy):
    done, log = run(copy, GPUS="4 5 6")
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in log if line.startswith("base")) == [
        "base runs/x/base/seed1",
        "base runs/x/base/seed2",
    ]
    trained = dict(line.split(" on ") for line in log if " on " in line)
    assert set(trained) == {f"runs/x/{v}/seed{s}" for v in ("trloo", "no_hack_check") for s in (1, 2)}
    assert len(set(trained.values())) >= 2 and set(trained.values()) <= {"4", "5", "6"}
    assert log[-1] == "drawn analysis.figure_2"
    # What the shared part cost is noted once, and every run says it.
    for seed in (1, 2):
        noted = (copy / f"runs/x/base/seed{seed}/stages.jsonl").read_text()
        assert [json.loads(line)["stage"] for line in noted.splitlines()] == ["Prepare", "Cold start", "SFT"]
        for variant in ("trloo", "no_hack_check"):
            assert (copy / f"runs/x/{variant}/seed{seed}/shared_stages.jsonl").read_text() == noted
    assert run(copy, GPUS="4 5 6")[1] == ["drawn analysis.figure_2"]


def test_evaluations_come_after_the_runs_and_have_short_names_for_their_output(copy):
    (copy / "scripts/eval.sh").write_text('echo "evaluated $*" >>"$LOG"; echo told')
    done, log = run(copy, "figure_6", GPUS="", SEEDS="1", EVAL_PROBLEMS="3")
    assert done.returncode == 0, done.stderr
    assert log[1] == "runs/x/mrs_pr_prs/seed1 on cpu" and log[-1] == "drawn analysis.figure_6"
    for kind, line in zip(("vanilla", "context"), log[2:4]):
        out = f"runs/x/eval/scaling_{kind}/generator-heldout-3-1/seed1"
        asked = f"evaluated runs/x/mrs_pr_prs/seed1 generator:heldout:3:1 --run {out} --turns 14 --samples 4"
        assert line.startswith(f"{asked} --scaling {kind}")
        name = f"eval_scaling_{kind}_mrs_pr_prs_1_generator-heldout-3-1.log"
        assert (copy / "runs/x/logs" / name).read_text() == "told\n"


def test_a_failed_run_is_named_the_others_go_on_and_the_next_call_repeats_it_alone(copy):
    done, log = run(copy, GPUS="", FAILS="no_hack_check/seed1")
    assert done.returncode == 2 and "FAILED: train no_hack_check 1" in done.stderr and "no luck" in done.stderr
    assert sum(" on cpu" in line for line in log) == 4
    done, log = run(copy, GPUS="")
    assert done.returncode == 0 and log == ["runs/x/no_hack_check/seed1 on cpu", "drawn analysis.figure_2"]


def test_a_run_of_several_gpus_gets_them_together(copy):
    _, log = run(copy, GPUS="0 1 2 3", GPUS_PER_RUN="2")
    assert {line.split(" on ")[1] for line in log if " on " in line} <= {"0,1", "2,3"}


def running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(") ")[2][0] != "Z"


@pytest.mark.parametrize("interrupts", [signal.SIG_DFL, signal.SIG_IGN], ids=["from a shell", "in the background"])
def test_stopped_it_leaves_no_stage_behind(copy, interrupts):
    """What a script starts in the background ignores Ctrl-C from birth, and so does all that it starts."""
    pid = copy / "pid"
    environment = {"PYTHON": str(copy / "python"), "LOG": "/dev/null", "RUNS": "runs/x", "SEEDS": "1", "GPUS": ""}
    process = subprocess.Popen(
        ["bash", str(copy / "scripts/ablations/figure_2.sh")],
        env={**os.environ, **environment, "HANGS": str(pid)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, interrupts),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 30
    while not (pid.exists() and pid.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    stage = int(pid.read_text())
    assert running(stage)
    process.terminate()
    assert process.wait(timeout=40) == 130
    assert not running(stage)
