"""Watches the host memory of workers and says which one to end, without cgroups.

Runs in the fork server, which is idle otherwise. The kernel's own limit (address space) breaks CUDA, so that memory is
looked at: of a worker with all that it started, anonymous and shared, beyond what it had when it was forked. How often
follows from how far away the limit is: nobody fills memory faster than `FASTEST`, so that a worker with gigabytes left
needs no look for a while, and one that is close is looked at every few milliseconds.
"""

from __future__ import annotations

import math
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

FASTEST = 64e9  # bytes a second: more than all cores of a large machine fault in
SOONEST_S, LATEST_S, TOGETHER_S = 0.004, 0.1, 0.02
MAX_SCANNED = 4096  # files of one worker that are looked at for shared memory
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SHARED = ("/memfd:", "/dev/zero (deleted)", "/SYSV")
_SHARED_BYTES = tuple(name.encode() for name in _SHARED)


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 65536)
    finally:
        os.close(fd)


def _names(folder: str) -> list[str]:
    # Not pathlib: all of this runs up to 250 times a second for each worker.
    return os.listdir(folder)  # noqa: PTH208


def anonymous_bytes(pid: int | str) -> int:
    """Resident memory of a process that no file and no shared memory backs. Raises OSError where it is gone."""
    fields = _read(f"/proc/{pid}/statm").split()
    return (int(fields[1]) - int(fields[2])) * _PAGE


def children(pid: int) -> tuple[list[int], int]:
    """(process ids of the children of all its threads, number of threads); ([], 0) where it is gone."""
    found: list[int] = []
    try:
        threads = _names(f"/proc/{pid}/task")
    except OSError:
        return [], 0
    for thread in threads:
        try:
            found += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
        except FileNotFoundError:
            if not _CHILDREN_LISTED:
                return _children_by_search(pid), len(threads)
        except OSError:
            continue
    return found, len(threads)


def _children_by_search(pid: int) -> list[int]:
    """For kernels without lists of children: all processes are asked for their parent."""
    found = []
    for name in _names("/proc"):
        if name.isdigit():
            try:
                if int(_read(f"/proc/{name}/stat").rsplit(b")", 1)[1].split()[1]) == pid:
                    found.append(int(name))
            except OSError:
                continue
    return found


_CHILDREN_LISTED = Path(f"/proc/self/task/{os.getpid()}/children").exists()


def descendants(pid: int) -> tuple[list[int], int]:
    """(all processes below `pid`, without itself, and how many threads they have)."""
    found, total, queue = [], 0, [pid]
    while queue:
        below, threads = children(queue.pop())
        found += below
        queue += below
        total += threads
    return found, total


def _shared_files(pid: int, budget: int, mapped: bool = True) -> tuple[dict[tuple[int, int], int], int]:
    """({(device, inode): bytes in memory} of the shared memory that a process has open, or also mapped; bytes of
    mappings that can't be followed without privileges, of which any part may be in memory).

    Raises OverflowError where that would mean more than `budget` files.
    """
    links: dict[str, int] = {}
    try:
        links |= {f"/proc/{pid}/fd/{name}": 0 for name in _names(f"/proc/{pid}/fd")}
        if mapped:
            for line in Path(f"/proc/{pid}/maps").read_bytes().splitlines():
                if line.endswith(b"(deleted)") and any(name in line for name in _SHARED_BYTES):
                    start, end = _range(line)
                    links[f"/proc/{pid}/map_files/{start:x}-{end:x}"] = end - start
    except OSError:
        return {}, 0  # it has ended meanwhile
    if len(links) > budget:
        raise OverflowError
    sizes: dict[tuple[int, int], int] = {}
    hidden = 0
    for link, size in links.items():
        try:
            if os.readlink(link).startswith(_SHARED):  # noqa: PTH115
                status = os.stat(link)  # noqa: PTH116
                sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
        except PermissionError:
            hidden += size
        except OSError:
            continue
    return sizes, hidden


def _range(line: bytes) -> tuple[int, int]:
    start, end = line.split(None, 1)[0].split(b"-")
    return int(start, 16), int(end, 16)


def _own_shm(pid: int) -> int:
    """Bytes in a worker's own /dev/shm; 0 where it has none."""
    path = Path(f"/proc/{pid}/root/dev/shm")
    try:
        if path.stat().st_dev == Path("/dev/shm").stat().st_dev:
            return 0
        usage = os.statvfs(path)
        return (usage.f_blocks - usage.f_bfree) * usage.f_frsize
    except OSError:
        return 0


