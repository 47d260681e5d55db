from __future__ import annotations
import functools, logging, math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Final
import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

log = logging.getLogger(__name__)
if TYPE_CHECKING:
    from torch import Tensor

@dataclass(frozen=True)
class Launch:
    block: int = 256
    warps: Final[int] = 4
    def grid(self, rows: int) -> tuple[int]:
        return (rows,)

@functools.lru_cache(maxsize=None)
def plan(cols: int) -> Launch:
    log.warning("plan for %d", cols)
    return Launch(block=triton.next_power_of_2(cols))

@triton.jit
def tanh(v):
    return 2.0 / (1.0 + tl.exp(-2.0 * v)) - 1.0

@triton.jit
def fused(x_ptr, w0, w1, w2, s_ptr, o_ptr, sum_ptr, C, B: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, B)
    m = c < C
    v = tl.load(x_ptr + r * C + c, mask=m, other=0.0)
    s = tl.load(s_ptr + c, mask=m, other=0.0)
    v = tanh(v * tl.load(w0 + c, mask=m, other=0.0) + s)
    v = tanh(v * tl.load(w1 + c, mask=m, other=0.0) + s)
    v = tanh(v * tl.load(w2 + c, mask=m, other=0.0) + s)
    tl.store(o_ptr + r * C + c, v, mask=m)
    tl.store(sum_ptr + r, tl.sum(tl.where(m, v, 0.0)))

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.ws = nn.ParameterList([nn.Parameter(torch.randn(256)) for _ in range(3)])
        self.register_buffer("shift", torch.ones(256))
        self._seen = 0
    @property
    def weights(self):
        return list(self.ws)
    def forward(self, x: Tensor) -> dict:
        self._seen += 1
        cfg = plan(x.shape[1])
        h = torch.empty_like(x); s = x.new_empty(x.shape[0])
        fused[cfg.grid(x.shape[0])](x, *self.weights, self.shift, h, s, x.shape[1], B=cfg.block)
        return {"h": h, "stats": (s, h.shape[0])}
