"""A user of its own for each worker, where the judge runs as root: no file, process or limit is shared with anybody.

Runs in the fork server (`Slots`) and in the freshly forked worker (`become`). Python often lies where only root may go
(a home folder): the worker's mount namespace then shows that folder empty but for what Python needs.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import socket
import stat
import sys
from pathlib import Path

from env.libc import LIBC, last_error

FIRST_UID, SLOTS = 61000, 180  # up to 61179: systemd gives out users from 61184 on

_MS_NOSUID_NODEV, _MS_BIND, _MS_REC = 2 | 4, 4096, 16384
_PR_SET_DUMPABLE = 4


class Slots:
    """Users that no other fork server on this machine hands out at the same time."""

    def __init__(self) -> None:
        # An abstract socket's name is a lock that goes with the process that holds it, whatever ends it.
        self._held: dict[int, socket.socket] = {}

    def take(self) -> int:
        """A free uid. Raises OSError where all are taken."""
        for uid in range(FIRST_UID, FIRST_UID + SLOTS):
            if uid in self._held:
                continue
            lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                lock.bind(f"\0kernel-judge-uid-{uid}")
            except OSError:
                lock.close()
                continue
            self._held[uid] = lock
            return uid
        raise OSError(0, f"all uids from {FIRST_UID} to {FIRST_UID + SLOTS - 1} are in use")

    def give_back(self, uid: int) -> None:
        """To be called once no process of that user is left."""
        self._held.pop(uid).close()


def _demand_open(path: Path) -> None:
    """Raises OSError where somebody who is neither owner nor in the group may not read it (or enter it, a folder)."""
    mode = path.stat().st_mode
    wanted = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) else 0)
    if mode & wanted != wanted:
        raise OSError(0, f"{path} can't be read by another user (chmod o+rX, or install Python elsewhere)")


def closed_folders(needed: list[Path], scratch: str) -> dict[Path, list[Path]]:
    """{folder that others may not enter: what lies below it and is needed}. Raises OSError for what is closed itself.

    Scratch will belong to the new user: only the way to it counts.
    """
    closed: dict[Path, list[Path]] = {}
    for path in [*needed, Path(scratch)]:
        if not path.exists():
            continue
        if path != Path(scratch):
            _demand_open(path)
        for folder in reversed(path.parents):
            if not folder.stat().st_mode & stat.S_IXOTH:
                closed.setdefault(folder, []).append(path)
                break
    return closed


def check_readable() -> None:
    """A sample of the files that a worker needs. Raises OSError naming the first that another user can't read."""
    sample = [Path(os.__file__), *Path("/dev").glob("nvidia*")]
    for name in ("torch", "triton"):
        found = importlib.util.find_spec(name)
        if found is not None and found.origin:
            sample.append(Path(found.origin))
    sample += [Path(__file__), Path(sys.executable)]
    for path in sample:
        _demand_open(path)


def uncover(closed: dict[Path, list[Path]]) -> None:
    """Lay an empty file system over each closed folder and show in it what is needed. Needs a mount namespace of one's
    own. Raises OSError.
    """

    def mount(source: bytes, target: Path, kind: bytes | None, flags: int, options: bytes | None) -> None:
        if LIBC.mount(source, os.fsencode(target), kind, ctypes.c_ulong(flags), options) != 0:
            raise last_error(str(target))

    for folder, paths in closed.items():
        descriptors = [os.open(path, os.O_PATH | os.O_CLOEXEC) for path in paths]
        try:
            mount(b"tmpfs", folder, b"tmpfs", _MS_NOSUID_NODEV, b"size=1m,mode=755")
            for path, fd in zip(paths, descriptors):
                if path.exists():
                    continue  # inside one that is shown already
                path.parent.mkdir(parents=True, exist_ok=True)
                if stat.S_ISDIR(os.fstat(fd).st_mode):
                    path.mkdir()
                else:
                    path.touch()
                mount(f"/proc/self/fd/{fd}".encode(), path, None, _MS_BIND | _MS_REC, None)
        finally:
            for fd in descriptors:
                os.close(fd)


def become(uid: int, scratch: str) -> None:
    """Turn into that user, for good, with scratch as the one folder that it owns. Raises OSError and changes nothing
    where that can't be.
    """
    check_readable()
    os.chown(scratch, uid, uid)
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError:
        os.chown(scratch, os.geteuid(), os.getegid())
        raise
    # Changing the user hides /proc/self from its own process; CUDA names its threads there.
    LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
