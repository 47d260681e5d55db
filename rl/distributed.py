"""One process or several: what the training stages need of torch.distributed. Runs in every rank.

Started by torchrun, each rank runs the same program on its own device. Every function here also works, and does
nothing, in a process that torchrun did not start.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

# The other ranks wait this long for rank 0 to sample and judge a step.
PATIENCE = datetime.timedelta(hours=6)


def start(device: str) -> torch.device:
    """Join torchrun's process group, if there is one, and return this rank's device. device: "cpu" or "cuda"."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return torch.device(device)
    local = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device("cpu")
    if local.type == "cuda":
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        # Both: objects travel over gloo, so that no rank spins on its GPU while rank 0 samples on the others' behalf.
        dist.init_process_group("cpu:gloo,cuda:nccl" if local.type == "cuda" else "gloo", timeout=PATIENCE)
    return local


def stop() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def world() -> int:
    """Number of ranks; 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def first() -> bool:
    """Whether this is the rank that samples, judges and writes files."""
    return rank() == 0


def broadcast(value: Any) -> Any:
    """Rank 0's value, on every rank. Anything that pickles."""
    if world() == 1:
        return value
    box = [value if first() else None]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def gather(value: Any) -> list[Any]:
    """Every rank's value, on every rank, in the order of ranks."""
    if world() == 1:
        return [value]
    values: list[Any] = [None] * world()
    dist.all_gather_object(values, value)
    return values


def agree(action: Any) -> Any:
    """The result of rank 0's `action()`, on every rank. Where it raises, all ranks raise: none is left waiting."""
    result, error = None, None
    if first():
        try:
            result = action()
        except Exception as raised:
            if world() == 1:
                raise
            error = raised
    result, message = broadcast((result, None if error is None else f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    if message is not None:
        raise RankError(f"rank 0 failed: {message}")
    return result


class RankError(RuntimeError):
    """Another rank failed, and this one can't go on without it."""


def shard(policy: torch.nn.Module, layers: Sequence[torch.nn.Module], device: torch.device, bf16: bool) -> None:
    """Split the policy's fp32 parameters over all ranks, layer by layer (FSDP2); compute in bf16 if wanted.

    What belongs to no layer (embedding, head, last norm) is one unit more, so a head tied to the embedding stays one
    parameter. Gradients are reduced in fp32.
    """
    mesh = init_device_mesh(device.type, (world(),))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32)
    for module in (*layers, policy):
        fully_shard(module, mesh=mesh, mp_policy=precision)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor put together (all ranks must ask for it); any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
