"""Timed calls on a GPU: one block at a time, in the worker.

Runs in the sandboxed process: its times are claims, which the judge bounds with its own clock (`env.measure`). A block:

    sleep ─ spins ┬ copy fresh inputs ── flush L2 ── settle ── start ── forward ── end ── copy the outputs out
                  └ … the next call                                                          tail

Calls of a block follow each other without a wait between them: the host is as warm as in a program that is used, and
ahead of the device, so that work on a stream which isn't joined reads an earlier call's inputs and is wrong. Outputs
are copied out as soon as the call has returned, so that work put off until later is wrong too.

`eager` is what a user sees and KernelBench reports: the host has a head start of 110 us (the flush's 60 on an H200 and
a short sleep after it), as in a program that has other work queued; what it needs beyond (many small launches) is in
the time. For `device` the stream sleeps before the first call until the host has handed over all of them, and the time
is the device's alone. While the host hands over a later call, the one that runs takes up to 5 % longer (12 us; in a
pattern of four calls that each process has its own way: two processes with the same program were 1.6 % apart however
many calls there were, 0.9 % so). Where the host needs less than its head start, `eager` calls after such a sleep give
both times, and no others are made. What comes right before the start is the same in both: after a longer pause of the
memory a small kernel takes 8 % longer.
"""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from typing import Any

import torch

from env import tensors

