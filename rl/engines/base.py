"""What an engine is: requests in, sampled tokens with their log-probs out. Runs in the driver.

The two seams of the system: `stream` and `push`. Ids and log-probs leave an engine as they were sampled and are never
made again. `checked` stands at the seam: an engine that answers something else than it was asked is refused there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from rl.config import COLDEST, HOTTEST
from rl.records import FINISH_REASONS

NAMED = 5  # requests that a message lists


class EngineError(RuntimeError):
    """An engine that can't be asked, or that answered something that can't be used: what, and what to do."""


@dataclass(frozen=True)
class Sampling:
    """How to sample: from softmax(logits / temperature) cut to its top-p nucleus, until one of `stop_ids`,
    `max_new_tokens`, or until prompt and answer together fill `context` tokens (0: no such limit). vocabulary: ids are
    below it (0: not known).

    Raises ValueError for values that are no distribution; temperature 0 is refused, since a greedy choice has no
    log-prob to train on (a small temperature, say 1e-3, is as good as greedy).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    context: int = 0
    vocabulary: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens = {self.max_new_tokens}; it must be at least 1")
        if not COLDEST <= self.temperature <= HOTTEST:
            raise ValueError(f"temperature = {self.temperature}; it must be {COLDEST:g} (nearly greedy) to {HOTTEST:g}")
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
    of text. seed: the completion's random draws come from it alone. name: what a person knows it by, for messages."""

    key: int
    prompt: Sequence[Any]
    seed: int
    name: str = ""

    def __str__(self) -> str:
        return self.name or f"request {self.key}"


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
    return [found[i] for i in range(len(requests))]


class _Noted:
    """A Source that remembers what it handed out."""

    def __init__(self, source: Source) -> None:
        self._source, self.most = source, source.most
        self.asked: dict[int, Request] = {}

    def take(self, limit: int, wait: bool) -> list[Request]:
        taken = self._source.take(limit, wait)
        self.asked |= {request.key: request for request in taken}
        return taken


def checked(engine: Engine, source: Source, sampling: Sampling) -> Iterator[tuple[Request, Completion]]:
    """`engine.stream`, every completion checked: an answer to what was asked, one for each, its own prompt, one
    log-prob a token, an end that is one.

    Raises EngineError at the first that can't be used, and where the stream ends with requests unanswered: training on
    such answers would bias the gradient without a word.
    """
    noted, answered, engine_name = _Noted(source), set(), type(engine).__name__
    for given, completion in engine.stream(noted, sampling):
        request = noted.asked.get(given.key)
        if request is None:
            raise EngineError(f"{engine_name} answered {given}, which it was never asked")
        fault = "answered twice" if request.key in answered else ""
        if not fault and engine.takes == "ids":
            fault = _fault(request, completion, sampling)
        if fault:
            raise EngineError(f"{engine_name}, {request}: {fault}")
        answered.add(request.key)
        yield request, completion
    noted.take(source.most, wait=True)
    missing = [str(request) for key, request in sorted(noted.asked.items()) if key not in answered]
    if missing:
        named = "; ".join(missing[:NAMED]) + (f" and {len(missing) - NAMED} more" if len(missing) > NAMED else "")
        raise EngineError(
            f"{engine_name} ended after it had answered {len(answered)} of {len(noted.asked)} requests; without an "
            f"answer: {named}"
        )


def _fault(request: Request, completion: Completion, sampling: Sampling) -> str:
    """What is wrong with a completion; "" if nothing."""
    ids, logprobs, reason = completion.ids, completion.logprobs, completion.finish_reason
    if list(completion.prompt_ids or ()) != list(request.prompt):
        return (
            f"it was given {len(request.prompt)} prompt tokens and says that it answered "
            f"{len(completion.prompt_ids or ())} others; turn off whatever changes prompts there (prefix tokens, "
            "truncation)"
        )
    if not ids:
        return "an answer without a token; the least is the end token"
    strange = [token for token in ids if not _is_token(token, sampling.vocabulary)]
    if strange:
        below = f" below {sampling.vocabulary}" if sampling.vocabulary else ""
        return f"{strange[0]!r} is no token of the model's; an id is an integer from 0{below}"
    if logprobs is None:
        return "no log-probs; it must return one for every sampled token"
    if len(logprobs) != len(ids):
        return f"{len(ids)} tokens but {len(logprobs)} log-probs; it must return one for every sampled token"
    bad = [value for value in logprobs if not _is_logprob(value)]
    if bad:
        return f"{bad[0]!r} is no log-prob; a sampled token has a finite one, not above 0"
    limit = sampling.limit(len(request.prompt))
    if len(ids) > limit:
        return f"{len(ids)} tokens where {limit} were asked for"
    if reason not in FINISH_REASONS or (reason == "stop") != (ids[-1] in sampling.stop_ids):
        return f"finish reason {reason!r} and last token {ids[-1]} don't belong together; stop ids: {sampling.stop_ids}"
    if any(token in sampling.stop_ids for token in ids[:-1]):
        return "it went on behind a stop token"
    return ""


def _is_token(value: Any, vocabulary: int) -> bool:
    return type(value) is int and value >= 0 and (not vocabulary or value < vocabulary)


def _is_logprob(value: Any) -> bool:
    return isinstance(value, float | int) and math.isfinite(value) and value <= 1e-3  # rounding may leave it above 0
