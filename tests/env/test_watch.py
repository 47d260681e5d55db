"""What counts as tampering, and what an honest program may do: the watch in a process of its own, as in a worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.budget(90)

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, os, sys
from env import runner
runner.preload("cpu")
from env.watch import Watch
import torch
path = sys.argv[1]
for source in json.loads(sys.argv[2]):
    read, write = os.pipe2(os.O_NONBLOCK)
    answer, told = os.pipe()
    child = os.fork()
    if child == 0:
        watch = Watch("Model", "cpu", path, write)
        watch.lay_expected([([8, 8], torch.float32)])
        failed = ""
        try:
            exec(compile(source, path, "exec"), {"__name__": "candidate"})
        except Exception as error:
            failed = repr(error)
        os.write(told, json.dumps({"found": watch.report(), "failed": failed}).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(told)
    try:
        sent = os.read(read, 4096).decode().splitlines()
    except BlockingIOError:
        sent = []
    print("=", json.dumps({**json.loads(os.read(answer, 65536)), "sent": sent}), flush=True)
"""
TAMPERING = {
    "clock": ("import time; time.perf_counter = lambda: 0.0", "time.perf_counter"),
    "clock imported by name": ("import time as t; setattr(t, 'time_ns', int)", "time.time_ns"),
    "event": ("import torch; torch.cuda.Event.elapsed_time = lambda s, o: 1e-3", "elapsed_time"),
    "inherited method": ("import torch; torch.Tensor.copy_ = lambda self, o: self", "torch.Tensor.copy_"),
    "bench": ("import triton.testing; triton.testing.do_bench = lambda f: 1.0", "do_bench"),
    "launch": ("from triton.runtime.interpreter import InterpretedFunction as F; F.run = print", "InterpretedFunction"),
    "module call": ("import torch; torch.nn.Module.__call__ = lambda s, *a: a[0]", "__call__"),
    "seed": ("import torch; torch.manual_seed = int", "manual_seed"),
    "comparison": ("import torch; torch.allclose = lambda *a: True", "allclose"),
    "operator": (
        "import torch, warnings; warnings.simplefilter('ignore'); L = torch.library.Library('aten', 'IMPL');"
        "L.impl('relu', lambda x: x * 0, 'CPU')",
        "aten/relu",
    ),
    "mode": (
        "from torch.overrides import TorchFunctionMode as M\nclass Calm(M): pass\nmode = Calm(); mode.__enter__()",
        "Calm",
    ),
    "cudnn off": ("import torch; torch.backends.cudnn.enabled = False", "cudnn"),
    "tracer": ("import sys; sys.settrace(lambda *a: None)", "tracer"),
    "import hook": (
        "import builtins; i = builtins.__import__; builtins.__import__ = lambda *a, **k: i(*a, **k)",
        "__import__",
    ),
    "all objects": ("import gc; gc.get_objects()", "gc"),
    "referrers": ("import gc; gc.get_referrers(gc)", "gc"),
    "frames": ("import sys; sys._getframe()", "frames"),
    "frames by inspect": ("import inspect; inspect.stack()", "frames"),
    "frames by a traceback": (
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    e.__traceback__.tb_frame",
        "frames",
    ),
    "ctypes": ("import ctypes; ctypes.CDLL(None)", "ctypes"),
    "thread": ("import threading; t = threading.Thread(target=int); t.start(); t.join()", "thread"),
    "pool of threads": ("from concurrent.futures import ThreadPoolExecutor as P; P(1).submit(int).result()", "thread"),
    "process": ("import subprocess; subprocess.run(['true'])", "process"),
    "fork": ("import os\npid = os.fork()\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0)", "process"),
    "own program": ("import env.records", "env"),
    "reference's class": ("import reference; reference.Model.forward = lambda s, x: x", "reference"),
    "reference's inputs": ("import reference; reference.get_inputs.__code__ = (lambda: []).__code__", "get_inputs"),
}
HONEST = {
    "imports": "import math, functools, typing, dataclasses, torch, triton, triton.language as tl, numpy as np",
    "compile": "import torch; f = torch.compile(lambda x: x + 1); f(torch.ones(3))",
    "faster settings": (
        "import torch; torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.cudnn.benchmark = True"
    ),
    "default device": "import torch; torch.set_default_device('cpu'); torch.set_default_dtype(torch.float32)",
    "double by default": "import torch; torch.set_default_dtype(torch.float64)",
    "threads of torch": "import torch; torch.set_num_threads(1)",
    "own operator": (
        "import torch\n@torch.library.custom_op('mine::twice', mutates_args=())\n"
        "def twice(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\ntwice(torch.ones(3))"
    ),
    "autograd": (
        "import torch\nclass F(torch.autograd.Function):\n    @staticmethod\n    def forward(c, x): return x * 2\n"
        "    @staticmethod\n    def backward(c, g): return g * 2\n"
        "F.apply(torch.ones(3, requires_grad=True)).sum().backward()"
    ),
    "log and warn": (
        "import logging, warnings; logging.getLogger('k').warning('x'); warnings.warn('slow', stacklevel=2)"
    ),
    "an exception caught": ("import traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    traceback.format_exc()"),
    "time read": "import time; time.perf_counter(); time.sleep(0)",
    "random": "import torch; g = torch.Generator().manual_seed(3); torch.rand(3, generator=g); torch.manual_seed(1)",
    "garbage": "import gc; gc.collect()",
    "a class of its own called Model": (
        "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x): return x"
    ),
    "a dataclass": "from dataclasses import dataclass\n@dataclass\nclass Config:\n    block: int = 128\nConfig()",
    "lru_cache": "from functools import lru_cache\n@lru_cache\ndef f(n): return n\nf(3)",
    "own tensor written": "import torch; x = torch.empty(8, 8); x.fill_(float('nan'))",
}


def reports(sources: list[str], path: Path) -> list[dict]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-c", SCRIPT, str(path), json.dumps(sources)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=80, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line[1:]) for line in done.stdout.splitlines() if line.startswith("=")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("watch") / "candidate.py"
    sources = [source for source, _ in TAMPERING.values()] + list(HONEST.values())
    return dict(zip([*TAMPERING, *HONEST], reports(sources, path), strict=True))


@pytest.mark.parametrize("name", TAMPERING)
def test_tampering_is_found(found, name):
    assert any(TAMPERING[name][1] in what for what in found[name]["found"]), found[name]


@pytest.mark.parametrize("name", HONEST)
def test_honest_code_is_not_accused(found, name):
    assert found[name] == {"found": [], "failed": "", "sent": []}


@pytest.mark.parametrize("name", ["all objects", "frames", "frames by a traceback", "ctypes", "thread", "process"])
def test_reaching_into_the_process_is_told_at_once(found, name):
    """On a way of its own, so that whoever got hold of the process can't take it back."""
    assert found[name]["sent"]


def test_an_overwritten_bait_convicts_and_a_stray_store_does_not(tmp_path):
    look = "import gc, torch\nfor t in gc.get_objects():\n"
    everything = look + "    if type(t) is torch.Tensor and t.shape == (8, 8): t{}"
    whole, stray = reports(
        [everything.format(".fill_(float('nan'))"), everything.format("[0, 0] = 5.0")], tmp_path / "candidate.py"
    )
    assert any("overwritten" in what for what in whole["found"])
    assert not any("overwritten" in what for what in stray["found"])
