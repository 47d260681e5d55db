"""Problems from a folder in the KernelBench format, a parquet table, JSON lines, or the built-in generator: `load`.

Runs in the driver. A problem is text here: nothing is imported, so a broken or hostile reference is found by the judge.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from env.files import write_atomic
from env.records import RECORD_VERSION, Problem

_LEVEL = re.compile(r"level_?(\d+)")

# The first of these that a table has. KernelBench's data set: code, level, name, problem_id.
_SOURCE = ("code", "reference", "source")
_ENTRY_POINT = "entry_point"


class ProblemError(ValueError):
    """A folder or file that holds no problems, or one that isn't a problem: says which and what to do."""


def load(spec: str | Path) -> list[Problem]:
    """Problems from a folder, a .py, .parquet or .jsonl file, or `generator:train:20[:SEED[:cpu|gpu]]`.

    Raises ProblemError naming the file (and line) and its fault.
    """
    if str(spec).startswith("generator:"):
        return _generated(str(spec))
    path = Path(spec)
    if path.is_dir():
        tables = sorted(path.rglob("*.parquet"))
        if tables and next(path.rglob("*.py"), None) is None:
            return _distinct([pair for table in tables for pair in _from_parquet(table)])
        return load_folder(path)
    if not path.exists():
        raise ProblemError(
            f"{path}: no such file or folder; give a folder of .py files, a .py, .parquet or .jsonl file, or "
            "generator:train:20"
        )
    if path.suffix == ".parquet":
        return load_parquet(path)
    if path.suffix == ".jsonl":
        return load_jsonl(path)
    if path.suffix == ".py":
        return [load_file(path)]
    raise ProblemError(f"{path}: problems come from a folder or from .py, .parquet and .jsonl files")


# Folders -------------------------------------------------------------------------------------------------------------


def load_file(path: Path, root: Path | None = None, entry_point: str = "Model") -> Problem:
    """One KernelBench-format file. Its level comes from a folder named level1, level2, … where there is one."""
    source = _read(path)
    _check_reference(source, str(path), entry_point)
    level = next((int(found.group(1)) for part in path.parts[::-1] if (found := _LEVEL.fullmatch(part))), 0)
    name = path.relative_to(root).with_suffix("").as_posix() if root else path.stem
    return Problem(id=name, source=source, entry_point=entry_point, level=level, name=path.stem, origin="folder")


def load_folder(path: str | Path) -> list[Problem]:
    """All .py files below a folder, in the order of their numbers. Raises ProblemError naming what is wrong.

    Where the folder (or the KernelBench folder in it, as in that project's repository) has level1, level2, …, files
    that stand beside these and aren't problems are left alone.
    """
    root = Path(path)
    if not root.is_dir():
        raise ProblemError(
            f"{root}: no such folder; point problems.path (or KERNELBENCH_DIR) at the folder of .py files"
        )
    if not _levels(root) and _levels(root / "KernelBench"):
        root = root / "KernelBench"
    levels = _levels(root)
    found = [file for file in root.rglob("*.py") if file.is_file() and not _is_aside(file.relative_to(root))]
    files = sorted(found, key=_natural)
    if not files:
        raise ProblemError(f"{root}: holds no .py files")
    problems = []
    for file in files:
        try:
            problems.append(load_file(file, root))
        except ProblemError:
            if not levels or file.relative_to(root).parts[0] in levels:
                raise
    return problems


def _levels(root: Path) -> set[str]:
    return (
        {part.name for part in root.iterdir() if part.is_dir() and _LEVEL.fullmatch(part.name)}
        if root.is_dir()
        else set()
    )


def _is_aside(path: Path) -> bool:
    """Package markers, notebooks' checkpoints and caches."""
    return path.name == "__init__.py" or any(part.startswith((".", "__pycache__")) for part in path.parts)


def _natural(path: Path) -> list:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]


def write_folder(problems: list[Problem], path: str | Path) -> None:
    """Write problems as KernelBench-format files named after their ids."""
    for problem in problems:
        write_atomic(Path(path) / f"{problem.id}.py", problem.source)


# Tables and lines ----------------------------------------------------------------------------------------------------


def load_parquet(path: str | Path) -> list[Problem]:
    """One problem a row of a Hugging Face style table: `code`, `reference` or `source`, and `id`, `name` or
    `problem_id`; `level` and `entry_point` where there are such columns. Raises ProblemError.
    """
    return _distinct(_from_parquet(Path(path)))


