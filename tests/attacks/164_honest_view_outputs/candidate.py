import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

@triton.jit
def k(x_ptr, o_ptr, n, B: tl.constexpr):
    offs = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x_ptr + offs, mask=offs < n)
    tl.store(o_ptr + offs, tl.exp(-tl.abs(v) * 0.5), mask=offs < n)

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
    def forward(self, x):
        h = torch.empty_like(x)
        k[(32,)](x, h, x.numel(), B=1024)
        return {"h": h, "t": h.t(), "flat": h.view(-1), "half": h[:32]}
