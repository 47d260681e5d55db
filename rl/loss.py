"""The policy loss: PPO's clipped surrogate, summed over a row's tokens, averaged over rows. Runs in the learner.

    L = - 1 / (rows * scale) * sum over rows i, tokens k of
            min(ratio * A_i, clip(ratio, 1 - clip_low, 1 + clip_high) * A_i),   ratio = pi_new(k) / pi_old(k)

`rows` counts every row with an advantage *before* MRS and PRS, over all micro-batches and ranks: a rejected row adds
nothing to the sum and keeps its place in the mean, so rejecting half the rows doesn't double the weight of the others.
The old policy is the learner before this update, so with one optimiser step a rollout step the ratio is 1, the clip is
idle and the gradient is A * grad log pi. No KL term, no entropy term.

`scale` is 1000 in the authors' code. AdamW alone would not notice a constant, but the clip of the gradient norm does:
it is idle while norms stay below it, and otherwise makes all steps equally long, those with little signal included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl.config import Loss


@dataclass(frozen=True)
class LossInput:
    """The tokens of one micro-batch, rows laid end to end.

    logprobs      [tokens]  under the weights being trained, with gradient
    old_logprobs  [tokens]  under the weights before the update, without
    advantages    [tokens]  the advantage of the row a token belongs to
    rows          the global denominator: rows with an advantage before rejection
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    rows: int


@dataclass(frozen=True)
class LossOutput:
    """`loss`: scalar to call backward on; `clipped`: tokens at which the clip acts; `tokens`: all tokens."""

    loss: torch.Tensor
    clipped: int
    tokens: int


def policy_loss(inputs: LossInput, config: Loss) -> LossOutput:
    """This micro-batch's part of the loss: parts of all micro-batches add up to L (module docstring)."""
    ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
    plain = ratio * inputs.advantages
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * inputs.advantages
    loss = -torch.minimum(plain, clipped).sum() / (inputs.rows * config.scale)
    return LossOutput(loss, int((clipped < plain).sum()), ratio.numel())
