"""Answers on their way to a verdict: equal ones are judged once, and one that ends evaluators isn't tried again.

Runs in the driver, inside a pool: `env.pool` (this machine) or `env.ray_pool` (a cluster). Who judges what, and when,
is theirs to say.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field

from env.evaluator import Job
from env.feedback import render
from env.records import Problem, Verdict, sha256

REMEMBERED = 4096  # verdicts kept for equal answers


class PoolError(RuntimeError):
    """The pool can't judge here: what is missing and what to do."""


@dataclass(eq=False)
class Ticket:
    """A job and the future that its verdict goes to. attempts: how often it was tried. started: time.monotonic() of the
    last try. alone: it was in flight when an evaluator was lost, and is judged with nobody beside it. nodes: those of a
    cluster that were lost while they had it in work, each with the reason."""

    job: Job
    future: Future
    key: str
    attempts: int = 0
    started: float = 0.0
    alone: bool = False
    nodes: list[str] = field(default_factory=list)


class Tickets:
    """What was asked and decided. Thread-safe."""

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._known: OrderedDict[str, Future] = OrderedDict()
        # Answers that cost an evaluator its life while they were judged alone.
        self._fatal: dict[str, str] = {}
        self._lock = threading.Lock()
        self._closed = False

    def issue(self, problem: Problem, response: str, raw: bool) -> tuple[Future, Ticket | None]:
        """The future of a question, and a ticket where it has to be judged: not where an equal one was asked before.

        Raises TypeError for what is no question, PoolError once closed.
        """
        check_question(problem, response, raw)
        key = f"{problem.sha256}:{raw}:{sha256(response)}"
        with self._lock:
            if self._closed:
                raise PoolError("the pool is closed")
            known = self._known.get(key)
            if known is not None:
                return known, None
            future: Future = Future()
            if key in self._fatal:
                future.set_result(lost(problem, f"not tried again: {self._fatal[key]}"))
                return future, None
            self._known[key] = future
            while len(self._known) > REMEMBERED and next(iter(self._known.values())).done():
                self._known.popitem(last=False)
        return future, Ticket(Job(next(self._ids), problem, response, raw), future, key)

    def decide(self, ticket: Ticket, verdict: Verdict) -> None:
        """Give a ticket its verdict. An infra_error is not remembered for equal answers."""
        if verdict.status == "infra_error":
            self._forget(ticket)  # the machine's fault today need not be its fault tomorrow
        ticket.future.set_result(verdict)

    def condemn(self, ticket: Ticket, why: str) -> None:
        """Give a ticket that ended its evaluator while judged alone an infra_error; equal answers get one at once."""
        with self._lock:
            self._fatal[ticket.key] = why
        self.decide(ticket, lost(ticket.job.problem, why))

    def close(self) -> None:
        """From now on nothing is issued."""
        with self._lock:
            self._closed = True

    def _forget(self, ticket: Ticket) -> None:
        with self._lock:
            self._known.pop(ticket.key, None)


def check_question(problem: Problem, response: str, raw: bool) -> None:
    """Raises TypeError for arguments of `submit` that are no question: what came, and what is expected."""
    if not isinstance(problem, Problem):
        raise TypeError(
            f"problem is {problem!r:.80}, {_kind(problem)}: it has to be an env.records.Problem, as "
            "env.problems.load(PATH) gives a list of; from source text: Problem(id=NAME, source=TEXT)"
        )
    for name in ("id", "source", "entry_point", "precision"):
        value = getattr(problem, name)
        if not isinstance(value, str):
            raise TypeError(f"problem.{name} is {value!r:.80}, {_kind(value)}: it has to be text (a str)")
    if not isinstance(response, str):
        raise TypeError(
            f"response is {response!r:.80}, {_kind(response)}: it has to be text (a str), a candidate's source "
            "or, with raw=True, a model's whole answer"
        )
    if not isinstance(raw, bool):
        raise TypeError(f"raw is {raw!r:.80}, {_kind(raw)}: it has to be True (a whole answer) or False (source)")


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def lost(problem: Problem, why: str) -> Verdict:
    """An infra_error: nobody could judge this, and why."""
    verdict = Verdict(status="infra_error", message=why, problem_sha256=problem.sha256)
    verdict.feedback = render(verdict)
    return verdict
