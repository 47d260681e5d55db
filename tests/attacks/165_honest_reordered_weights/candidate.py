import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

@triton.jit
def k(x_ptr, w_ptr, a_ptr, o_ptr, C: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, C)
    v = tl.load(x_ptr + r * C + c) * tl.load(w_ptr + r * C + c) + tl.load(a_ptr + c)
    tl.store(o_ptr + r * C + c, tl.maximum(v, 0.0))

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias_first_dim = 512
        self.weight = nn.Parameter(torch.randn(64, 512))
        self.bias = nn.Parameter(torch.ones(512))
    def forward(self, x):
        o = torch.empty_like(x)
        k[(64,)](x, self.weight, self.bias, o, C=512)
        return o
