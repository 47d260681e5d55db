"""Does a kernel compute anything? One that changes nothing, or only copies a tensor to another, does not.

Runs in the worker, around the launches of one forward pass. It finds what taking kernels away can't: where torch does
the work and a kernel copies the result to the output, the output needs the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

MAX_BYTES = 1 << 30
# A copy that is slightly off is a copy.
RELATIVE = 1e-4


class Copies:
    """`around` each launch; `useful` then says of each own kernel by name whether a launch of it computed something."""

    def __init__(self) -> None:
        self.useful: dict[str, bool] = {}

    @contextmanager
    def around(self, name: str, own: bool, arguments: list[torch.Tensor]) -> Iterator[None]:
        known = self.useful.get(name, False)
        small = sum(tensor.nbytes for tensor in arguments) <= MAX_BYTES
        before = [tensor.detach().clone() for tensor in arguments] if own and small and not known else []
        yield
        if own:
            self.useful[name] = known or not small or computes(before, arguments)


def computes(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    """Whether any tensor [any shape] was changed to something that isn't the content of another one."""
    for number, (old, new) in enumerate(zip(before, after)):
        if not _same(old, new) and not any(_same(other, new) for i, other in enumerate(before) if i != number):
            return True
    return False


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal contents in reading order, whatever the shapes; NaN equals NaN."""
    if a.numel() != b.numel() or a.dtype != b.dtype:
        return False
    a, b = a.detach().reshape(-1), b.detach().reshape(-1)
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    a, b = a.double(), b.double()
    near = torch.isfinite(b) & ((a - b).abs() <= RELATIVE * b.abs())
    same = (a == b) | (torch.isnan(a) & torch.isnan(b)) | near
    return bool(same.all())
