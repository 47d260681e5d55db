"""The policy loss: PPO's clipped surrogate, summed over a row's tokens, averaged over rows. Runs in the learner.

    L = - 1 / (rows * scale) * sum over rows i, tokens k of  w(k) * objective(k)
    objective = min(ratio * A_i, clip(ratio, 1 - clip_low, 1 + clip_high) * A_i),   ratio = pi_new(k) / pi_old(k)

`rows` is one number for all micro-batches and ranks. With `loss.rows = "valid"` it counts every row with an advantage
*before* MRS and PRS: a rejected row adds nothing to the sum and keeps its place in the mean, so rejecting half the rows
doesn't double the weight of the others. With "kept" it counts the rows that are left, and does.
The old policy is the learner before this update, so with one optimiser step a rollout step the ratio is 1, the clip is
idle and the gradient is A * grad log pi. No KL term, no entropy term.

`dual_clip` (0: off) bounds the objective of a negative advantage from below at dual_clip * A: without it a token that
has become much likelier, and should not have, has a loss without bound (arXiv 1912.09729).
w(k) are optional truncated importance weights pi_old / pi_rollout (rl/rejection.py), constants to the gradient.

`scale` is 1000 in the authors' code. AdamW alone would not notice a constant, but the clip of the gradient norm does:
it is idle while norms stay below it, and otherwise makes all steps equally long, those with little signal included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rl.batch import Row
from rl.config import Loss


@dataclass(frozen=True)
class LossInput:
    """The tokens of one micro-batch, rows laid end to end.

    logprobs      [tokens]  under the weights being trained, with gradient
    old_logprobs  [tokens]  under the weights before the update, without
    advantages    [tokens]  the advantage of the row a token belongs to
    rows          the global denominator (`count_rows`)
    weights       [tokens]  importance weights; None: all 1
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    rows: int
    weights: torch.Tensor | None = None


@dataclass(frozen=True)
class LossOutput:
    """`loss`: scalar to call backward on; `clipped`: tokens at which a clip acts, on the device (reading it in the
    middle of a step would make the GPU wait); `tokens`: all tokens."""

    loss: torch.Tensor
    clipped: torch.Tensor
    tokens: int


def policy_loss(inputs: LossInput, config: Loss) -> LossOutput:
    """This micro-batch's part of the loss: parts of all micro-batches add up to L (module docstring)."""
    ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
    plain = ratio * inputs.advantages
    objective = torch.minimum(plain, ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * inputs.advantages)
    if config.dual_clip:
        bound = torch.where(inputs.advantages < 0, config.dual_clip * inputs.advantages, -torch.inf)
        objective = torch.maximum(objective, bound)
    clipped = (objective != plain).sum()
    if inputs.weights is not None:
        objective = inputs.weights * objective
    return LossOutput(-objective.sum() / (inputs.rows * config.scale), clipped, ratio.numel())


def count_rows(rows: Sequence[Row], config: Loss) -> int:
    """The loss's denominator: rows with an advantage, all of them ("valid") or those without a mask ("kept")."""
    return sum(row.advantage is not None and (config.rows == "valid" or not row.masks) for row in rows)


def kl_k3(learner: Sequence[torch.Tensor], rollout: Sequence[torch.Tensor]) -> float | None:
    """Estimate of KL(rollout || learner) in nats a token: mean of r - 1 - log r, r = pi_learner / pi_rollout.

    learner, rollout: [rows] of [completion tokens] log-probs. Unbiased, as tokens come from the rollout policy, and
    never negative (Schulman's k3). A metric, no part of the loss. None without a token.
    """
    pairs = [new.double() - old.double() for new, old in zip(learner, rollout, strict=True)]
    log_ratio = torch.cat([*pairs, torch.empty(0, dtype=torch.float64)])
    return (log_ratio.expm1() - log_ratio).mean().item() if log_ratio.numel() else None
