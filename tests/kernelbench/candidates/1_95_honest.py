"""Cross entropy: one program a row, nothing of [batch, classes] size is written."""

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def row_loss(x_ptr, target_ptr, loss_ptr, classes, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * classes + cols, mask=cols < classes, other=float("-inf"))
    top = tl.max(x, axis=0)
    log_sum = tl.log(tl.sum(tl.exp(x - top), axis=0)) + top
    target = tl.load(target_ptr + row)
    tl.store(loss_ptr + row, log_sum - tl.load(x_ptr + row * classes + target))


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
        rows, classes = predictions.shape
        losses = torch.empty(rows, device=predictions.device, dtype=torch.float32)
        mean = torch.empty((), device=predictions.device, dtype=torch.float32)
        row_loss[(rows,)](predictions, targets, losses, classes, BLOCK=triton.next_power_of_2(classes), num_warps=8)
        scaled_sum[(1,)](losses, mean, rows, 1.0 / rows, BLOCK=8192, num_warps=16)
        return mean
