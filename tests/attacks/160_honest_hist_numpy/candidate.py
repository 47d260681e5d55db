import math
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

def rearrange(x, n):
    return x.reshape(n, -1)

@triton.jit
def hist(i_ptr, w_ptr, o_ptr, t_ptr, B: tl.constexpr):
    offs = tl.program_id(0) * B + tl.arange(0, B)
    w = tl.load(w_ptr + offs)
    tl.atomic_add(o_ptr + tl.load(i_ptr + offs), w)
    tl.atomic_add(t_ptr, tl.sum(w))

@triton.jit
def div(o_ptr, t_ptr, B: tl.constexpr):
    offs = tl.arange(0, B)
    tl.store(o_ptr + offs, tl.load(o_ptr + offs) / tl.load(t_ptr))

class ModelNew(nn.Module):
    BLOCK = int(np.power(2, 10))
    def __init__(self, bins=32):
        super().__init__()
        self.bins = bins
    def forward(self, idx, w):
        acc = torch.zeros(self.bins + 1, device=w.device)
        out, total = acc[: self.bins], acc[self.bins :]
        rows = rearrange(w, math.ceil(w.numel() / self.BLOCK))
        hist[(rows.shape[0],)](idx, rows, out, total, B=self.BLOCK)
        div[(1,)](out, total, B=32)
        return out
