"""Who may use the device now: many lanes load and check beside each other, one times alone.

Runs in the evaluator. Holding the gate means that no other lane of this evaluator touches the device from the judge's
side; `alone` also stops (SIGSTOP) every worker but the two that are compared, so that nobody compiles or warms up
meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from env.worker import Worker

QUIET_TIMEOUT_S = 2.0
PROBES = 3


class DeviceBusy(Exception):
    """Somebody that can't be stopped uses the GPU: no time that is measured now means anything."""


class DeviceGate:
    """A re-entrant lock over one device and the list of workers that can be stopped for whoever holds it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._list_lock = threading.Lock()
        self._workers: set[Worker] = set()
        self._allowed: list[Worker] | None = None
        self._probe: Probe | None = None

    def __enter__(self) -> DeviceGate:
        self.lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def register(self, worker: Worker) -> None:
        """Know a new worker; one born while somebody times alone waits until that is over."""
        with self._list_lock:
            self._workers = {known for known in self._workers if not known.ended}
            self._workers.add(worker)
            if self._allowed is not None:
                worker.pause()

    @contextmanager
    def alone(self, allowed: list[Worker]) -> Iterator[None]:
        """Hold the device with only `allowed` running."""
        with self.lock:
            with self._list_lock:
                self._allowed = allowed
                for worker in self._workers:
                    if worker not in allowed and not worker.ended:
                        worker.pause()
            try:
                yield
            finally:
                with self._list_lock:
                    self._allowed = None
                    for worker in self._workers:
                        worker.resume()

    def calibrate(self) -> None:
        """Learn how long a probe takes on a GPU that nobody uses (at start)."""
        self._probe = Probe()

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
