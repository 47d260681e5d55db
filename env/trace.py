"""One forward pass written down as a program: torch's operators and Triton's launches, with what they read and write.

Runs in the candidate's worker (CPU). Times are modelled there from counts, and what a process that runs foreign code
says of itself is a claim. So the pass is written down, and `env.program` runs it in a fresh process, where it is
counted, on inputs that the candidate has never seen. Only if that gives the right outputs is the count the candidate's
time: work that isn't in the program isn't in its outputs either.

A tensor is written as the memory that it is: (storage, dtype, shape, stride, offset). So views needn't be told. Memory
that was there before the pass (weights, and what was derived of them) goes along with its contents.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from env import kernel_text
from env.kernel_text import Refused
from env.launches import LaunchLog

MAX_STEPS, MAX_JSON, MAX_CONSTANT_BYTES = 20_000, 6 << 20, 1 << 30
INPUTS = 0  # the storage that holds all of them
TORCHS = ("aten", "prims", "prim")
# They change what a tensor object is, and move nothing: a tensor is written as what it is when it is used.
_METADATA = {"aten::set_", "aten::lift_fresh", "aten::detach", "aten::alias"}
_INNER_KEYS = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


class Recorder(TorchDispatchMode):
    """Active while a forward pass runs; `program` then is what it did. inputs: the buffer [bytes] that they lie in."""

    def __init__(self, log: LaunchLog, inputs: torch.Tensor) -> None:
        super().__init__()
        self.log = log
        self.refused = ""
        # Values and sizes that came out of data: what Python made of them isn't in the program.
        self.host_reads = 0
        self.steps: list[list[Any]] = []
        self.units: list[dict[str, Any]] = []
        self.known_units: dict[int, int] = {}
        self.constants: list[torch.Tensor] = []
        self.constant_ids: list[int] = []
        self.passing = 0  # what runs now is ours or the interpreter's: copies of arguments and contents
        # By the identity of what holds the memory, which is kept alive: an address would be given to another one.
        self.storages: dict[int, int] = {inputs.untyped_storage()._cdata: INPUTS}
        self.opaque: dict[int, int] = {}
        self.keep: list[Any] = [inputs]
        self.count = 1

    # What happens ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.passing:
            return func(*args, **kwargs)
        if func.namespace not in TORCHS:
            return self._look_inside(func, args, kwargs)
        step = None
        with self._writing():
            if not _only_views(func, args, kwargs) and func._schema.name not in _METADATA:
                name = f"{func._schema.name}.{func._overloadname}"
                step = ["op", name, self._tree(args), {key: self._tree(value) for key, value in kwargs.items()}, []]
        result = func(*args, **kwargs)
        if step is not None:
            with self._writing():
                leaves = tree_leaves(result)
                told = all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in leaves)
                self.host_reads += not told or _sized_by_data(func, args) or _sparse(leaves)
                step[4] = [self._made(leaf) for leaf in leaves]
                self._append(step)
        return result

    def _look_inside(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """An operator that somebody registered: what it does inside is what counts."""
        for key in _INNER_KEYS:
            if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
                with self:
                    return func._op_dk(getattr(torch._C.DispatchKey, key), *args, **kwargs)
        self.refused = self.refused or f"the operator {func.name()} can't be looked into"
        return func(*args, **kwargs)

    @contextmanager
    def launch(self, kernel: Any, name: str, args: tuple, kwargs: dict) -> Iterator[None]:
        """Around a launch of a kernel in the interpreter, which works out its grid."""
        step: list[Any] | None = None
        with self._writing():
            wanted = {key: value for key, value in kwargs.items() if key in kernel.arg_names}
            unit = kernel_text.describe(kernel, self.units, self.known_units, self.log.own_file, name)
            named = {key: self._argument(value, key) for key, value in wanted.items()}
            step = ["kernel", unit, [], [self._argument(value, "an argument") for value in args], named]
        self.passing += 1
        builder = interpreter.interpreter_builder
        set_grid = builder.set_grid_dim

        def noted(*grid: Any) -> None:
            if step is not None:
                step[2] = [int(size) for size in grid]
            set_grid(*grid)

        builder.set_grid_dim = noted
        try:
            yield
        finally:
            self.passing -= 1
            del builder.set_grid_dim
        if step is not None:
            with self._writing():
                self._append(step)

    # How it is written -----------------------------------------------------------------------------------------------

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """What can't be written is noted, and the pass goes on all the same."""
        self.passing += 1
        try:
            yield
        except Refused as error:
            self.refused = self.refused or str(error)
        except Exception as error:  # no mistake of the candidate's
            self.refused = self.refused or f"{type(error).__name__}: {error}"[:200]
        finally:
            self.passing -= 1

    def _append(self, step: list[Any]) -> None:
        if len(self.steps) >= MAX_STEPS:
            raise Refused(f"more than {MAX_STEPS} operators and launches")
        self.steps.append(step)

    def program(self, outputs: Any) -> dict[str, Any]:
        """{units, steps, constants, outputs, host_reads} as plain JSON; {refused} where the pass can't be told."""
        tree: Any = None
        with self._writing():
            tree = self._tree(outputs)
        found = {
            "units": self.units, "steps": self.steps, "constants": self.constant_ids, "outputs": tree,
            "host_reads": self.host_reads,
        }  # fmt: skip
        if not self.refused and len(json.dumps(found)) > MAX_JSON:
            self.refused = f"it takes more than {MAX_JSON >> 20} MiB of text"
        return {"refused": self.refused} if self.refused else found

    def _tree(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (list, tuple)):
            return {"list" if isinstance(value, list) else "tuple": [self._tree(item) for item in value]}
        if isinstance(value, dict):
            return {"dict": [[str(key), self._tree(item)] for key, item in value.items()]}
        if value is None or type(value) in (bool, int, str):
            return {"value": value}
        if type(value) is float:
            return {"float": repr(value)}
        if type(value) is complex:
            return {"complex": [repr(value.real), repr(value.imag)]}
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": value.type}
        if isinstance(value, torch.Generator):
            return self._generator(value)
        raise Refused(f"an operator is given a {type(value).__name__}")

    def _tensor(self, tensor: torch.Tensor) -> dict[str, Any]:
        if tensor.layout is not torch.strided:
            if id(tensor) not in self.opaque:
                return self._parts(tensor)
            return {"opaque": self.opaque[id(tensor)]}
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storages:
            self._constant(storage)
        written: dict[str, Any] = {
            "at": self.storages[storage._cdata], "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape), "stride": list(tensor.stride()), "offset": tensor.storage_offset(),
        }  # fmt: skip
        if tensor.is_conj() or tensor.is_neg():
            written["lazy"] = [tensor.is_conj(), tensor.is_neg()]
        return written

    def _parts(self, tensor: torch.Tensor) -> dict[str, Any]:
        """A tensor without a storage that was there before: what it is made of."""
        place = self._numbered(self.opaque, id(tensor), tensor)
        if tensor.is_mkldnn:
            parts, kind = [tensor.to_dense()], "mkldnn"
        elif tensor.layout is torch.sparse_coo:
            parts, kind = [tensor._indices(), tensor._values()], "coo"
        elif tensor.layout is torch.sparse_csr:
            parts, kind = [tensor.crow_indices(), tensor.col_indices(), tensor.values()], "csr"
        else:
            raise Refused(f"a tensor of layout {tensor.layout}")
        step = ["make", place, kind, [self._tensor(part) for part in parts], list(tensor.shape)]
        step.append(tensor.is_coalesced() if kind == "coo" else True)
        self._append(step)
        return {"opaque": place}

    def _constant(self, storage: torch.UntypedStorage) -> None:
        flat = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
        if sum(constant.nbytes for constant in self.constants) + flat.nbytes > MAX_CONSTANT_BYTES:
            raise Refused(f"it holds more than {MAX_CONSTANT_BYTES >> 30} GiB")
        self.constants.append(flat.clone())
        self.constant_ids.append(self._numbered(self.storages, storage._cdata, storage))

    def _numbered(self, numbers: dict[int, int], identity: int, thing: Any) -> int:
        """The next number, for something that is kept alive: its identity would be given to another."""
        self.keep.append(thing)
        number = numbers[identity] = self.count
        self.count += 1
        return number

    def _generator(self, generator: torch.Generator) -> dict[str, Any]:
        if generator is torch.default_generator:
            return {"value": None}
        if id(generator) not in self.opaque:
            state = generator.get_state()
            place = self._numbered(self.opaque, id(generator), generator)
            self._append(["make", place, "generator", [self._tensor(state)], [], True])
        return {"opaque": self.opaque[id(generator)]}

    def _made(self, leaf: Any) -> int:
        """The number of what an operator made anew, -1 for what was there."""
        if not isinstance(leaf, torch.Tensor):
            return -1
        if leaf.layout is not torch.strided:
            return -1 if id(leaf) in self.opaque else self._numbered(self.opaque, id(leaf), leaf)
        storage = leaf.untyped_storage()
        return -1 if storage._cdata in self.storages else self._numbered(self.storages, storage._cdata, storage)

    def _argument(self, value: Any, what: str) -> dict[str, Any]:
        """An argument of a kernel."""
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value)}
        if isinstance(value, TensorDescriptor):
            plain = [value.shape, value.strides, value.block_shape]
            return {
                "descriptor": self._tensor(value.base), "padding": value.padding,
                "numbers": [[int(number) for number in numbers] for numbers in plain],
            }  # fmt: skip
        if hasattr(value, "base") and hasattr(value, "data_ptr"):  # a TensorWrapper
            dtype = kernel_text.encode(value.dtype, self.units, self.known_units, self.log.own_file, what)
            return {"reinterpreted": self._tensor(value.base), "dtype": dtype}
        return kernel_text.encode(value, self.units, self.known_units, self.log.own_file, what)


def _sized_by_data(func: Any, args: tuple) -> bool:
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    # An index of numbers has its size beforehand, a mask hasn't.
    masks = (torch.bool, torch.uint8)
    return func._schema.name != "aten::index" or any(index is not None and index.dtype in masks for index in args[1])


def _sparse(leaves: list[Any]) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided for leaf in leaves)


def _only_views(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an operator only looks at memory in another way, and that memory can be told."""
    returns = func._schema.returns
    if not returns or not all(ret.alias_info is not None and not ret.alias_info.is_write for ret in returns):
        return False
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return all(tensor.layout is torch.strided for tensor in given)


def recorded_call(model: Any, arguments: list, log: LaunchLog, inputs: torch.Tensor) -> tuple[Any, dict, list]:
    """One forward pass. Returns (its outputs, its program as JSON, the contents [bytes] of what it found in memory)."""
    recorder = Recorder(log, inputs)
    log.recorder = recorder
    try:
        with recorder:
            outputs = model(*arguments)
    finally:
        log.recorder = None
    return outputs, recorder.program(outputs), recorder.constants
