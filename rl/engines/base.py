"""What an engine is: requests in, sampled tokens with their log-probs out. Runs in the driver.

The two seams of the system: `stream` and `push`. Ids and log-probs leave an engine as they were sampled and are never
made again. `checked` stands at the seam: an engine that answers something else than it was asked is refused there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rl.records import FINISH_REASONS


class EngineError(RuntimeError):
    """An engine that can't be asked, or that answered something that can't be used: what, and what to do."""


@dataclass(frozen=True)
class Sampling:
    """How to sample: from softmax(logits / temperature) cut to its top-p nucleus, until one of `stop_ids`,
    `max_new_tokens`, or until prompt and answer together fill `context` tokens (0: no such limit).

    Raises ValueError for values that are no distribution; temperature 0 is refused, since a greedy choice has no
    log-prob to train on (a small temperature, say 1e-3, is as good as greedy).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    context: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens = {self.max_new_tokens}; it must be at least 1")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature = {self.temperature}; it must be above 0 (nearly greedy: 0.001) and finite")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}; it must be above 0 and at most 1")

    def limit(self, prompt_tokens: int) -> int:
        """The longest answer to a prompt. Raises ValueError where the context has no room for any."""
        limit = min(self.max_new_tokens, self.context - prompt_tokens) if self.context else self.max_new_tokens
        if limit < 1:
            raise ValueError(f"a prompt of {prompt_tokens} tokens leaves no room in a context of {self.context}")
        return limit

    def reason(self, last_id: int, limit: int) -> str:
        """Why an answer ended that ended with `last_id` (one of records.FINISH_REASONS)."""
        if last_id in self.stop_ids:
            return "stop"
        return "length" if limit == self.max_new_tokens else "context"


@dataclass(frozen=True)
class Request:
    """One prompt. key: the caller's own name for it. prompt: token ids, or messages ({"role", "content"}) for engines
    of text. seed: the completion's random draws come from it alone."""

    key: int
    prompt: Sequence[Any]
    seed: int


@dataclass(frozen=True)
class Completion:
    """A sampled answer.

    ids            [tokens]; [] from an engine of text
    logprobs       [tokens]  natural log-probability of each id under the sampling distribution (temperature and top-p)
    finish_reason  "stop" (its last id is a stop id), "length" (max_new_tokens) or "context" (no room left)
    prompt_ids     [prompt tokens]  what the engine was given, as it says itself
    text           the answer of an engine of text
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    prompt_ids: Sequence[int] = ()
    text: str = ""


class Source(Protocol):
    """Where an engine gets its requests, so that new ones can join those that are being answered."""

    most: int  # how many requests can be under way at once

    def take(self, limit: int, wait: bool) -> list[Request]:
        """At most `limit` requests that are ready. wait: don't return without one, unless no more will ever come."""
        ...


class Batch:
    """A Source of requests that are all there from the beginning."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._left = list(requests)
        self.most = len(self._left)

    def take(self, limit: int, wait: bool) -> list[Request]:
        taken, self._left = self._left[:limit], self._left[limit:]
        return taken


class Engine(Protocol):
    """Samples from a policy."""

    # "ids": prompts are token ids, answers come with log-probs. "messages": text in, text out; good for teachers and
    # evaluation, nothing to train on.
    takes: str

    def stream(self, source: Source, sampling: Sampling) -> Iterator[tuple[Request, Completion]]:
        """Yield each request with its completion as it is finished, so that judging overlaps with sampling, until the
        source has no more. Raises EngineError."""
        ...

    def push(self, model: torch.nn.Module) -> None:
        """Sample from these weights from now on."""
        ...


def generate(
    engine: Engine, prompts: Sequence[Sequence[Any]], sampling: Sampling, seeds: Sequence[int]
) -> list[Completion]:
    """All completions, in the order of the prompts. Raises ValueError where prompts and seeds differ in number."""
    if len(seeds) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts and {len(seeds)} seeds; each prompt needs its own")
    requests = [Request(i, prompt, seed) for i, (prompt, seed) in enumerate(zip(prompts, seeds))]
    found = {request.key: completion for request, completion in checked(engine, Batch(requests), sampling)}
    if len(found) != len(requests):
        raise EngineError(f"{type(engine).__name__} answered {len(found)} of {len(requests)} prompts")
    return [found[i] for i in range(len(requests))]


def checked(engine: Engine, source: Source, sampling: Sampling) -> Iterator[tuple[Request, Completion]]:
    """`engine.stream`, every completion checked: its own prompt, one log-prob a token, an end that is one.

    Raises EngineError at the first that can't be used: training on it would bias the gradient without a word.
    """
    answered: set[int] = set()
    for request, completion in engine.stream(source, sampling):
        fault = _fault(request, completion, sampling, answered) if engine.takes == "ids" else ""
        if fault:
            raise EngineError(f"{type(engine).__name__}, request {request.key}: {fault}")
        answered.add(request.key)
        yield request, completion


def _fault(request: Request, completion: Completion, sampling: Sampling, answered: Collection[int]) -> str:
    """What is wrong with a completion; "" if nothing."""
    ids, logprobs, reason = completion.ids, completion.logprobs, completion.finish_reason
    if request.key in answered:
        return "answered twice"
    if list(completion.prompt_ids) != list(request.prompt):
        return (
            f"it was given {len(request.prompt)} prompt tokens and says that it answered {len(completion.prompt_ids)} "
            "others; turn off whatever changes prompts there (prefix tokens, truncation)"
        )
    if not ids:
        return "an answer without a token; the least is the end token"
    if len(logprobs) != len(ids):
        return f"{len(ids)} tokens but {len(logprobs)} log-probs; it must return one for every sampled token"
    bad = [value for value in logprobs if not math.isfinite(value) or value > 1e-3]
    if bad:
        return f"{bad[0]} is no log-prob; a sampled token has a finite one, not above 0"
    limit = sampling.limit(len(request.prompt))
    if len(ids) > limit:
        return f"{len(ids)} tokens where {limit} were asked for"
    if reason not in FINISH_REASONS or (reason == "stop") != (ids[-1] in sampling.stop_ids):
        return f"finish reason {reason!r} and last token {ids[-1]} don't belong together; stop ids: {sampling.stop_ids}"
    if any(token in sampling.stop_ids for token in ids[:-1]):
        return "it went on behind a stop token"
    return ""
