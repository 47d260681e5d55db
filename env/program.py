"""A program that was written down in another process (`env.trace`), as a module that can be called.

Runs in a worker that executes no foreign Python (CPU). The description is a claim: every name in it is looked up among
what torch and Triton offer, every kernel's text is checked (`env.kernel_text`), and what doesn't fit raises.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import reinterpret
from triton.tools.tensor_descriptor import TensorDescriptor

from env import kernel_text, tensors
from env.kernel_text import Refused
from env.launches import LaunchLog
from env.trace import INPUTS, TORCHS

# They reach for files, or give a tensor memory of its own choosing.
_FORBIDDEN = {"from_file", "set_", "set_data", "swap_storage", "_unsafe_set_storage"}


class Program(torch.nn.Module):
    """Called as the candidate's model would be. constants: contents [bytes] of the memory that was there before."""

    def __init__(self, description: dict[str, Any], constants: list[torch.Tensor], folder: Path, log: LaunchLog):
        """Raises Refused."""
        super().__init__()
        self.kernels = kernel_text.build(description["units"], folder)
        log.own_file = str(folder / "own.py")
        for kernel, unit in zip(self.kernels, description["units"], strict=True):
            log.names[kernel.fn.__code__] = unit["name"]
        self.steps = [self._step(step) for step in description["steps"]]
        self.outputs = description["outputs"]
        self.places: list[int] = description["constants"]
        # As buffers they are put back before each call, should the program write to them.
        for place, constant in zip(self.places, constants, strict=True):
            self.register_buffer(f"at{place}", constant.clone())

    def _step(self, step: list[Any]) -> list[Any]:
        """A step with its operator found."""
        if step[0] == "op":
            match = re.fullmatch(r"(\w+)::(\w+)\.(\w+)", step[1])
            if match is None or match[1] not in TORCHS or match[2] in _FORBIDDEN or match[2].startswith("__"):
                raise Refused(f"the operator {str(step[1])[:80]}")
            packet = getattr(getattr(torch.ops, match[1]), match[2], None)
            if not isinstance(packet, torch._ops.OpOverloadPacket) or match[3] not in packet.overloads():
                raise Refused(f"the operator {step[1]} isn't there")
            return ["op", getattr(packet, match[3]), *step[2:]]
        if step[0] == "kernel":
            return ["kernel", self.kernels[step[1]], *step[2:]]
        return step

    def forward(self, *arguments: Any) -> Any:
        made: dict[int, Any] = {place: getattr(self, f"at{place}").untyped_storage() for place in self.places}
        for leaf in tensors.leaves(list(arguments)):
            if isinstance(leaf, torch.Tensor):
                made[INPUTS] = leaf.untyped_storage()
        for step in self.steps:
            if step[0] == "op":
                _, operator, args, kwargs, places = step
                result = operator(*_value(args, made), **{name: _value(value, made) for name, value in kwargs.items()})
                for place, leaf in zip(places, tree_leaves(result), strict=True):
                    if place >= 0:
                        made[place] = _memory(leaf)
            elif step[0] == "kernel":
                _, kernel, grid, args, kwargs = step
                kernel[tuple(grid)](
                    *(self._argument(value, made) for value in args),
                    **{name: self._argument(value, made) for name, value in kwargs.items()},
                )
            else:
                made[step[1]] = _remake(*step[2:], made)
        return _value(self.outputs, made)

    def _argument(self, value: dict[str, Any], made: dict[int, Any]) -> Any:
        match value:
            case {"tensor": tensor}:
                return _value(tensor, made)
            case {"descriptor": base, "padding": padding, "numbers": [shape, strides, block]}:
                return TensorDescriptor(_value(base, made), shape, strides, block, padding)
            case {"reinterpreted": base, "dtype": dtype}:
                return reinterpret(_value(base, made), kernel_text.decode(dtype, self.kernels))
        return kernel_text.decode(value, self.kernels)


def _memory(leaf: torch.Tensor) -> Any:
    """What later steps find a tensor's memory by: its storage; itself where it has none."""
    return leaf.untyped_storage() if leaf.layout is torch.strided else leaf


def _remake(kind: str, parts: list, shape: list[int], coalesced: bool, made: dict[int, Any]) -> Any:
    found = [_value(part, made) for part in parts]
    if kind == "mkldnn":
        return found[0].to_mkldnn()
    if kind == "coo":
        return torch.sparse_coo_tensor(*found, shape, is_coalesced=coalesced, check_invariants=True)
    if kind == "csr":
        return torch.sparse_csr_tensor(*found, shape, check_invariants=True)
    if kind == "generator":
        generator = torch.Generator()
        generator.set_state(found[0])
        return generator
    raise Refused(f"a tensor of kind {str(kind)[:40]}")


def _value(value: dict[str, Any], made: dict[int, Any]) -> Any:
    """What a written value stands for."""
    match value:
        case {"at": int(place), "dtype": str(name), "shape": shape, "stride": stride, "offset": offset}:
            dtype = getattr(torch, name)
            if not isinstance(dtype, torch.dtype):
                raise Refused(f"a dtype {name[:40]}")
            tensor = torch.empty(0, dtype=dtype).set_(made[place], offset, shape, stride)
            conj, neg = value.get("lazy", (False, False))
            tensor = tensor.conj() if conj else tensor
            return torch._neg_view(tensor) if neg else tensor
        case {"opaque": int(place)}:
            return made[place]
        case {"value": plain}:
            return plain
        case {"float": text}:
            return float(text)
        case {"complex": [real, imaginary]}:
            return complex(float(real), float(imaginary))
        case {"list": items}:
            return [_value(item, made) for item in items]
        case {"tuple": items}:
            return tuple(_value(item, made) for item in items)
        case {"dict": items}:
            return {key: _value(item, made) for key, item in items}
        case {"torch": str(name)}:
            found = getattr(torch, name)
            if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
                return found
        case {"device": "cpu"}:
            return torch.device("cpu")
    raise Refused(f"a value that isn't one: {str(value)[:80]}")
