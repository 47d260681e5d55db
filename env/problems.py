"""Problems from files: a folder in the KernelBench format, or JSON lines.

Runs in the driver. A problem is text here: nothing is imported, so a broken or hostile reference is found by the judge.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from env.files import write_atomic
from env.records import Problem

_LEVEL = re.compile(r"level(\d+)")


class ProblemError(ValueError):
    """A folder or file that holds no problems, or one that isn't a problem: says which and what to do."""


def load_file(path: Path, root: Path | None = None) -> Problem:
    """One KernelBench-format file. Its level comes from a folder named level1, level2, … where there is one."""
    try:
        source = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProblemError(f"{path}: not text in UTF-8 ({error.reason} at byte {error.start})") from error
    for needed in ("class Model", "def get_inputs", "def get_init_inputs"):
        if needed not in source:
            raise ProblemError(f"{path}: not a KernelBench problem: it has no '{needed}'")
    level = next((int(found.group(1)) for part in path.parts[::-1] if (found := _LEVEL.fullmatch(part))), 0)
    name = str(path.relative_to(root).with_suffix("")) if root else path.stem
    return Problem(id=name, source=source, level=level, name=path.stem, origin="folder")


def load_folder(path: str | Path) -> list[Problem]:
    """All .py files below a folder, in the order of their numbers. Raises ProblemError naming what is wrong."""
    root = Path(path)
    if not root.is_dir():
        raise ProblemError(
            f"{root}: no such folder; point problems.path (or KERNELBENCH_DIR) at the folder of .py files"
        )
    files = sorted(root.rglob("*.py"), key=_natural)
    if not files:
        raise ProblemError(f"{root}: holds no .py files")
    return [load_file(file, root) for file in files]


def _natural(path: Path) -> list:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]


def write_folder(problems: list[Problem], path: str | Path) -> None:
    """Write problems as KernelBench-format files named after their ids."""
    for problem in problems:
        write_atomic(Path(path) / f"{problem.id}.py", problem.source)


def load_jsonl(path: str | Path) -> list[Problem]:
    """One Problem a line. Raises ProblemError naming the line."""
    problems = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            problems.append(Problem.from_json(json.loads(line)))
        except (json.JSONDecodeError, TypeError) as error:
            raise ProblemError(f"{path}:{number}: not a problem record ({error})") from error
    return problems


def write_jsonl(problems: list[Problem], path: str | Path) -> None:
    """One Problem a line, atomically."""
    write_atomic(Path(path), "".join(json.dumps(problem.to_json(), sort_keys=True) + "\n" for problem in problems))
