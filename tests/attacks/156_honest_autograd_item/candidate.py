import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

@triton.jit
def fwd(x_ptr, o_ptr, s, B: tl.constexpr):
    offs = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + offs)
    t = 2.0 / (1.0 + tl.exp(-2.0 * x * s)) - 1.0
    tl.store(o_ptr + offs, t * s + x)

@triton.jit
def bwd(x_ptr, g_ptr, dx_ptr, s, B: tl.constexpr):
    offs = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + offs)
    t = 2.0 / (1.0 + tl.exp(-2.0 * x * s)) - 1.0
    tl.store(dx_ptr + offs, tl.load(g_ptr + offs) * ((1 - t * t) * s * s + 1.0))

class Fn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        s = scale.item()
        ctx.save_for_backward(x); ctx.s = s
        o = torch.empty_like(x)
        fwd[(x.numel() // 1024,)](x, o, s, B=1024)
        return o
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        bwd[(x.numel() // 1024,)](x, g.contiguous(), dx, ctx.s, B=1024)
        return dx, None

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
    def forward(self, x):
        return Fn.apply(x, self.scale)
