"""Timed calls on a GPU: one block at a time, in the worker.

Runs in the sandboxed process: its times are claims, which the judge bounds with its own clock (`env.measure`). A call:

    synchronise ── [sleep] ── copy fresh inputs ── flush L2 ── start ── forward ── end ── copy the outputs out

Inputs come behind what delays the stream, so that work on a stream which isn't joined reads the last call's inputs and
is wrong. Outputs are copied out as soon as the call has returned, so that work put off until later is wrong too.

`eager` is what a user sees and KernelBench reports: the flush gives the host a head start of its own length, what the
host needs beyond it is in the time. `device` puts a sleep in front that is longer than the host needs: the queue is
full when the start event passes, and the time is the device's alone.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from env import tensors

FLUSH_BYTES = 256 << 20  # several times the L2 cache of any GPU at hand
MIN_SLEEP_US, MAX_SLEEP_US = 60.0, 20_000.0
SLEEP_CYCLES_PER_US = 1950.0  # measured on an H200 at 1980 MHz; other clocks make the sleep somewhat longer or shorter


def shorten_autotuning() -> None:
    """Triton's autotuner benchmarks each configuration for 125 ms: 25 are enough, the judge measures the winner."""
    import functools

    import triton
    from triton.runtime import driver

    short = functools.partial(triton.testing.do_bench, warmup=5, rep=20)
    driver.active.get_benchmarker = lambda: short


class Bench:
    """What timed calls need in a worker: the flush buffer, the working copies of the inputs, bound CUDA calls."""

    def __init__(self) -> None:
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self.flush.zero_()
        torch.cuda._sleep(1000)
        self.work: torch.Tensor | None = None
        # Bound now: what foreign code replaces later isn't what is called here.
        self._event, self._synchronize, self._sleep = torch.cuda.Event, torch.cuda.synchronize, torch.cuda._sleep
        self._clock = time.perf_counter

    def _working_copies(self, stride: int) -> list[torch.Tensor]:
        """Two places to put inputs in turn, 256-byte aligned and apart from each other: no call sees the last one's
        addresses."""
        if self.work is None or self.work.numel() < 2 * stride + 4096:
            self.work = torch.empty(2 * stride + 4096, dtype=torch.uint8, device=self.flush.device)
        return [self.work[:stride], self.work[stride + 1024 : 2 * stride + 1024]]

    def block(self, model: Any, buffers: dict, request: dict) -> dict[str, Any]:
        """Run `request["calls"]`: [[set, mode], …]. Returns claimed times in microseconds and the host's own.

        request: layout (of one set), stride (bytes between sets in the buffer "sets"), slot (bytes between outputs in
        the buffer "outputs", 0: only the last is kept), sleep_us, cold, copies (whether inputs are copied before each
        call). In the reply `output_layouts[i]` says where call i's outputs lie, null where they weren't kept.
        """
        layout, stride, slot = request["layout"], request["stride"], request["slot"]
        sets, outputs_buffer = buffers["sets"].tensor, buffers["outputs"].tensor
        if request["copies"]:
            places = self._working_copies(stride)
            arguments = [tensors.unpack(layout, place) for place in places]
        cycles = int(request["sleep_us"] * SLEEP_CYCLES_PER_US)
        times_us: list[float] = []
        host_us: list[float] = []
        kept: list[Any] = []
        for number, (index, mode) in enumerate(request["calls"]):
            pristine = sets[index * stride : (index + 1) * stride]
            self._synchronize()
            if mode == "device":
                self._sleep(cycles)
            if request["copies"]:
                place = number % 2
                places[place].copy_(pristine)
                tree = arguments[place]
            else:
                tree = tensors.unpack(layout, pristine)
            call = list(tree) if isinstance(tree, (list, tuple)) else [tree]
            if request["cold"]:
                self.flush.zero_()
            start, end = self._event(enable_timing=True), self._event(enable_timing=True)
            before = self._clock()
            start.record()
            outputs = model(*call)
            end.record()
            host_us.append((self._clock() - before) * 1e6)
            kept.append(self._keep(outputs, outputs_buffer, number if slot else 0, slot))
            del outputs
            self._synchronize()
            times_us.append(start.elapsed_time(end) * 1000.0)
        return {"times_us": times_us, "host_us": host_us, "outputs": kept}

    @staticmethod
    def _keep(outputs: Any, buffer: torch.Tensor, number: int, slot: int) -> dict[str, Any] | None:
        with torch._C.DisableTorchFunctionSubclass():
            layout, held, nbytes = tensors.plan(outputs, keep_strides=False)
            place = buffer[number * slot :]
            if nbytes > (slot or place.numel()) or nbytes > place.numel():
                return {"layout": layout, "nbytes": nbytes, "packed": False}
            tensors.pack(layout, held, place)
        return {"layout": layout, "nbytes": nbytes, "packed": True}


def sleep_us(host_us: float) -> float:
    """How long the stream sleeps so that a call which takes the host that long is queued before it begins."""
    return min(max(1.5 * host_us + 20.0, MIN_SLEEP_US), MAX_SLEEP_US)


def aligned(nbytes: int) -> int:
    """Bytes rounded up to what keeps every set and every output aligned like torch's own allocations."""
    return math.ceil(nbytes / tensors.ALIGN) * tensors.ALIGN
