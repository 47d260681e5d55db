"""A whole matrix product in Triton, in true fp32, with bias and ReLU in its epilogue.

cuBLAS does fp32 without tensor cores as fast as anyone: this one is here for its profiling ratio, not for its speed.
"""

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def linear_relu(x_ptr, w_ptr, b_ptr, y_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        x = tl.load(x_ptr + m[:, None].to(tl.int64) * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        w = tl.load(w_ptr + n[None, :].to(tl.int64) * K + k[:, None], mask=(n < N)[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    b = tl.load(b_ptr + n, mask=n < N, other=0.0)
    offs = m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(y_ptr + offs, tl.maximum(acc + b[None, :], 0.0), mask=(m < M)[:, None] & (n < N)[None, :])


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, bias_shape):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features, bias=False)
        self.bias = nn.Parameter(torch.randn(bias_shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, w = x.contiguous(), self.gemm.weight.contiguous()
        M, K = x.shape
        N = w.shape[0]
        y = torch.empty(M, N, device=x.device, dtype=x.dtype)
        grid = (triton.cdiv(M, 64), triton.cdiv(N, 128))
        linear_relu[grid](x, w, self.bias, y, M, N, K, BM=64, BN=128, BK=16, num_warps=8, num_stages=3)
        return y
