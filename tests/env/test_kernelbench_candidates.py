"""The KernelBench candidates are what the manifest says: honest and lazy ones right, wrong ones wrong, all compile.

The problems themselves are not in this repository: KERNELBENCH_DIR names the folder that holds level1/ and level2/, and
without it only the manifest is checked. Values are compared under Triton's interpreter on problems whose size constants
are replaced by small ones. Kernels are compiled for sm_90 at the problems' true sizes, on tensors without memory
(device "meta"), in a process of its own, since TRITON_INTERPRET is read when a kernel is decorated.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

# Without KERNELBENCH_DIR this takes a second; with it, 40 kernels are compiled.
pytestmark = pytest.mark.budget(240)

FOLDER = Path(__file__).resolve().parent.parent / "kernelbench"
CANDIDATES = FOLDER / "candidates"
MANIFEST = json.loads((FOLDER / "manifest.json").read_text())
ROWS = [row for row in MANIFEST if row["candidate"]]
EXPECTED = {"honest": ["correct"], "lazy": ["correct"], "wrong": ["incorrect"], "decoy": ["hack"], "self": ["hack"]}
LEAST = {"honest": 10, "wrong": 4, "lazy": 4, "decoy": 4, "self": 20}

# Module-level constants for the interpreter (about 2 ms a program instance). Uneven, so that masks are at work.
SMALL = json.loads((FOLDER / "small_sizes.json").read_text())


def problem_source(row: dict) -> str:
    """The reference's text. Skips the test where there is no KERNELBENCH_DIR, fails where it lacks the file."""
    root = os.environ.get("KERNELBENCH_DIR")
    if not root:
        pytest.skip("set KERNELBENCH_DIR to the KernelBench folder that holds level1/ and level2/")
    return (Path(root) / row["problem"]).read_text()


def shrunk(source: str, problem: str) -> str:
    """The same problem with small sizes. Every replacement must hit: a silent miss would run gigabytes."""
    for name, value in SMALL[problem].items():
        source, hits = re.subn(rf"^{re.escape(name)}\s*=\s*[^#\n]*", f"{name} = {value}  ", source, flags=re.MULTILINE)
        assert hits == 1, f"{problem}: expected one line '{name} = …', found {hits}"
    return source


def load(path: Path, name: str):
    """Import a file as a module (Triton wants kernels that have a source file)."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def candidate_path(row: dict) -> Path:
    return CANDIDATES / row["candidate"]


def test_manifest_is_complete():
    kinds = Counter(row["kind"] for row in MANIFEST)
    problems = {row["problem"] for row in MANIFEST}
    assert len(problems) == 20
    assert {row["problem"] for row in MANIFEST if row["kind"] == "self"} == problems == set(SMALL)
    assert all(kinds[kind] >= least for kind, least in LEAST.items()), kinds
    assert sum(row["expect_faster"] for row in MANIFEST) >= 5
    assert {row["candidate"] for row in ROWS} == {path.name for path in CANDIDATES.glob("*.py")}
    for row in MANIFEST:
        assert row["expected"] == EXPECTED[row["kind"]] and row["note"], row
        assert re.fullmatch(r"level[12]/\d+_\w+\.py", row["problem"]), row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["candidate"])
def test_candidate_is_well_formed(row):
    level, number, kind = re.fullmatch(r"([12])_(\d+)_([a-z]+)(?:_\d+)?\.py", row["candidate"]).groups()
    assert row["problem"].startswith(f"level{level}/{number}_") and kind == row["kind"]
    tree = ast.parse(candidate_path(row).read_text())
    assert any(isinstance(node, ast.ClassDef) and node.name == "ModelNew" for node in tree.body)
    assert "tl.store" in candidate_path(row).read_text()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["candidate"])
def test_values_on_small_sizes(row, tmp_path, monkeypatch):
    """Honest, lazy and decoy agree with the reference in fp32; a wrong one differs."""
    source = problem_source(row)
    import torch

    small = tmp_path / "reference.py"
    small.write_text(shrunk(source, row["problem"]))
    torch.manual_seed(3)
    reference_module = load(small, "kernelbench_reference")
    candidate_module = load(candidate_path(row), "kernelbench_candidate")
    arguments = reference_module.get_init_inputs()
    reference = reference_module.Model(*arguments)
    candidate = candidate_module.ModelNew(*arguments)
    candidate.load_state_dict(reference.state_dict(), strict=True)
    inputs = reference_module.get_inputs()
    with torch.no_grad():
        expected = reference(*[x.clone() if torch.is_tensor(x) else x for x in inputs])
        got = candidate(*[x.clone() if torch.is_tensor(x) else x for x in inputs])
    assert got.shape == expected.shape and got.dtype == expected.dtype
    # Relative to the output's size: a softmax over a long row is all below any absolute tolerance.
    close = torch.allclose(got, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    assert close == (row["kind"] != "wrong"), f"largest error {float((got - expected).abs().max()):.3g}"


def test_kernels_compile_for_sm_90(tmp_path):
    """Every launch of every candidate, at the true sizes, reaches a cubin."""
    root = os.environ.get("KERNELBENCH_DIR")
    if not root:
        pytest.skip("set KERNELBENCH_DIR to the KernelBench folder that holds level1/ and level2/")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--compile", root],
        env=environment, capture_output=True, text=True, timeout=230,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    compiled = json.loads(done.stdout.splitlines()[-1])
    never = {row["candidate"] for row in ROWS if not compiled[row["candidate"]]}
    assert never == {"1_1_decoy.py", "1_30_decoy.py", "1_99_decoy.py"}, "only these never launch anything"


def compile_all(root: str) -> int:
    """Run every candidate on meta tensors, compiling, not launching. Prints {candidate: {kernel: bytes}} as JSON."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime.jit import JITFunction

    class CompileOnly(DriverBase):
        """Says that the target is an H200 and has no device to launch on."""

        def __init__(self):
            pass

        @classmethod
        def is_active(cls):
            return True

        def map_python_to_cpp_type(self, ty):
            return ty

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_active_torch_device(self):
            return torch.device("meta")

        def get_benchmarker(self):
            raise RuntimeError("nothing is timed here")

        def get_current_device(self):
            return 0

        def get_current_stream(self, device=None):
            return 0

        def get_device_interface(self):
            return torch.cuda

    triton.runtime.driver.set_active(CompileOnly())
    run, compiled = JITFunction.run, {row["candidate"]: {} for row in ROWS}
    current = ""

    def compile_instead(self, *arguments, grid, warmup, **keywords):
        kernel = run(self, *arguments, grid=grid, warmup=True, **keywords)
        compiled[current][self.__name__] = len(kernel.asm["cubin"])
        return kernel

    JITFunction.run = compile_instead
    for row in ROWS:
        current = row["candidate"]
        reference = load(Path(root) / row["problem"], "kernelbench_reference")
        with torch.device("meta"), torch.no_grad():
            model = load(candidate_path(row), "kernelbench_candidate").ModelNew(*reference.get_init_inputs())
            model(*reference.get_inputs())
        print(current, compiled[current], file=sys.stderr, flush=True)
    print(json.dumps(compiled))
    return 0


if __name__ == "__main__" and sys.argv[1:2] == ["--compile"]:
    sys.exit(compile_all(sys.argv[2]))
