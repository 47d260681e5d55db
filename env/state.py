"""A model's parameters and buffers, read without running a line of the model's own code.

Runs in the worker. Between runs the judge looks at a candidate's state and puts it back: what a candidate overrides
(named_modules, a dict's items, a parameter's comparison, __dict__) would run there, where nothing is counted or timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_COPY, _CLONE, _DETACH, _NE, _ANY = (
    torch.Tensor.copy_, torch.Tensor.clone, torch.Tensor.detach, torch.Tensor.ne, torch.Tensor.any,
)  # fmt: skip
# The slot itself: a class may define a property of that name.
_INSTANCE_DICT = torch.nn.Module.__dict__["__dict__"].__get__


def _parts(module: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield from dict.items(dict.__getitem__(_INSTANCE_DICT(module), name))


def modules_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """(prefix, module) for the model and all below it, each once, in the order of torch's named_modules()."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", model)]
    while waiting:
        prefix, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield prefix, module
        below = [(f"{prefix}{name}.", part) for name, part in _parts(module, "_modules") if part is not None]
        waiting.extend(reversed(below))


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, in the order of torch's own state_dict(); one that has several names
    only under its first."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, module in modules_of(model):
        hidden = dict.__getitem__(_INSTANCE_DICT(module), "_non_persistent_buffers_set")
        for kind in ("_parameters", "_buffers"):
            for name, value in _parts(module, kind):
                if isinstance(value, torch.Tensor) and not (kind == "_buffers" and set.__contains__(hidden, name)):
                    if id(value) not in seen:
                        found[prefix + name] = value
                    seen.add(id(value))
    return found


def set_training(module: torch.nn.Module, train: bool) -> None:
    dict.__setitem__(_INSTANCE_DICT(module), "training", train)


def copy_of(value: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return _CLONE(_DETACH(value))


def put(value: torch.Tensor, content: torch.Tensor) -> None:
    """Overwrite a tensor in place."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        _COPY(value, content)


def restore(state: dict[str, torch.Tensor], initial: dict[str, torch.Tensor]) -> None:
    """Put back what differs from `initial`, and only that: a copy counts as a change, and makes a candidate derive anew
    what it keeps of its weights.
    """
    pairs = [(value, initial[name]) for name, value in state.items() if name in initial]
    if not pairs:
        return
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        differ = torch.stack([_ANY(_NE(_DETACH(value), first)) for value, first in pairs]).tolist()
        for (value, first), differs in zip(pairs, differ):
            if differs:
                _COPY(value, first)


def counterparts(own: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> tuple[str, dict[str, str]]:
    """Which of a model's tensors stand for the reference's: (how they were found, {own name: its name}).

    By name where each of its names is there with the same shape and dtype, whatever else the model holds; else in
    order, where the model holds as many of each shape and dtype as the reference does. ("", {}) where neither is so.
    """
    look = {name: (value.shape, value.dtype) for name, value in own.items()}
    wanted = {name: (value.shape, value.dtype) for name, value in theirs.items()}
    if all(look.get(name) == value for name, value in wanted.items()):
        return "by name", {name: name for name in wanted}
    kinds = set(wanted.values())
    mine = {kind: [name for name, value in look.items() if value == kind] for kind in kinds}
    its = {kind: [name for name, value in wanted.items() if value == kind] for kind in kinds}
    if all(len(mine[kind]) == len(its[kind]) for kind in kinds):
        return "in order", {name: other for kind in kinds for name, other in zip(mine[kind], its[kind])}
    return "", {}
