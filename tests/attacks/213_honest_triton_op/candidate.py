import math
import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

@triton.jit
def k(x, o, n, B: tl.constexpr):
    offs = tl.program_id(0) * B + tl.arange(0, B)
    m = offs < n
    v = tl.load(x + offs, mask=m)
    tl.store(o + offs, tl.maximum(v * 2.0 + 1.0, 0.0), mask=m)
from torch.library import triton_op, wrap_triton
@triton_op('mine2::act', mutates_args={})
def act(x: torch.Tensor) -> torch.Tensor:
    o = torch.empty_like(x)
    wrap_triton(k)[(triton.cdiv(x.numel(), 1024),)](x, o, x.numel(), B=1024)
    return o
class ModelNew(nn.Module):
    def forward(self, x):
        return act(x)
