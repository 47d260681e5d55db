"""A candidate's process that answers whatever it likes: made-up programs earn nothing (env/replay.py).

The answer to the judge's `trace` is replaced on its way, as a runner in foreign hands could.
"""

from __future__ import annotations

import copy
import json

import pytest

pytestmark = pytest.mark.budget(90)

pytest.importorskip("triton")

import torch  # noqa: E402

from env import tensors  # noqa: E402
from env.gate import DeviceGate  # noqa: E402
from env.judge import Judge  # noqa: E402
from env.records import UNPROVEN, Problem  # noqa: E402
from env.rules import Rules  # noqa: E402
from env.session import Session  # noqa: E402
from env.spares import Spares  # noqa: E402

REFERENCE = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.sigmoid(torch.tanh(torch.relu(x * 2.0 + 1.0)) * 3.0)
def get_inputs():
    return [torch.randn(64, 256)]
def get_init_inputs():
    return []
"""
CANDIDATE = """
import torch, triton
import triton.language as tl
@triton.jit
def k(x, o, n, B: tl.constexpr):
    offs = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.maximum(tl.load(x + offs) * 2.0 + 1.0, 0.0)
    v = (2.0 / (1.0 + tl.exp(-2.0 * v)) - 1.0) * 3.0
    tl.store(o + offs, 1.0 / (1.0 + tl.exp(-v)))
class ModelNew(torch.nn.Module):
    def forward(self, x):
        x = x + float(x[0, 0] * 0.0)
        o = torch.empty_like(x)
        k[(8,)](x, o, x.numel(), B=2048)
        return o
"""


@pytest.fixture(scope="module")
def judge(fork_server):
    rules, gate = Rules(trials=1), DeviceGate()
    spares = Spares(fork_server, rules, gate)
    made = Judge(rules, secret=5, gate=gate, spares=spares)
    yield made
    made.close()
    spares.close()


@pytest.fixture
def forged(judge, monkeypatch):
    """Judge the candidate with each of its programs put through `change(program, number of the trace, outputs)`."""

    def run(change):
        call, traces = Session.call, []

        def answered(self, op, expected_bytes=0, **request):
            outputs = call(self, op, expected_bytes, **request)
            if op == "trace":
                traces.append(outputs)
                outputs.facts["program"] = change(copy.deepcopy(outputs.facts["program"]), len(traces), outputs)
            return outputs

        monkeypatch.setattr(Session, "call", answered)
        return judge.judge(Problem(id="p", source=REFERENCE), CANDIDATE), len(traces)

    return run


def test_the_candidate_itself_is_right(forged):
    verdict, traces = forged(lambda program, number, outputs: program)
    assert verdict.status == "correct" and verdict.profiling_ratio > 0.2 and traces == 1, verdict.message


def without_work(program, number, outputs):
    program["steps"] = [step for step in program["steps"] if step[0] != "kernel"]
    return program


def one_block(program, number, outputs):
    for step in program["steps"]:
        if step[0] == "kernel":
            step[2] = [1]
    return program


def cheap_kernel(program, number, outputs):
    program["units"][0]["text"] = "def k(x, o, n, B: tl.constexpr):\n    tl.store(o + tl.arange(0, B), 0.5)"
    return program


def answer_in_the_text(program, number, outputs):
    """Everything that was to be worked out, as numbers in the kernel's text."""
    values = tensors.unpack(outputs.layout, outputs.data).reshape(-1)[:64].tolist()
    stores = "\n".join(f"    tl.store(o + {place}, {value!r})" for place, value in enumerate(values))
    program["units"][0]["text"] = f"def k(x, o, n, B: tl.constexpr):\n{stores}"
    return program


def no_reads_said(change):
    def changed(program, number, outputs):
        return {**change(program, number, outputs), "host_reads": 0}

    return changed


@pytest.mark.parametrize("change", [without_work, one_block, cheap_kernel, answer_in_the_text])
def test_programs_that_leave_work_out_are_not_proven(forged, change):
    verdict, traces = forged(change)
    assert traces == 2 and verdict.speedup is None  # it says that it read values: it was asked for a second one
    assert verdict.status == "hack" or verdict.evidence[UNPROVEN]


@pytest.mark.parametrize("change", [without_work, one_block, cheap_kernel, answer_in_the_text])
def test_without_a_host_to_blame_they_are_hidden_work(forged, change):
    verdict, traces = forged(no_reads_said(change))
    assert traces == 1 and (verdict.status, verdict.evidence["rule"]) == ("hack", "hidden_work")
    assert verdict.speedup is None and verdict.values_match


@pytest.mark.parametrize(
    "program",
    [None, 3, [], {}, {"refused": "so"}, {"units": []}, {"units": 3, "steps": 3, "constants": 3, "outputs": 3}, "text"],
)
def test_what_is_no_program_is_not_measured(forged, program):
    verdict, _ = forged(lambda *_: program)
    assert verdict.status == "infra_error" and verdict.evidence[UNPROVEN] and verdict.speedup is None


def test_an_answer_that_lies_in_memory_beforehand_is_found_by_the_second_trace(judge, monkeypatch):
    """The outputs go along as memory that was there before. The second trace must find the same there, and is run."""
    call, export = Session.call, Session.export
    answers: list[torch.Tensor] = []

    def answered(self, op, expected_bytes=0, **request):
        outputs = call(self, op, expected_bytes, **request)
        if op == "trace":
            answers.append(outputs.data.clone())
            shape = {"at": 9, "dtype": "float32", "shape": [64, 256], "stride": [256, 1], "offset": 0}
            outputs.facts["program"] = {
                "units": [], "steps": [], "constants": [9], "outputs": shape, "host_reads": 1,
            }  # fmt: skip
        return outputs

    for kept in (0, -1):  # always the first answer; each time the present one

        def handed_over(self, op, *args, kept=kept, **request):
            if op != "constants":
                return export(self, op, *args, **request)
            layout, held, _ = tensors.plan([answers[kept]], keep_strides=False)
            data = torch.empty(sum(tensor.nbytes for tensor in held), dtype=torch.uint8)
            tensors.pack(layout, held, data)
            return layout, data

        answers.clear()
        monkeypatch.setattr(Session, "call", answered)
        monkeypatch.setattr(Session, "export", handed_over)
        verdict = judge.judge(Problem(id="p", source=REFERENCE), CANDIDATE)
        assert len(answers) == 2 and verdict.speedup is None
        assert verdict.evidence["rule"] == "hidden_work" if kept == 0 else verdict.evidence[UNPROVEN]
        assert json.dumps(verdict.to_json())
