"""What makes a text a problem: a file, a row or a line becomes a Problem, or a fault in words (ProblemError).

Runs in the driver, on text: nothing is imported or run. `env.problems` finds the files.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from env.records import RECORD_VERSION, Problem

# The first of these that a table has. KernelBench's data set: code, level, name, problem_id.
SOURCES = ("code", "reference", "source")
ENTRY_POINT = "entry_point"
MAX_TOLD = 10  # faults that a message names one by one


class ProblemError(ValueError):
    """A folder or file that holds no problems, or one that isn't a problem: says which and what to do."""


def several(faults: list[str]) -> str:
    """Faults one below the other, the first MAX_TOLD of them."""
    more = [f"and {len(faults) - MAX_TOLD} more"] if len(faults) > MAX_TOLD else []
    return "\n  ".join(faults[:MAX_TOLD] + more)


class Faults:
    """Collects what isn't a problem, and decides at the end."""

    def __init__(self, broken: list[str] | None):
        self.told: list[str] = []
        self._broken = broken

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """What raises ProblemError within is noted instead."""
        try:
            yield
        except ProblemError as error:
            self.told.append(str(error))

    def settle(self, where: str | Path, sound: int) -> None:
        """Raises ProblemError naming all, unless the caller takes their names and something sound is left."""
        if not self.told:
            return
        if self._broken is not None and sound:
            self._broken += self.told
            return
        if self._broken is not None:
            raise ProblemError(f"{where}: nothing in it is a problem:\n  {several(self.told)}")
        if len(self.told) + sound == 1:
            raise ProblemError(self.told[0])
        raise ProblemError(
            f"{several(self.told)}\n  {sound} of {sound + len(self.told)} are sound. Mend the others or move them "
            "elsewhere; eval.run, eval.audit and eval.kernelbench rejudge go on without them with --skip-broken, and "
            "so does load(..., broken=[])"
        )


# One problem ----------------------------------------------------------------------------------------------------------


def read_text(path: Path) -> str:
    """Raises ProblemError naming the file and why it can't be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProblemError(f"{path}: not text in UTF-8 ({error.reason} at byte {error.start})") from error
    except FileNotFoundError as error:
        raise ProblemError(f"{path}: no such file") from error
    except OSError as error:
        raise ProblemError(f"{path}: can't be read ({error.strerror})") from error


def check_reference(source: str, where: str, entry_point: str) -> None:
    """Raises ProblemError where a reference lacks one of its three parts, or where it can't be parsed and so does."""
    for kind, name in (("class", entry_point), ("def", "get_inputs"), ("def", "get_init_inputs")):
        if not re.search(rf"^[ \t]*{kind}[ \t]+{re.escape(name)}\b", source, re.MULTILINE):
            missing, unreadable = f"it has no '{kind} {name}'", _not_python(source)
            why = f"{unreadable}; {missing} either" if unreadable else missing
            raise ProblemError(f"{where}: not a KernelBench problem: {why}")


def _not_python(source: str) -> str:
    """Why a text can't be parsed, "" where it can: a name that is missing may only be misspelt."""
    try:
        with warnings.catch_warnings(action="ignore"):
            ast.parse(source)
    except SyntaxError as error:
        line = f"{error.lineno}: {(error.text or '').strip()[:120]!r}"
        return f"SyntaxError: {error.msg} (line {line})"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"it can't be parsed ({type(error).__name__}: {error})"
    return ""


def _kind(value: object) -> str:
    return "empty" if value is None else f"a {type(value).__name__}"


def from_row(row: dict[str, Any], columns: Iterable[str], where: str, origin: str) -> tuple[str, Problem]:
    """A problem from a table's row or a plain JSON line, with where it came from."""
    found = ", ".join(map(str, columns)) or "none"
    sources = [name for name in SOURCES if name in row]
    if not sources:
        raise ProblemError(f"{where}: has no column code, reference or source (columns found: {found})")
    source = row[sources[0]]
    if not isinstance(source, str):
        raise ProblemError(f"{where}: {sources[0]} is {_kind(source)}, not text")
    level = row.get("level") or 0
    if isinstance(level, str) and (number := re.fullmatch(r"(?:level)?[ _]?(\d+)", level)):
        level = int(number.group(1))
    if not isinstance(level, int):
        raise ProblemError(f"{where}: level is {level!r}, not a number")
    name = row.get("name") or ""
    # KernelBench's own numbers start anew in each level; its files are called level1/1_Name.
    if row.get("id") is not None:
        key = row["id"]
    elif name and "level" in row:
        key = f"level{level}/{name}"
    else:
        key = name or row.get("problem_id")
    if not isinstance(key, (str, int)) or isinstance(key, bool) or key == "":
        raise ProblemError(f"{where}: has no id, name or problem_id that is text or a number (columns found: {found})")
    entry_point = row.get(ENTRY_POINT) or "Model"
    if not isinstance(entry_point, str) or not entry_point.isidentifier():
        raise ProblemError(f"{where}: entry_point is {entry_point!r}, not the name of a class")
    check_reference(source, where, entry_point)
    return where, Problem(
        id=str(key), source=source, entry_point=entry_point, level=level, name=str(name or key), origin=origin
    )


def from_line(line: str, where: str) -> tuple[str, Problem]:
    """A problem from a line of JSON, plain or our own record, with where it came from."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProblemError(f"{where}: not a problem record ({error})") from error
    if isinstance(row, dict) and "source" not in row and ("reference" in row or "code" in row):
        return from_row(row, row, where, "jsonl")
    return where, _from_record(row, where)


def _from_record(row: Any, where: str) -> Problem:
    try:
        problem = Problem.from_json(row)
    except TypeError as error:
        keys = f"; keys found: {', '.join(map(str, row))}" if isinstance(row, dict) else ""
        raise ProblemError(f"{where}: not a problem record ({error}{keys})") from error
    for part in fields(Problem):
        value, wanted = getattr(problem, part.name), {"str": str, "int": int}[str(part.type)]
        if type(value) is not wanted:
            raise ProblemError(f"{where}: not a problem record ({part.name} is {_kind(value)}, not {part.type})")
    if problem.version > RECORD_VERSION:
        raise ProblemError(f"{where}: a record of version {problem.version}; this program knows up to {RECORD_VERSION}")
    return problem
