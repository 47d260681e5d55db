"""A pass written down (env/trace.py), run as a program (env/program.py), held to what it claims (env/replay.py)."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.budget(120)

triton = pytest.importorskip("triton")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import triton.language as tl  # noqa: E402
from torch import nn  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

from env import replay, tensors  # noqa: E402
from env.kernel_text import Refused  # noqa: E402
from env.launches import LaunchLog, install  # noqa: E402
from env.modelled import counted_call  # noqa: E402
from env.pool import Pool  # noqa: E402
from env.program import Program  # noqa: E402
from env.records import UNPROVEN, Problem  # noqa: E402
from env.reference import Rejected  # noqa: E402
from env.trace import recorded_call  # noqa: E402


@triton.jit
def scaled(x, o, n, by, B: tl.constexpr):
    offs = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + offs, tl.load(x + offs, mask=offs < n) * by, mask=offs < n)


@triton.jit
def noted(x, o, memo: tl.constexpr, B: tl.constexpr):
    offs = tl.arange(0, B)
    tl.store(o + offs, tl.load(x + offs))


def launched(x: torch.Tensor, by: float) -> torch.Tensor:
    o = torch.empty_like(x)
    scaled[lambda meta: (triton.cdiv(x.numel(), meta["B"]),)](x, o, x.numel(), by=by, B=64, num_warps=4)
    return o


@pytest.fixture(autouse=True)
def log(monkeypatch) -> LaunchLog:
    """Launches of this process are reported to it, as in a worker."""
    monkeypatch.setattr(InterpretedFunction, "run", InterpretedFunction.run)  # put back afterwards
    found = LaunchLog(own_file=__file__)
    install(found, "cpu")
    return found


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.lstm = nn.LSTM(8, 5)
        self.register_buffer("table", torch.randn(4, 8))


def everything(model: Inner, x: torch.Tensor, y: torch.Tensor) -> dict:
    """Views, in-place work, several outputs, weights, constants, a kernel on a view with an offset, random numbers."""
    h = model.norm(model.linear(x))
    h[:, 1:3] += 1.0
    h.t().mul_(torch.tensor([0.5, 2.0] * (h.shape[0] // 2)))
    first, second = torch.split(h, 4, dim=1)
    z = torch.empty(h.shape[0], 8)
    torch.add(first, second, out=z[:, 4:])
    z[:, :4] = F.gelu(first)
    scaled_ = launched(z.reshape(-1)[8:], 0.5)
    picked = model.table[y % 4].sum(dim=0, keepdim=True).expand(3, 8)
    steps, _ = model.lstm(x.unsqueeze(0))
    where = torch.where(x > 0, x, torch.full_like(x, float("-inf")))
    best = where.max(dim=1)
    noise = F.dropout(x, 0.5, training=True) + torch.rand(8)
    wave = torch.fft.rfft(x).conj()
    return {
        "a": (scaled_, [picked, steps]), "b": best.values, "c": best.indices, "n": noise, "k": 3,
        "w": torch.view_as_real(wave * 1j), "s": h.softmax(-1).half(), "m": (x > 0).any(dim=1),
    }  # fmt: skip


def inputs(seed: int, rows: int = 6) -> torch.Tensor:
    """x [rows, 8] and y [rows] in one buffer, as a worker has them."""
    torch.manual_seed(seed)
    tree = [torch.randn(rows, 8), torch.randint(0, 9, (rows,))]
    layout, held, nbytes = tensors.plan(tree, keep_strides=True)
    buffer = torch.zeros(nbytes, dtype=torch.uint8)
    tensors.pack(layout, held, buffer)
    return SimpleNamespace(buffer=buffer, args=tensors.call_arguments(layout, buffer))


def traced(function, log: LaunchLog, given) -> tuple:
    torch.manual_seed(1)
    with torch.no_grad():
        outputs, program, constants = recorded_call(function, given.args, log, given.buffer)
    return outputs, json.loads(json.dumps(program)), constants


def test_a_program_does_what_was_written_down_on_other_inputs(tmp_path, log):
    torch.manual_seed(0)
    model = Inner()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _, description, constants = traced(lambda *a: everything(model, *a), log, inputs(1))
    assert "refused" not in description and not description["host_reads"]
    for seed in (1, 2):
        log.own_file = __file__
        model.load_state_dict(before)
        this, again = inputs(seed), inputs(seed)
        torch.manual_seed(1)
        with torch.no_grad():
            right, rows = counted_call(lambda *a: everything(model, *a), this.args, log)
            program = Program(description, constants, tmp_path, log)
            torch.manual_seed(1)
            found, counted = counted_call(program, again.args, log)
        assert tensors.plan(found, False)[0] == tensors.plan(right, False)[0]
        for mine, theirs in zip(tensors.leaves(found), tensors.leaves(right), strict=True):
            if isinstance(theirs, torch.Tensor):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
        assert counted == rows and sum(row["own"] for row in rows) == 1 and len(rows) > 10
        assert torch.equal(again.buffer, this.buffer)


def test_state_that_a_pass_changes_is_written_down_as_it_was(tmp_path, log):
    model, given = nn.BatchNorm1d(8), inputs(1)
    _, description, constants = traced(lambda x, y: model(x), log, given)
    program = Program(description, constants, tmp_path, LaunchLog())
    first = {name: value.clone() for name, value in program.state_dict().items()}
    with torch.no_grad():
        program(*given.args)
    changed = [name for name, value in program.state_dict().items() if not torch.equal(value, first[name])]
    assert len(changed) == 3  # both running averages and the number of batches: what the judge puts back


def test_values_that_python_sees_are_counted(log):
    for function, reads in (
        (lambda x, y: x * float(x.max()), True), (lambda x, y: x[x > 0], True), (lambda x, y: torch.nonzero(y), True),
        (lambda x, y: x.to_sparse_csr().values(), True), (lambda x, y: x * 2, False),
    ):  # fmt: skip
        assert bool(traced(function, log, inputs(1))[1]["host_reads"]) == reads


def test_work_of_numpy_is_missing_from_the_program(tmp_path, log):
    given, other = inputs(1), inputs(2)
    hidden = lambda x, y: torch.from_numpy(x.numpy() * 2) + 0  # noqa: E731
    _, description, constants = traced(hidden, log, given)
    found = Program(description, constants, tmp_path, LaunchLog())(*other.args)
    assert torch.equal(found, given.args[0] * 2)  # what it had found in memory then


def test_what_cannot_be_told_is_said(log):
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        noted[(1,)](x, torch.empty_like(x), {}, B=32)
        return x + 1

    outputs, description, _ = traced(forward, log, inputs(1))
    assert description == {"refused": "an argument is a dict"}
    torch.testing.assert_close(outputs, inputs(1).args[0] + 1)  # the pass went on
    assert log.recorder is None


FORGED = {
    "no such operator": {"steps": [["op", "aten::nothing.default", {"tuple": []}, {}, []]]},
    "a file": {"steps": [["op", "aten::from_file.default", {"tuple": []}, {}, []]]},
    "another namespace": {"steps": [["op", "os::system.default", {"tuple": []}, {}, []]]},
    "an attribute of the packet": {"steps": [["op", "aten::add.__class__", {"tuple": []}, {}, []]]},
    "memory of its choosing": {"steps": [["op", "aten::set_.source_Storage", {"tuple": []}, {}, []]]},
    "a value that isn't one": {"outputs": {"torch": "save"}},
    "a device": {"outputs": {"device": "meta"}},
    "nothing": {"outputs": {}},
    "memory that isn't there": {"outputs": {"at": 7, "dtype": "float32", "shape": [1], "stride": [1], "offset": 0}},
    "a negative offset": {"outputs": {"at": 0, "dtype": "float32", "shape": [1], "stride": [1], "offset": -1}},
    "a size that isn't": {"outputs": {"at": 0, "dtype": "float32", "shape": [1 << 40], "stride": [1], "offset": 0}},
    "a kernel that isn't there": {"steps": [["kernel", 3, [1], [], {}]]},
    "an unknown thing": {"steps": [["make", 5, "pickle", [], [], True]]},
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_forged_programs_raise(tmp_path, name):
    sound = {"units": [], "steps": [], "constants": [], "outputs": {"tuple": []}, "host_reads": 0}
    given = inputs(1)
    assert Program(sound, [], tmp_path, LaunchLog())(*given.args) == ()
    with pytest.raises((Refused, RuntimeError, LookupError, TypeError, ValueError)):
        Program(sound | FORGED[name], [], tmp_path, LaunchLog())(*given.args)


def test_what_two_traces_differ_in_is_counted():
    def trace(number=1, text="2.0", units=(), constants=(1, 2), steps=2) -> dict:
        both = [["op", "a", {"value": number}, number], ["op", "b", {"float": text}]]
        return {"units": list(units), "constants": list(constants), "steps": both[:steps]}

    assert replay.learned(trace(), trace()) == set()
    assert replay.learned(trace(), trace(4, "2.5")) == {("1", "4"), ("'2.0'", "'2.5'")}
    others = {
        "another kernel, in which anything could be written": trace(units=[{"text": "def k(): 3"}]),
        "other memory": trace(constants=[1, 3]), "another step": trace(steps=1),
        "a number that holds many": trace(10**40), "a text that holds many": trace(text="1" * 40),
        "another structure": {**trace(), "steps": 3},
    }  # fmt: skip
    for name, other in others.items():
        with pytest.raises(Rejected) as raised:
            replay.learned(trace(), other)
        assert raised.value.status == "infra_error" and raised.value.evidence[UNPROVEN], name


REFERENCE = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x * 2.0 + 1.0) * x.abs().max()
def get_inputs():
    return [torch.randn(64, 256)]
def get_init_inputs():
    return []
"""
CANDIDATE = """
import torch, triton
import triton.language as tl
@triton.jit
def k(x, o, by, n, B: tl.constexpr):
    offs = tl.program_id(0) * B + tl.arange(0, B)
    m = offs < n
    tl.store(o + offs, tl.maximum(tl.load(x + offs, mask=m) * 2.0 + 1.0, 0.0) * by, mask=m)
class ModelNew(torch.nn.Module):
    def forward(self, x):
        o = torch.empty_like(x)
        {how}
        return o
"""


