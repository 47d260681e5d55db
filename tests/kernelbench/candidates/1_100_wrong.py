"""Wrong: the margins are squared, which is another loss (squared hinge)."""

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def hinge_rows(p_ptr, t_ptr, part_ptr, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, cols, BLOCK):
        c = start + tl.arange(0, BLOCK)
        mask = c < cols
        p = tl.load(p_ptr + row * cols + c, mask=mask, other=0.0)
        t = tl.load(t_ptr + c, mask=mask, other=0.0)
        margin = tl.maximum(1.0 - p * t, 0.0)
        total += tl.where(mask, margin * margin, 0.0)
    tl.store(part_ptr + row, tl.sum(total, axis=0))


@triton.jit
def scaled_sum(x_ptr, y_ptr, n, scale, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    tl.store(y_ptr, tl.sum(total, axis=0) * scale)


class ModelNew(nn.Module):
    def forward(self, predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        predictions, targets = predictions.contiguous(), targets.contiguous()
        rows, cols = predictions.shape
        partial = torch.empty(rows, device=predictions.device, dtype=torch.float32)
        mean = torch.empty((), device=predictions.device, dtype=torch.float32)
        hinge_rows[(rows,)](predictions, targets, partial, cols, BLOCK=4096, num_warps=8)
        scaled_sum[(1,)](partial, mean, rows, 1.0 / predictions.numel(), BLOCK=8192, num_warps=16)
        return mean
