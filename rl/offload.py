"""AdamW whose moments are kept in the host's memory: half of what an optimiser takes of a GPU. Runs in the learner.

A step brings one parameter's moments to the GPU at a time, steps there, and takes them back: the same arithmetic, so
the same weights, and the GPU holds the moments of one parameter. What it costs is the way there and back, 16 bytes a
parameter and step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

MOMENTS = ("exp_avg", "exp_avg_sq")


class OffloadedAdamW(torch.optim.AdamW):
    """As torch.optim.AdamW; `state` holds tensors of the CPU alone (pinned, where the weights are on a GPU)."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One step from the weights' gradients. Raises ValueError for a closure: nothing here evaluates a loss."""
        if closure is not None:
            raise ValueError("OffloadedAdamW takes no closure")
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step_one(local(weight), local(weight.grad), self.state[weight], group)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # a checkpoint reads the moments next, and knows nothing of copies under way

    def _step_one(self, weight: torch.Tensor, grad: torch.Tensor, state: dict, group: dict) -> None:
        kept = [local(state[name]) for name in MOMENTS]
        moments = [moment.to(weight.device, non_blocking=True) for moment in kept]
        fused = weight.is_cuda
        step = state["step"].to(weight.device) if fused else state["step"]
        beta1, beta2 = group["betas"]
        adamw(
            [weight], [grad], moments[:1], moments[1:], [], [step], foreach=False, fused=fused, amsgrad=False,
            beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
            maximize=False,
        )  # fmt: skip
        if fused:
            state["step"].copy_(step)
            for place, moment in zip(kept, moments):
                place.copy_(moment, non_blocking=True)


def host_zeros_like(weight: torch.Tensor) -> torch.Tensor:
    """Zeros in the host's memory; of a sharded weight its shard, as a DTensor that a checkpoint can cut otherwise."""
    part = local(weight)
    zeros = torch.zeros(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
    if not isinstance(weight, DTensor):
        return zeros
    return DTensor.from_local(
        zeros, _host_mesh(weight.device_mesh), weight.placements, run_check=False, shape=weight.shape,
        stride=weight.stride(),
    )  # fmt: skip


@functools.cache
def _host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks, with tensors in the host's memory."""
    return init_device_mesh("cpu", (mesh.size(),))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a sharded tensor, which shares its memory; any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
