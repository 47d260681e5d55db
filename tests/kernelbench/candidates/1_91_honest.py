"""Reverse cumulative sum: blocks of a row from its end to its start, with the sum so far carried along."""

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def reverse_cumsum(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * n
    lanes = tl.arange(0, BLOCK)
    carry = 0.0
    blocks = tl.cdiv(n, BLOCK)
    for step in range(0, blocks):
        cols = (blocks - 1 - step) * BLOCK + lanes
        mask = cols < n
        x = tl.load(x_ptr + base + cols, mask=mask, other=0.0)
        y = tl.cumsum(x, axis=0, reverse=True) + carry
        tl.store(y_ptr + base + cols, y, mask=mask)
        carry += tl.sum(x, axis=0)


class ModelNew(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved = x.movedim(self.dim, -1).contiguous()
        y = torch.empty_like(moved)
        n = moved.shape[-1]
        reverse_cumsum[(moved.numel() // n,)](moved, y, n, BLOCK=4096, num_warps=8)
        return y.movedim(-1, self.dim)
