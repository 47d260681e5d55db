"""Many evaluators, one queue: `Pool(...)`, `submit` → future, `close`.

Runs in the driver, which never touches a GPU and never runs foreign code. One evaluator process is pinned to each GPU
(or CPU slot). An evaluator that dies or hangs is replaced and its jobs are judged again; only when that fails too does
a candidate get `infra_error`, which is nobody's fault.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import queue
import secrets
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from env.evaluator import Job, Setup
from env.feedback import render
from env.records import Problem, Verdict, sha256
from env.rules import Rules, spares_for

ROOT = Path(__file__).resolve().parent.parent
ATTEMPTS = 2
START_TIMEOUT_S = 180
CPU_LANES, GPU_LANES = 1, 10


class PoolError(RuntimeError):
    """The pool can't judge here: what is missing and what to do."""


@dataclass
class _Ticket:
    job: Job
    future: Future
    key: str
    attempts: int = 0
    started: float = 0.0


def visible_gpus() -> list[str]:
    """The GPUs that CUDA would show this process, without touching CUDA (a driver must stay free of a context)."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name.strip()]
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(number) for number, line in enumerate(listing.splitlines()) if line.startswith("GPU ")]


class Pool:
    """A context manager over the evaluators of this machine.

    device: "cpu" (Triton's interpreter, modelled times) or "cuda" (one evaluator a visible GPU). slots: evaluators; 0
    means one a GPU, or one a core on the CPU. seed: makes the judge's secret inputs reproducible; None draws a secret,
    which is what a candidate can't have tuned to. Raises PoolError where the device isn't there or an evaluator doesn't
    start.
    """

    def __init__(
        self, device: str = "cpu", slots: int = 0, seed: int | None = None, rules: Rules | None = None, lanes: int = 0
    ):
        if device not in ("cpu", "cuda"):
            raise PoolError(f"unknown device {device!r}: use 'cpu' or 'cuda'")
        if slots < 0 or lanes < 0:
            raise PoolError(f"slots = {slots}, lanes = {lanes}: 0 means as many as the device allows, less is nothing")
        gpus = visible_gpus() if device == "cuda" else []
        if device == "cuda" and not gpus:
            raise PoolError("no GPU is visible (nvidia-smi -L lists none): use --device cpu, or check the driver")
        if device == "cuda" and slots > len(gpus):
            raise PoolError(
                f"{slots} evaluators were asked for, but only {len(gpus)} GPUs are visible: timing needs one each"
            )
        count = slots or (len(gpus) if device == "cuda" else os.cpu_count() or 1)
        self.device = device
        self.rules = rules or Rules(spares=spares_for(device))
        self.secret = secrets.randbits(60) if seed is None else seed
        self.lanes = lanes or (GPU_LANES if device == "cuda" else CPU_LANES)
        self.info: dict[str, Any] = {}
        self._queue: queue.Queue[_Ticket] = queue.Queue()
        self._ids = itertools.count()
        self._known: dict[str, Future] = {}
        self._lock = threading.Lock()
        self._closing = False
        # The slowest honest verdict: every stage of both workers at its limit.
        self._patience_s = 4 * (self.rules.compile_timeout_s + self.rules.run_timeout_s) + 60
        started: list[Future] = [Future() for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._tend, args=(gpus[i] if gpus else "", started[i]), daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()
        try:
            for future in started:
                self.info = future.result()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """How many candidates are judged at once."""
        return len(self._threads) * self.lanes

    def submit(self, problem: Problem, response: str, raw: bool = True) -> Future:
        """Queue a candidate. The future's result is a Verdict; it never raises for what a candidate does.

        raw: `response` is a model's whole answer, its code is extracted. Equal answers to equal problems are judged
        once.
        """
        key = f"{problem.sha256}:{raw}:{sha256(response)}"
        with self._lock:
            if self._closing:
                raise PoolError("the pool is closed")
            known = self._known.get(key)
            if known is not None:
                return known
            future: Future = Future()
            self._known[key] = future
        self._queue.put(_Ticket(Job(next(self._ids), problem, response, raw), future, key))
        return future

    def close(self) -> None:
        """End all evaluators. Futures that have no result yet are cancelled."""
        with self._lock:
            self._closing = True
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout=15)
        while True:
            try:
                self._queue.get_nowait().future.cancel()
            except queue.Empty:
                break

    # One thread an evaluator ---------------------------------------------------------------------------------------

    def _tend(self, gpu: str, started: Future) -> None:
        """Start an evaluator, keep it busy, replace it when it is lost."""
        in_flight: dict[int, _Ticket] = {}
        while not self._closing:
            try:
                process, connection, info = self._start(gpu)
            except PoolError as error:
                if not started.done():
                    started.set_exception(error)
                    return
                time.sleep(1.0)
                self._give_back(in_flight, str(error))
                continue
            if not started.done():
                started.set_result(info)
            why = self._feed(process, connection, in_flight)
            if why:
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
            connection.close()
            # One that was killed could not do it itself.
            shutil.rmtree(info["scratch"], ignore_errors=True)
            self._give_back(in_flight, why or "the pool was closed")

    def _start(self, gpu: str) -> tuple[subprocess.Popen, Connection, dict]:
        """Start an evaluator and wait until it can judge. Raises PoolError with its own words where it can't.

        Not multiprocessing.Process: "spawn" would import the driver's main module, and with it transformers, in every
        evaluator, and "fork" would copy a driver that has threads.
        """
        ours, theirs = multiprocessing.Pipe()
        setup = Setup(self.device, gpu, self.lanes, self.rules, self.secret)
        process = subprocess.Popen(
            [sys.executable, "-m", "env.evaluator", str(theirs.fileno())],
            cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        try:
            ours.send(setup)
            kind, info = ours.recv() if ours.poll(START_TIMEOUT_S) else ("failed", f"no answer in {START_TIMEOUT_S} s")
        except (EOFError, OSError):
            kind, info = "failed", "it ended while starting; its last words are above"
        if kind == "failed":
            process.kill()
            process.wait()
            ours.close()
            raise PoolError(f"an evaluator could not start on {self.device} {gpu}".rstrip() + f": {info}")
        return process, ours, info

    def _feed(self, process: subprocess.Popen, connection: Connection, in_flight: dict[int, _Ticket]) -> str:
        """Send jobs and take verdicts until the pool closes (returns "") or the evaluator is lost (returns why)."""
        try:
            while True:
                if self._closing:
                    connection.send(None)
                    return ""
                if len(in_flight) < self.lanes:
                    with contextlib.suppress(queue.Empty):
                        ticket = self._queue.get(timeout=0.02 if in_flight else 0.1)
                        try:
                            connection.send(ticket.job)
                        except OSError:
                            self._queue.put(ticket)  # it never arrived: that was no attempt
                            raise
                        ticket.started = time.monotonic()
                        ticket.attempts += 1
                        in_flight[ticket.job.id] = ticket
                        continue
                wait([connection], timeout=0.02 if len(in_flight) < self.lanes else 0.5)
                while connection.poll():
                    _, job_id, data = connection.recv()
                    self._finish(in_flight.pop(job_id), Verdict.from_json(data))
                if process.poll() is not None:
                    return f"the evaluator ended with exit code {process.returncode}"
                if any(time.monotonic() - ticket.started > self._patience_s for ticket in in_flight.values()):
                    return f"the evaluator gave no verdict for {self._patience_s:.0f} s"
        except (EOFError, OSError) as error:
            return f"the evaluator is gone ({error})"

    def _finish(self, ticket: _Ticket, verdict: Verdict) -> None:
        if verdict.status == "infra_error":
            if ticket.attempts < ATTEMPTS and not self._closing:
                self._queue.put(ticket)
                return
            with self._lock:
                self._known.pop(ticket.key, None)  # the machine's fault today need not be its fault tomorrow
        ticket.future.set_result(verdict)

    def _give_back(self, in_flight: dict[int, _Ticket], why: str) -> None:
        for ticket in list(in_flight.values()):
            if self._closing:
                ticket.future.cancel()
                continue
            verdict = Verdict(status="infra_error", message=why, problem_sha256=ticket.job.problem.sha256)
            verdict.feedback = render(verdict)
            self._finish(ticket, verdict)
        in_flight.clear()
