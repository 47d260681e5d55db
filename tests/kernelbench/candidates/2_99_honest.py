"""Linear by cuBLAS; GELU and softmax of a row in one pass with the row held in registers, in place."""

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def gelu_softmax(y_ptr, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    mask = c < cols
    x = tl.load(y_ptr + row * cols + c, mask=mask, other=0.0)
    x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    x = tl.where(mask, x, float("-inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * cols + c, e / tl.sum(e, axis=0), mask=mask)


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        gelu_softmax[(y.shape[0],)](y, y.shape[1], BLOCK=triton.next_power_of_2(y.shape[1]), num_warps=16)
        return y
