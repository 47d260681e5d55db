"""Writing files so that a kill at any instant leaves the old content or the new one. Runs everywhere."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` through a temporary file beside it: readers never see half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def remove_tree(path: str | Path) -> None:
    """Remove a folder that foreign code has filled, as far as that can be done; never raises.

    It may be nested deeper than Python recurses and longer than a path may be: then what lies below is moved up, level
    by level, until every folder is empty.
    """
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        with contextlib.suppress(OSError):
            _flatten(Path(path))


def _flatten(root: Path) -> None:
    number = 0
    while entries := list(root.iterdir()):
        for entry in entries:
            if entry.is_symlink() or not entry.is_dir():
                entry.unlink()
                continue
            entry.chmod(0o700)
            for child in list(entry.iterdir()):
                child.rename(root / f".moved-up-{number}")
                number += 1
            entry.rmdir()
    root.rmdir()
