"""Causal attention over rows laid end to end, for any Hugging Face model that takes an attention function.

`use_packed_attention(model)` puts it in. A call that names where rows begin (`cu_seq_lens_q`, transformers' own name
for it) attends within rows only; any other call, sampling with a cache say, is ordinary SDPA. Nothing of size
[tokens, tokens] is made, and no kernel that must be installed apart is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rl.batch import Pack
from rl.config import ConfigError

NAME = "packed"


def use_packed_attention(model: torch.nn.Module) -> None:
    """Let `model` compute attention with `packed_attention`. Sampling from it stays as it was."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def arguments(pack: Pack) -> dict[str, Any]:
    """What the model's body is called with to compute a pack."""
    return {
        "input_ids": pack.input_ids,
        "position_ids": pack.position_ids,
        # transformers builds a [tokens, tokens] mask where it is given none, and leaves one of four dimensions alone.
        "attention_mask": torch.empty(1, 1, 1, 1, device=pack.input_ids.device),
        "use_cache": False,
        "cu_seq_lens_q": pack.starts,
        "cu_seq_lens_k": pack.starts,
        "max_length_q": pack.longest,
        "max_length_k": pack.longest,
    }


def short_window(who: str, window: int, length: str) -> str:
    """What is wrong with a model that attends to the last `window` tokens only. length: what is longer, in words."""
    return (
        f"{who} attends to the last {window} tokens only, {length}: lower model.context to {window}, or use a model "
        "without sliding windows"
    )


def capped(who: str, caps: Mapping[str, float]) -> str:
    """What is wrong with a model that soft-caps its attention scores or logits, as Gemma 2 does."""
    named = ", ".join(f"{key} = {value}" for key, value in caps.items())
    return (
        f"{who} soft-caps its attention scores or its logits ({named}), which the learner doesn't compute: its "
        "log-probs would be another model's. Use a model without soft-capping, e.g. Qwen3 or Llama"
    )


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Query [1, heads, tokens, size], key and value [1, kv heads, tokens, size] -> ([1, tokens, heads, size], None).

    Raises ConfigError for a model whose window is shorter than a row, or that soft-caps its scores.
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **others
        )
    if sliding_window is not None and sliding_window < max_length_q:
        raise ConfigError(short_window(type(module).__name__, sliding_window, f"a row has {max_length_q}"))
    if softcap is not None:
        raise ConfigError(capped(type(module).__name__, {"softcap": softcap}))
    size = query.shape[-1]
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and size % 8 == 0 and size <= 256:
        return _flash(query, key, value, scaling, cu_seq_lens_q, max_length_q), None
    return _row_by_row(query, key, value, scaling, cu_seq_lens_q.tolist()), None


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    starts: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """torch's own FlashAttention, whose public entry has another signature in every version; this one's is stable."""
    query, key, value = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    results = torch.ops.aten._flash_attention_forward(
        query, key, value, starts, starts, longest, longest, 0.0, True, False, scale=scaling
    )
    return results[0].unsqueeze(0)


def _row_by_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, starts: list[int]
) -> torch.Tensor:
    """A causal SDPA a row: what each row alone would give, to the bit."""
    grouped = query.shape[1] != key.shape[1]
    rows = [
        scaled_dot_product_attention(
            query[:, :, begin:end],
            key[:, :, begin:end],
            value[:, :, begin:end],
            is_causal=True,
            scale=scaling,
            enable_gqa=grouped,
        )
        for begin, end in itertools.pairwise(starts)
    ]
    return torch.cat(rows, dim=2).transpose(1, 2)
