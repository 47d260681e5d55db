import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

@triton.jit
def swap(h_ptr, o_ptr, R, D: tl.constexpr):
    r = tl.program_id(0)
    d = tl.arange(0, D)
    tl.store(o_ptr + r * D + (d + D // 2) % D, tl.load(h_ptr + r * D + d))

@triton.jit
def attn(x_ptr, e_ptr, h_ptr, R: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    r = tl.program_id(0) * R + tl.arange(0, R)
    d = tl.arange(0, D); n = tl.arange(0, N)
    x = tl.load(x_ptr + r[:, None] * D + d[None, :])
    e = tl.load(e_ptr + n[:, None] * D + d[None, :])
    s = tl.dot(x, tl.trans(e), input_precision="ieee")
    p = tl.exp(s - tl.max(s, axis=1)[:, None])
    p = p / tl.sum(p, axis=1)[:, None]
    tl.store(h_ptr + r[:, None] * D + d[None, :], tl.dot(p, e, input_precision="ieee"))

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Parameter(torch.randn(64, 128))
    def forward(self, x):
        h = torch.empty_like(x); o = torch.empty_like(x)
        attn[(x.shape[0] // 32,)](x, self.emb, h, R=32, N=64, D=128)
        swap[(x.shape[0],)](h, o, x.shape[0], D=128)
        return o
