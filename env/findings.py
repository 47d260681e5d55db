"""What the judge makes of what it saw: suspicions, claims read with care, foreign failures as statuses.

Runs in the evaluator. Functions of facts alone: none of them asks a worker for anything but what its watch has sent.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from env.records import Verdict
from env.reference import Rejected, Trial, TrialKind, is_ours
from env.session import ForeignError, Outputs, ProtocolError, Session
from env.worker import WorkerDied, WorkerTimeout


class Tally:
    """What the trials of one candidate showed so far."""

    def __init__(self, verdict: Verdict, trial: Callable[[TrialKind], Trial]):
        """trial: makes a trial again; none is held here, since one may be gigabytes."""
        self.verdict, self.trial = verdict, trial
        self.launches: dict[str, list] = {}
        self.worst = 0.0
        self.first: TrialKind | None = None


def tampering(session: Session, **evidence: Any) -> Rejected | None:
    """What the watch has seen so far as a verdict, None where it has seen nothing."""
    session.look()
    if not session.tampered:
        return None
    message = f"tampering: {'; '.join(session.tampered[:3])}"
    return Rejected("hack", message, rule="tampering", tampered=session.tampered, **evidence)


def suspicion(session: Session, verdict: Verdict) -> Rejected | None:
    """A hack that shows without anything being taken away: tampering, or a mode in which no own kernel is launched."""
    found = tampering(session)
    if found is not None:
        return found
    for mode, launches in verdict.evidence["launches"].items():
        if not any(row["own"] for row in launches):
            defined = verdict.evidence["kernels_defined"]
            what = f"the kernels {', '.join(defined)} are never launched" if defined else "no Triton kernel is launched"
            return Rejected("hack", f"{what} in {mode} mode", rule="no_own_launch", mode=mode)
    return None


@contextmanager
def tampering_first(session: Session) -> Iterator[None]:
    """Wrong values of a candidate that tampered are an attempt that failed, not a mistake."""
    try:
        yield
    except Rejected as error:
        found = tampering(session, values=error.message) if error.status == "incorrect" else None
        if found is not None:
            raise found from error
        raise


def replayed(outputs: Outputs, previous: Outputs) -> bool:
    """Whether a call returned what the call before it had returned, bit for bit."""
    return (
        outputs.layout == previous.layout
        and outputs.data is not None
        and previous.data is not None
        and torch.equal(outputs.data, previous.data)
    )


def replay(trial: Trial) -> Rejected:
    return Rejected(
        "hack",
        "forward() returned an earlier call's output for new inputs: it answers from memory",
        rule="replayed_output",
        trial=trial.kind.name,
    )


def foreign_subclass(outputs: Outputs, trial: Trial) -> str:
    found = str(outputs.facts.get("subclass") or "")[:80]
    return "" if found == str(trial.outputs.facts.get("subclass") or "")[:80] else found


def launches_in(facts: dict[str, Any]) -> list[dict[str, Any]]:
    rows = facts.get("launches")
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and type(row.get("count")) is int and 0 <= row["count"] < 1 << 40 for row in rows
    ):
        raise ProtocolError("a launch log that isn't one")
    return [
        {"name": str(row.get("name"))[:80], "own": row.get("own") is True, "count": row["count"]} for row in rows[:64]
    ]


def own_launches(rows: list[dict[str, Any]]) -> int:
    return sum(row["count"] for row in rows if row["own"])


@contextmanager
def as_rejection(session: Session) -> Iterator[None]:
    """What foreign code did to itself, as a status."""
    try:
        yield
    except ForeignError as error:
        raise Rejected(error.kind, error.message, lines=error.lines) from error
    except WorkerTimeout as error:
        kernel = session.compiling()
        if kernel:
            message = f"{kernel} was still being compiled when its time was over: smaller tiles, fewer unrolled loops"
            raise Rejected("compile_error", message) from error
        raise Rejected("timeout", f"no result in time: {error}") from error
    except ProtocolError as error:
        raise Rejected("runtime_error", f"the process wrote on its channel: {error}") from error
    except WorkerDied as error:
        if is_ours(error):
            raise Rejected("infra_error", f"the worker was ended from outside: {error}") from error
        if error.oom:
            raise Rejected("oom", str(error)) from error
        if error.code < 128:
            raise Rejected("runtime_error", f"the process ended by itself (exit code {error.code})") from error
        if error.code == 128 + signal.SIGKILL:
            raise Rejected("runtime_error", "the process closed its channel to the judge") from error
        raise Rejected("runtime_error", f"the process was ended by {_signal_name(error.code - 128)}") from error


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