def _from_parquet(path: Path) -> list[tuple[str, Problem]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ProblemError(
            f"{path}: reading parquet needs pyarrow, which isn't installed: pip install pyarrow (requirements.txt has "
            "the version), or turn the table into .jsonl"
        ) from error
    wanted = {*_SOURCE, "id", "name", "problem_id", "level", _ENTRY_POINT}
    try:
        with parquet.ParquetFile(path) as file:
            columns = list(file.schema_arrow.names)
            rows = file.read(columns=[name for name in columns if name in wanted]).to_pylist()
    except (ArrowException, OSError, ValueError) as error:
        raise ProblemError(f"{path}: not a parquet table that can be read ({str(error).strip()[:200]})") from error
    if not rows:
        raise ProblemError(f"{path}: the table has no rows (columns: {', '.join(columns)})")
    return [_from_row(row, columns, f"{path}: row {number}", "parquet") for number, row in enumerate(rows)]


def _from_row(row: dict[str, Any], columns: Iterable[str], where: str, origin: str) -> tuple[str, Problem]:
    """A problem from a table's row or a plain JSON line, with where it came from."""
    found = ", ".join(map(str, columns)) or "none"
    sources = [name for name in _SOURCE if name in row]
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
    entry_point = row.get(_ENTRY_POINT) or "Model"
    if not isinstance(entry_point, str) or not entry_point.isidentifier():
        raise ProblemError(f"{where}: entry_point is {entry_point!r}, not the name of a class")
    _check_reference(source, where, entry_point)
    return where, Problem(
        id=str(key), source=source, entry_point=entry_point, level=level, name=str(name or key), origin=origin
    )


def load_jsonl(path: str | Path) -> list[Problem]:
    """One problem a line: our own records (as `write_jsonl` has them), or plain lines with `id` and `reference`.

    Raises ProblemError naming the line.
    """
    found = []
    # Not splitlines(): JSON may hold U+2028 and U+0085 as they are, which Python takes for line ends.
    for number, line in enumerate(_read(Path(path)).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ProblemError(f"{where}: not a problem record ({error})") from error
        if isinstance(row, dict) and "source" not in row and ("reference" in row or "code" in row):
            found.append(_from_row(row, row, where, "jsonl"))
        else:
            found.append((where, _from_record(row, where)))
    if not found:
        raise ProblemError(f"{path}: holds no problem: one JSON object a line is expected")
    return _distinct(found)


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


def write_jsonl(problems: list[Problem], path: str | Path) -> None:
    """One Problem a line, atomically."""
    write_atomic(Path(path), "".join(json.dumps(problem.to_json(), sort_keys=True) + "\n" for problem in problems))


# Common to all -------------------------------------------------------------------------------------------------------


def _generated(spec: str) -> list[Problem]:
    from env.generator import generate

    _, split, *rest = spec.split(":")
    numbers, size = rest[:2], rest[2] if len(rest) == 3 else "cpu"
    if not 1 <= len(rest) <= 3 or not all(re.fullmatch(r"\d{1,9}", part) for part in numbers) or int(numbers[0]) < 1:
        raise ProblemError(f"{spec}: write generator:train:20, or generator:heldout:20:SEED:gpu")
    try:
        return generate(split, int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 0, size)
    except ValueError as error:
        raise ProblemError(f"{spec}: {error}") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProblemError(f"{path}: not text in UTF-8 ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise ProblemError(f"{path}: can't be read ({error.strerror})") from error


def _check_reference(source: str, where: str, entry_point: str) -> None:
    for kind, name in (("class", entry_point), ("def", "get_inputs"), ("def", "get_init_inputs")):
        if not re.search(rf"^[ \t]*{kind}[ \t]+{re.escape(name)}\b", source, re.MULTILINE):
            raise ProblemError(f"{where}: not a KernelBench problem: it has no '{kind} {name}'")


def _kind(value: object) -> str:
    return "empty" if value is None else f"a {type(value).__name__}"


def _distinct(found: list[tuple[str, Problem]]) -> list[Problem]:
    seen: dict[str, str] = {}
    for where, problem in found:
        if problem.id in seen:
            raise ProblemError(f"{where}: the id {problem.id} is taken already ({seen[problem.id]})")
        seen[problem.id] = where
    return [problem for _, problem in found]
