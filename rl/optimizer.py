"""AdamW over fp32 weights, with bf16 copies to compute with where they are wanted; learning rates. Runs in the learner.

Weights of a large model take steps too small for bf16: 8 bits of mantissa can't hold w + 1e-6. So the optimiser owns
fp32 weights ("masters"). On one device the model's own parameters are then bf16 copies of them, refreshed once a step,
and each micro-batch's bf16 gradients are added up in fp32. With several ranks FSDP does the same (rl/distributed.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from rl.config import Optim
from rl.offload import OffloadedAdamW, host_zeros_like

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: int, total: int, peak: float, warmup: int = 0, schedule: Schedule = "constant", final_share: float = 0.0
) -> float:
    """The rate of `step` (from 0) of `total`: linear from peak / warmup to peak over the first `warmup` steps, then
    constant, or falling as a line or half a cosine, to reach final_share * peak at step `total`, one after the last."""
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    left = 1 - done if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return peak * (final_share + (1 - final_share) * left)


def make_optimizer(
    parameters: Sequence[torch.Tensor], config: Optim, lr: float, offload: bool = False
) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: decaying norms' gains and biases pulls them to 0 for nothing. offload:
    keep its moments in the host's memory (rl/offload.py).

    Its state exists at once, not from the first step on: a model that doesn't fit fails at the start, and a checkpoint
    has something to be loaded into.
    """
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = parameters[0].is_cuda
    kind, zeros = (OffloadedAdamW, host_zeros_like) if offload else (torch.optim.AdamW, torch.zeros_like)
    optimizer = kind(groups, lr=lr, betas=(config.beta1, config.beta2), fused=fused)
    for p in parameters:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device if fused and not offload else "cpu"),
            "exp_avg": zeros(p),
            "exp_avg_sq": zeros(p),
        }
    return optimizer


class Masters:
    """fp32 weights behind a model whose parameters become bf16. `weights` are what an optimiser steps."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Turns the parameters to bf16 (and no buffer: rotary frequencies in bf16 would blur positions)."""
        self.parameters = list(parameters)
        self.weights = [torch.nn.Parameter(p.detach().float()) for p in self.parameters]
        for p, weight in zip(self.parameters, self.weights):
            p.data = weight.data.bfloat16()
            p.register_post_accumulate_grad_hook(lambda p, weight=weight: _move_gradient(p, weight))

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights into the model, after they have changed."""
        torch._foreach_copy_(self.parameters, self.weights)


def _move_gradient(p: torch.Tensor, weight: torch.Tensor) -> None:
    """Add a micro-batch's bf16 gradient to the weight's fp32 one: bf16 sums would lose what small ones add."""
    if weight.grad is None:
        weight.grad = p.grad.float()
    else:
        weight.grad += p.grad
    p.grad = None