# Written, then as much read elsewhere: each more than the L2 cache of any GPU at hand. After writing alone the cache is
# full of lines that the program's own misses have to write back first: 13.2 us instead of 11.6 for a small kernel on an
# H200, and a scatter between blocks of 3.0 % instead of 0.45 (in a pattern of four blocks that all processes share).
FLUSH_BYTES = 128 << 20
# Timed spins of a fixed length at a block's start: how much longer than others this process finds everything. On an
# H200 that is up to 0.15 us, the same for as long as the process lives, for a spin as for any kernel.
SPINS, SPIN_US = 8, 8.0
# Empty launches behind the last call: with nothing queued behind it a call is 0.6 to 0.9 us quicker.
TAIL = 16
MAX_PLACES, PLACES_BYTES = 8, 512 << 20
SETTLE_US, MAX_SLEEP_US = 50.0, 60_000.0
# What the host may need for a program and still be ahead of the GPU: the flush takes 60 us on an H200, the settling 50.
HEAD_START_US = 95.0
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
        self.clean = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
        self.sink = torch.zeros((), dtype=torch.float32, device="cuda")
        self._sum = torch.sum
        self.cool()
        torch.cuda._sleep(1000)
        self.work: torch.Tensor | None = None
        # Made once: making one may wait for the driver's lock, which other processes' contexts hold for milliseconds.
        self.events: list[tuple[Any, Any]] = []
        self.spins: list[tuple[Any, Any]] = []
        # Bound now: what foreign code replaces later isn't what is called here.
        self._event, self._synchronize, self._sleep = torch.cuda.Event, torch.cuda.synchronize, torch.cuda._sleep
        self._clock, self._current_stream = time.perf_counter, torch.cuda.current_stream

    def cool(self) -> None:
        """Fill the L2 cache with lines that nobody needs and nobody has to write back."""
        self.flush.zero_()
        self._sum(self.clean, dim=0, out=self.sink)

    def _spin(self, stream: Any) -> None:
        """Time some spins of the same length, each behind one that isn't timed."""
        while len(self.spins) < SPINS:
            self.spins.append((self._event(enable_timing=True), self._event(enable_timing=True)))
        cycles = int(SPIN_US * SLEEP_CYCLES_PER_US)
        for start, end in self.spins:
            self._sleep(cycles)
            start.record(stream)
            self._sleep(cycles)
            end.record(stream)

    def _working_copies(self, stride: int) -> list[torch.Tensor]:
        """Places to put inputs in turn, 256-byte aligned and apart from each other: no call sees the last one's
        addresses, and what a physical page's distance from a core costs (2 % of a small kernel's time, for as long as
        its process lives) averages out.
        """
        count = max(2, min(MAX_PLACES, PLACES_BYTES // stride))
        apart = stride + 1024
        if self.work is None or self.work.numel() < count * apart:
            self.work = torch.empty(count * apart, dtype=torch.uint8, device=self.flush.device)
        return [self.work[i * apart : i * apart + stride] for i in range(count)]

    def block(self, model: Any, buffers: dict, request: dict) -> dict[str, Any]:
        """Run `request["calls"]`: [[set, mode], …]. Returns claimed times in microseconds and the host's own.

        request: layout (of one set), stride (bytes between sets in the buffer "sets"), slot (bytes between outputs in
        the buffer "outputs", 0: only the last is kept), sleep_us (by mode, before its first call), cold, copies (are
        inputs copied before each call), alive (outputs of earlier calls that are kept), lead (calls at the start that
        don't count).
        The reply: times_us, spin_us (of SPINS spins, where the calls are cold), host_us (of a whole call on the host),
        forward_us (of the program on the host), and how the outputs lie: call i's as layouts[which[i]].
        """
        layout, stride, slot = request["layout"], request["stride"], request["slot"]
        sets, outputs_buffer = buffers["sets"].tensor, buffers["outputs"].tensor
        calls, lead, cold = request["calls"], request["lead"], request["cold"]
        places = self._working_copies(stride) if request["copies"] else []
        pristine = {index: sets[index * stride : (index + 1) * stride] for index, _ in calls}
        arguments = {
            place: tensors.call_arguments(layout, memory)
            for place, memory in (enumerate(places) if places else pristine.items())
        }
        ahead = {mode: int(us * SLEEP_CYCLES_PER_US) for mode, us in request["sleep_us"].items()}
        settle = int(SETTLE_US * SLEEP_CYCLES_PER_US)
        while len(self.events) < len(calls):
            self.events.append((self._event(enable_timing=True), self._event(enable_timing=True)))
        keeper = _Keeper(outputs_buffer, slot, len(calls))
        host_us: list[float] = []
        forward_us: list[float] = []
        # Outputs that stay alive for some calls make the program's allocator hand out other places as well.
        alive: deque[Any] = deque(maxlen=request["alive"])
        # All that can be worked out beforehand is: a call costs the host 60 us instead of 150, of which the GPU waits.
        stream, cool, sleep, clock = self._current_stream(), self.cool, self._sleep, self._clock
        gc.disable()
        self._synchronize()
        for number, (index, mode) in enumerate(calls):
            before = clock()
            if number == 0 or mode != calls[number - 1][1]:
                sleep(ahead[mode])
                if number == 0 and cold:
                    self._spin(stream)
            if places:
                place = number % len(places)
                places[place].copy_(pristine[index])
                call = arguments[place]
            else:
                call = arguments[index]
            if cold:
                cool()
                sleep(settle)
            start, end = self.events[number]
            start.record(stream)
            called = clock()
            outputs = model(*call)
            forward_us.append((clock() - called) * 1e6)
            end.record(stream)
            keeper.keep(outputs, number)
            alive.append(outputs)
            del outputs
            host_us.append((clock() - before) * 1e6)
        for _ in range(TAIL):
            sleep(1)
        self._synchronize()
        gc.enable()
        times_us = [start.elapsed_time(end) * 1000.0 for start, end in self.events[: len(calls)]]
        # Short, since writing and reading it takes time in which the GPU waits.
        return {
            "times_us": [round(t, 3) for t in times_us[lead:]],
            "spin_us": [round(start.elapsed_time(end) * 1000.0, 3) for start, end in self.spins] if cold else [],
            "host_us": [round(t, 1) for t in host_us[lead:]],
            "forward_us": [round(t, 1) for t in forward_us[lead:]],
            "layouts": keeper.layouts,
            "which": keeper.kept[lead:],
        }


_DETACH = torch.Tensor.detach


class _Keeper:
    """Copies each call's outputs to its slot of the judge's buffer, in stream order."""

    def __init__(self, buffer: torch.Tensor, slot: int, calls: int):
        self.buffer, self.slot, self.calls = buffer, slot, calls
        self.layouts: list[dict[str, Any]] = []
        self.kept: list[int] = []  # by call: which of the layouts
        # What the last plain tensor looked like, and which layout that is.
        self._look: tuple[Any, ...] | None = None
        self._known = 0
        self._targets: list[torch.Tensor] = []

    def keep(self, outputs: Any, number: int) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            if type(outputs) is torch.Tensor and self._look == (outputs.shape, outputs.dtype, outputs.device):
                self._targets[number].copy_(_DETACH(outputs))
                self.kept.append(self._known)
                return
            place = self.buffer[number * self.slot :]
            layout, held, nbytes = tensors.plan(outputs, keep_strides=False)
            fits = nbytes <= min(self.slot or place.numel(), place.numel())
            if fits:
                tensors.pack(layout, held, place)
            reply = {"layout": layout, "nbytes": nbytes, "packed": fits}
            if reply not in self.layouts:
                self.layouts.append(reply)
            self._known = self.layouts.index(reply)
            self.kept.append(self._known)
            if type(outputs) is torch.Tensor and fits:
                # Laid out anew only where it looks otherwise: planning takes longer than many a kernel.
                self._look = (outputs.shape, outputs.dtype, outputs.device)
                self._targets = [tensors.view(layout, self.buffer[i * self.slot :]) for i in range(self.calls)]


def sleep_us(host_us: float, calls: int, headroom: float = 1.25) -> float:
    """How long the stream sleeps before `calls` calls in a row, so that the host, which needs `host_us` for each, has
    handed over all of them before the first one starts. headroom: how much slower than that it may be.
    """
    return min(headroom * host_us * calls, MAX_SLEEP_US)


def aligned(nbytes: int) -> int:
    """Bytes rounded up to what keeps every set and every output aligned like torch's own allocations."""
    return math.ceil(nbytes / tensors.ALIGN) * tensors.ALIGN
