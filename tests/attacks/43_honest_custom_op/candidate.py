import torch
import torch.nn as nn
import torch.nn.functional as F
import numpy as np
import triton
import triton.language as tl


@triton.jit
def copy_k(x_ptr, o_ptr, n, B: tl.constexpr):
    offs = tl.program_id(0) * B + tl.arange(0, B)
    m = offs < n
    tl.store(o_ptr + offs, tl.load(x_ptr + offs, mask=m), mask=m)


@triton.jit
def fill_k(o_ptr, n, B: tl.constexpr):
    offs = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o_ptr + offs, tl.full((B,), 1.0, tl.float32), mask=offs < n)


def tcopy(x):
    o = torch.empty_like(x)
    copy_k[(triton.cdiv(x.numel(), 4096),)](x, o, x.numel(), B=4096)
    return o


def ones_like(x):
    o = torch.empty_like(x)
    fill_k[(triton.cdiv(x.numel(), 4096),)](o, x.numel(), B=4096)
    return o


def work(x):
    x = torch.sigmoid(x)
    x = x * 2.0
    x = F.gelu(x)
    x = torch.tanh(x)
    x = x + 0.5
    x = F.silu(x)
    return x * x


@triton.jit
def fused_k(x_ptr, o_ptr, n, B: tl.constexpr):
    offs = tl.program_id(0) * B + tl.arange(0, B)
    m = offs < n
    v = tl.load(x_ptr + offs, mask=m)
    v = 2.0 / (1.0 + tl.exp(-v))
    v = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    v = 2.0 / (1.0 + tl.exp(-2.0 * v)) - 1.0 + 0.5
    v = v / (1.0 + tl.exp(-v))
    tl.store(o_ptr + offs, v * v, mask=m)


def fused(x):
    o = torch.empty_like(x)
    fused_k[(triton.cdiv(x.numel(), 4096),)](x, o, x.numel(), B=4096)
    return o


@torch.library.custom_op("honestns::fused", mutates_args=())
def fused_op(x: torch.Tensor) -> torch.Tensor:
    return fused(x)


@fused_op.register_fake
def _(x):
    return torch.empty_like(x)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return torch.ops.honestns.fused(x)
