"""Drawing a token from logits, the same way in every engine of ours. Pure functions on tensors of any device.

Every draw is an inverse-CDF lookup of a uniform number that belongs to (the sequence's seed, the position), so the
company that a sequence is decoded in changes its tokens only where rounding moves a boundary of the CDF over the draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def uniform_table(seeds: Sequence[int], count: int) -> torch.Tensor:
    """[seeds, count] float64 draws from [0, 1): row i is a function of seeds[i] alone."""
    return torch.stack(
        [torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in seeds]
    )


def sample(
    logits: torch.Tensor, draws: torch.Tensor, temperature: float, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [rows], log-probs [rows] fp32): the token where the CDF of each row passes its draw.

    logits [rows, vocabulary], draws [rows] from [0, 1). With top_p < 1 the distribution is cut to the smallest set of
    most likely tokens that holds top_p, and the log-prob is under the cut, renormalised distribution.
    """
    logprobs = (logits.float() / temperature).log_softmax(-1)
    if top_p < 1:
        ordered, where = torch.sort(logprobs, dim=-1, descending=True, stable=True)
        probabilities = ordered.double().exp()
        outside = (probabilities.cumsum(-1) - probabilities) >= top_p  # never the first
        logprobs = logprobs.masked_fill(outside.gather(-1, where.argsort(-1)), -torch.inf).log_softmax(-1)
    cdf = logprobs.double().exp().cumsum(-1)
    total = cdf[:, -1:]
    # The draw times the total may round up to the total, beyond which there is no token.
    target = torch.minimum(draws.unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
    # right: the first token whose CDF is above the target, so one of probability 0 is never chosen.
    tokens = torch.searchsorted(cdf, target, right=True)
    return tokens.squeeze(-1), logprobs.gather(-1, tokens).squeeze(-1)
