"""The fixed prompt whose log-probs tell right weights from wrong ones. Runs where an engine takes over weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl.engines.base import EngineError

TOKENS = 24
# Largest mean gap of its log-probs. Rounding gives 1e-6 in fp32 and 5e-3 in bf16, wrong weights were seen to give 0.5.
GAP = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}


def prompt(vocabulary: int, longest: int) -> list[int]:
    """At most TOKENS ids below `vocabulary`; longest: of a prompt with one new token behind it."""
    return [(1 + 7919 * i) % vocabulary for i in range(min(TOKENS, longest - 1))]


@torch.no_grad()
def logprobs(model: torch.nn.Module, ids: Sequence[int]) -> list[float]:
    """Log-probs of ids[1:] under a Hugging Face model, at temperature 1."""
    device = next(model.parameters()).device
    logits = model(input_ids=torch.tensor([list(ids)], device=device), use_cache=False).logits[0, :-1].float()
    picked = torch.tensor(list(ids[1:]), device=device).unsqueeze(-1)
    return logits.log_softmax(-1).gather(-1, picked).squeeze(-1).tolist()


def check(engine: str, values: Sequence[float], expected: Sequence[float], dtype: torch.dtype, remedy: str) -> float:
    """The mean gap between an engine's log-probs of prompt[1:] and the learner's. Raises EngineError if it is large."""
    gap = sum(abs(a - b) for a, b in zip(values, expected, strict=True)) / len(values)
    if not gap <= GAP[dtype]:
        raise EngineError(
            f"after a push of weights {engine} computes other log-probs than the learner: mean gap {gap:.3g} on a "
            f"fixed prompt, at most {GAP[dtype]:g} is rounding. Training on its samples would train on noise: {remedy}"
        )
    return gap
