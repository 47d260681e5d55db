"""Times on a machine without a GPU: bytes moved over a stated bandwidth, plus a constant a launch.

Runs in the worker. Modelled, never measured, and labelled so everywhere: it rewards what counts on a GPU (fusion, fewer
passes) and is the same on every machine. Bytes are those that ATen operators read and write and that Triton's loads and
stores touch; caches don't exist in this model, so a value read twice is paid for twice.
"""

from __future__ import annotations

import builtins
import math
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.autograd import profiler
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from env.launches import LaunchLog

# What is defined below looks builtins up in this copy: foreign code may replace one for the time of a call.
__builtins__ = dict(vars(builtins))

# Bound before foreign code comes in, which may replace numpy's for the time of a call.
_asarray, _count_nonzero, _ones_like = np.asarray, np.count_nonzero, np.ones_like

# Chosen so that a launch and the traffic of a few thousand elements weigh about the same, as with real kernels of a
# few million elements: with a GPU's true figures the miniature's problems would be all launch overhead.
BANDWIDTH_BYTES_PER_US = 8_000.0
LAUNCH_US = 2.0

# A copy to the host crosses PCIe: about 64 GB/s where a GPU's memory has 3 to 5 TB/s.
HOST_COPY_FACTOR = 50
# Bytes of each copy to the host in the call that is being counted (`env.interpreter` notes them).
HOST_COPIES: list[int] = []

# Operators that move nothing though their schema doesn't say so.
_FREE = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
    "aten::set_", "aten::_unsafe_view", "aten::_reshape_alias", "aten::resize_", "aten::lift_fresh", "aten::alias",
}  # fmt: skip
_VIEWS = {
    "aten::view", "aten::as_strided", "aten::expand", "aten::t", "aten::transpose", "aten::permute", "aten::slice",
    "aten::select", "aten::unsqueeze", "aten::squeeze", "aten::detach", "aten::reshape", "aten::narrow", "aten::unfold",
    "aten::resolve_conj", "aten::resolve_neg", "aten::item", "aten::_local_scalar_dense", "aten::is_nonzero",
}  # fmt: skip
_LAUNCH = "kernel-judge-launch"
_TORCHS = ("aten", "prims", "prim")
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

    def __init__(self, own_file: str = "") -> None:
        super().__init__()
        self.own_file = own_file
        self.rows: dict[tuple[str, bool], list[float]] = {}
        self.in_kernel: tuple[str, bool] | None = None
        # Every operator that came by, counted or not: what else ran is found by `unseen_rows`.
        self.seen: Counter[str] = Counter()

    def add(self, name: str, own: bool, launches: int, moved: float) -> None:
        row = self.rows.setdefault((name, own), [0, 0.0])
        row[0] += launches
        row[1] += moved

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace not in _TORCHS:
            # An operator that somebody registered: what counts is what it does inside, where no mode reaches
            # (`unseen_rows`).
            return func(*args, **(kwargs or {}))
        self.seen[func._schema.name] += 1
        result = func(*args, **(kwargs or {}))
        # The interpreter copies its arguments with torch operators: those are its own doing, not the kernel's traffic.
        # What the candidate calls itself, in a kernel's body or its grid, no GPU would run there.
        if self.in_kernel is None or called_by(self.own_file):
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
            with profiler.record_function(_LAUNCH):
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


def called_by(own_file: str) -> bool:
    """Whether the candidate's own code stands nearer on the stack than Triton's interpreter."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == own_file:
            return True
        if frame.f_code.co_filename.endswith("triton/runtime/interpreter.py"):
            return False
        frame = frame.f_back
    return False


def unseen_rows(events: Any, seen: Counter[str]) -> list[tuple[str, float]]:
    """Operators that torch's profiler saw and the counter didn't: [(name, bytes moved)].

    They ran where no dispatch mode reaches. The profiler knows the shapes that they read: they are charged for those
    and as much again, in float32; or for what they did inside, where that is more. One that did its work through
    operators or kernels which the counter saw is paid for.
    """
    left = Counter(seen)

    def walk(event: Any, in_launch: bool) -> tuple[bool, list[tuple[str, float]]]:
        """(whether the counter saw some of it, what it is charged for)."""
        in_launch = in_launch or event.name == _LAUNCH
        if left[event.name] > 0:
            left[event.name] -= 1
            return True, []
        parts = [walk(child, in_launch) for child in event.cpu_children]
        inside = [row for _, rows in parts for row in rows]
        covered = event.name == _LAUNCH or any(seen_inside for seen_inside, _ in parts)
        operator = "::" in event.name and not event.name.startswith("autograd::")
        if covered or not operator or event.name in _FREE or event.name in _VIEWS:
            return covered, inside
        if in_launch and event.name == "aten::copy_":
            return False, []  # the interpreter's own, of a kernel's arguments
        own = 8.0 * sum(math.prod(shape) for shape in event.input_shapes if shape)
        return False, inside if sum(moved for _, moved in inside) >= own else [(event.name, own)]

    return [row for event in events if event.cpu_parent is None for row in walk(event, False)[1]]


@contextmanager
def interpreter_traffic(counter: TrafficCounter) -> Iterator[None]:
    """While active, every load and store of Triton's interpreter is booked in `counter`."""
    from triton.runtime import interpreter

    real = interpreter._interpreter

    class Counted:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def _book(self, mask: Any, value: Any, passes: int) -> None:
            if counter.in_kernel is not None:
                # Block pointers hand over memory views instead of arrays.
                moved = int(_count_nonzero(_asarray(mask))) * _asarray(value).itemsize * passes
                counter.add(*counter.in_kernel, 0, moved)

        def load(self, ptr: Any, mask: Any, other: Any, dtype: Any) -> Any:
            self._book(mask, other, 1)
            return real.load(ptr, mask, other, dtype)

        def store(self, ptr: Any, value: Any, mask: Any) -> None:
            self._book(mask, value, 1)
            return real.store(ptr, value, mask)

        def atomic_rmw(self, op: Any, ptr: Any, value: Any, mask: Any, sem: Any) -> Any:
            self._book(mask, value, 2)
            return real.atomic_rmw(op, ptr, value, mask, sem)

        def atomic_cas(self, ptr: Any, cmp: Any, value: Any, sem: Any) -> Any:
            self._book(_ones_like(ptr, dtype=bool), value, 2)
            return real.atomic_cas(ptr, cmp, value, sem)

    interpreter._interpreter = Counted()
    try:
        yield
    finally:
        interpreter._interpreter = real


def counted_call(model: Any, arguments: list, log: LaunchLog) -> tuple[Any, list[dict[str, Any]]]:
    """One forward pass with its traffic counted. Returns its outputs and the table of `TrafficCounter.table`."""
    counter = TrafficCounter(log.own_file)
    log.around = counter.kernel
    HOST_COPIES.clear()
    try:
        with profiler.profile(record_shapes=True) as profiled, interpreter_traffic(counter), counter:
            outputs = model(*arguments)
    finally:
        log.around = None
    for name, moved in unseen_rows(profiled.function_events, counter.seen):
        counter.add(name, False, 1, moved)
    for nbytes in HOST_COPIES:
        counter.add("copy to the host", False, 1, nbytes * HOST_COPY_FACTOR)
    return outputs, counter.table()
