"""The sum over outputs moves inside: sum_j x . w_j = x . (sum_j w_j). A matrix product becomes a column sum and a dot."""

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def column_sums(w_ptr, part_ptr, rows, cols, rows_each, ROWS: tl.constexpr, COLS: tl.constexpr):
    slice_id = tl.program_id(1)
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, rows_each, ROWS):
        within = start + tl.arange(0, ROWS)
        r = slice_id * rows_each + within
        mask = ((within < rows_each) & (r < rows))[:, None] & (c < cols)[None, :]
        total += tl.load(w_ptr + r[:, None].to(tl.int64) * cols + c[None, :], mask=mask, other=0.0)
    tl.store(part_ptr + slice_id * cols + c, tl.sum(total, axis=0), mask=c < cols)


@triton.jit
def add_slices(part_ptr, sum_ptr, slices, cols, COLS: tl.constexpr):
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([COLS], tl.float32)
    for s in range(0, slices):
        total += tl.load(part_ptr + s * cols + c, mask=c < cols, other=0.0)
    tl.store(sum_ptr + c, total, mask=c < cols)


@triton.jit
def row_dots(x_ptr, sum_ptr, y_ptr, cols, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, cols, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * cols + c, mask=c < cols, other=0.0)
        total += x * tl.load(sum_ptr + c, mask=c < cols, other=0.0)
    tl.store(y_ptr + row, tl.sum(total, axis=0) * scale)


class ModelNew(nn.Module):
    def __init__(self, input_size, hidden_size, scaling_factor):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden_size, input_size))
        self.scaling_factor = scaling_factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, w = x.contiguous(), self.weight.contiguous()
        rows, cols = w.shape
        rows_each = 256
        slices = triton.cdiv(rows, rows_each)
        parts = torch.empty(slices, cols, device=x.device, dtype=torch.float32)
        sums = torch.empty(cols, device=x.device, dtype=torch.float32)
        y = torch.empty(x.shape[0], 1, device=x.device, dtype=torch.float32)
        column_sums[(triton.cdiv(cols, 128), slices)](w, parts, rows, cols, rows_each, ROWS=32, COLS=128, num_warps=8)
        add_slices[(triton.cdiv(cols, 64),)](parts, sums, slices, cols, COLS=64, num_warps=2)
        row_dots[(x.shape[0],)](x, sums, y, cols, self.scaling_factor / 2.0, BLOCK=2048, num_warps=8)
        return y
