"""How many bytes any program must move to make a reference's outputs of given inputs: what its gradient proves.

Runs in the reference's worker (CPU, where times are modelled from counts). The judge holds it against what a candidate
counted: who claims less did the work where nothing is counted. Every byte here is one that can't be left out, at the
price of missing some: an element is needed where it isn't zero and the output changes with it, as autograd has it. What
relu cuts off, integers and what has no gradient count for nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from env.state import tensors_of
from env.tensors import leaves, map_tensors


def needed_bytes(model: torch.nn.Module, arguments: list) -> tuple[int, list[int]]:
    """(bytes of the elements of inputs and weights that the outputs depend on, bytes of each output's own memory)."""
    weights = [value for value in tensors_of(model).values() if value.requires_grad]
    with torch.enable_grad():
        leaves_, lent = [], []

        def followed(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_floating_point():
                leaves_.append(tensor.detach().requires_grad_())
                tensor = leaves_[-1]
            lent.append(tensor.clone())  # which may be overwritten, as a leaf may not
            return lent[-1]

        made = _tensors(model(*map_tensors(arguments, followed)))
        try:
            read = _read_bytes(made, [*leaves_, *weights])
        except RuntimeError:  # an operator without a gradient, or one whose operands were overwritten
            read = 0
    return read, _written_bytes(made, [*lent, *weights])


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def _read_bytes(outputs: list[torch.Tensor], sources: list[torch.Tensor]) -> int:
    differentiable = [output for output in outputs if output.requires_grad]
    if not differentiable or not sources:
        return 0
    # Directions drawn at random: what a plain sum would cancel (a softmax's rows) shows.
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in differentiable]
    gradients = torch.autograd.grad(differentiable, sources, directions, allow_unused=True)
    total = 0
    for source, gradient in zip(sources, gradients):
        if gradient is not None:
            used = int(((gradient != 0) & (source.detach() != 0)).sum())
            total += min(used, _own_elements(source)) * source.element_size()
    return total


def _written_bytes(outputs: list[torch.Tensor], sources: list[torch.Tensor]) -> list[int]:
    """Views of what is there already cost nothing, an expanded tensor what it holds."""
    known = {source.untyped_storage().data_ptr() for source in sources}
    written = []
    for output in outputs:
        place = output.untyped_storage().data_ptr()
        written.append(0 if place in known else _own_elements(output) * output.element_size())
        known.add(place)
    return written


def _own_elements(tensor: torch.Tensor) -> int:
    return math.prod(size for size, step in zip(tensor.shape, tensor.stride()) if step)
