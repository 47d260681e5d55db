"""A key-value cache in slots and the attention that reads it, for any Hugging Face model with full attention.

Shapes never change, so that a decode step can be captured as a CUDA graph (rl/engines/static.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import sdpa_mask

ATTENTION = "slots"


class SlotCache(Cache):
    """Keys and values of every slot, a [slots, kv heads, capacity, size] pair a layer. Each row writes at its own
    position, and attention sees the whole capacity under a mask."""

    def __init__(self, positions: torch.Tensor, capacity: int) -> None:
        """positions: [slots], where the next token of each row goes; the tensor is read at every update."""
        super().__init__(layers=[])
        self.positions, self.capacity = positions, capacity
        self.rows = torch.arange(len(positions), device=positions.device)
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple:
        """key, value: [slots, kv heads, 1, size] of the new tokens. Returns the layer's keys and values."""
        if layer_idx == len(self.pairs):
            # Zeros: what lies behind the mask is multiplied by 0, and NaN times 0 is NaN.
            self.pairs.append(tuple(new.new_zeros(*new.shape[:2], self.capacity, new.shape[3]) for new in (key, value)))
        for held, new in zip(self.pairs[layer_idx], (key, value)):
            held[self.rows, :, self.positions] = new[:, :, 0]
        return self.pairs[layer_idx]

    def fill(self, slots: torch.Tensor, layers: Sequence[Any]) -> None:
        """Take over a prefill: layers with `keys` and `values` [slots, kv heads, tokens, size]."""
        for held, layer in zip(self.pairs, layers, strict=True):
            for mine, new in zip(held, (layer.keys, layer.values)):
                mine[slots, :, : new.shape[2]] = new

    def grow(self, capacity: int) -> None:
        """Make room for longer rows."""
        room = capacity - self.capacity
        self.pairs = [tuple(torch.nn.functional.pad(t, (0, 0, 0, room)) for t in pair) for pair in self.pairs]
        self.capacity = capacity

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always given


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """One query a row: [rows, heads, 1, size] on [rows, kv heads, capacity, size] -> ([rows, 1, heads, size], None).

    The query heads that share a key head are taken as so many queries of it: no key is copied for every head.
    """
    rows, heads, _, size = query.shape
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    output = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(rows, 1, heads, -1), None


@contextlib.contextmanager
def using_attention(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """`slot_attention` inside a model that may be a learner's as well, for one call."""
    before = model.config._attn_implementation
    model.config._attn_implementation = ATTENTION
    try:
        with _kernels(device):
            yield
    finally:
        model.config._attn_implementation = before


def _kernels(device: torch.device) -> contextlib.AbstractContextManager:
    """Attention kernels that take a mask and can be captured; the choice is left to torch on a CPU."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


AttentionInterface.register(ATTENTION, slot_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
