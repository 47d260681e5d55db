"""Problems from a folder in the KernelBench format, a parquet table, JSON lines, or the built-in generator: `load`.

Runs in the driver. A problem is text here: nothing is imported, so a broken or hostile reference is found by the judge.
Files, lines and rows that aren't problems are all named in one ProblemError, or, where the caller gives a list `broken`
for that, left out and named there: never left out without a word.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

from env.files import write_atomic
from env.problem_format import (
    ENTRY_POINT,
    SOURCES,
    Faults,
    ProblemError,
    check_reference,
    from_line,
    from_row,
    read_text,
)
from env.records import Problem

_LEVEL = re.compile(r"level_?(\d+)")


def load(spec: str | Path, broken: list[str] | None = None) -> list[Problem]:
    """Problems from a folder, a .py, .parquet or .jsonl file, or `generator:train:20[:SEED[:cpu|gpu]]`.

    broken: a list that gets a sentence on each file, line or row that isn't a problem; they are left out then. Raises
    ProblemError naming each of them otherwise, and where none is sound.
    """
    if str(spec).startswith("generator:"):
        return _generated(str(spec))
    path = Path(spec)
    if path.is_dir():
        tables = sorted(path.rglob("*.parquet"))
        if tables and next(path.rglob("*.py"), None) is None:
            faults = Faults(broken)
            found: list[tuple[str, Problem]] = []
            for table in tables:
                with faults.kept():
                    found += _from_parquet(table, faults)
            faults.settle(path, len(found))
            return _distinct(found)
        return load_folder(path, broken)
    if not path.exists():
        raise ProblemError(
            f"{path}: no such file or folder; give a folder of .py files, a .py, .parquet or .jsonl file, or "
            "generator:train:20"
        )
    if path.suffix == ".parquet":
        return load_parquet(path, broken)
    if path.suffix == ".jsonl":
        return load_jsonl(path, broken)
    if path.suffix == ".py":
        return [load_file(path)]
    raise ProblemError(f"{path}: problems come from a folder or from .py, .parquet and .jsonl files")


# Folders -------------------------------------------------------------------------------------------------------------


def load_file(path: str | Path, root: str | Path | None = None, entry_point: str = "Model") -> Problem:
    """One KernelBench-format file. Its level comes from a folder named level1, level2, … where there is one.

    root: the folder that it is named from. Raises ProblemError naming the file and its fault.
    """
    path = Path(path)
    source = read_text(path)
    check_reference(source, str(path), entry_point)
    level = next((int(found.group(1)) for part in path.parts[::-1] if (found := _LEVEL.fullmatch(part))), 0)
    name = path.relative_to(root).with_suffix("").as_posix() if root else path.stem
    return Problem(id=name, source=source, entry_point=entry_point, level=level, name=path.stem, origin="folder")


def load_folder(path: str | Path, broken: list[str] | None = None) -> list[Problem]:
    """All .py files below a folder, in the order of their numbers. Raises ProblemError naming what is wrong, or leaves
    it out where there is a list `broken` for that, as `load` does.

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
    problems, faults = [], Faults(broken)
    for file in files:
        is_aside = levels and file.relative_to(root).parts[0] not in levels
        with contextlib.suppress(ProblemError) if is_aside else faults.kept():
            problems.append(load_file(file, root))
    faults.settle(root, len(problems))
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


def load_parquet(path: str | Path, broken: list[str] | None = None) -> list[Problem]:
    """One problem a row of a Hugging Face style table: `code`, `reference` or `source`, and `id`, `name` or
    `problem_id`; `level` and `entry_point` where there are such columns. Raises ProblemError, or leaves rows out, as
    `load` does.
    """
    faults = Faults(broken)
    found = _from_parquet(Path(path), faults)
    faults.settle(path, len(found))
    return _distinct(found)


def _from_parquet(path: Path, faults: Faults) -> list[tuple[str, Problem]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ProblemError(
            f"{path}: reading parquet needs pyarrow, which isn't installed: pip install pyarrow (requirements.txt has "
            "the version), or turn the table into .jsonl"
        ) from error
    wanted = {*SOURCES, "id", "name", "problem_id", "level", ENTRY_POINT}
    try:
        with parquet.ParquetFile(path) as file:
            columns = list(file.schema_arrow.names)
            rows = file.read(columns=[name for name in columns if name in wanted]).to_pylist()
    except (ArrowException, OSError, ValueError) as error:
        raise ProblemError(f"{path}: not a parquet table that can be read ({str(error).strip()[:200]})") from error
    if not rows:
        raise ProblemError(f"{path}: the table has no rows (columns: {', '.join(columns)})")
    if not any(name in columns for name in SOURCES):  # said once, not for every row
        raise ProblemError(f"{path}: has no column code, reference or source (columns found: {', '.join(columns)})")
    found = []
    for number, row in enumerate(rows):
        with faults.kept():
            found.append(from_row(row, columns, f"{path}: row {number}", "parquet"))
    return found


def load_jsonl(path: str | Path, broken: list[str] | None = None) -> list[Problem]:
    """One problem a line: our own records (as `write_jsonl` has them), or plain lines with `id` and `reference`.

    Raises ProblemError naming the bad lines, or leaves them out, as `load` does.
    """
    found, faults = [], Faults(broken)
    # Not splitlines(): JSON may hold U+2028 and U+0085 as they are, which Python takes for line ends.
    for number, line in enumerate(read_text(Path(path)).split("\n"), 1):
        if not line.strip():
            continue
        with faults.kept():
            found.append(from_line(line, f"{path}:{number}"))
    faults.settle(path, len(found))
    if not found:
        raise ProblemError(f"{path}: holds no problem: one JSON object a line is expected")
    return _distinct(found)


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


def _distinct(found: list[tuple[str, Problem]]) -> list[Problem]:
    seen: dict[str, str] = {}
    for where, problem in found:
        if problem.id in seen:
            raise ProblemError(f"{where}: the id {problem.id} is taken already ({seen[problem.id]})")
        seen[problem.id] = where
    return [problem for _, problem in found]
