"""Between the store and the pool: what was accepted is judged in its order, and who waits is told.

Runs in the driver, in a thread of its own. Only some work at a time is in the pool's hands, the rest waits on the disk.
A verdict that the disk would not take is kept and offered again; a pool that is closing gives work back, which then
waits for the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import sys
import threading
import time
from collections import deque
from concurrent.futures import CancelledError, Future
from typing import Any, Protocol

from env.pool import PoolError
from env.records import Problem, Verdict
from env.store import Question, Receipt, State, Store

LOW_DISK_BYTES = 256 << 20
FORGET_EVERY_S = 3600.0
TICK_S = 0.5
RECENT = 256  # verdicts that the rate is taken from


class Judging(Protocol):
    """What the front needs of a pool; env.pool.Pool has it, and so has any other behind the same three verbs."""

    info: dict[str, Any]

    def submit(self, problem: Problem, response: str, raw: bool = True) -> Future: ...

    def close(self) -> None: ...

    def __len__(self) -> int: ...


class Stopping(Exception):
    """The server ends; what was accepted is on the disk and is judged after the next start."""


def finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity: None in their place."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


class Front:
    """Feeds `pool` from `store`. keep_s: verdicts older than that are removed, 0 keeps all."""

    def __init__(self, store: Store, pool: Judging, keep_s: float = 0.0):
        self.store, self.pool, self.keep_s = store, pool, keep_s
        self.started = time.time()
        self.verdicts: dict[str, int] = {}  # by status, since the start
        self.judging_s = 0.0
        self.stopping = False
        self._limit = max(2 * len(pool), 4)  # enough that no evaluator waits for the next tick
        self._in_flight: dict[int, float] = {}
        self._unsaved: deque[tuple[int, Verdict]] = deque()
        self._last = 0
        self._trouble = ""
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._waiters: dict[int, list[tuple[asyncio.AbstractEventLoop, asyncio.Future]]] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="front", daemon=True)
        self._thread.start()

    # For the HTTP side ------------------------------------------------------------------------------------------------

    async def submit(self, jobs: list[tuple[str, Question]], rename: bool = False) -> list[Receipt]:
        """Accept all or none (see `Store.submit`); on the disk when this returns.

        Raises QueueFull, IdTaken, StoreError, Stopping.
        """
        if self.stopping:
            raise Stopping
        receipts = await asyncio.wrap_future(self.store.submit(jobs, rename))
        self._wake.set()
        return receipts

    async def wait(self, job: str, timeout_s: float) -> State | None:
        """The job's state once it has a verdict, or as it is after timeout_s. Raises Stopping."""
        end = time.monotonic() + timeout_s
        while True:
            state = self.store.state(job)
            left = end - time.monotonic()
            if state is None or state.finished is not None or left <= 0:
                return state
            loop = asyncio.get_running_loop()
            entry = (loop, loop.create_future())
            with self._lock:
                if self.stopping:
                    raise Stopping
                self._waiters.setdefault(state.work, []).append(entry)
            try:
                # Looked at again after registering: the verdict may have come between the two.
                state = self.store.state(job)
                if state is not None and state.finished is None:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(entry[1], left)
            finally:
                self._leave(state.work if state else -1, entry)
            if self.stopping:
                raise Stopping

    def _leave(self, work: int, entry: tuple[asyncio.AbstractEventLoop, asyncio.Future]) -> None:
        with self._lock:
            waiting = self._waiters.get(work, [])
            if entry in waiting:
                waiting.remove(entry)
            if not waiting:
                self._waiters.pop(work, None)

    def running(self, work: int) -> bool:
        """Whether the pool has this piece of work."""
        return work in self._in_flight

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def rate(self) -> float:
        """Verdicts a second, over the last ones; 0 before the second."""
        recent = list(self._recent)
        return (len(recent) - 1) / max(time.monotonic() - recent[0], 1e-3) if len(recent) > 1 else 0.0

    def retry_after_s(self) -> int:
        """When to ask again after the queue was full: a tenth of it should be judged by then; 1 to 60 s."""
        rate = self.rate()
        return min(60, max(1, math.ceil(self.store.queue_limit / 10 / rate))) if rate else 10

    def trouble(self) -> str:
        """Why this server can't be relied on just now; empty where it can."""
        if self.stopping:
            return "stopping"
        if not self._thread.is_alive():
            return "nothing is handed to the evaluators any more: restart the server, accepted jobs are kept"
        free = shutil.disk_usage(self.store.path.parent).free
        if free < LOW_DISK_BYTES:
            return f"{free >> 20} MiB of disk are left under {self.store.path.parent}"
        return self._trouble

    # Stopping ---------------------------------------------------------------------------------------------------------

    def begin_stop(self) -> None:
        """Nothing is accepted or waited for any more, from the next tick on. Takes no lock: signal handlers call it."""
        self.stopping = True

    def stop(self, patience_s: float) -> bool:
        """Close the pool and the store. False where the pool took longer: its processes end with this one."""
        self.begin_stop()
        self._wake.set()
        closer = threading.Thread(target=self.pool.close, daemon=True)
        closer.start()
        closer.join(patience_s)
        self._thread.join(1.0)
        self.store.close()
        return not closer.is_alive()

    # The thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        forget_at = 0.0
        while not self.stopping:
            try:
                while self._unsaved:
                    self._save(*self._unsaved.popleft())
                if self.keep_s and time.monotonic() >= forget_at:
                    forget_at = time.monotonic() + FORGET_EVERY_S
                    self.store.forget(time.time() - self.keep_s)
                self._hand_over()
            except PoolError as error:
                self._trouble = str(error)
            except Exception as error:  # the thread must outlive a bad moment of the disk; health tells
                self._trouble = f"{type(error).__name__}: {error}"
                print(f"env.serve: {self._trouble}", file=sys.stderr, flush=True)
            self._wake.wait(TICK_S)
            self._wake.clear()
        self._tell_all()

    def _hand_over(self) -> None:
        room = self._limit - len(self._in_flight)
        if room <= 0:
            return
        for work, question in self.store.waiting(self._last, room):
            if self.stopping:
                return
            self._in_flight[work] = time.monotonic()
            try:
                future = self.pool.submit(question.problem(f"work-{work}"), question.response, raw=question.raw)
            except BaseException:
                del self._in_flight[work]
                raise
            self._last = work
            future.add_done_callback(lambda future, work=work: self._judged(work, future))

    def _judged(self, work: int, future: Future) -> None:
        """Runs in a thread of the pool."""
        try:
            verdict = future.result()
        except CancelledError:
            return  # the pool is closing: it waits for the next start
        except Exception as error:
            verdict = Verdict(status="infra_error", message=f"the pool failed: {type(error).__name__}: {error}")
        self._recent.append(time.monotonic())
        self._save(work, verdict)

    def _save(self, work: int, verdict: Verdict) -> None:
        text = json.dumps(finite(verdict.to_json()), allow_nan=False)
        saved = self.store.finish(work, verdict.status, text)
        saved.add_done_callback(lambda saved: self._saved(work, verdict, saved))

    def _saved(self, work: int, verdict: Verdict, saved: Future) -> None:
        """Runs in the store's thread."""
        if error := saved.exception():
            self._trouble = str(error)
            if not self.stopping:
                self._unsaved.append((work, verdict))  # offered again at the next tick
            return
        self._trouble = ""
        self.judging_s += time.monotonic() - self._in_flight.pop(work, time.monotonic())
        self.verdicts[verdict.status] = self.verdicts.get(verdict.status, 0) + 1
        self._tell(work)
        self._wake.set()

    def _tell(self, work: int) -> None:
        with self._lock:
            waiting = self._waiters.pop(work, [])
        for loop, future in waiting:
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(lambda future=future: future.done() or future.set_result(None))

    def _tell_all(self) -> None:
        with self._lock:
            works = list(self._waiters)
        for work in works:
            self._tell(work)
