"""Modelled times against numbers worked out by hand: bytes that move, launches, and what fusing saves."""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl

from env import modelled
from env.launches import LaunchLog, install
from env.modelled import (
    BANDWIDTH_BYTES_PER_US,
    LAUNCH_US,
    TrafficCounter,
    counted_call,
    interpreter_traffic,
    modelled_us,
)

pytestmark = [
    pytest.mark.budget(20),
    pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="needs Triton's interpreter (TRITON_INTERPRET=1)"),
]


@triton.jit
def copy_kernel(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def chain_kernel(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n)
    tl.store(y + i, tl.maximum(v * 2.0 + 1.0, 0.0), mask=i < n)


@triton.jit
def unmasked_kernel(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i) + tl.load(x + i))


@triton.jit
def scalar_kernel(x, y):
    tl.store(y, tl.load(x) + 1.0)


@triton.jit
def atomic_kernel(y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(y + i, 1.0, mask=i < n)


@triton.jit
def swap_kernel(y, BLOCK: tl.constexpr):
    one = tl.full((BLOCK,), 1, tl.int32)
    tl.atomic_cas(y + tl.arange(0, BLOCK), one - 1, one)


@triton.jit
def block_pointer_kernel(x, y, rows, cols, BLOCK: tl.constexpr):
    source = tl.make_block_ptr(x, (rows, cols), (cols, 1), (0, 0), (BLOCK, BLOCK), (1, 0))
    target = tl.make_block_ptr(y, (rows, cols), (cols, 1), (0, 0), (BLOCK, BLOCK), (1, 0))
    tl.store(target, tl.load(source, boundary_check=(0, 1)), boundary_check=(0, 1))


@pytest.fixture
def log(monkeypatch):
    """A launch log in force for one test."""
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setattr(InterpretedFunction, "run", InterpretedFunction.run)
    log = LaunchLog(own_file=__file__)
    install(log, "cpu")
    return log


def table(log: LaunchLog, call) -> dict[str, dict]:
    _, rows = counted_call(call, [], log)
    assert all(row["time_us"] == modelled_us(row["bytes"], row["count"]) for row in rows)
    return {row["name"]: row for row in rows}


def torch_bytes(call) -> dict[str, int]:
    counter = TrafficCounter()
    with counter:
        call()
    return {row["name"]: row["bytes"] for row in counter.table()}


def total_us(log: LaunchLog, call) -> float:
    return sum(row["time_us"] for row in table(log, call).values())


# Torch operators -----------------------------------------------------------------------------------------------------

N = 1000
X, Y = torch.randn(N), torch.randn(N)


def test_time_is_bytes_over_bandwidth_plus_launches():
    assert modelled_us(80_000, 3) == 80_000 / BANDWIDTH_BYTES_PER_US + 3 * LAUNCH_US == 16.0
    assert modelled_us(8_000, 1) == 3.0


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: torch.relu(X), {"aten::relu": 8 * N}),
        (lambda: X + Y, {"aten::add": 12 * N}),
        (lambda: X + 1.0, {"aten::add": 8 * N}),
        (lambda: X.clone().add_(1.0), {"aten::clone": 8 * N, "aten::add_": 8 * N}),
        (lambda: torch.softmax(X, 0), {"aten::_softmax": 8 * N}),
        (lambda: X.sum(), {"aten::sum": 4 * N + 4}),
        (lambda: torch.zeros(N), {"aten::zeros": 4 * N}),
        (lambda: torch.empty(N), {}),
        (lambda: torch.empty(N).fill_(1.0), {"aten::fill_": 4 * N}),
        (lambda: torch.empty(N).copy_(X), {"aten::copy_": 8 * N}),
        (lambda: torch.add(X, Y, out=torch.empty(N)), {"aten::add": 12 * N}),
        (lambda: X.half(), {"aten::_to_copy": 6 * N}),
        (lambda: torch.mm(X.view(100, 10), Y.view(10, 100)), {"aten::mm": 8 * N + 4 * 100 * 100}),
        (lambda: X.expand(50, N) + 1.0, {"aten::add": 4 * N + 4 * 50 * N}),
        (lambda: X[:10] + 1.0, {"aten::add": 80}),
    ],
)
def test_bytes_of_an_operator(call, expected):
    assert torch_bytes(call) == expected


def test_views_are_free():
    def views():
        y = X.view(10, 100).t()[2:5].reshape(-1, 1).squeeze(1).unsqueeze(0).expand(3, -1)
        return y.permute(1, 0), X.reshape(100, 10), X.detach(), X.unbind(0), X.chunk(4), X.as_strided((2, 2), (1, 2))

    assert torch_bytes(views) == {"aten::clone": 8 * 30}, "only the reshape of a transposed slice copies"
    assert torch_bytes(lambda: X.view(100, 10).t()) == {}


