"""Linear by cuBLAS; swish, halving, clamp and tanh in one pass, in place (the last clamp can't bind after tanh)."""

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def epilogue(y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    x = tl.load(y_ptr + offs, mask=mask, other=0.0)
    x = x * tl.sigmoid(x) * 0.5
    x = tl.minimum(tl.maximum(x, -1.0), 1.0)
    tl.store(y_ptr + offs, 2.0 * tl.sigmoid(2.0 * x) - 1.0, mask=mask)


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, bias=True):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.gemm(x)
        epilogue[(triton.cdiv(y.numel(), 2048),)](y, y.numel(), BLOCK=2048, num_warps=8)
        return y
