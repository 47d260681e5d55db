"""Times on a machine without a GPU: bytes moved over a stated bandwidth, plus a constant a launch.

Runs in the worker. Modelled, never measured, and labelled so everywhere: it rewards what counts on a GPU (fusion, fewer
passes) and is the same on every machine. Bytes are those that ATen operators read and write and that Triton's loads and
stores touch; caches don't exist in this model, so a value read twice is paid for twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from env.launches import LaunchLog

# Chosen so that a launch and the traffic of a few thousand elements weigh about the same, as with real kernels of a
# few million elements: with a GPU's true figures the miniature's problems would be all launch overhead.
BANDWIDTH_BYTES_PER_US = 8_000.0
LAUNCH_US = 2.0

# Of what a load picks out of memory: half of every float read as 16 bits is the whole of it on a GPU.
WORD_BYTES = 4

# Operators that move nothing though their schema doesn't say so.
_FREE = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
    "aten::set_", "aten::_unsafe_view", "aten::_reshape_alias", "aten::resize_", "aten::lift_fresh", "aten::alias",
}  # fmt: skip
# Operators that overwrite their first argument without reading it.
_WRITE_ONLY = {"aten::fill_", "aten::zero_", "aten::copy_", "aten::normal_", "aten::uniform_", "aten::bernoulli_"}


def modelled_us(bytes_moved: float, launches: int) -> float:
    """Modelled time in microseconds."""
    return bytes_moved / BANDWIDTH_BYTES_PER_US + launches * LAUNCH_US


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(map(_bytes_of, tensors))


def _bytes_of(tensor: torch.Tensor) -> int:
    """What a tensor occupies: a sparse one its indices and values, one without a storage (MKL-DNN) all its elements."""
    if tensor.layout is torch.strided:
        # An expanded tensor has more elements than memory.
        return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
    with _disable_current_modes():  # asking for the parts is no work of the program's
        return sum(map(_bytes_of, _parts(tensor))) or tensor.numel() * tensor.element_size()


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def _written_only(schema: Any) -> set[str]:
    """Names of the out= arguments."""
    return {argument.name for argument in schema.arguments if argument.is_out}


class TrafficCounter(TorchDispatchMode):
    """Counts traffic of a forward pass: ATen operators as they are dispatched, Triton kernels through
    `interpreter_traffic`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[tuple[str, bool], list[float]] = {}
        self.in_kernel: tuple[str, bool] | None = None

    def add(self, name: str, own: bool, launches: int, moved: float) -> None:
        row = self.rows.setdefault((name, own), [0, 0.0])
        row[0] += launches
        row[1] += moved

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # The interpreter copies its arguments with torch operators: those are its own doing, not the kernel's traffic.
        if self.in_kernel is None:
            self._operator(func, args, kwargs or {}, result)
        return result

    def _operator(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        schema = func._schema
        is_view = any(ret.alias_info is not None and not ret.alias_info.is_write for ret in schema.returns)
        if is_view or schema.name in _FREE:
            return
        read = {name: value for name, value in kwargs.items() if name not in _written_only(schema)}
        positional = args[1:] if schema.name in _WRITE_ONLY else args
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        inputs = [leaf for leaf in tree_leaves((positional, read)) if isinstance(leaf, torch.Tensor)]
        moved = _bytes(outputs) + _bytes(inputs)
        self.add(schema.name, False, 1, moved)

    @contextmanager
    def kernel(self, name: str, own: bool) -> Iterator[None]:
        """Around a Triton launch: its loads and stores are booked under its name."""
        outer, self.in_kernel = self.in_kernel, (name, own)
        self.add(name, own, 1, 0.0)
        try:
            yield
        finally:
            self.in_kernel = outer

    def table(self) -> list[dict[str, Any]]:
        """[{name, own, count, bytes, time_us}], the longest first."""
        rows = [
            {
                "name": name,
                "own": own,
                "count": int(count),
                "bytes": int(moved),
                "time_us": modelled_us(moved, int(count)),
            }
            for (name, own), (count, moved) in self.rows.items()
        ]
        return sorted(rows, key=lambda row: (-row["time_us"], row["name"]))


@contextmanager
def interpreter_traffic(counter: TrafficCounter) -> Iterator[None]:
    """While active, every load and store of Triton's interpreter is booked in `counter`."""
    from triton.runtime import interpreter

    real = interpreter._interpreter

    class Counted:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def _book(self, ptr: Any, mask: Any, value: Any, passes: int) -> None:
            if counter.in_kernel is not None:
                # Block pointers hand over memory views instead of arrays.
                moved = touched_bytes(np.asarray(ptr), np.asarray(mask), np.asarray(value).itemsize)
                counter.add(*counter.in_kernel, 0, moved * passes)

        def load(self, ptr: Any, mask: Any, other: Any, dtype: Any) -> Any:
            self._book(ptr, mask, other, 1)
            return real.load(ptr, mask, other, dtype)

        def store(self, ptr: Any, value: Any, mask: Any) -> None:
            self._book(ptr, mask, value, 1)
            return real.store(ptr, value, mask)

        def atomic_rmw(self, op: Any, ptr: Any, value: Any, mask: Any, sem: Any) -> Any:
            self._book(ptr, mask, value, 2)
            return real.atomic_rmw(op, ptr, value, mask, sem)

        def atomic_cas(self, ptr: Any, cmp: Any, value: Any, sem: Any) -> Any:
            self._book(ptr, np.ones_like(ptr, dtype=bool), value, 2)
            return real.atomic_cas(ptr, cmp, value, sem)

    interpreter._interpreter = Counted()
    try:
        yield
    finally:
        interpreter._interpreter = real


def touched_bytes(addresses: np.ndarray, mask: np.ndarray, itemsize: int) -> int:
    """What a load or store [block] of Triton's moves: its elements, of shorter ones that lie apart the words that hold
    them. A value read twice is paid for twice, also within a block; neighbours that other loads read aren't held
    against it, since a GPU's caches keep them.
    """
    count = int(np.count_nonzero(mask))
    if count == 0 or itemsize >= WORD_BYTES:
        return count * itemsize
    chosen = addresses.reshape(-1) if count == addresses.size else addresses[np.broadcast_to(mask, addresses.shape)]
    first, last = int(chosen.min()), int(chosen.max())
    if last - first + itemsize <= count * itemsize:
        return count * itemsize  # one piece: nothing lies between
    return max(count * itemsize, WORD_BYTES * len(np.unique(chosen // WORD_BYTES)))


def counted_call(model: Any, arguments: list, log: LaunchLog) -> tuple[Any, list[dict[str, Any]]]:
    """One forward pass with its traffic counted, in a process that no foreign code has reason to fool. Returns its
    outputs and the table of `TrafficCounter.table`.
    """
    counter = TrafficCounter()
    log.around = counter.kernel
    try:
        with interpreter_traffic(counter), counter:
            outputs = model(*arguments)
    finally:
        log.around = None
    return outputs, counter.table()
