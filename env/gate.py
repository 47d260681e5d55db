"""Who may use the device now: many lanes load and check beside each other, one times alone.

Runs in the evaluator. Holding the gate means that no other lane of this evaluator touches the device from the judge's
side; `alone` also stops (SIGSTOP) every worker but the two that are compared, so that nobody compiles or warms up
meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from env.worker import Worker


class DeviceGate:
    """A re-entrant lock over one device and the list of workers that can be stopped for whoever holds it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._list_lock = threading.Lock()
        self._workers: set[Worker] = set()
        self._allowed: list[Worker] | None = None

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
