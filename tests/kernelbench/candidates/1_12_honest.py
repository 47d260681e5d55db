"""Product with a diagonal matrix: every row times its own number. One pass, as in PyTorch: no gain to be had."""

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def scale_rows(a_ptr, b_ptr, y_ptr, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    a = tl.load(a_ptr + row)
    for start in range(0, cols, BLOCK):
        c = start + tl.arange(0, BLOCK)
        b = tl.load(b_ptr + row * cols + c, mask=c < cols, other=0.0)
        tl.store(y_ptr + row * cols + c, a * b, mask=c < cols)


class ModelNew(nn.Module):
    def forward(self, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        A, B = A.contiguous(), B.contiguous()
        y = torch.empty_like(B)
        scale_rows[(B.shape[0],)](A, B, y, B.shape[1], BLOCK=2048, num_warps=8)
        return y
