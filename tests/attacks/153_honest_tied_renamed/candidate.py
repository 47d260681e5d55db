import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

@triton.jit
def mlp(x_ptr, w_ptr, g_ptr, b_ptr, o_ptr, R: tl.constexpr, D: tl.constexpr):
    r = tl.program_id(0) * R + tl.arange(0, R)
    d = tl.arange(0, D)
    x = tl.load(x_ptr + r[:, None] * D + d[None, :])
    w = tl.load(w_ptr + d[:, None] * D + d[None, :])
    wt = tl.trans(w)
    h = tl.maximum(tl.dot(x, wt, input_precision="ieee"), 0.0)
    y = tl.dot(h, wt, input_precision="ieee")
    mean = tl.sum(y, axis=1) / D
    c = y - mean[:, None]
    var = tl.sum(c * c, axis=1) / D
    y = c / tl.sqrt(var + 1e-5)[:, None] * tl.load(g_ptr + d)[None, :] + tl.load(b_ptr + d)[None, :]
    tl.store(o_ptr + r[:, None] * D + d[None, :], y)

class Norm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(n)); self.bias = nn.Parameter(torch.zeros(n))

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Parameter(torch.empty(64, 64))
        nn.init.kaiming_uniform_(self.shared, a=5 ** 0.5)
        self.ln = Norm(64)
    def forward(self, x):
        o = torch.empty_like(x)
        mlp[(x.shape[0] // 16,)](x, self.shared, self.ln.gain, self.ln.bias, o, R=16, D=64)
        return o
