"""What an engine is: prompts in, sampled tokens with their log-probs out. Runs in the driver.

The two seams of the system: `stream` (or `generate`) and `push`. Ids and log-probs leave an engine as they were sampled
and are never made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Sampling:
    """How to sample: at most `max_new_tokens`, from softmax(logits / temperature) cut to its top-p nucleus, until one
    of `stop_ids`. Raises ValueError for values that are no distribution; temperature 0 is refused, since a greedy
    choice has no log-prob to train on (a small temperature, say 1e-3, is as good as greedy)."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens = {self.max_new_tokens}; it must be at least 1")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature = {self.temperature}; it must be above 0 (nearly greedy: 0.001) and finite")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}; it must be above 0 and at most 1")


@dataclass(frozen=True)
class Completion:
    """A sampled answer. finish_reason: "stop" (its last id is a stop id) or "length".

    ids       [tokens]
    logprobs  [tokens]  natural log-probability of each id under the sampling distribution (after temperature and top-p)
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: str


class Engine(Protocol):
    """Samples from a policy."""

    def stream(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> Iterator[tuple[int, Completion]]:
        """Yield (index of the prompt, its completion) as each is finished, so that judging overlaps with sampling.

        seeds: one a prompt; a completion's random draws come from its own seed alone.
        """
        ...

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        """All completions, in the order of the prompts."""
        ...

    def push(self, model: torch.nn.Module) -> None:
        """Sample from these weights from now on."""
        ...


def in_order(stream: Iterator[tuple[int, Completion]]) -> list[Completion]:
    """A finished stream's completions in the order of the prompts."""
    return [completion for _, completion in sorted(stream, key=lambda pair: pair[0])]
