"""Which rows the gradient leaves out or weighs: MRS, token veto, PRS, importance weights. Pure functions; the driver.

MRS (mismatch rejection sampling) drops rows whose tokens the learner finds more or less likely than the engine that
sampled them did; PRS (profiling-based rejection sampling) drops correct rows that do little of the work in Triton
(arXiv 2602.05885). A rejected row stays in the loss's denominator, and, unless `rejection.baseline` is "drop", in its
group's baseline: only its gradient goes, as in the authors' code.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence

import torch

from rl.config import Rejection


def geometric_weight(log_ratios: torch.Tensor) -> float:
    """w = exp(mean over tokens of log pi_learner - log pi_rollout). log_ratios: [tokens]; no tokens: 1."""
    return log_ratios.double().mean().exp().item() if log_ratios.numel() else 1.0


def mismatch_masks(
    learner: Sequence[torch.Tensor],
    rollout: Sequence[torch.Tensor],
    trajectories: Sequence[Hashable],
    config: Rejection,
) -> list[list[str]]:
    """For every row the reasons to reject it, of "mrs" and "veto"; [] keeps it.

    learner, rollout: [rows] of [completion tokens] log-probs, under the learner before its update and as sampled.
    trajectories: [rows], equal for the turns of one trajectory.
    mrs "sample": w of each row alone must lie in [mrs_low, mrs_high]; "trajectory": one w over all tokens of the
    trajectory's rows, which then stay or go together (the authors' public code). The veto rejects the same unit if any
    token has pi_learner / pi_rollout < token_veto; it holds with mrs "off" too.
    """
    ratios = [new.double() - old.double() for new, old in zip(learner, rollout, strict=True)]
    units: dict[Hashable, list[int]] = defaultdict(list)
    for row, trajectory in enumerate(trajectories):
        units[trajectory if config.mrs == "trajectory" else row].append(row)
    masks: list[list[str]] = [[] for _ in ratios]
    for rows in units.values():
        joined = torch.cat([ratios[row] for row in rows])
        reasons = []
        if config.mrs != "off" and not config.mrs_low <= geometric_weight(joined) <= config.mrs_high:
            reasons.append("mrs")
        if config.token_veto > 0 and joined.numel() and joined.min().item() < math.log(config.token_veto):
            reasons.append("veto")
        for row in rows:
            masks[row] = list(reasons)
    return masks


def importance_weights(
    learner: Sequence[torch.Tensor], rollout: Sequence[torch.Tensor], config: Rejection
) -> list[torch.Tensor] | None:
    """Truncated importance weights, [rows] of [completion tokens] float64; None with importance "off".

    The tokens come from the engine's distribution, the gradient is the learner's: pi_learner / pi_rollout corrects for
    it, at most `importance_cap`, which bounds the variance. "token": each token's own ratio (biased, since what came
    before it is taken as sampled). "sequence": the product over the answer, the same for all its tokens.
    learner, rollout: as in `mismatch_masks`.
    """
    if config.importance == "off":
        return None
    weights = []
    for new, old in zip(learner, rollout, strict=True):
        log_ratio = new.double() - old.double()
        if config.importance == "sequence":
            log_ratio = log_ratio.sum().expand_as(log_ratio)
        weights.append(log_ratio.exp().clamp(max=config.importance_cap))
    return weights


def importance_metrics(weights: Sequence[torch.Tensor] | None, config: Rejection) -> dict[str, float]:
    """Mean weight, and the share of tokens at the cap; {} without weights."""
    joined = torch.cat([*(weights or []), torch.empty(0, dtype=torch.float64)])
    if not joined.numel():
        return {}
    capped = (joined >= config.importance_cap).double().mean().item()
    return {"policy/importance_mean": joined.mean().item(), "policy/importance_capped": capped}


def prs_probability(profiling_ratio: float, config: Rejection) -> float:
    """The probability to keep a correct row: clip((PR - tau) / s, 0, 1); "hard": 1 iff PR >= tau; "off": 1."""
    if config.prs == "off":
        return 1.0
    if config.prs == "hard":
        return float(profiling_ratio >= config.prs_tau)
    return min(max((profiling_ratio - config.prs_tau) / config.prs_s, 0.0), 1.0)


def prs_rejects(correct: bool, profiling_ratio: float | None, draw: float, config: Rejection) -> bool:
    """Whether PRS drops a row. draw: uniform on [0, 1), the row's own.

    Take the draw from rl.seeding.uniform(seed, "prs", step, problem_id, sample_index, turn), so that a row's fate
    doesn't hang on the order of the batch. Rows that are not correct have no PR and are kept; so is a correct row whose
    PR was not measured, since missing evidence is no evidence of laziness.
    """
    if not correct or profiling_ratio is None:
        return False
    return draw >= prs_probability(profiling_ratio, config)


def mismatch_metrics(learner: Sequence[torch.Tensor], rollout: Sequence[torch.Tensor]) -> dict[str, float]:
    """Perplexity of the sampled tokens under either side and the mean absolute difference of their log-probs.

    learner, rollout: [rows] of [completion tokens] log-probs. Without a token: {}.
    """
    new, old = torch.cat([*learner, torch.empty(0)]).double(), torch.cat([*rollout, torch.empty(0)]).double()
    if not new.numel():
        return {}
    return {
        "policy/ppl_learner": (-new.mean()).exp().item(),
        "policy/ppl_rollout": (-old.mean()).exp().item(),
        "policy/logprob_gap": (new - old).abs().mean().item(),
    }
