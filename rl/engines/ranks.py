"""All ranks' engines as one: requests that rank 0 takes are dealt over the ranks, answers come back to it.

Runs in every rank of torchrun where each has an engine of its own (vLLM). Rank 0 alone asks the source, judges and
writes, as with one engine; meanwhile the other ranks `serve`. Made for phases: a batch of requests is dealt when it is
there, and new ones wait until the slowest rank has answered its share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from rl import distributed
from rl.engines.base import Batch, Completion, EngineError, Request, Sampling, Source, checked


class RankEngine:
    """This rank's `own` engine, and on rank 0 everybody's."""

    takes = "ids"

    def __init__(self, own: Any) -> None:
        self.own = own
        self.dtype: torch.dtype = own.dtype

    def stream(self, source: Source, sampling: Sampling) -> Iterator[tuple[Request, Completion]]:
        """As an Engine's; on rank 0, while all other ranks are in `serve`. Raises EngineError if any engine fails."""
        while requests := source.take(source.most, wait=True):
            # Neighbours have equal prompts (samples of one problem): striped, every rank gets some of each length.
            shares = [requests[rank :: distributed.world()] for rank in range(distributed.world())]
            distributed.broadcast((shares, sampling))
            for rank, (answers, failure) in enumerate(distributed.gather(self._answer(shares[0], sampling))):
                if failure:
                    raise EngineError(f"the engine of rank {rank}: {failure}")
                yield from zip(shares[rank], answers, strict=True)

    def serve(self) -> None:
        """Answer this rank's share of every batch, until rank 0 has no more."""
        while (task := distributed.broadcast(None)) is not None:
            shares, sampling = task
            distributed.gather(self._answer(shares[distributed.rank()], sampling))

    def _answer(self, share: Sequence[Request], sampling: Sampling) -> tuple[list[Completion], str]:
        """Completions in the order of requests, or why there are none: then the others must hear of it."""
        try:
            found = {request.key: completion for request, completion in checked(self.own, Batch(share), sampling)}
            return [found[request.key] for request in share], ""
        except Exception as error:
            return [], f"{type(error).__name__}: {error}"

    def sleep(self) -> None:
        self.own.sleep()

    def probe(self) -> list[int]:
        return self.own.probe()

    def push_named(self, weights: Iterator[tuple[str, torch.Tensor]], expected: Sequence[float]) -> None:
        self.own.push_named(weights, expected)


def together(engine: Any, action: Callable[[], Any]) -> Any:
    """Rank 0's `action()`, which samples from `engine`, while the other ranks serve it; the result on every rank.

    Where it raises, all ranks raise. With any other engine it is distributed.agree.
    """
    if not isinstance(engine, RankEngine) or distributed.world() == 1:
        return distributed.agree(action)
    if not distributed.first():
        engine.serve()
        return distributed.agree(action)

    def served() -> Any:
        try:
            return action()
        finally:
            distributed.broadcast(None)

    return distributed.agree(served)
