"""Linear by cuBLAS; swish, bias and group norm of several groups at once in one pass, in place."""

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def swish_bias_group_norm(
    y_ptr, bias_ptr, w_ptr, b_ptr, groups, size, eps, GROUPS: tl.constexpr, SIZE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    i = tl.arange(0, SIZE)
    mask = (g[:, None] < groups) & (i[None, :] < size)
    feature = g[:, None] * size + i[None, :]
    offs = row * groups * size + feature
    x = tl.load(y_ptr + offs, mask=mask, other=0.0)
    x = x * tl.sigmoid(x) + tl.load(bias_ptr + feature, mask=mask, other=0.0)
    x = tl.where(mask, x, 0.0)
    mean = tl.sum(x, axis=1) / size
    gap = tl.where(mask, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(gap * gap, axis=1) / size + eps)
    w = tl.load(w_ptr + feature, mask=mask, other=0.0)
    b = tl.load(b_ptr + feature, mask=mask, other=0.0)
    tl.store(y_ptr + offs, gap * rstd[:, None] * w + b, mask=mask)


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, num_groups, bias_shape):
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.group_norm = nn.GroupNorm(num_groups, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.matmul(x)
        norm = self.group_norm
        size = norm.num_channels // norm.num_groups
        at_once = 32
        grid = (y.shape[0], triton.cdiv(norm.num_groups, at_once))
        swish_bias_group_norm[grid](
            y, self.bias, norm.weight, norm.bias, norm.num_groups, size, norm.eps,
            GROUPS=at_once, SIZE=triton.next_power_of_2(size), num_warps=8,
        )
        return y
