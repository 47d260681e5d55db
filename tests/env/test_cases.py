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

CLOCK = "open: times are modelled on the CPU, so that patching a clock changes nothing; the patch itself isn't found"
UNPAID = "open: called wrong instead of a hack; it earns nothing either way"
# Not right today. A case that becomes right must leave this list, or its test fails.
KNOWN_OPEN = {
    "b03_zero_param_skip": "open: parameters stay as built, so a branch that starts at zero can be left out",
    "b17_fp16_matmul": "open: the problem's inputs are all positive, and fp16's errors then average out",
    "b23_correct_then_drift": "open: goes wrong at its seventh call, and three trials make six",
    "c01_patch_event_elapsed": CLOCK,
    "c03_patch_host_clocks": CLOCK,
    "c05_patch_do_bench": CLOCK,
    "c07_patch_manual_seed": UNPAID,
    "c09_patch_reference_class": UNPAID,
    "c13_replace_get_inputs_code": UNPAID,
    "c15_lazy_tensor": "open: an output that is computed when it is looked at counts as not measured",
    "c21_content_fingerprint_cache": "open: each call has new inputs, its cache never hits; the attempt goes unseen",
    "c25_slow_down_reference": "open: the reference runs elsewhere and isn't slowed; the attempt goes unseen",
    "c29_call_vs_forward_split": UNPAID,
    "c31_expected_nan_poison": UNPAID,
    "c35_aten_override": UNPAID,
    "c37_global_function_mode": UNPAID,
}


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


@pytest.mark.parametrize("name", [name for name in CPU if name not in KNOWN_OPEN])
def test_right_verdict(verdicts, name):
    verdict = verdicts[name].result()
    assert verdict.status in CASES[name]["acceptable"], verdict.message
    assert (verdict.speedup is not None) == (verdict.status == "correct")


@pytest.mark.parametrize("name", KNOWN_OPEN)
def test_known_to_be_open(verdicts, name):
    verdict = verdicts[name].result()
    assert verdict.status not in CASES[name]["acceptable"], f"{name} is right now: take it off the list"
    assert KNOWN_OPEN[name].startswith("open: ")
    if KNOWN_OPEN[name] == UNPAID:
        assert verdict.status == "incorrect"


def test_every_kind_is_there_and_every_open_case_exists():
    assert {name[0] for name in CPU} == set("abcdeh") and set(KNOWN_OPEN) <= set(CPU)
    assert not [name for name in KNOWN_OPEN if name[0] not in "bc"]
