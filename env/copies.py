"""Does a kernel compute anything? One that changes nothing, or only copies a tensor to another, does not.

Runs in the worker, around the launches of one forward pass. It finds what taking kernels away can't: where torch does
the work and a kernel copies the result to the output, the output needs the kernel.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

MAX_BYTES = 1 << 30
# A copy that is slightly off is a copy.
RELATIVE = 1e-4


class Copies:
    """`launch` runs own kernels; `useful` then says of each by name whether any launch of it computed something."""

    def __init__(self) -> None:
        self.useful: dict[str, bool] = {}

    def launch(self, name: str, call: Callable[[tuple, dict], Any], args: tuple, kwargs: dict) -> Any:
        """Run a kernel on its arguments. Where it copied them, run it once more on arguments of another kind, since
        what copies these need not copy others: relu, behind exp.
        """
        if self.useful.get(name, False):
            return call(args, kwargs)
        tensors = _tensors(args, kwargs)
        if not tensors or sum(tensor.nbytes for tensor in tensors) > MAX_BYTES:
            self.useful[name] = True
            return call(args, kwargs)
        before = [tensor.detach().clone() for tensor in tensors]
        result = call(args, kwargs)
        self.useful[name] = computes(before, tensors)
        if not self.useful[name]:
            others = {id(tensor): _other_values(tensor) for tensor in tensors}
            args = tuple(_swapped(value, others) for value in args)
            kwargs = {key: _swapped(value, others) for key, value in kwargs.items()}
            tensors = _tensors(args, kwargs)
            before = [tensor.clone() for tensor in tensors]
            call(args, kwargs)
            self.useful[name] = computes(before, tensors)
        return result


def _tensors(args: tuple, kwargs: dict) -> list[torch.Tensor]:
    return [tensor for value in (*args, *kwargs.values()) for tensor in _within(value)]


def _within(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an argument: itself, those of a tuple, the one that a descriptor or a wrapper is about."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _within(item)
    elif isinstance(getattr(value, "base", None), torch.Tensor):
        yield value.base


def _swapped(value: Any, others: dict[int, torch.Tensor]) -> Any:
    """An argument with other tensors in the place of its own."""
    if isinstance(value, torch.Tensor):
        return others.get(id(value), value)
    if isinstance(value, (tuple, list)):
        items = [_swapped(item, others) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(getattr(value, "base", None), torch.Tensor):
        swapped = copy.copy(value)
        swapped.base = others.get(id(value.base), value.base)
        return swapped
    return value


def _other_values(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor laid out like this one, with numbers of both signs; integers, which may be indices, stay."""
    other = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    with torch.no_grad():
        other.copy_(tensor)
        if other.is_floating_point() and 0 not in other.stride():
            generator = torch.Generator(tensor.device).manual_seed(tensor.numel())
            noise = torch.randn(tensor.shape, generator=generator, device=tensor.device)
            other.copy_(noise * 2)
    return other


def computes(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    """Whether any tensor [any shape] was changed to something that isn't the content of another one."""
    for number, (old, new) in enumerate(zip(before, after)):
        if not _same(old, new) and not any(_same(other, new) for i, other in enumerate(before) if i != number):
            return True
    return False


def _row_major(tensor: torch.Tensor) -> bool:
    steps = [step for size, step in zip(tensor.shape, tensor.stride()) if size > 1]
    return steps == sorted(steps, reverse=True)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal contents in reading order, whatever the shapes; NaN equals NaN. Not where one lies in another order than
    the other: putting it there is what torch's contiguous() does, and work.
    """
    if a.numel() != b.numel() or a.dtype != b.dtype or _row_major(a) != _row_major(b):
        return False
    a, b = a.detach().reshape(-1), b.detach().reshape(-1)
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    a, b = a.double(), b.double()
    near = torch.isfinite(b) & ((a - b).abs() <= RELATIVE * b.abs())
    same = (a == b) | (torch.isnan(a) & torch.isnan(b)) | near
    return bool(same.all())
