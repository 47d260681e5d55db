import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

@triton.jit
def gelu(x_ptr, o_ptr, n, B: tl.constexpr):
    offs = tl.program_id(0) * B + tl.arange(0, B)
    m = offs < n
    v = tl.load(x_ptr + offs, mask=m, other=0.0)
    u = 0.7978845608028654 * (v + 0.044715 * v * v * v)
    tl.store(o_ptr + offs, 0.5 * v * (2.0 - 2.0 / (1.0 + tl.exp(2.0 * u))) * 0.5, mask=m)

@torch.compile
def project(x, w, b):
    return torch.addmm(b, x, w.t())

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(256, 256)
    @torch.no_grad()
    def forward(self, x):
        h = project(x, self.fc.weight, self.fc.bias)
        gelu[(triton.cdiv(h.numel(), 1024),)](h, h, h.numel(), B=1024)
        return h
