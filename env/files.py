"""Writing files so that a kill at any instant leaves the old content or the new one. Runs everywhere."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(found for found in (path, *path.absolute().parents) if found.exists())


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an OSError of writing to `path` into one that says which file, how much room there is, and what to do."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(existing(path)).free / 2**20
        what = f"{error.strerror or error}; {free:,.0f} MiB are free there. Make room or mend the folder, and run the"
        raise OSError(error.errno, f"{what} same command again: it goes on where it stopped", str(path)) from error


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
