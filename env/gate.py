"""Who may use the device now: many lanes load and check beside each other, one times alone.

Runs in the evaluator. Whoever touches the device from the judge's side does it inside the gate; being `alone` keeps all
other lanes out and stops (SIGSTOP) every worker that a lane uses but the two that are compared, so that nobody compiles
meanwhile. Those that only warm up go on (`env.spares`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from env.clocks import Clocks, open_clocks
from env.worker import Worker

QUIET_TIMEOUT_S = 2.0
PROBES = 3


class DeviceBusy(Exception):
    """Somebody that can't be stopped uses the GPU: no time that is measured now means anything."""


class DeviceGate:
    """Who is on the device: many at once (`with gate`), or one alone (`with gate.alone(workers)`).

    Turns alternate: whoever waits to be alone keeps newcomers out, and when that is over all who waited meanwhile come
    first. The thread that is alone passes freely.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._inside = 0
        self._waiting = 0
        # Visitors who wait at the door, and how many of them come before the next one who wants to be alone.
        self._outside = 0
        self._owed = 0
        self._round = 0
        self._owner: int | None = None
        self._list_lock = threading.Lock()
        self._workers: set[Worker] = set()
        self._warming: set[Worker] = set()
        self._allowed: list[Worker] | None = None
        self._held = False  # those that warm up stand still
        self._probe: Probe | None = None
        self._clocks: Clocks | None = None

    def __enter__(self) -> DeviceGate:
        with self._turn:
            if self._owner != threading.get_ident():
                arrived = self._round
                self._outside += 1
                while self._owner is not None or (self._waiting and self._round == arrived):
                    self._turn.wait()
                self._outside -= 1
                self._owed -= self._round > arrived and self._owed > 0
                self._inside += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._turn:
            if self._owner != threading.get_ident():
                self._inside -= 1
                self._turn.notify_all()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._turn:
            self._waiting += 1
            while self._owner is not None or self._inside or self._owed:
                self._turn.wait()
            self._waiting -= 1
            self._owner = threading.get_ident()
        try:
            yield
        finally:
            with self._turn:
                self._owner = None
                self._round += 1
                self._owed = self._outside
                self._turn.notify_all()

    def warms(self, worker: Worker) -> None:
        """Know a worker that warms up: only `driver_alone` stops it."""
        with self._list_lock:
            self._warming = {known for known in self._warming if not known.ended}
            self._warming.add(worker)
            if self._held:
                worker.pause()

    @contextmanager
    def driver_alone(self) -> Iterator[None]:
        """Hold those that warm up as well, for a moment: making a context holds a lock of the driver's for up to 80 ms
        at a time, which the profiler waits for. Only for who is alone.
        """
        with self._list_lock:
            self._held = True
            for worker in self._warming:
                worker.pause()
        try:
            yield
        finally:
            with self._list_lock:
                self._held = False
                for worker in self._warming:
                    worker.resume()

    def register(self, worker: Worker) -> None:
        """Know a worker that a lane takes up; while somebody times alone it waits until that is over."""
        with self._list_lock:
            self._warming.discard(worker)
            self._workers = {known for known in self._workers if not known.ended}
            self._workers.add(worker)
            if self._allowed is not None:
                worker.pause()

    @contextmanager
    def alone(self, allowed: list[Worker]) -> Iterator[float]:
        """Hold the device with only `allowed` running. Not to be entered from within the gate. Gives the time from
        which on it was held (time.perf_counter).
        """
        with self._alone():
            since = time.perf_counter()
            with self._list_lock:
                self._allowed = allowed
                for worker in self._workers:
                    if worker not in allowed and not worker.ended:
                        worker.pause()
            try:
                yield since
            finally:
                with self._list_lock:
                    self._allowed = None
                    for worker in self._workers:
                        worker.resume()

    def calibrate(self) -> None:
        """Learn how long a probe takes on a GPU that nobody uses, and where its clocks are read (at start)."""
        self._probe = Probe()
        self._clocks = open_clocks()

    def clocks(self) -> dict[str, Any] | None:
        """What the GPU runs at now; None where nobody can say."""
        return self._clocks.read() if self._clocks is not None else None

    def wait_until_quiet(self) -> None:
        """Wait until what stopped workers had queued is done. Raises DeviceBusy where that doesn't end.

        Contexts share a GPU by time slices: while another one works, a probe takes a multiple of its time.
        """
        if self._probe is None:
            return
        end = time.monotonic() + QUIET_TIMEOUT_S
        while not self._probe.quiet():
            if time.monotonic() > end:
                raise DeviceBusy("another process works on this GPU, which no worker of this evaluator is")
            time.sleep(0.001)


class Probe:
    """A little work of the judge's own, whose time says whether somebody else is on the GPU."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.buffer = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        self.buffer.zero_()
        self.usual_ms = sorted(self._run() for _ in range(20))[5]

    def _run(self) -> float:
        events = [self.torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for _ in range(4):
            self.buffer.zero_()
        events[1].record()
        events[1].synchronize()
        return events[0].elapsed_time(events[1])

    def quiet(self) -> bool:
        """Whether some probes in a row take about their usual time."""
        return all(self._run() < 1.4 * self.usual_ms + 0.02 for _ in range(PROBES))
