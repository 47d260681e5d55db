import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

@triton.autotune(configs=[triton.Config({"B": b}, num_warps=w) for b, w in ((1024, 4), (2048, 8))], key=["n"])
@triton.heuristics({"EVEN": lambda a: a["n"] % a["B"] == 0})
@triton.jit
def k(x_ptr, o_ptr, n, B: tl.constexpr, EVEN: tl.constexpr):
    offs = tl.program_id(0) * B + tl.arange(0, B)
    if EVEN:
        v = tl.load(x_ptr + offs)
    else:
        v = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    v = v * 2.0 + 1.0
    v = tl.abs(v * tl.sigmoid(v))
    if EVEN:
        tl.store(o_ptr + offs, v)
    else:
        tl.store(o_ptr + offs, v, mask=offs < n)

class Inner(nn.Module):
    def forward(self, x):
        o = torch.empty_like(x)
        k[lambda meta: (triton.cdiv(x.numel(), meta["B"]),)](x, o, x.numel())
        return o

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Identity(), Inner())
        self.body.register_forward_pre_hook(lambda m, a: (a[0].contiguous(),))
        self.body[1].register_forward_hook(lambda m, a, out: out)
    def forward(self, x):
        return self.body(x)
