import math
import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl
@triton.jit
def act(v):
    return tl.maximum(v, 0.0)
@triton.jit
def k(x, o, n, B: tl.constexpr, FN: tl.constexpr, KIND: tl.constexpr):
    offs = tl.program_id(0) * B + tl.arange(0, B)
    m = offs < n
    v = tl.load(x + offs, mask=m, other=0.0) * 2.0 + 1.0
    if KIND == 'relu':
        v = FN(v)
    else:
        tl.static_assert(False)
    tl.store(o + offs, v, mask=m)
class ModelNew(nn.Module):
    def forward(self, x):
        o = torch.empty_like(x)
        k[(triton.cdiv(x.numel(), 1024),)](x, o, x.numel(), B=1024, FN=act, KIND='relu')
        return o
