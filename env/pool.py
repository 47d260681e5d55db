"""Many evaluators, one queue: `Pool(...)`, `submit` → future, `close`.

Runs in the driver, which never touches a GPU and never runs foreign code. One evaluator process is pinned to each GPU
(or CPU slot), and on a GPU another one stands by with everything imported. An evaluator that dies or hangs is replaced
and its jobs are judged again, one at a time, so that the one that did it is known: it gets `infra_error`, and isn't
tried again.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from env.evaluator import Setup
from env.files import remove_tree
from env.records import UNPROVEN, Problem, Verdict
from env.room import SHORT
from env.rules import Rules, rules_for
from env.tickets import PoolError, Ticket, Tickets

ROOT = Path(__file__).resolve().parent.parent
ATTEMPTS = 2
START_TIMEOUT_S = 180
# A GPU verdict is mostly compiling and waiting: it takes more lanes than cores to keep 16 cores busy.
CPU_LANES, GPU_LANES = 1, 24


@dataclass
class _Evaluator:
    """A process that is starting, standing by or serving."""

    process: subprocess.Popen
    connection: Connection
    scratch: str = ""

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()
        if self.scratch:
            # One that was killed could not do it itself.
            remove_tree(self.scratch)


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


def refuse_settings(device: str, slots: int, lanes: int, rules: Rules | None, seed: int | None = None) -> None:
    """Raises PoolError for what no pool can do, here or on a cluster, and TypeError for what is no setting at all."""
    for name, value in (("slots", slots), ("lanes", lanes), ("seed", 0 if seed is None else seed)):
        if not hasattr(value, "__index__"):
            raise TypeError(f"{name} is {value!r}, a {type(value).__name__}: it has to be a whole number")
    if rules is not None and not isinstance(rules, Rules):
        raise TypeError(f"rules is {rules!r:.80}, a {type(rules).__name__}: give env.rules.rules_for(PROFILE, DEVICE)")
    if device not in ("cpu", "cuda"):
        raise PoolError(f"unknown device {device!r}: use 'cpu' or 'cuda'")
    if device == "cpu" and rules is not None and rules.reference == "compile":
        raise PoolError("a reference under torch.compile needs a GPU: on the CPU times are modelled by operators")
    if slots < 0 or lanes < 0:
        raise PoolError(f"slots = {slots}, lanes = {lanes}: 0 means as many as the device allows, less is nothing")


def usual_lanes(device: str) -> int:
    """Candidates that an evaluator has in work at once."""
    return GPU_LANES if device == "cuda" else CPU_LANES


def patience_s(rules: Rules) -> float:
    """Seconds that the slowest honest verdict may take an evaluator: every stage of both workers at its limit."""
    return 4 * (rules.compile_timeout_s + rules.run_timeout_s) + 60


class Pool:
    """A context manager over the evaluators of this machine.

    device: "cpu" (Triton's interpreter, modelled times) or "cuda" (one evaluator a visible GPU). slots: evaluators; 0
    means one a GPU, or one a core on the CPU. seed: makes the judge's secret inputs reproducible; None draws a secret,
    which is what a candidate can't have tuned to. lanes: candidates that an evaluator has in work at once. gpus: those
    to use, as CUDA_VISIBLE_DEVICES names them; None means all that are visible. standby: keep an evaluator ready for
    when one is lost; None means on GPUs. Raises PoolError where the device isn't there or an evaluator doesn't start.
    """

    def __init__(
        self,
        device: str = "cpu",
        slots: int = 0,
        seed: int | None = None,
        rules: Rules | None = None,
        lanes: int = 0,
        gpus: list[str] | None = None,
        standby: bool | None = None,
    ):
        refuse_settings(device, slots, lanes, rules, seed)
        if gpus is not None and (isinstance(gpus, str) or not all(isinstance(gpu, str) for gpu in gpus)):
            raise TypeError(f"gpus is {gpus!r}: it has to be a list of names, as in ['0', '1']")
        visible = visible_gpus() if device == "cuda" else []
        if device == "cuda" and not visible:
            raise PoolError("no GPU is visible (nvidia-smi -L lists none): use --device cpu, or check the driver")
        unknown = [gpu for gpu in gpus or [] if gpu not in visible]
        if unknown:
            raise PoolError(f"no such GPU: {', '.join(unknown)}; visible: {', '.join(visible) or 'none'}")
        if device == "cuda" and gpus is not None and not gpus:
            raise PoolError("gpus is an empty list: nobody would judge; None means all that are visible")
        gpus = visible if gpus is None else gpus
        if device == "cuda" and slots > len(gpus):
            raise PoolError(
                f"{slots} evaluators were asked for, but only {len(gpus)} GPUs are visible: timing needs one each"
            )
        count = slots or (len(gpus) if device == "cuda" else os.cpu_count() or 1)
        self.device = device
        self.rules = (rules or rules_for(device=device)).on(device)
        self.secret = secrets.randbits(60) if seed is None else seed
        self.lanes = lanes or usual_lanes(device)
        self.info: dict[str, Any] = {}
        self._queue: queue.Queue[Ticket] = queue.Queue()
        self._alone: queue.Queue[Ticket] = queue.Queue()
        self._tickets = Tickets()
        self._standby_lock = threading.Lock()
        self._keep_standby = device == "cuda" if standby is None else standby
        self._standby: _Evaluator | None = None
        self._closing = False
        self._patience_s = patience_s(self.rules)
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
        self._refill_standby()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """How many candidates are judged at once."""
        return len(self._threads) * self.lanes

    def standby_ready(self) -> bool:
        """Whether an evaluator stands by, loaded, for one that is lost."""
        with self._standby_lock:
            return self._standby is not None and self._standby.connection.poll(0)

    def submit(self, problem: Problem, response: str, raw: bool = True) -> Future:
        """Queue a candidate. The future's result is a Verdict; it never raises for what a candidate does.

        raw: `response` is a model's whole answer, its code is extracted. Equal answers to equal problems are judged
        once. Raises TypeError for arguments that are no question, PoolError once closed.
        """
        future, ticket = self._tickets.issue(problem, response, raw)
        if ticket is not None:
            self._queue.put(ticket)
        return future

    def close(self) -> None:
        """End all evaluators. Futures that have no result yet are cancelled."""
        self._tickets.close()
        self._closing = True
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout=15)
        with self._standby_lock:
            if self._standby is not None:
                self._standby.end()
                self._standby = None
        for left in (self._queue, self._alone):
            while not left.empty():
                left.get_nowait().future.cancel()

    # One thread an evaluator ---------------------------------------------------------------------------------------

    def _tend(self, gpu: str, started: Future) -> None:
        """Start an evaluator, keep it busy, replace it when it is lost."""
        in_flight: dict[int, Ticket] = {}
        while not self._closing:
            try:
                evaluator, info = self._start(gpu)
            except PoolError as error:
                if not started.done():
                    started.set_exception(error)
                    return
                time.sleep(1.0)
                self._give_back(in_flight, str(error))
                continue
            if not started.done():
                started.set_result(info)
            why = self._feed(evaluator.process, evaluator.connection, in_flight)
            if not why:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    evaluator.process.wait(10)
            evaluator.end()
            self._give_back(in_flight, why or "the pool was closed")

    def _spawn(self) -> _Evaluator:
        """Start an evaluator's process, which prepares what needs no GPU.

        Not multiprocessing.Process: "spawn" would import the driver's main module, and with it transformers, in every
        evaluator, and "fork" would copy a driver that has threads.
        """
        ours, theirs = multiprocessing.Pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "env.evaluator", str(theirs.fileno())],
            cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        with contextlib.suppress(OSError):  # one that is gone already is found when it is asked
            ours.send(Setup(self.device, self.lanes, self.rules, self.secret))
        return _Evaluator(process, ours)

    def _refill_standby(self) -> None:
        with self._standby_lock:
            if self._keep_standby and self._standby is None and not self._closing:
                self._standby = self._spawn()

    def _start(self, gpu: str) -> tuple[_Evaluator, dict]:
        """An evaluator that can judge: the one that stands by, or a new one. Raises PoolError with its own words where
        it can't."""
        with self._standby_lock:
            evaluator, self._standby = self._standby, None
        evaluator = evaluator or self._spawn()
        try:
            kind, told = self._hear(evaluator)
            if kind == "loaded":
                evaluator.scratch = told
                evaluator.connection.send(gpu)
                kind, told = self._hear(evaluator)
        except (EOFError, OSError):
            kind, told = "failed", "it ended while starting; its last words are above"
        if kind == "failed":
            evaluator.end()
            raise PoolError(f"an evaluator could not start on {self.device} {gpu}".rstrip() + f": {told}")
        if self.info:  # not one of the first: this was a replacement
            self._refill_standby()
        return evaluator, told

    def _hear(self, evaluator: _Evaluator) -> tuple[str, Any]:
        end = time.monotonic() + START_TIMEOUT_S
        while not evaluator.connection.poll(0.5):
            if self._closing:
                return "failed", "the pool was closed"
            if time.monotonic() > end:
                return "failed", f"no answer in {START_TIMEOUT_S} s"
        return evaluator.connection.recv()

    def _feed(self, process: subprocess.Popen, connection: Connection, in_flight: dict[int, Ticket]) -> str:
        """Send jobs and take verdicts until the pool closes (returns "") or the evaluator is lost (returns why)."""
        try:
            while True:
                if self._closing:
                    connection.send(None)
                    return ""
                room = len(in_flight) < self.lanes and not any(ticket.alone for ticket in in_flight.values())
                if room and (ticket := self._next(in_flight)) is not None:
                    try:
                        connection.send(ticket.job)
                    except OSError:
                        (self._alone if ticket.alone else self._queue).put(ticket)  # it never arrived: no attempt
                        raise
                    ticket.started = time.monotonic()
                    ticket.attempts += 1
                    in_flight[ticket.job.id] = ticket
                    continue
                wait([connection], timeout=0.02 if room else 0.5)
                while connection.poll():
                    _, job_id, data = connection.recv()
                    self._finish(in_flight.pop(job_id), Verdict.from_json(data))
                if process.poll() is not None:
                    return f"the evaluator ended with exit code {process.returncode}"
                if any(time.monotonic() - ticket.started > self._patience_s for ticket in in_flight.values()):
                    return f"the evaluator gave no verdict for {self._patience_s:.0f} s"
        except (EOFError, OSError) as error:
            return f"the evaluator is gone ({error})"

    def _next(self, in_flight: dict[int, Ticket]) -> Ticket | None:
        if not in_flight and not self._alone.empty():
            with contextlib.suppress(queue.Empty):  # another slot was quicker
                return self._alone.get_nowait()
        with contextlib.suppress(queue.Empty):
            return self._queue.get(timeout=0.02 if in_flight else 0.1)
        return None

    def _finish(self, ticket: Ticket, verdict: Verdict) -> None:
        # What was too big alone on the device is too big the next time.
        again = verdict.status == "infra_error" and not {SHORT, UNPROVEN} & verdict.evidence.keys()
        if again and ticket.attempts < ATTEMPTS and not self._closing:
            (self._alone if ticket.alone else self._queue).put(ticket)
            return
        self._tickets.decide(ticket, verdict)

    def _give_back(self, in_flight: dict[int, Ticket], why: str) -> None:
        """What an evaluator had in work when it was lost: judged again, alone, unless it was alone already."""
        for ticket in list(in_flight.values()):
            if self._closing:
                ticket.future.cancel()
                continue
            if ticket.alone:
                self._tickets.condemn(ticket, why)
                continue
            ticket.alone = True
            self._alone.put(ticket)
        in_flight.clear()
