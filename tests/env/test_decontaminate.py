"""KernelBench's problems are known whatever they are called and however large; others aren't taken for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from env.decontaminate import computation, kernelbench_among, kernelbench_digests
from env.generator import generate
from env.records import Problem

pytestmark = pytest.mark.budget(20)
ROOT = Path(__file__).resolve().parents[2]

# KernelBench's level1/19_ReLU in other words and at another size.
RELU = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super(Model, self).__init__()

    def forward(self, tensor):
        return torch.relu(tensor)

SIZE = 77

def get_inputs():
    return [torch.rand(SIZE)]

def get_init_inputs():
    return []
"""
FOREIGN = RELU.replace("torch.relu(tensor)", "torch.relu(tensor) + torch.sin(tensor)")


def test_kernelbench_is_known_by_what_it_computes() -> None:
    assert len(set(kernelbench_digests().values())) > 230  # those that differ in sizes alone are one
    same = (
        RELU.replace("tensor", "x")
        .replace("SIZE", "n")
        .replace("77", "9")
        .replace("    def __init__", "    'doc'\n    def __init__")
    )
    relu = "import torch\nimport torch.nn as nn\n" + same.split("from torch import nn\n")[1]
    found = kernelbench_among([Problem("mine", relu), Problem("other", FOREIGN)], [])
    assert found == [("mine", "level1/19_ReLU")]


def test_a_folder_of_newer_problems_counts_too() -> None:
    theirs = [Problem("level1/999_New", FOREIGN)]
    assert kernelbench_among([Problem("mine", FOREIGN.replace("tensor", "t"))], theirs) == [("mine", "level1/999_New")]


def test_generated_problems_are_not_kernelbench() -> None:
    for size in ("cpu", "gpu"):
        assert kernelbench_among(generate("train", 320, 1, size), []) == []


def test_digests_do_not_depend_on_the_version_of_python() -> None:
    # Written down: ast gains fields from version to version.
    assert computation(Problem("mine", RELU)) == computation(Problem("x", RELU.replace("77", "78")))
    assert computation(Problem("broken", "class Model(")) != computation(Problem("broken", "class Model["))


def test_a_folder_gives_digests(tmp_path: Path) -> None:
    (tmp_path / "relu.py").write_text(RELU)
    command = [sys.executable, "-m", "env.decontaminate", str(tmp_path)]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out == f"{computation(Problem('relu', RELU))} relu\n"
