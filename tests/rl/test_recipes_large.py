"""The paper's recipes: every figure that it fixes, and a plan on any machine."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl.boxes import shape_of
from rl.config import load_recipe
from scripts import plan

pytestmark = pytest.mark.budget(60)

ROOT = Path(__file__).parents[2]
# arXiv 2602.05885, section by section.
PAPER = {
    "collect": {"trajectories": 8000, "turns": 5, "teacher": "server"},
    "sft": {"lr": 1e-6, "epochs": 4},
    "rollout": {
        "prompts_per_step": 16, "samples_per_prompt": 16, "turns": 3, "max_new_tokens": 8192, "temperature": 1.0,
        "top_p": 1.0,
    },
    "reward": {"speedup_cap": 3.0, "profiling_ratio": True, "hack_check": True},
    "advantage": {"estimator": "trloo", "gamma": 1.0},
    "rejection": {
        "mrs": "sample", "mrs_low": 0.999, "mrs_high": 1.001, "token_veto": 1e-4, "prs": "soft", "prs_tau": 0.3,
        "prs_s": 0.1, "importance": "off",
    },
    "loss": {"clip_low": 0.2, "clip_high": 0.28, "scale": 1000.0, "dual_clip": 0.0},
    "optim": {"lr": 1e-6, "max_grad_norm": 1.0, "schedule": "constant"},
    "train": {"steps": 300},
    "env": {"trials": 5, "profile": "paper"},
    "eval": {"samples": 8, "turns": 3, "temperature": 1.0, "top_p": 0.95},
}  # fmt: skip


@pytest.mark.parametrize("name", ["drkernel-8b", "drkernel-14b"])
def test_the_paper_s_figures(name):
    config = load_recipe(name)
    settings = config.to_json()
    assert {s: {key: settings[s][key] for key in figures} for s, figures in PAPER.items()} == PAPER
    assert config.model.context == 10240 + 8192 and config.name == name
    assert config.engine.name == "vllm" and config.rollout.batch_size * 8 == 16 * 16
    assert config.train.micro_batch_tokens >= config.model.context  # else a full row could never be trained on


def test_the_two_differ_in_size_alone():
    small, large = (load_recipe(f"drkernel-{size}").to_json() for size in ("8b", "14b"))
    assert {key for key in small if small[key] != large[key]} == {"name", "model", "env"}
    assert {key for key in small["env"] if small["env"][key] != large["env"][key]} == {"lanes"}


@pytest.mark.parametrize("name", ["drkernel-8b", "drkernel-14b"])
def test_a_plan_needs_neither_gpu_nor_weights(name, capsys):
    assert plan.main([name]) == 0
    said = capsys.readouterr().out
    for box in ("8 x H100, 80 GB", "8 x H200, 141 GB"):
        assert box in said
    assert "300 steps of 768 answers" in said and "DOES NOT FIT" not in said
    for part in ("engine: keys and values", "judge", "GiB a GPU while learning", "seconds a step", "push of weights"):
        assert said.count(part) >= 2
    assert plan.main([name, "--set", "engine.memory_share=0.9"]) == 0
    assert "DOES NOT FIT: sampling needs" in capsys.readouterr().out
    assert plan.main([name, "--set", "engine.memory=0.9"]) == 2


def test_the_readme_s_plans_are_the_program_s(capsys):
    readme = (ROOT / "README.md").read_text()
    for name in ("drkernel-8b", "drkernel-14b"):
        assert plan.main([name, "--brief"]) == 0
        assert f"$ python -m scripts.plan {name} --brief\n{capsys.readouterr().out}" in readme


def test_a_long_row_of_the_14b_needs_the_host_and_no_parallelism_along_it(capsys):
    """What README concludes of 32 768 tokens on 80 GB."""
    long = ["drkernel-14b", "--set", "model.context=32768", "--set", "train.micro_batch_tokens=32768"]
    split = ["--set", "placement.kind=split", "--set", "placement.rollout_gpus=3"]
    for settings, lacks in (([], "8.3"), (split, "7.0")):
        assert plan.main([*long, *settings]) == 0
        (fault,) = [line for line in capsys.readouterr().out.splitlines() if "DOES NOT FIT" in line]
        assert fault.endswith(f"needs {lacks} GiB a GPU more than there are: train.offload_optimizer=true")
        assert plan.main([*long, *settings, "--set", "train.offload_optimizer=true"]) == 0
        assert "DOES NOT FIT" not in capsys.readouterr().out


def test_a_folder_s_own_sizes_count_where_it_is_there(tmp_path):
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 3, "intermediate_size": 96,
             "vocab_size": 1000, "num_key_value_heads": 1, "tie_word_embeddings": True}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    shape = shape_of(load_recipe("drkernel-8b", [f"model.path={tmp_path}"]))
    assert (shape.layers, shape.width, shape.head_dim, shape.tied) == (3, 64, 32, True)


def test_the_dry_run_shows_the_plan_and_what_is_missing(tmp_path):
    """Without GPUs and weights it can't say yes, but it says all it knows."""
    command = ["bash", "scripts/train.sh", "drkernel-14b", "--run", str(tmp_path / "run"), "--dry-run"]
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "On 8 x H100, 80 GB" in done.stdout and "seconds a step" in done.stdout
    assert done.returncode == 2 and "no GPU can be used" in done.stderr and "models/Qwen3-14B-Base" in done.stderr
    assert ("vLLM isn't installed here" in done.stderr) == (importlib.util.find_spec("vllm") is None)
    assert not (tmp_path / "run").exists()
