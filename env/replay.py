"""The candidate's timed pass once more where nothing foreign runs, on inputs that it hasn't seen.

Runs in the judge (CPU). What a candidate's process counts of itself is a claim; here its pass, written down
(`env.trace`), is run by a fresh worker (`env.program`). If that gives the right outputs, then what it counts is what
the candidate does. If it doesn't, something was done that isn't in the program. Where Python looked at values on the
way, that may be honest: then a second pass is written down on those other inputs, which may differ from the first one,
written before, in a few numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from env.compare import Comparison
from env.records import UNPROVEN
from env.reference import Rejected, Trial, is_ours
from env.session import ForeignError, Outputs, ProtocolError, Session
from env.spares import Spares
from env.worker import WorkerDied, WorkerTimeout

# Of so many elements of the outputs one number may have been learned from the inputs, and what it costs a GPU to wait
# for the host: five launches.
ELEMENTS_A_NUMBER, HOST_READ_US = 100, 10.0
MAX_NUMBER_CHARS = 32  # of a number as text
Run = Callable[[Session, Trial], tuple[Outputs, Comparison]]


def unproven(why: str) -> Rejected:
    message = f"not measured: this pass can't be told as operators and launches alone ({why})"
    return Rejected("infra_error", message, **{UNPROVEN: why})


def replaying(spares: Spares, session: Session, traced: Outputs) -> Session:
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


def proven(fresh: Session, trial: Trial, run: Run) -> Outputs | str:
    """The outputs and counts of the program on inputs that its author hasn't seen; where they aren't right, what is
    wrong with them. Raises Rejected where that says nothing.
    """
    try:
        outputs, result = run(fresh, trial)
        return outputs if result.match else result.message
    except (ForeignError, WorkerDied, WorkerTimeout, ProtocolError) as error:
        if is_ours(error):
            raise
        if isinstance(error, ForeignError) and error.kind == "oom":
            raise unproven(error.message) from error
        return str(error)[:400]


def same_constants(one: Session, other: Session) -> bool:
    """Whether two traces found the same in memory."""
    mine, theirs = one.buffers["state"].tensor, other.buffers["state"].tensor
    return one.constants == other.constants and torch.equal(mine, theirs)


def hidden(wrong: str) -> Rejected:
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
