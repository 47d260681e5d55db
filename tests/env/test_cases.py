"""Every kind of cheat, edge and honest answer under tests/cases gets the verdict that its expected.json allows.

a: decoys, b: wrong or degenerate, c: tampering with the judge, d: hostile to the machine, e: odd formats, h: honest.
All are submitted at once to one pool, the slow ones first; each test waits for its own verdict.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from env.pool import Pool
from env.records import Problem
from env.rules import Rules

pytestmark = pytest.mark.budget(170)

FOLDER = Path(__file__).resolve().parents[1] / "cases"
CASES = {
    folder.name: {**json.loads((folder / "expected.json").read_text()), "folder": folder}
    for folder in sorted(FOLDER.iterdir())
    if (folder / "expected.json").exists()
}
# These run into a timeout or try many configurations.
SLOW = ("d05_kernel_infinite_loop", "d11_signal_ignored_hang", "d19_deep_recursion", "h37_autotune_many_configs")
CPU = [name for name, case in CASES.items() if not case["needs_gpu"]]

# Sized for a GPU's clock: under the interpreter, which takes milliseconds a program, 64 rows show the same.
LARGE, SMALL = "torch.randn(512, 1024)", "torch.randn(64, 1024)"


@pytest.fixture(scope="module")
def verdicts():
    """{case: future of its verdict}."""
    rules = Rules(trials=3, compile_timeout_s=8, run_timeout_s=5)
    with Pool("cpu", slots=2, seed=7, rules=rules) as pool:
        futures = {}
        for name in sorted(CPU, key=lambda name: name not in SLOW):
            case = CASES[name]
            source = (case["folder"] / "reference.py").read_text().replace(LARGE, SMALL)
            candidate = (case["folder"] / "candidate.py").read_bytes().decode("utf-8", "surrogateescape")
            raw = case["input_kind"] == "raw_response"
            futures[name] = pool.submit(Problem(id=name, source=source), candidate, raw=raw)
        yield futures


@pytest.mark.parametrize("name", CPU)
def test_right_verdict(verdicts, name):
    verdict = verdicts[name].result()
    assert verdict.status in CASES[name]["acceptable"], verdict.message
    if verdict.status == "correct":
        assert verdict.speedup is not None and verdict.values_match
    elif verdict.status != "hack":
        assert verdict.speedup is None
    else:
        assert verdict.evidence["rule"] and verdict.message


def test_every_kind_is_there():
    assert {name[0] for name in CPU} == set("abcdeh")
