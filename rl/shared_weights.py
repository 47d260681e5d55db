"""A policy's weights in memory that the learner's process shares with those that sample. Runs at both ends.

The memory is anonymous (memfd): it needs no room in /dev/shm or on a disk, and is gone with the last process that has
it, however that ends. What arrives is checked against a checksum taken while it was written.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rl.engines.base import EngineError

ALIGNMENT = 64


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies: (name, shape, first byte), all of one dtype; `size`: bytes of all."""

    places: list[tuple[str, tuple[int, ...], int]]
    dtype: torch.dtype
    size: int


def layout(named: Sequence[tuple[str, Sequence[int]]], dtype: torch.dtype) -> Layout:
    """One tensor behind the other, in the order of `named` (name, shape)."""
    places, begin = [], 0
    for name, shape in named:
        places.append((name, tuple(shape), begin))
        begin += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return Layout(places, dtype, max(begin, ALIGNMENT))


def write(plan: Layout, weights: Iterator[tuple[str, torch.Tensor]]) -> tuple[int, int]:
    """Fill new shared memory with weights, which must come in the plan's order; one is held at a time.

    Returns (file descriptor, checksum); the caller closes the descriptor. Raises EngineError where there isn't room,
    and ValueError for other weights than planned.
    """
    descriptor = os.memfd_create("weights")
    try:
        # Not ftruncate: where memory is short, writing to a hole would end the process without a word.
        os.posix_fallocate(descriptor, 0, plan.size)
        memory = mmap.mmap(descriptor, plan.size)
        for (name, shape, begin), (given, weight) in zip(plan.places, weights, strict=True):
            if (given, tuple(weight.shape)) != (name, shape):
                raise ValueError(f"{given} {tuple(weight.shape)} came where {name} {shape} was planned")
            _at(memory, plan.dtype, shape, begin).copy_(weight)
        return descriptor, _checksum(memory)
    except OSError as error:
        os.close(descriptor)
        raise EngineError(
            f"{plan.size / 2**30:.1f} GiB of host memory for the weights that go to the rollout process can't be had "
            f"({error.strerror}): free memory, or use placement.kind = colocated"
        ) from error
    except BaseException:
        os.close(descriptor)
        raise


def read(descriptor: int, plan: Layout, checksum: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that `write` has left, on the CPU, valid until the next; closes the descriptor. Raises EngineError
    before the first where the checksum is another."""
    try:
        memory = mmap.mmap(descriptor, plan.size, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    if _checksum(memory) != checksum:
        raise EngineError("weights changed on their way to the rollout process: run the same command again")
    for name, shape, begin in plan.places:
        yield name, _at(memory, plan.dtype, shape, begin)


def _checksum(memory: mmap.mmap) -> int:
    """The sum of all words of 8 bytes, modulo 2**64: at the speed of memory, where narrower words take 20 times as
    long to add."""
    return int(torch.frombuffer(memory, dtype=torch.int64).sum())


def _at(memory: mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...], begin: int) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=begin).view(shape)
