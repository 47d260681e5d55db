"""Conv2d by cuDNN without its bias; bias, both subtractions and Mish in one pass, in place."""

import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl


@triton.jit
def epilogue(y_ptr, bias_ptr, first, second, channels, plane, BLOCK: tl.constexpr):
    which = tl.program_id(0).to(tl.int64)
    shift = tl.load(bias_ptr + which % channels) - first - second
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < plane
    x = tl.load(y_ptr + which * plane + offs, mask=mask, other=0.0) + shift
    # tanh(log(1 + e)) = (e^2 + 2 e) / (e^2 + 2 e + 2); beyond 20 it is 1 in fp32 and e^2 must not overflow.
    e = tl.exp(tl.minimum(x, 20.0))
    top = e * (e + 2.0)
    tl.store(y_ptr + which * plane + offs, tl.where(x > 20.0, x, x * top / (top + 2.0)), mask=mask)


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, subtract_value_1, subtract_value_2):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.subtract_value_1 = subtract_value_1
        self.subtract_value_2 = subtract_value_2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.conv2d(x, self.conv.weight).contiguous()
        items, channels = y.shape[:2]
        plane = y[0, 0].numel()
        grid = (items * channels, triton.cdiv(plane, 4096))
        epilogue[grid](
            y, self.conv.bias, float(self.subtract_value_1), float(self.subtract_value_2), channels, plane,
            BLOCK=4096, num_warps=8,
        )
        return y
