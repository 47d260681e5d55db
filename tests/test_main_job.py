"""The main job in minutes: every stage of scripts/train.sh with real kernels and verdicts, and training that learns.

Problems are chains of two element-wise operators, and in half of its answers the teacher cheats: SFT learns to answer
well and to cheat, and RL has to leave one of them. The direction is asserted, with margins that a run without learning
misses; the size of the effect is for the whole recipe to show (mini-cpu).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest

from env.generator import canonical, is_sound, render
from env.problems import write_folder
from env.records import Problem
from rl.records import read_trajectories

# Some three minutes on two free cores, most of them decoding and judging; nothing smaller has verdicts to learn from.
# The rest is room for a machine that others use, too.
pytestmark = pytest.mark.budget(420)
ROOT = Path(__file__).resolve().parent.parent
OPERATORS = ("relu", "sigmoid", "tanh", "abs", "square", "half", "add_one", "silu")
STEPS = 9

SETTINGS = {
    "problems.source": "folder", "problems.train": 24, "problems.heldout": 12, "env.trials": 1,
    "collect.trajectories": 96, "collect.turns": 1, "collect.shares.decoy": 0.5, "collect.shares.tuned": 0.5,
    "collect.shares.wrong": 0, "collect.shares.broken": 0, "collect.shares.lazy": 0, "collect.shares.fused": 0,
    "model.layers": 2, "model.width": 128, "model.heads": 4, "model.mlp": 256, "sft.epochs": 16, "sft.lr": 2e-3,
    "rollout.turns": 1, "rollout.prompts_per_step": 4, "rollout.samples_per_prompt": 16, "optim.lr": 4e-4,
    "train.steps": STEPS, "train.checkpoint_every": 5, "eval.samples": 3, "eval.turns": 1,
}  # fmt: skip


def problems() -> list[Problem]:
    """Chains of two that compute different things."""
    chains = {canonical(chain): chain for chain in permutations(OPERATORS, 2) if is_sound(chain)}
    return [Problem(id="-".join(chain), source=render(chain, 16, 128)) for chain in chains.values()]


def command(*arguments: str) -> None:
    """Run one to its end, from the root of the repository."""
    settings = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    result = subprocess.run(arguments, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True)
    assert result.returncode == 0, f"{arguments}\n{result.stdout[-1000:]}\n{result.stderr[-3000:]}"


def summary(run: Path, which: str) -> dict:
    return json.loads((run / "eval" / which / "summary.json").read_text(encoding="utf-8"))


def untrained_reward(run: Path, copy: Path) -> float:
    """The mean held-out reward of the model that SFT began with."""
    shutil.copytree(run / "problems", copy / "problems")
    shutil.copytree(run / "sft" / "init", copy / "sft" / "model")
    shutil.copy(run / "config.json", copy)
    command(sys.executable, "-m", "eval.heldout", "--run", str(copy), "--which", "sft")
    return summary(copy, "sft")["reward_mean"]["value"]


def test_one_command_from_nothing_to_a_report_of_a_policy_that_learned(tmp_path):
    run, folder = tmp_path / "run", tmp_path / "problems"
    write_folder(problems(), folder)
    settings = {**SETTINGS, "problems.path": folder}
    overrides = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command("bash", "scripts/train.sh", "mini-cpu", "--run", str(run), *overrides)

    assert (run / "report.html").stat().st_size > 10_000
    asked = list(read_trajectories(run / "collect" / "trajectories.jsonl"))
    assert {turn.verdict["status"] for t in asked for turn in t.turns} == {"correct", "hack"}
    steps = [json.loads(line) for line in (run / "rl" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))

    def change(name: str) -> tuple[float, float]:
        """Mean over the first two and over the last three steps; the rate only warms up in the first two."""
        values = [step[name] for step in steps]
        return sum(values[:2]) / 2, sum(values[-3:]) / 3

    # On problems that were trained on, which differ from step to step. Measured: decoys 0.41 -> 0.08, rewards
    # 1.5 -> 2.8; without learning (optim.lr=1e-12) 0.43 -> 0.41 and 1.5 -> 1.7.
    before, after = change("hack/ratio")
    assert before > 0.2 and after < 0.5 * before
    before, after = change("reward/mean")
    assert after > before + 0.6

    # On held-out ones. Measured: rewards 0 -> 1.4 -> 1.9, decoys 0.28 -> 0.08. Both evaluations draw from the same
    # seeds: without learning they are the same to the last digit.
    sft, rl = summary(run, "sft"), summary(run, "rl")
    assert sft["reward_mean"]["value"] > untrained_reward(run, tmp_path / "untrained") + 0.5
    assert rl["reward_mean"]["value"] > sft["reward_mean"]["value"] + 0.15
    assert rl["hack_ratio"]["value"] < sft["hack_ratio"]["value"]
