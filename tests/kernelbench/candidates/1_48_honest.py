"""Mean over the middle dimension: each program owns some columns of one batch item and walks down the rows."""

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def mean_middle(x_ptr, y_ptr, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    item = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, rows, ROWS):
        r = start + tl.arange(0, ROWS)
        mask = (r[:, None] < rows) & (c[None, :] < cols)
        offs = item * rows * cols + r[:, None].to(tl.int64) * cols + c[None, :]
        total += tl.load(x_ptr + offs, mask=mask, other=0.0)
    tl.store(y_ptr + item * cols + c, tl.sum(total, axis=0) / rows, mask=c < cols)


class ModelNew(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.movedim(self.dim, 1).contiguous()
        items, rows, cols = x.shape
        y = torch.empty(items, cols, device=x.device, dtype=x.dtype)
        mean_middle[(triton.cdiv(cols, 128), items)](x, y, rows, cols, ROWS=32, COLS=128, num_warps=8)
        return y
