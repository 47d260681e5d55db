"""Workers kept warm, shared by the lanes of an evaluator. Runs in the evaluator.

A worker's start and, on a GPU, its context take a while, and the driver makes contexts one by one: they are made ahead,
as many as are about to be needed and not more, since each holds 0.65 GB of the GPU's memory. They warm up while others
time: on an H200 that moved 36 us by less than 0.1 % and 6 us by one step of the timer.
"""

from __future__ import annotations

import threading
from collections import deque

from env.gate import DeviceGate
from env.rules import Rules
from env.session import Session
from env.wire import WireError
from env.worker import ForkServer, Worker, WorkerDied


class Spares:
    """`take` gives a fresh worker that is ready; another one starts warming in its place."""

    def __init__(self, server: ForkServer, rules: Rules, gate: DeviceGate, gpu: str = ""):
        self.server, self.rules, self.gate, self.gpu = server, rules, gate, gpu
        self._lock = threading.Lock()
        self._warming: deque[Worker] = deque()
        # Few at first: they warm up against each other, and the first job waits for two of them.
        self._fill(min(2, rules.spares))

    def _fill(self, count: int) -> None:
        while len(self._warming) < count:
            worker = self.server.fork()
            worker.post("warm", precision=self.rules.precision, gpu=self.gpu)
            self._warming.append(worker)
            self.gate.warms(worker)

    def take(self) -> Session:
        """Raises WireError, WorkerDied or WorkerTimeout where none can be made ready."""
        with self._lock:
            waiting = len(self._warming)
        for _ in range(waiting):
            try:
                return self._take()
            except WorkerDied:
                continue  # killed from outside while it waited, maybe all of them: the next one
        return self._take()

    def _take(self) -> Session:
        with self._lock:
            self._fill(1)
            worker = self._warming.popleft()
            self._fill(min(self.rules.spares, len(self._warming) + 2))
        self.gate.register(worker)
        reply = worker.collect(self.rules.compile_timeout_s)
        # It answered before it was taken; its channel closes before its context is gone and it can be seen to be dead.
        if worker.wire.readable(0.0) or not worker.alive():
            raise WorkerDied(worker.end(), "a warm worker was killed while it waited", outside=True)
        worker.isolation = reply.get("isolation", {})
        if reply.get("ok") is not True:
            worker.end()
            raise WireError(f"a worker could not be made ready: {reply.get('message')}")
        return Session(worker, self.server.device, self.gate, self.rules.run_timeout_s, self.rules.compile_timeout_s)

    def close(self, keep: int = 0) -> None:
        """End those that nobody took, all but the `keep` oldest."""
        with self._lock:
            while len(self._warming) > keep:
                self._warming.pop().end()
