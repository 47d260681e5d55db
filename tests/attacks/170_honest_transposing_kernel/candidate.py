import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

@triton.jit
def relayout(h_ptr, o_ptr, s0, s1, C, B: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, B)
    tl.store(o_ptr + r * C + c, tl.load(h_ptr + r * s0 + c * s1, mask=c < C), mask=c < C)

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 64)
    def forward(self, x):
        h = self.qkv(x).t()
        o = torch.empty(h.shape, device=x.device)
        relayout[(h.shape[0],)](h, o, *h.stride(), h.shape[1], B=128)
        return o
