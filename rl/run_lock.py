"""One process a stage's folder: two at once would write into the same files. Runs in rank 0 of a stage.

The lock is the kernel's (flock) and goes with the process that holds it, however that ends. Its file stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

from env.files import explained
from rl import distributed


class FolderInUse(RuntimeError):
    """Another process works in the folder."""


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold `folder`/.lock, which is not the .lock that scripts/train.sh holds of the run folder, on rank 0.

    All ranks must enter. Raises FolderInUse naming the holder (on the other ranks RankError).
    """
    descriptor = distributed.agree(lambda: _take(folder))
    try:
        yield
    finally:
        if distributed.first():
            os.close(descriptor)


def _take(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    # Not inherited by what this process starts (Python's default): a judge that outlives it must not block the next.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(descriptor, 200).decode("utf-8", "replace").strip() or "another process"
        os.close(descriptor)
        raise FolderInUse(
            f"{folder} is in use by {holder}: wait for it or stop it, and run the same command again; or give this run "
            "a folder of its own"
        ) from error
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    with explained(path):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()} since {now}\n".encode(), 0)
    return descriptor
