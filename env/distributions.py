"""Inputs that `get_inputs` would draw from another distribution: other signs, heavier tails.

Runs in the reference's worker. Only the random draws inside `get_inputs` are changed, never what is made of them, so
that index, mask and triangular inputs stay what they are. Cheap tricks live on tame inputs: a float16 product of
positive numbers averages its rounding out, a mean of many values is about zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

DISTRIBUTIONS = ("plain", "wide")
_RANDN_LIKE = torch.randn_like


def _signed(draw: torch.Tensor) -> torch.Tensor:
    """[0, 1) to [-1, 1)."""
    return draw * 2 - 1


def _heavy(draw: torch.Tensor) -> torch.Tensor:
    """A normal draw times a log-normal one: about one element in a thousand beyond 10, none beyond exp()'s range."""
    if not draw.is_floating_point():
        return draw
    return draw * torch.exp(0.5 * _RANDN_LIKE(draw))


@contextmanager
def drawing(distribution: str) -> Iterator[None]:
    """While active, torch.rand and torch.randn (and their `_like` forms) draw from that distribution."""
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"unknown distribution {distribution!r}: use one of {', '.join(DISTRIBUTIONS)}")
    if distribution == "plain":
        yield
        return
    changes = {"rand": _signed, "rand_like": _signed, "randn": _heavy, "randn_like": _heavy}
    originals = {name: getattr(torch, name) for name in changes}
    for name, change in changes.items():
        setattr(torch, name, _then(originals[name], change))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


def _then(draw: Callable[..., torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    return lambda *args, **kwargs: change(draw(*args, **kwargs))
