"""What a kernel may touch in Triton's interpreter: the memory of the tensors that it was given.

Runs in the worker (CPU only), installed before foreign code comes in. The interpreter follows any address. A kernel
that writes behind its output then damages the process's heap, and whether that ends in a crash, in wrong values or in
nothing is chance, which no two runs share. Here such a store is an error, and such a load gives NaN (the largest number
for integers): what comes of it is the same in every run. No defence: foreign code has other ways to memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class OutOfBounds(IndexError):
    """A kernel stored outside of its tensors."""


class _Memory:
    """Address ranges of the tensors of the launch that runs; None: outside of launches, or not to be told."""

    # Of this process: no way out by an address that a kernel made of a number either.
    strict = False

    def __init__(self) -> None:
        self.starts: np.ndarray | None = None
        self.ends: np.ndarray | None = None

    def enter(self, arguments: Any) -> None:
        ranges: dict[int, int] = {}
        for tensor in _tensors(arguments):
            storage = tensor.untyped_storage()
            if storage.nbytes():  # an empty one lies at address 0
                ranges[storage.data_ptr()] = storage.nbytes()
        self.starts = np.array(sorted(ranges), dtype=np.uint64)
        self.ends = self.starts + np.array([ranges[int(start)] for start in self.starts], dtype=np.uint64)

    def leave(self) -> None:
        self.starts = self.ends = None

    def outside(self, addresses: np.ndarray, mask: np.ndarray | None, size: int) -> np.ndarray | None:
        """Which of the addresses, of `size` bytes each, lie outside; None where none does, which is quick to tell."""
        if self.starts is None:
            return None
        # Masks of block pointers are memoryviews, which pybind11 takes as well.
        addresses, mask = np.asarray(addresses), None if mask is None else np.asarray(mask)
        asked = addresses if mask is None or mask.all() else addresses[np.broadcast_to(mask, addresses.shape)]
        if not asked.size:
            return None
        place = int(np.searchsorted(self.starts, asked.min(), side="right")) - 1
        if place >= 0 and int(asked.max()) + size <= int(self.ends[place]):
            return None
        if not len(self.starts):
            found = np.ones(addresses.shape, dtype=bool)
        else:
            places = np.searchsorted(self.starts, addresses, side="right").astype(np.int64) - 1
            inside = (places >= 0) & (addresses <= self.ends[np.maximum(places, 0)] - np.uint64(size))
            found = ~inside
        if mask is not None:
            found = found & mask
        return found if found.any() else None


def install() -> None:
    """Guard the loads, stores and atomics of all launches of this process."""
    from triton.runtime import interpreter

    memory, real = _Memory(), interpreter._interpreter
    convert, launch = interpreter.GridExecutor._init_args_hst, interpreter.GridExecutor.__call__
    to_pointer = interpreter.InterpreterBuilder.create_int_to_ptr

    def converted(self: Any, arguments: Any, keywords: Any) -> Any:
        result = convert(self, arguments, keywords)
        memory.enter(result)
        return result

    def launched(self: Any, *arguments: Any, **keywords: Any) -> Any:
        try:
            return launch(self, *arguments, **keywords)
        finally:
            memory.leave()

    def made_pointer(self: Any, *arguments: Any) -> Any:
        if _Memory.strict:
            raise OutOfBounds("an address made of a number")
        memory.leave()  # a table of pointers, say: whose memory that is can't be told
        return to_pointer(self, *arguments)

    interpreter._interpreter = _Guarded(real, memory)
    interpreter.GridExecutor._init_args_hst = converted
    interpreter.GridExecutor.__call__ = launched
    interpreter.InterpreterBuilder.create_int_to_ptr = made_pointer


def keep_in() -> None:
    """From now on and for the rest of this process, kernels have no address but their tensors'."""
    _Memory.strict = True


class _Guarded:
    """Triton's compiled module for memory, with its addresses looked at first."""

    def __init__(self, real: Any, memory: _Memory) -> None:
        self._real, self._memory = real, memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        outside = self._memory.outside(addresses, mask, np.dtype(dtype).itemsize)
        if outside is None:
            return self._real.load(addresses, mask, other, dtype)
        values = self._real.load(addresses, np.asarray(mask) & ~outside, other, dtype)
        values[outside] = np.nan if values.dtype.kind == "f" else _largest(values.dtype)
        return values

    def store(self, addresses: Any, values: Any, mask: Any) -> Any:
        self._refuse(addresses, mask, values)
        return self._real.store(addresses, values, mask)

    def atomic_rmw(self, operation: Any, addresses: Any, values: Any, mask: Any, semantics: Any) -> Any:
        self._refuse(addresses, mask, values)
        return self._real.atomic_rmw(operation, addresses, values, mask, semantics)

    def atomic_cas(self, addresses: Any, expected: Any, values: Any, semantics: Any) -> Any:
        self._refuse(addresses, None, values)
        return self._real.atomic_cas(addresses, expected, values, semantics)

    def _refuse(self, addresses: np.ndarray, mask: np.ndarray | None, values: np.ndarray) -> None:
        outside = self._memory.outside(addresses, mask, np.asarray(values).dtype.itemsize)
        if outside is not None:
            raise OutOfBounds(
                f"{int(outside.sum())} of {outside.size} elements are stored outside of the kernel's tensors: mask "
                "what lies behind their end, or make the output larger"
            )


def _largest(dtype: np.dtype) -> Any:
    return True if dtype.kind == "b" else np.iinfo(dtype).max


def _tensors(arguments: Any) -> Any:
    if hasattr(arguments, "untyped_storage"):
        yield arguments
    elif hasattr(arguments, "block_shape"):  # a TensorDescriptor
        yield from _tensors(arguments.base)
    elif isinstance(arguments, (list, tuple)):
        for argument in arguments:
            yield from _tensors(argument)
    elif isinstance(arguments, dict):
        yield from _tensors(tuple(arguments.values()))
    elif hasattr(arguments, "base") and hasattr(arguments, "data_ptr"):  # a TensorWrapper (reinterpreted dtype)
        yield from _tensors(arguments.base)
