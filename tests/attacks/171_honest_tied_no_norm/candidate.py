import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

@triton.jit
def mlp(x_ptr, w_ptr, s_ptr, o_ptr, R: tl.constexpr, D: tl.constexpr):
    r = tl.program_id(0) * R + tl.arange(0, R)
    d = tl.arange(0, D)
    x = tl.load(x_ptr + r[:, None] * D + d[None, :])
    wt = tl.trans(tl.load(w_ptr + d[:, None] * D + d[None, :]))
    h = tl.maximum(tl.dot(x, wt, input_precision="ieee"), 0.0)
    y = tl.dot(h, wt, input_precision="ieee") * tl.load(s_ptr + d)[None, :]
    tl.store(o_ptr + r[:, None] * D + d[None, :], y)

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 64, bias=False)
        self.scale = nn.Parameter(torch.randn(64))
    def forward(self, x):
        o = torch.empty_like(x)
        mlp[(2,)](x, self.a.weight, self.scale, o, R=16, D=64)
        return o
