"""Triton kernels for rl/logprobs.py: one pass over the logits where torch takes several, and no fp32 copy of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS = 4096


@triton.jit
def _statistics_kernel(
    logits, targets, normalisers, logprobs, entropies, greedy, columns, stride, scale, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    # Each lane goes over its own columns. Not from -inf: a lane without columns would compute -inf - -inf.
    largest = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)  # sum of exp(x - largest)
    weighted = tl.zeros([BLOCK], tl.float32)  # sum of (x - largest) * exp(x - largest)
    for begin in range(0, columns, BLOCK):
        mask = begin + offsets < columns
        x = tl.load(logits + row * stride + begin + offsets, mask=mask, other=0.0).to(tl.float32) * scale
        above = tl.where(mask, tl.maximum(largest, x), largest)
        grown = tl.where(mask, tl.exp(x - above), 0.0)
        down = largest - above
        weighted = tl.exp(down) * (weighted + down * total) + grown * (x - above)
        total = tl.exp(down) * total + grown
        largest = above
    top = tl.max(largest, axis=0)
    down = largest - top
    mass = tl.sum(tl.exp(down) * total, axis=0)
    normaliser = top + tl.log(mass)
    entropy = tl.log(mass) - tl.sum(tl.exp(down) * (weighted + down * total), axis=0) / mass
    chosen = tl.load(logits + row * stride + tl.load(targets + row)).to(tl.float32) * scale
    tl.store(normalisers + row, normaliser)
    tl.store(logprobs + row, chosen - normaliser)
    tl.store(entropies + row, entropy)
    tl.store(greedy + row, (chosen >= top).to(tl.int8))


@triton.jit
def _gradient_kernel(logits, targets, normalisers, gradients, columns, stride, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    place = logits + row * stride + column
    x = tl.load(place, mask=mask, other=0.0).to(tl.float32) * scale
    probability = tl.exp(x - tl.load(normalisers + row))
    one_hot = tl.where(column == tl.load(targets + row), 1.0, 0.0)
    value = (one_hot - probability) * tl.load(gradients + row) * scale
    tl.store(place, value.to(logits.dtype.element_ty), mask=mask)


def statistics(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, ...]:
    """(logsumexp, log-prob of the target, entropy, whether the target has the largest logit) of logits / temperature.

    logits [rows, columns], contiguous rows; targets [rows]. Each result [rows].
    """
    rows, columns = logits.shape
    values = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    greedy = torch.empty(rows, dtype=torch.int8, device=logits.device)
    if rows:
        _statistics_kernel[(rows,)](
            logits, targets, *values, greedy, columns, logits.stride(0), 1.0 / temperature, BLOCK=COLUMNS, num_warps=8
        )
    return *values, greedy.bool()


def logits_gradient_(
    logits: torch.Tensor, targets: torch.Tensor, normaliser: torch.Tensor, gradient: torch.Tensor, temperature: float
) -> None:
    """logits[i, j] = gradient[i] / temperature * ((j == targets[i]) - softmax(logits / temperature)[i, j]), in place,
    for a block of columns; targets count from the block's first column and may lie outside it."""
    rows, columns = logits.shape
    if rows:
        _gradient_kernel[(rows, triton.cdiv(columns, COLUMNS))](
            logits,
            targets,
            normaliser,
            gradient.contiguous(),
            columns,
            logits.stride(0),
            1.0 / temperature,
            BLOCK=COLUMNS,
            num_warps=8,
        )