class Machine:
    """What is left of this machine's memory, or of the container's."""

    def __init__(self) -> None:
        self._meminfo = os.open("/proc/meminfo", os.O_RDONLY | os.O_CLOEXEC)
        self.available, self.shared, total = self._read()
        self._group = _limited_group()
        if self._group:
            total = min(total, self._group[0])
        # Below this the machine, and with it everybody's work, is in danger.
        self.floor = max(1 << 30, total // 20)
        self.look()

    def _read(self) -> tuple[int, int, int]:
        text = os.pread(self._meminfo, 8192, 0)

        def kibibytes(name: bytes) -> int:
            at = text.index(b"\n" + name) + len(name) + 1 if not text.startswith(name) else len(name)
            return int(text[at : text.index(b"kB", at)]) << 10

        return kibibytes(b"MemAvailable:"), kibibytes(b"Shmem:"), kibibytes(b"MemTotal:")

    def look(self) -> None:
        """Read anew: `available` and `shared`, in bytes."""
        self.available, self.shared, _ = self._read()
        if self._group:
            limit, usage, statistics = self._group
            try:
                cached = re.search(rb"^(?:total_)?inactive_file (\d+)", _read(statistics), re.MULTILINE)
                left = limit - int(_read(usage)) + (int(cached[1]) if cached else 0)
                self.available = min(self.available, left)
            except (OSError, ValueError):
                self._group = None  # moved elsewhere: the machine's figure remains


def _limited_group() -> tuple[int, str, str] | None:
    """(limit in bytes, file with the usage, file with the statistics) of the memory cgroup around us, if it has a
    limit.
    """
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots, names = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            roots, names = ("/sys/fs/cgroup/memory",), ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        for root in roots:
            for folder in (Path(root + path), Path(root)):
                try:
                    limit = int((folder / names[0]).read_text())
                    if limit < 1 << 60:
                        return limit, str(folder / names[1]), str(folder / "memory.stat")
                except (OSError, ValueError):
                    continue
    return None


@dataclass
class _Watched:
    worker: int
    base: int
    next_look: float = 0.0
    used: int = 0
    shared: int = 0
    shared_at: int = 0  # the machine's shared memory when `shared` was counted
    pids: list[int] = field(default_factory=list)
    condemned: float = 0.0


class Watch:
    """Looks after workers, known by the process id of their supervisor. Times are `time.monotonic`."""

    def __init__(self, limit_bytes: int, max_processes: int):
        self.limit = limit_bytes
        self.max_processes = max_processes
        self.machine = Machine()
        self.workers: dict[int, _Watched] = {}
        self._next_machine = 0.0
        self._last_sacrifice = 0.0

    def add(self, supervisor: int, worker: int, base: int) -> None:
        """base: anonymous memory of the fork server, which a fork shares with it."""
        self.machine.look()
        self.workers[supervisor] = _Watched(worker, base, shared_at=self.machine.shared)

    def remove(self, supervisor: int) -> None:
        self.workers.pop(supervisor, None)

    def processes(self, supervisor: int) -> list[int]:
        """The worker and what it has started, as last seen."""
        watched = self.workers[supervisor]
        return [watched.worker, *watched.pids]

    def wait_s(self) -> float | None:
        """Seconds until somebody must be looked at; None where there is nobody."""
        times = [watched.next_look for watched in self.workers.values() if not watched.condemned]
        return max(0.0, min([*times, self._next_machine]) - time.monotonic()) if times else None

    def look(self) -> list[tuple[int, str, bool]]:
        """Look at whoever is due. Returns [(supervisor, why it has to end, whether by its own fault)]."""
        now = time.monotonic()
        if not self.workers:
            return []
        ended: list[tuple[int, str, bool]] = []
        if now < min([self._next_machine, *(watched.next_look for watched in self.workers.values())]):
            return ended
        # Anew for every round: a worker's shared memory is known from the machine's.
        self.machine.look()
        self._next_machine = now + _interval(self.machine.available - self.machine.floor)
        short = self.machine.available < self.machine.floor
        for supervisor, watched in self.workers.items():
            # Those that are due soon are looked at now, so that looks fall together.
            if not watched.condemned and (short or now >= watched.next_look - TOGETHER_S):
                why = self._examine(supervisor, watched, now)
                if why:
                    watched.condemned, watched.next_look = now, math.inf
                    ended.append((supervisor, why, True))
        if short and not ended:
            ended += self._sacrifice(now)
        return ended

    def _examine(self, supervisor: int, watched: _Watched, now: float) -> str | None:
        """Count one worker's memory and processes. Returns why it has to end, if it does."""
        # From the supervisor, which adopts orphans where there is no PID namespace.
        pids, threads = descendants(supervisor)
        watched.pids = [pid for pid in pids if pid != watched.worker]
        if threads > self.max_processes:
            return f"more than {self.max_processes} processes and threads"
        private, largest = 0, 0
        for pid in pids:
            try:
                anonymous = anonymous_bytes(pid)
            except OSError:
                continue
            largest = max(largest, anonymous - watched.base)
            private += anonymous - watched.base if pid == watched.worker else anonymous
        private = max(0, private)
        if private > self.limit >= largest and watched.pids:
            # Forks share their parent's memory: each counts its part.
            private = _proportional_bytes(pids, private)
        grown = max(0, self.machine.shared - watched.shared_at)
        used = private + watched.shared + grown
        if used > self.limit and private <= self.limit:
            watched.shared = self._count_shared(pids, watched.worker, watched.shared + grown)
            watched.shared_at = self.machine.shared
            used = private + watched.shared
        watched.used = used
        if used > self.limit:
            # By how much is chance: whoever takes too much is ended as soon as it is seen.
            return f"host memory: over the limit of {self.limit / (1 << 30):.2f} GiB"
        watched.next_look = now + min(
            _interval(self.limit - used), _interval(self.machine.available - self.machine.floor)
        )
        return None

    def _count_shared(self, pids: list[int], worker: int, at_most: int) -> int:
        """Shared memory of a worker, without what its judge lent it. `at_most` where there is too much to count."""
        sizes: dict[tuple[int, int], int] = {}
        unseen = 0
        try:
            for pid in pids:
                found, hidden = _shared_files(pid, MAX_SCANNED - len(sizes))
                sizes.update(found)
                unseen += hidden
            for lent in _shared_files(os.getppid(), 1 << 20, mapped=False)[0]:
                sizes.pop(lent, None)
        except OverflowError:
            return at_most
        seen = sum(sizes.values()) + _own_shm(worker)
        return seen + min(unseen, max(0, at_most - seen))

    def _sacrifice(self, now: float) -> list[tuple[int, str, bool]]:
        """The machine runs short: the largest has to end, and gets a moment to give its memory back."""
        dying = any(watched.condemned > now - 1.0 for watched in self.workers.values())
        if (dying and self.machine.available > self.machine.floor // 2) or now < self._last_sacrifice + 0.1:
            return []
        living = [
            (watched.used + _pinned_bytes(self.processes(supervisor)), supervisor)
            for supervisor, watched in self.workers.items()
            if not watched.condemned
        ]
        if not living or max(living)[0] < 256 << 20:
            return []  # nobody here: it is other programs that fill the memory
        used, supervisor = max(living)
        self.workers[supervisor].condemned = self._last_sacrifice = now
        self.workers[supervisor].next_look = math.inf
        left = self.machine.available / (1 << 30)
        why = f"host memory: {used / (1 << 30):.2f} GiB used while this machine had {left:.2f} GiB left"
        return [(supervisor, why, used > self.limit)]


def _pinned_bytes(pids: list[int]) -> int:
    """Host memory that CUDA's driver has pinned for processes. It is in no process's resident memory, and looking for
    it takes a millisecond, so that it only counts once the machine runs short.
    """
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.endswith(b"/dev/nvidiactl"):
                start, end = _range(line)
                total += end - start
    return total


def _interval(headroom: int) -> float:
    return min(LATEST_S, max(SOONEST_S, headroom / FASTEST))


def _proportional_bytes(pids: list[int], at_most: int) -> int:
    """Anonymous memory of processes that share pages, each page counted once. `at_most` where this can't be seen."""
    total = 0
    for pid in pids:
        try:
            found = re.search(rb"^Pss_Anon:\s+(\d+)", _read(f"/proc/{pid}/smaps_rollup"), re.MULTILINE)
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:
            return at_most
        if found is None:
            return at_most
        total += int(found[1]) << 10
    return min(at_most, total)
