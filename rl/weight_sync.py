"""The learner's present weights into the engines, tensor after tensor. Runs in every rank, after each update.

A model that is sharded over the ranks is never whole anywhere: each parameter is cast to what the engine computes in,
put together on all ranks at once, handed over and dropped, before the next. An engine that fails doesn't leave the
other ranks waiting: its rank takes part to the end, and then all raise, with the cause.
"""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from rl import distributed
from rl.batch import Row
from rl.engines.base import Engine, EngineError
from rl.learner import Learner


class TakesNamed(Protocol):
    """What an engine with weights of its own offers (rl/engines/vllm.py), and the way to one in another process
    (rl/rollout_link.py)."""

    dtype: torch.dtype

    def probe(self) -> list[int]: ...

    def push_named(self, weights: Iterator[tuple[str, torch.Tensor]], expected: list[float]) -> None: ...


def push(learner: Learner, engine: Engine | TakesNamed | None) -> float:
    """Let `engine` sample from the learner's present weights; returns the seconds that it took.

    All ranks must call it, those without an engine too. Raises EngineError where an engine failed or holds other
    weights than the learner's, RankError on the other ranks, and where one doesn't take part in time.
    """
    begun = time.perf_counter()
    if learner.config.engine.name == "hf" and learner.config.placement.kind == "colocated":
        model = learner.plain_model()
        if engine is not None:
            engine.push(model)
    else:
        _push_named(learner, engine)
    return time.perf_counter() - begun


def _push_named(learner: Learner, engine: TakesNamed | None) -> None:
    group = _group(learner.config.engine.push_timeout_s)
    # The first rank that has an engine says for which prompt log-probs are compared, and what it computes in.
    asked = _gather((engine.probe(), engine.dtype) if engine is not None else None, group)
    probe, dtype = next(entry for entry in asked if entry is not None)
    expected = probe_logprobs(learner, probe)
    weights = named_weights(learner, dtype, group)
    error: EngineError | None = None
    if engine is not None:
        try:
            engine.push_named(weights, expected)
        except EngineError as raised:
            error = raised
    for _ in weights:
        pass  # without an engine, or with one that gave up: the others need this rank's shards
    failures = _gather(str(error) if error else None, group)
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise distributed.RankError(f"the engine of rank {rank} failed: {failure}")


def named_weights(
    learner: Learner, dtype: torch.dtype, group: dist.ProcessGroup | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor in `dtype`) of every parameter that trains, tied ones once. All ranks must take all of them.

    Raises RankError where a rank doesn't take part within the group's timeout.
    """
    for name, weight in zip(learner.names, learner.weights):
        yield name, whole(weight.detach(), dtype, group, name)


def whole(weight: torch.Tensor, dtype: torch.dtype, group: dist.ProcessGroup | None, name: str = "") -> torch.Tensor:
    """A parameter put together from all ranks' shards, in `dtype`; one that isn't sharded, in `dtype`.

    As DTensor.full_tensor, with two differences: it is cast before it travels, and it waits no longer than the group's
    timeout. FSDP2 shards along the first dimension, ceil(rows / ranks) rows a rank until there are none left.
    """
    if not isinstance(weight, DTensor):
        return weight.to(dtype)
    if list(weight.placements) != [Shard(0)]:
        raise ValueError(f"{name} is laid out as {weight.placements}, not sharded by FSDP2 along its first dimension")
    ranks = weight.device_mesh.size()
    rows = -(-weight.shape[0] // ranks)
    local = weight.to_local().to(dtype)
    if len(local) < rows:
        local = torch.cat([local, local.new_zeros(rows - len(local), *weight.shape[1:])])
    gathered = local.new_empty(rows * ranks, *weight.shape[1:])
    try:
        dist.all_gather_into_tensor(gathered, local.contiguous(), group=group)
    except RuntimeError as error:
        raise _late(name, error) from error
    return gathered[: weight.shape[0]]


def probe_logprobs(learner: Learner, probe: list[int]) -> list[float]:
    """Log-probs of probe[1:] under the learner's present weights at temperature 1, on all ranks."""
    row = Row(probe, 1, [0.0] * (len(probe) - 1))
    kept, learner.policy.temperature = learner.policy.temperature, 1.0
    try:
        (values,) = learner.logprobs([row])
    finally:
        learner.policy.temperature = kept
    return values.tolist()


def _group(timeout_s: float) -> dist.ProcessGroup | None:
    """A group of all ranks that waits no longer than this; the default one must have the patience for a rollout."""
    return _new_group(timeout_s) if distributed.world() > 1 else None


@functools.cache
def _new_group(timeout_s: float) -> dist.ProcessGroup:
    return dist.new_group(timeout=datetime.timedelta(seconds=timeout_s), backend=dist.get_backend_config())


def _gather(value: object, group: dist.ProcessGroup | None) -> list:
    """Every rank's value, on every rank."""
    if group is None:
        return [value]
    values: list = [None] * distributed.world()
    try:
        dist.all_gather_object(values, value, group=group)
    except RuntimeError as error:
        raise _late("", error) from error
    return values


def _late(name: str, error: Exception) -> distributed.RankError:
    at = f" at {name}" if name else ""
    reason = str(error).strip().partition("\n")[0][:200]
    return distributed.RankError(
        f"handing over weights stopped{at}: another rank is gone, or took longer than engine.push_timeout_s "
        f"({reason}). The first rank that complained says why; run the same command again to go on from the newest "
        "checkpoint"
    )
