"""Writing files so that a kill at any instant leaves the old content or the new one. Runs everywhere."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

MIB = 2**20


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(found for found in (path, *path.absolute().parents) if found.exists())


def file_limit() -> int | None:
    """Bytes that a file of this process may have (ulimit -f); None where there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def room(folder: Path) -> str:
    """How much can be written to `folder`, or where it will be, and what to do if that is too little."""
    free = f"{shutil.disk_usage(existing(folder)).free / MIB:,.0f} MiB are free there"
    limit = file_limit()
    if limit is None:
        return f"{free}: make room or mend the folder"
    return f"{free}, but no file may have more than {limit / MIB:,.1f} MiB: raise that limit (ulimit -f), or make room"


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an OSError of writing to `path` into one that says which file, how much room there is, and what to do."""
    try:
        yield
    except OSError as error:
        what = f"{error.strerror or error}; {room(path)}, and run the same command again: it goes on where it stopped"
        raise OSError(error.errno, what, str(path)) from error


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` through a temporary file beside it: readers never see half of it."""
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def append_durably(path: Path, text: str) -> None:
    """Append `text` to a file and force it to disk before returning."""
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


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
