"""What several modules need: one fork server for all of them, and a problem with answers of every kind."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

FAKE_TOKEN = "hf_not_a_real_token_1234567890"

REFERENCE = """import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x * 2.0 + 1.0)


def get_inputs():
    return [torch.randn(8, 64)]


def get_init_inputs():
    return []
"""

CORRECT = """import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def chain(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n)
    tl.store(y + i, tl.maximum(v * 2.0 + 1.0, 0.0), mask=i < n)


class ModelNew(nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        chain[(triton.cdiv(x.numel(), 512),)](x, y, x.numel(), BLOCK=512)
        return y
"""


@pytest.fixture(scope="session")
def answers() -> SimpleNamespace:
    """A reference, and candidates named after the status that they earn."""
    return SimpleNamespace(
        reference=REFERENCE,
        correct=CORRECT,
        incorrect=CORRECT.replace("+ 1.0", "+ 1.5"),
        hack=CORRECT.replace("return y", "return torch.relu(x * 2.0 + 1.0)"),
        compile_error=CORRECT.replace("class ModelNew(nn.Module):", "class ModelNew(nn.Module)"),
        runtime_error=CORRECT.replace("y = torch.empty_like(x)", "y = torch.empty_like(x.no_such_attribute)"),
        problem_error=REFERENCE.replace("torch.relu(x * 2.0 + 1.0)", "torch.no_such_function(x)"),
        slow=CORRECT.replace("y = torch.empty_like(x)", "__import__('time').sleep(0.5); y = torch.empty_like(x)"),
    )


@pytest.fixture(scope="session")
def fake_token() -> str:
    """Stands in the environment in which `fork_server` was started."""
    return FAKE_TOKEN


@pytest.fixture(scope="session")
def fork_server():
    """A running fork server, started where the environment holds a secret that no worker may see."""
    from env.worker import ForkServer

    os.environ["HF_TOKEN"] = FAKE_TOKEN
    try:
        server = ForkServer("cpu")
    finally:
        del os.environ["HF_TOKEN"]
    yield server
    server.close()
    assert not Path(server.home).exists()
