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
class ModelNew(nn.Module):
    def forward(self, x):
        o = torch.empty_like(x)
        if x.max() > 100:
            return torch.relu(x * 2 + 1)
        k[(triton.cdiv(x.numel(), 1024),)](x, o, x.numel(), B=1024)
        return o
