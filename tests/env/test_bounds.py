"""Kernels in Triton's interpreter that leave the memory of their tensors: an error or NaN, never chance."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from env import bounds

pytestmark = [
    pytest.mark.budget(30),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"),
]


@pytest.fixture(autouse=True)
def guarded(monkeypatch):
    from triton.runtime import interpreter

    for owner, name in (
        (interpreter, "_interpreter"),
        (interpreter.GridExecutor, "_init_args_hst"),
        (interpreter.GridExecutor, "__call__"),
        (interpreter.InterpreterBuilder, "create_int_to_ptr"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back behind the test
    bounds.install()


@triton.jit
def copy(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def shifted(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i - 1, tl.load(x + i))


@triton.jit
def add(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(y + i, tl.load(x + i))


@triton.jit
def through_table(table, y, BLOCK: tl.constexpr):
    x = tl.load(table).to(tl.pointer_type(tl.float32))
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i))


@triton.jit
def blockwise(x, y, n, BLOCK: tl.constexpr):
    source = tl.make_block_ptr(x, (n,), (1,), (0,), (BLOCK,), (0,))
    target = tl.make_block_ptr(y, (n,), (1,), (0,), (BLOCK,), (0,))
    tl.store(target, tl.load(source, boundary_check=(0,)), boundary_check=(0,))


@pytest.mark.parametrize("extra", [1, 15, 2**20])
def test_a_store_behind_the_output_is_an_error_that_says_so(extra):
    x, y = torch.randn(32 + extra), torch.zeros(32)
    with pytest.raises(Exception, match=r"elements are stored outside of the kernel's tensors: mask what"):
        copy[(triton.cdiv(32 + extra, 32),)](x, y, 32 + extra, BLOCK=32)


def test_a_store_before_the_output_too():
    x, y = torch.randn(64), torch.zeros(64)
    with pytest.raises(Exception, match="1 of 64 elements are stored outside"):
        shifted[(1,)](x, y, BLOCK=64)


def test_a_load_from_outside_gives_nan_or_the_largest_number_in_every_run():
    for dtype, value in ((torch.float32, float("nan")), (torch.float16, float("nan")), (torch.int32, 2**31 - 1)):
        x, y = torch.ones(8, dtype=dtype), torch.zeros(16, dtype=dtype)
        copy[(1,)](x, y, 16, BLOCK=16)
        expected = torch.cat([x, torch.full((8,), value, dtype=dtype)])
        assert torch.equal(y.isnan(), expected.isnan()) and torch.equal(y.nan_to_num(), expected.nan_to_num())


def test_masked_lanes_views_and_equal_storages_are_fine():
    whole = torch.arange(100.0)
    x, y = whole[10:47], torch.zeros(100)
    copy[(2,)](x, y[50:], 37, BLOCK=32)  # masked at the end; both begin within their storage
    assert torch.equal(y[50:87], x) and not y[:50].any() and not y[87:].any()
    copy[(1,)](x, y, 64, BLOCK=64)  # longer than the view, within its storage
    assert torch.equal(y[:64], whole[10:74])
    copy[(1,)](whole, whole, 100, BLOCK=128)


def test_atomics_are_guarded():
    y = torch.zeros(8)
    add[(1,)](torch.ones(8), y, BLOCK=8)
    assert torch.equal(y, torch.ones(8))
    with pytest.raises(Exception, match="8 of 16 elements are stored outside"):
        add[(1,)](torch.ones(16), y, BLOCK=16)


def test_a_table_of_pointers_is_followed_and_the_next_launch_is_guarded_again():
    x, y = torch.randn(16), torch.zeros(16)
    through_table[(1,)](torch.tensor([x.data_ptr()]), y, BLOCK=16)
    assert torch.equal(x, y)
    with pytest.raises(Exception, match="outside of the kernel's tensors"):
        copy[(1,)](x, y[:0].clone(), 16, BLOCK=16)


def test_block_pointers_and_empty_tensors():
    x, y = torch.randn(10), torch.zeros(10)
    blockwise[(1,)](x, y, 10, BLOCK=16)
    assert torch.equal(x, y)
    empty = torch.zeros(0)
    copy[(1,)](empty, empty, 0, BLOCK=16)


def test_outside_of_launches_nothing_is_known():
    memory = bounds._Memory()
    assert memory.outside(np.array([1], dtype=np.uint64), None, 4) is None
    memory.enter(((), {}))
    assert memory.outside(np.array([1], dtype=np.uint64), None, 4).all()
