"""The candidate's timed pass once more where nothing foreign runs, on inputs that it hasn't seen.

Runs in the judge (CPU). What a candidate's process counts of itself is a claim; here its pass, written down
(`env.trace`), is run by a fresh worker (`env.program`). If that gives the right outputs, then what it counts is what
the candidate does. If it doesn't, something was done that isn't in the program. Where Python looked at values on the
way, that may be honest: then a second pass is written down on those other inputs, which may differ from the first one,
written before, in a few numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch

from env.compare import Comparison
from env.records import UNPROVEN
from env.reference import Rejected, Trial, is_ours
from env.session import ForeignError, Outputs, ProtocolError, Session
from env.spares import Spares
from env.tensors import tensor_nodes
from env.worker import WorkerDied, WorkerTimeout

# Of so many elements of the outputs one number may have been learned from the inputs, and what it costs a GPU to wait
# for the host: five launches.
ELEMENTS_A_NUMBER, HOST_READ_US = 100, 10.0
MAX_NUMBER_CHARS = 32  # of a number as text
# Asks a worker for one operation on a trial's inputs and compares the outputs.
Run = Callable[[Session, Trial, str], tuple[Outputs, Comparison]]


def unproven(why: str) -> Rejected:
    message = f"not measured: this pass can't be told as operators and launches alone ({why})"
    return Rejected("infra_error", message, **{UNPROVEN: why})


def _replaying(spares: Spares, session: Session, traced: Outputs) -> Session:
    """A fresh worker that holds the program of a traced pass in a model's place. Raises Rejected."""
    program = traced.facts.get("program")
    if not isinstance(program, dict) or "refused" in program:
        raise unproven(str(program.get("refused"))[:200] if isinstance(program, dict) else "nothing was written")
    layout, constants = session.export("constants", "constants", "constants")
    fresh = spares.take()
    fresh.constants = layout
    try:
        fresh.fill("state", constants)
        timeout_s = fresh.compile_timeout_s
        fresh.ask("program", timeout_s, program=program, layout=layout, buffer="state", folder=fresh.worker.scratch)
    except ForeignError as error:
        fresh.end()
        raise unproven(error.message.removeprefix("Refused: ")) from error
    except BaseException:
        fresh.end()
        raise
    return fresh


def prove(
    spares: Spares, session: Session, seen: Trial, unseen: Trial, run: Run, ending: ExitStack
) -> tuple[Outputs, Session, int]:
    """The timed pass of a candidate as a program, proven on a trial that wasn't seen when it was written.

    Returns (the program's outputs and counts, the worker that holds it, how many numbers it took from the host). The
    workers that it takes are ended by `ending`. Raises Rejected.
    """

    def held(traced: Outputs) -> Session:
        fresh = _replaying(spares, session, traced)
        ending.callback(fresh.end)
        return fresh

    traced = _traced(session, seen, run)
    fresh, program, wrong = held(traced), traced.facts["program"], "other inputs have other shapes"
    if unseen.layout == seen.layout:
        found = _proven(fresh, unseen, run)
        if isinstance(found, Outputs):
            return found, fresh, 0
        if not program.get("host_reads"):
            raise _hidden(found)
        wrong = found
    again = _traced(session, unseen, run)
    second = held(again)
    numbers = learned(program, again.facts["program"])
    elements = sum(math.prod(node["shape"]) for node in tensor_nodes(unseen.outputs.layout))
    if not _same_constants(fresh, second) or len(numbers) * ELEMENTS_A_NUMBER > elements:
        raise unproven(f"it looks at values on the host, and other inputs have others: {wrong}")
    found = _proven(second, unseen, run)
    if not isinstance(found, Outputs):
        raise _hidden(found)
    return found, second, len(numbers)


def _traced(session: Session, trial: Trial, run: Run) -> Outputs:
    """A pass of the candidate's own process, written down. Raises Rejected where its outputs are wrong."""
    traced, result = run(session, trial, "trace")
    if not result.match:
        raise Rejected("hack", f"right when checked, wrong when timed: {result.message}", rule="timed_output_differs")
    return traced


def _proven(fresh: Session, trial: Trial, run: Run) -> Outputs | str:
    """The outputs and counts of a program; where they aren't right, what is wrong with them. Raises Rejected where that
    says nothing.
    """
    try:
        outputs, result = run(fresh, trial, "model_time")
        return outputs if result.match else result.message
    except (ForeignError, WorkerDied, WorkerTimeout, ProtocolError) as error:
        if is_ours(error):
            raise
        if isinstance(error, ForeignError) and error.kind == "oom":
            raise unproven(error.message) from error
        return str(error)[:400]


def _same_constants(one: Session, other: Session) -> bool:
    """Whether two traces found the same in memory."""
    mine, theirs = one.buffers["state"].tensor, other.buffers["state"].tensor
    return one.constants == other.constants and torch.equal(mine, theirs)


def _hidden(wrong: str) -> Rejected:
    return Rejected(
        "hack",
        "its operators and launches alone, run again on other inputs, don't give the right outputs: the rest was done "
        f"where it isn't counted ({wrong})",
        rule="hidden_work",
    )


def learned(first: dict[str, Any], second: dict[str, Any]) -> set[tuple[str, str]]:
    """The numbers in which two traces of the same code differ, as pairs: no more can the second one have put into its
    program of what it saw of its inputs. Raises Rejected where they differ in anything else.
    """
    if first.get("units") != second.get("units") or first.get("constants") != second.get("constants"):
        raise unproven("its kernels or its memory depend on the values of its inputs")
    return set(_differences(first, second))


def _differences(first: Any, second: Any) -> Iterator[tuple[str, str]]:
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        for key in first:
            yield from _differences(first[key], second[key])
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for mine, theirs in zip(first, second):
            yield from _differences(mine, theirs)
    elif isinstance(first, (dict, list)) or isinstance(second, (dict, list)):
        raise unproven("what it does depends on the values of its inputs")
    elif first != second:
        pair = repr(first), repr(second)
        if max(map(len, pair)) > MAX_NUMBER_CHARS:
            raise unproven("what it does depends on the values of its inputs")
        yield pair