def test_operators_are_counted_one_launch_each():
    counter = TrafficCounter()
    with counter:
        torch.relu(torch.relu(X)) + torch.tanh(X)
    assert {row["name"]: row["count"] for row in counter.table()} == {"aten::relu": 2, "aten::add": 1, "aten::tanh": 1}
    assert not any(row["own"] for row in counter.table())


def test_table_is_ordered_and_nothing_is_counted_outside():
    counter = TrafficCounter()
    with counter:
        torch.relu(X[:10])
        X + Y
    torch.tanh(X)
    assert [row["name"] for row in counter.table()] == ["aten::add", "aten::relu"]


# Triton kernels ------------------------------------------------------------------------------------------------------


def test_masked_elements_do_not_count(log):
    y = torch.empty(N)
    rows = table(log, lambda: copy_kernel[(triton.cdiv(N, 256),)](X, y, N, BLOCK=256))
    assert rows["copy_kernel"]["bytes"] == 8 * N and rows["copy_kernel"]["count"] == 1 and rows["copy_kernel"]["own"]
    assert set(rows) == {"copy_kernel"}, "the interpreter's own copies are not traffic"
    assert torch.equal(X, y)


def test_a_value_read_twice_is_paid_for_twice(log):
    assert (
        table(log, lambda: unmasked_kernel[(1,)](X, torch.empty(64), BLOCK=64))["unmasked_kernel"]["bytes"]
        == 3 * 4 * 64
    )


def test_element_size_counts(log):
    rows = table(log, lambda: copy_kernel[(4,)](X.half(), torch.empty(N, dtype=torch.float16), N, BLOCK=256))
    assert rows["copy_kernel"]["bytes"] == 4 * N


def test_scalars(log):
    assert table(log, lambda: scalar_kernel[(3,)](X, torch.empty(1)))["scalar_kernel"]["bytes"] == 3 * 8


def test_atomics_read_and_write(log):
    y = torch.zeros(16)
    assert table(log, lambda: atomic_kernel[(2,)](y, 10, BLOCK=16))["atomic_kernel"]["bytes"] == 2 * 10 * 8
    assert y[:10].eq(2).all() and y[10:].eq(0).all()


def test_compare_and_swap_is_not_free(log):
    y = torch.zeros(16, dtype=torch.int32)
    assert table(log, lambda: swap_kernel[(1,)](y, BLOCK=16))["swap_kernel"]["bytes"] == 16 * 8
    assert y.eq(1).all()


def test_block_pointers_count_what_lies_inside(log):
    x, y = torch.randn(5, 7), torch.zeros(5, 7)
    rows = table(log, lambda: block_pointer_kernel[(1,)](x, y, 5, 7, BLOCK=8))
    assert rows["block_pointer_kernel"]["bytes"] == 8 * 35
    assert torch.equal(x, y)


def test_launches_add_up(log):
    def twice():
        for _ in range(2):
            copy_kernel[(4,)](X, torch.empty(N), N, BLOCK=256)

    row = table(log, twice)["copy_kernel"]
    assert (
        row["count"] == 2
        and row["bytes"] == 16 * N
        and row["time_us"] == 2 * LAUNCH_US + 16 * N / BANDWIDTH_BYTES_PER_US
    )


def test_kernels_of_other_files_are_not_own(log):
    log.own_file = "/somewhere/else.py"
    assert table(log, lambda: copy_kernel[(4,)](X, torch.empty(N), N, BLOCK=256))["copy_kernel"]["own"] is False


def test_fusing_three_operators_is_three_times_as_fast(log):
    y = torch.empty(N)

    def fused():
        chain_kernel[(4,)](X, y, N, BLOCK=256)
        return y

    def unfused():
        return torch.relu(X * 2.0 + 1.0)

    assert total_us(log, unfused) / total_us(log, fused) == pytest.approx(3.0)
    assert torch.allclose(fused(), unfused())
    assert total_us(log, fused) == pytest.approx(modelled_us(8 * N, 1))


def test_more_programs_of_the_same_kernel_cost_nothing(log):
    def run(block):
        return total_us(log, lambda: copy_kernel[(triton.cdiv(N, block),)](X, torch.empty(N), N, BLOCK=block))

    assert run(64) == run(1024)


def test_the_interpreter_is_put_back(log):
    from triton.runtime import interpreter

    before = interpreter._interpreter
    with pytest.raises(ZeroDivisionError), interpreter_traffic(TrafficCounter()):
        assert interpreter._interpreter is not before
        raise ZeroDivisionError
    assert interpreter._interpreter is before and log.around is None


def test_same_program_same_time(log):
    def run():
        copy_kernel[(4,)](X, torch.empty(N), N, BLOCK=256)
        torch.softmax(X, 0)

    assert table(log, run) == table(log, run)
    assert modelled.modelled_us(0, 0) == 0.0
