"""Wrong: the bias after the sigmoid is forgotten."""

import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl


@triton.jit
def epilogue(y_ptr, conv_bias_ptr, bias_ptr, channels, plane, BLOCK: tl.constexpr):
    which = tl.program_id(0).to(tl.int64)
    channel = which % channels
    c = tl.load(conv_bias_ptr + channel)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < plane
    x = tl.load(y_ptr + which * plane + offs, mask=mask, other=0.0)
    x = tl.maximum(x + c, 0.0)  # leaky ReLU changes nothing on what ReLU leaves
    x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    tl.store(y_ptr + which * plane + offs, tl.sigmoid(x), mask=mask)


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, bias_shape):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.bias = nn.Parameter(torch.randn(bias_shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.conv3d(x, self.conv.weight).contiguous()
        items, channels = y.shape[:2]
        plane = y[0, 0].numel()
        grid = (items * channels, triton.cdiv(plane, 4096))
        epilogue[grid](y, self.conv.bias, self.bias, channels, plane, BLOCK=4096, num_warps=8)
        return y
