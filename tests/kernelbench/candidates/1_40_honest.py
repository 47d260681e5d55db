"""Layer norm over very long rows: many programs a row gather (mean, M2) of their chunk, then all normalise.

Eager PyTorch gives each row to one thread block; with 16 rows most of the GPU idles.
"""

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def chunk_stats(x_ptr, mean_ptr, m2_ptr, n, parts, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    cols = part * CHUNK + tl.arange(0, CHUNK)
    mask = cols < n
    x = tl.load(x_ptr + row * n + cols, mask=mask, other=0.0)
    count = tl.minimum(n - part * CHUNK, CHUNK).to(tl.float32)
    mean = tl.sum(x, axis=0) / count
    gap = tl.where(mask, x - mean, 0.0)
    tl.store(mean_ptr + row * parts + part, mean)
    tl.store(m2_ptr + row * parts + part, tl.sum(gap * gap, axis=0))


@triton.jit
def normalise(x_ptr, w_ptr, b_ptr, mean_ptr, m2_ptr, y_ptr, n, parts, eps, CHUNK: tl.constexpr, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, PARTS)
    live = ids < parts
    counts = tl.where(live, tl.minimum(n - ids * CHUNK, CHUNK), 0).to(tl.float32)
    means = tl.load(mean_ptr + row * parts + ids, mask=live, other=0.0)
    m2s = tl.load(m2_ptr + row * parts + ids, mask=live, other=0.0)
    mean = tl.sum(means * counts, axis=0) / n
    shift = means - mean
    var = tl.sum(m2s + counts * shift * shift, axis=0) / n
    rstd = 1.0 / tl.sqrt(var + eps)

    cols = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = cols < n
    x = tl.load(x_ptr + row * n + cols, mask=mask, other=0.0)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0)
    b = tl.load(b_ptr + cols, mask=mask, other=0.0)
    tl.store(y_ptr + row * n + cols, (x - mean) * rstd * w + b, mask=mask)


class ModelNew(nn.Module):
    def __init__(self, normalized_shape: tuple):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape=normalized_shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        n = self.ln.weight.numel()
        rows = x.numel() // n
        chunk = 8192
        parts = triton.cdiv(n, chunk)
        means = torch.empty(rows, parts, device=x.device, dtype=torch.float32)
        m2s = torch.empty_like(means)
        y = torch.empty_like(x)
        # Rows vary fastest, so that neighbours in time share their slice of weight and bias in the L2 cache.
        grid = (rows, parts)
        chunk_stats[grid](x, means, m2s, n, parts, CHUNK=chunk, num_warps=8)
        normalise[grid](
            x, self.ln.weight, self.ln.bias, means, m2s, y, n, parts, self.ln.eps,
            CHUNK=chunk, PARTS=triton.next_power_of_2(parts), num_warps=8,
        )
        return y
