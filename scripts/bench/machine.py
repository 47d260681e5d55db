"""What this machine and the judge's processes hold: read from /proc and nvidia-smi.

Runs in the driver, without CUDA.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies: a process that was leaked stays in our tree."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this kernel knows no child subreaper, so leaked processes can't be counted")


def describe(device: str) -> dict[str, Any]:
    """Device, cores, memory and versions, without a CUDA context."""
    versions = {"python": sys.version.split()[0]}
    for package in ("torch", "triton"):
        versions[package] = importlib.metadata.version(package)
    name = "cpu (Triton's interpreter, modelled times)"
    if device == "cuda":
        name, versions["driver"] = (part.strip() for part in _nvidia_smi("name,driver_version")[0].split(",", 1))
    memory_gb = round(_meminfo()["MemTotal"] / (1 << 20), 1)
    return {"device": name, "cores": len(os.sched_getaffinity(0)), "memory_gb": memory_gb, "versions": versions}


def _nvidia_smi(fields: str) -> list[str]:
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    return subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()


def gpu_used_mb(device: str) -> int | None:
    """Memory in use on the first GPU, whoever uses it; None on the CPU."""
    return int(_nvidia_smi("memory.used")[0]) if device == "cuda" else None


# Processes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    state: str
    command: str
    started: int  # in clock ticks since boot


def _process(pid: int) -> Process | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (OSError, IndexError):
        return None  # it ended while we looked
    return Process(pid, int(fields[1]), fields[0], command, int(fields[19]))


def descendants(pid: int | None = None) -> list[Process]:
    """All live processes below `pid` (this one), parents before children; the unreaped dead are left out."""
    children: dict[int, list[Process]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (process := _process(int(entry.name))) is not None:
            children.setdefault(process.parent, []).append(process)
    found, waiting = [], [pid or os.getpid()]
    while waiting:
        below = children.get(waiting.pop(0), [])
        found += below
        waiting += [process.pid for process in below]
    return [process for process in found if process.state not in "ZX"]


@dataclass(frozen=True)
class Judge:
    """The processes of a pool by their part; workers in the order of their birth. serving: process ids of the
    evaluators and fork servers that have workers, as one that stands by hasn't.
    """

    evaluators: list[Process]
    fork_servers: list[Process]
    workers: list[Process]
    serving: frozenset[int] = frozenset()


def judge_processes() -> Judge:
    """Tell evaluators, fork servers and workers below this process apart. A forked child keeps its parent's command."""
    everyone = descendants()
    by_pid = {process.pid: process for process in everyone}
    parents = {process.parent for process in everyone}

    def above(process: Process) -> str:
        parent = by_pid.get(process.parent)
        return parent.command if parent else ""

    def tops(word: str) -> list[Process]:
        return [process for process in everyone if word in process.command and word not in above(process)]

    forked = [p for p in everyone if "env.forkserver" in p.command and "env.forkserver" in above(p)]
    workers = sorted((p for p in forked if p.pid not in parents), key=lambda p: (p.started, p.pid))
    serving = set()
    for process in workers:
        while process := by_pid.get(process.parent):
            serving.add(process.pid)
    return Judge(tops("env.evaluator"), tops("env.forkserver"), workers, frozenset(serving))


def descriptors(pid: int) -> int:
    """Open descriptors of a process; 0 where it is gone."""
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return 0


def resident_mb(pid: int) -> float:
    """Memory that a process has to itself in RAM (anonymous pages); 0 where it is gone."""
    try:
        _, resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[:3]
    except OSError:
        return 0.0
    return (int(resident) - int(shared)) * _PAGE_MB


# Scratch --------------------------------------------------------------------------------------------------------------


def own_temporary_folder() -> Path:
    """A TMPDIR of our own for everything started from here, so that what others leave in /tmp isn't counted.

    Anybody may pass through it: workers may run as other users.
    """
    folder = Path(tempfile.mkdtemp(prefix="kernel-bench-"))
    folder.chmod(0o755)
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = str(folder)
    return folder


def scratch() -> dict[str, int]:
    """Folders of judges and of workers in our temporary folder, and files below them."""
    root = Path(tempfile.gettempdir())
    homes = list(root.glob("kernel-judge-*"))
    inside = [path for home in homes for path in _walk(home)]
    return {
        "judge_folders": len(homes),
        "worker_folders": sum(path.is_dir() and path.parent in homes for path in inside),
        "files": sum(not path.is_dir() for path in inside),
    }


def _walk(folder: Path) -> list[Path]:
    # Workers come and go below it meanwhile: os.walk passes over what has vanished.
    return [Path(top) / name for top, folders, files in os.walk(folder) for name in folders + files]


def snapshot(device: str) -> dict[str, Any]:
    """Everything that could leak, now."""
    judge = judge_processes()
    driver = os.getpid()
    return {
        "processes": len(descendants()),
        "workers": len(judge.workers),
        "driver_fds": descriptors(driver),
        "evaluator_fds": sum(descriptors(process.pid) for process in judge.evaluators),
        "fork_server_fds": sum(descriptors(process.pid) for process in judge.fork_servers),
        "driver_mb": round(resident_mb(driver), 1),
        "evaluator_mb": round(sum(resident_mb(process.pid) for process in judge.evaluators), 1),
        "fork_server_mb": round(sum(resident_mb(process.pid) for process in judge.fork_servers), 1),
        "gpu_mb": gpu_used_mb(device),
        **scratch(),
    }


# Load -----------------------------------------------------------------------------------------------------------------


class CpuMeter:
    """Share of all cores that was busy since it was made or last asked."""

    def __init__(self) -> None:
        self.last = self._read()

    @staticmethod
    def _read() -> tuple[int, int]:
        fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]  # idle and waiting for disks

    def busy_share(self) -> float:
        before, self.last = self.last, self._read()
        total, idle = self.last[0] - before[0], self.last[1] - before[1]
        return 1.0 - idle / total if total else 0.0


def _meminfo() -> dict[str, int]:
    """/proc/meminfo in KiB."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {name: int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in lines)}


def used_gb() -> float:
    """Memory of the machine that nobody else could have now."""
    memory = _meminfo()
    return (memory["MemTotal"] - memory["MemAvailable"]) / (1 << 20)


class MemoryWatch:
    """Samples the machine's used memory in a thread, while it is open: [(seconds, GB above the start)]."""

    def __init__(self, every_s: float = 0.005):
        self.every_s = every_s
        self.samples: list[tuple[float, float]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        start, base = time.monotonic(), used_gb()
        while not self._end.wait(self.every_s):
            self.samples.append((time.monotonic() - start, used_gb() - base))

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def peak_gb(self) -> float:
        return max((gb for _, gb in self.samples), default=0.0)

    def fastest_gb_s(self, over_s: float = 0.1) -> float:
        """The steepest growth over any stretch of `over_s`: how fast the memory really was eaten."""
        best, first = 0.0, 0
        for last, (moment, gb) in enumerate(self.samples):
            while moment - self.samples[first][0] > over_s and first < last - 1:
                first += 1
            width = moment - self.samples[first][0]
            if width >= over_s / 2:
                best = max(best, (gb - self.samples[first][1]) / width)
        return best