@pytest.fixture(scope="module")
def pool():
    with Pool("cpu", slots=1, seed=3) as pool:
        yield pool


def judged(pool, how: str):
    problem = Problem(id="scaled", source=REFERENCE)
    return pool.submit(problem, CANDIDATE.replace("{how}", how), raw=False).result()


def test_a_number_that_python_looks_at_is_no_offence(pool):
    """The largest element goes through the host into a launch: other inputs have another one, and it is one number, for
    which a GPU waits."""
    verdict = judged(pool, "k[(8,)](x, o, x.abs().max().item(), x.numel(), B=2048)")
    assert verdict.status == "correct" and 0.3 < verdict.profiling_ratio < 1.0
    assert verdict.evidence["numbers_from_the_host"] == 1
    counted = sum(row["time_us"] for row in verdict.profile)
    assert verdict.candidate_us == pytest.approx(counted + replay.HOST_READ_US)
    assert any("_local_scalar_dense" in row["name"] for row in verdict.profile)


def test_a_branch_on_data_that_goes_the_same_way_is_none_either(pool):
    verdict = judged(pool, "k[(8,)](x, o, x.abs().max().item() if x.max() > 0 else 7.0, x.numel(), B=2048)")
    assert verdict.status == "correct"


def test_what_the_host_works_out_is_hidden_work(pool):
    how = "y = torch.from_numpy(x.numpy() * x.abs().max().numpy()); k[(8,)](y, o, 1.0, x.numel(), B=2048)"
    verdict = judged(pool, how.replace("k[(8,)](y, o, 1.0", "k[(8,)](x, o, float(abs(x.numpy()).max())"))
    assert verdict.status in ("hack", "infra_error") and verdict.speedup is None


def test_an_answer_that_the_host_learned_number_by_number_is_not_measured(pool):
    """Every value passes through the host as a Python number: what it made of them isn't in the program."""
    how = "o.copy_(torch.tensor([max(2 * v.item() + 1, 0) for v in x[0]]).repeat(64, 1)); "
    how += "k[(8,)](x, o, x.abs().max().item() + 0 * float(o.sum()), x.numel(), B=2048)"
    verdict = judged(pool, how)
    assert verdict.status in ("correct", "infra_error", "hack")
    assert verdict.status != "correct" or verdict.speedup < 1.0
