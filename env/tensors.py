"""Python trees of tensors laid out in one flat byte buffer, and back.

Runs in the judge and in the workers: it is how inputs, weights and outputs cross between processes that don't trust
each other. A layout is plain JSON; the bytes are in a buffer that the judge owns. A layout that comes from a worker is
checked against the buffer's size before anything is read (`check_layout`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Triton specialises a kernel on pointers divisible by 16; torch's own allocator gives 512. Less would mean recompiling.
ALIGN = 256
MAX_NODES = 4096
MAX_DEPTH = 16
MAX_NUMBER = 1 << 48  # of elements, bytes, strides: far from where torch's 64-bit integers overflow

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip


# An attribute of a tensor hides a method of the same name: methods are called on the class.
_DETACH, _STRIDE = torch.Tensor.detach, torch.Tensor.stride


class LayoutError(ValueError):
    """A tree that can't be passed between processes, or a layout that doesn't fit its buffer."""


def _extent(shape: list[int], stride: list[int]) -> int:
    """Elements between the first and the last one that a strided tensor touches, both counted."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride))


class _Planner:
    def __init__(self, keep_strides: bool):
        self.keep_strides = keep_strides
        self.offset = 0
        self.nodes = 0
        self.tensors: list[torch.Tensor] = []

    def node(self, value: Any, depth: int = 0) -> dict[str, Any]:
        self.nodes += 1
        if self.nodes > MAX_NODES or depth > MAX_DEPTH:
            raise LayoutError(f"more than {MAX_NODES} values or {MAX_DEPTH} levels of nesting")
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        # A subclass could make its items when it is asked for them: the base class is asked.
        if isinstance(value, (list, tuple)):
            kind = "list" if isinstance(value, list) else "tuple"
            return {"kind": kind, "items": [self.node(item, depth + 1) for item in _items(value)]}
        if isinstance(value, dict):
            keys = list(dict.keys(value))
            if not all(type(key) is str for key in keys):
                raise LayoutError("a dict whose keys are not all strings")
            return {"kind": "dict", "keys": keys, "items": [self.node(item, depth + 1) for item in _items(value)]}
        if value is None or type(value) in (bool, int, float, str):
            return {
                "kind": "value",
                "value": repr(value) if isinstance(value, float) else value,
                "type": type(value).__name__,
            }
        raise LayoutError(
            f"a value of type {type(value).__name__}: only tensors, numbers, strings, lists, tuples and dicts"
        )

    def tensor(self, value: torch.Tensor) -> dict[str, Any]:
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in DTYPES or value.layout != torch.strided:
            raise LayoutError(f"a tensor of dtype {value.dtype} and layout {value.layout}")
        shape = list(value.shape)
        stride = list(_STRIDE(value)) if self.keep_strides else _contiguous(shape)
        nbytes = _extent(shape, stride) * DTYPES[dtype].itemsize
        node = {
            "kind": "tensor",
            "dtype": dtype,
            "shape": shape,
            "stride": stride,
            "offset": self.offset,
            "nbytes": nbytes,
        }
        node["device"] = value.device.type
        self.offset += -(-nbytes // ALIGN) * ALIGN
        self.tensors.append(value)
        return node


def plan(tree: Any, keep_strides: bool) -> tuple[dict[str, Any], list[torch.Tensor], int]:
    """Layout of a tree: (JSON layout, its tensors in layout order, bytes needed).

    keep_strides: inputs keep the strides their author chose; outputs are compared by value and are laid out
    contiguously. Raises LayoutError for values that can't be passed.
    """
    planner = _Planner(keep_strides)
    layout = planner.node(tree)
    return layout, planner.tensors, max(planner.offset, ALIGN)


def tensor_nodes(layout: dict[str, Any]) -> list[dict[str, Any]]:
    """The tensor nodes of a layout in order."""
    if layout["kind"] == "tensor":
        return [layout]
    return [node for item in layout.get("items", []) for node in tensor_nodes(item)]


def view(node: dict[str, Any], buffer: torch.Tensor) -> torch.Tensor:
    """The tensor that a node describes, as a view of the byte buffer [bytes]."""
    flat = buffer[node["offset"] : node["offset"] + node["nbytes"]].view(DTYPES[node["dtype"]])
    return flat.as_strided(node["shape"], node["stride"])


def pack(layout: dict[str, Any], tensors: list[torch.Tensor], buffer: torch.Tensor) -> None:
    """Copy tensors into the buffer at the places that their layout names."""
    for node, tensor in zip(tensor_nodes(layout), tensors, strict=True):
        target, source = view(node, buffer), _DETACH(tensor)
        for dim, (size, step) in enumerate(zip(node["shape"], node["stride"])):
            if step == 0 and size > 1:
                # An expanded dimension holds one value: torch refuses to write the same element twice.
                target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
        target.copy_(source)


def unpack(layout: dict[str, Any], buffer: torch.Tensor) -> Any:
    """The tree that a layout describes, its tensors being views of the buffer."""
    kind = layout["kind"]
    if kind == "tensor":
        return view(layout, buffer)
    if kind == "value":
        return float(layout["value"]) if layout["type"] == "float" else layout["value"]
    items = [unpack(item, buffer) for item in layout["items"]]
    if kind == "dict":
        return dict(zip(layout["keys"], items, strict=True))
    return items if kind == "list" else tuple(items)


def call_arguments(layout: dict[str, Any], buffer: torch.Tensor) -> list:
    """The positional arguments of forward() that a layout of inputs stands for, views of the buffer."""
    tree = unpack(layout, buffer)
    return list(tree) if isinstance(tree, (list, tuple)) else [tree]


def map_tensors(tree: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same tree with `function` applied to each of its tensors."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (list, tuple)):
        items = [map_tensors(item, function) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict):
        return {key: map_tensors(value, function) for key, value in tree.items()}
    return tree


def leaves(tree: Any, depth: int = 0) -> Iterator[Any]:
    """What a tree of lists, tuples and dicts holds, down to the depth that a layout may have."""
    if isinstance(tree, (dict, list, tuple)) and depth <= MAX_DEPTH:
        for item in _items(tree):
            yield from leaves(item, depth + 1)
    else:
        yield tree


def _items(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return list(dict.values(tree))
    return list(list.__iter__(tree)) if isinstance(tree, list) else list(tuple.__iter__(tree))


def _contiguous(shape: list[int]) -> list[int]:
    """Strides of a contiguous tensor, as torch counts them (a size of 0 counts as 1)."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return stride[::-1]


def _is_plain(node: dict[str, Any]) -> bool:
    """Whether a value node is one that `plan` could have made: floats travel as text, since JSON knows no NaN."""
    value, kind = node.get("value", ...), node.get("type")
    if kind == "float":
        try:
            return type(value) is str and float(value) is not None
        except ValueError:
            return False
    return isinstance(value, (bool, int, str, type(None))) and kind == type(value).__name__


def check_layout(layout: Any, capacity: int, depth: int = 0) -> int:
    """Refuse a layout that names bytes outside a buffer of `capacity` bytes or isn't one. Returns its number of nodes.

    Raises LayoutError. Every layout that comes out of a worker passes here before `view` touches memory.
    """
    if not isinstance(layout, dict) or depth > MAX_DEPTH:
        raise LayoutError("not a layout")
    kind = layout.get("kind")
    if kind == "value":
        if not _is_plain(layout) or "items" in layout:
            raise LayoutError("a value that isn't plain")
        return 1
    if kind in ("list", "tuple", "dict"):
        items, keys = layout.get("items"), layout.get("keys")
        if not isinstance(items, list):
            raise LayoutError(f"a {kind} without its items")
        if kind == "dict" and not (
            isinstance(keys, list) and len(keys) == len(items) and all(type(k) is str for k in keys)
        ):
            raise LayoutError("a dict without its keys")
        nodes = 1
        for item in items:
            nodes += check_layout(item, capacity, depth + 1)
            if nodes > MAX_NODES:
                raise LayoutError(f"more than {MAX_NODES} values")
        return nodes
    if kind != "tensor" or type(layout.get("dtype")) is not str or layout["dtype"] not in DTYPES:
        raise LayoutError("a node of an unknown kind or dtype")
    shape, stride = layout.get("shape"), layout.get("stride")
    if not isinstance(shape, list) or not isinstance(stride, list) or len(shape) != len(stride) or len(shape) > 32:
        raise LayoutError("a tensor without shape and strides")
    numbers = [layout.get("offset"), layout.get("nbytes"), *shape, *stride]
    if any(type(number) is not int or not 0 <= number < MAX_NUMBER for number in numbers):
        raise LayoutError("a tensor with a size, stride or offset that isn't a whole number >= 0, or far too large")
    if math.prod(max(size, 1) for size in shape) >= MAX_NUMBER:
        raise LayoutError("a tensor with more elements than torch can count")
    needed = _extent(shape, stride) * DTYPES[layout["dtype"]].itemsize
    if layout["nbytes"] != needed or layout["offset"] % ALIGN or layout["offset"] + needed > capacity:
        raise LayoutError(f"a tensor of {needed} bytes at {layout['offset']} outside its buffer of {capacity} bytes")
    return 1
