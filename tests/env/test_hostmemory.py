"""Hogs of host memory in every disguise are ended soon after their limit, and the judge is told what it was."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from env import hostmemory
from env.worker import ForkServer, WorkerDied

pytestmark = pytest.mark.budget(60)

LIMIT = 512 << 20
ALLOWED = 1200 << 20  # the limit and what several threads fill until they are dead, on a busy machine

HOG = """
import ctypes, mmap, os, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
STEP = 32 << 20
class M:
    pass

def fill(times=80, flags=0x22, fd=-1, advice=14, forget=False):
    # 14: huge pages, the fastest way to fill memory
    for n in range(times):
        at = libc.mmap(None, STEP, 3, flags, fd, n * STEP if fd >= 0 else 0)
        libc.madvise(at, STEP, advice)
        libc.memset(at, 1, STEP)
        if forget:
            libc.madvise(at, STEP, 4)  # out of this process's tables, still in memory where it is shared

def in_threads(**arguments):
    threads = [threading.Thread(target=fill, kwargs=arguments) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]

def in_children():
    for _ in range(6):
        if os.fork() == 0:
            os.setsid()
            fill(20)
            time.sleep(60)
    time.sleep(60)

def in_files():
    files = []
    for n in range(40):
        fd = os.memfd_create("x")
        os.write(fd, bytes(STEP))
        os.write(fd, bytes(STEP))
        files.append(fd)
    time.sleep(60)

def in_shared():
    for n in range(4):
        with open("/dev/shm/%d" % n, "wb") as file:
            for _ in range(8):
                file.write(bytes(STEP))
    time.sleep(60)
"""
WAYS = {
    "threads": "in_threads()",
    "children": "in_children()",
    "shared and forgotten": "fill(flags=0x21, forget=True)\ntime.sleep(60)",
    "files in memory": "in_files()",
    "/dev/shm": "in_shared()",
    "little by little": "keep = []\nwhile True:\n    keep.append(bytearray(1 << 20))",
    "within the limit": "fill(10)\n",
}


@pytest.fixture(scope="module")
def server():
    server = ForkServer("cpu", max_host_bytes=LIMIT)
    yield server
    server.close()


def request(worker, source: str) -> dict:
    return {"source": source, "path": f"{worker.scratch}/m.py", "module": "m", "class": "M", "watch": None}


class Fullest:
    """The most memory that was taken from this machine meanwhile."""

    def __enter__(self):
        self.machine = hostmemory.Machine()
        self.before, self.most = self.machine.available, 0
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.follow)
        self.thread.start()
        return self

    def follow(self):
        while not self.done.wait(0.002):
            self.machine.look()
            self.most = max(self.most, self.before - self.machine.available)

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()


@pytest.mark.parametrize("way", WAYS)
def test_hog(server, way):
    worker = server.fork()
    started = time.monotonic()
    with Fullest() as fullest:
        if way == "within the limit":
            assert worker.call("load", 20, **request(worker, HOG + WAYS[way]))["ok"]
            worker.end()
            assert not worker.oom and worker.why is None
            return
        with pytest.raises(WorkerDied, match="host memory") as died:
            worker.call("load", 20, **request(worker, HOG + WAYS[way]))
    assert died.value.oom and not died.value.machine_short and "over the limit" in str(died.value)
    assert fullest.most < ALLOWED and time.monotonic() - started < 10


def test_a_stopped_hog_is_ended(server):
    """One that stands still for somebody else's timing holds its memory all the same."""
    worker = server.fork()
    assert worker.call("load", 20, **request(worker, HOG + "fill(10)\n"))["ok"]
    worker.pause()
    watch = hostmemory.Watch(128 << 20, 512)
    watch.add(worker.supervisor, worker.pid, hostmemory.anonymous_bytes(server.process.pid))
    ((supervisor, why, own_fault),) = watch.look()
    assert supervisor == worker.supervisor and "over the limit of 0.12 GiB" in why and own_fault
    worker.end()


def test_the_largest_is_named_when_the_machine_runs_short(server, monkeypatch):
    small, large = server.fork(), server.fork()
    assert large.call("load", 20, **request(large, HOG + "fill(10)\n"))["ok"]
    watch = hostmemory.Watch(64 << 30, 512)
    for worker in (small, large):
        watch.add(worker.supervisor, worker.pid, hostmemory.anonymous_bytes(server.process.pid))
    assert watch.look() == [] and 0 < watch.wait_s() <= hostmemory.LATEST_S
    watch.machine.floor = 1 << 50
    monkeypatch.setattr(watch, "_next_machine", 0.0)
    ((supervisor, why, own_fault),) = watch.look()
    assert supervisor == large.supervisor and not own_fault and "this machine had" in why
    assert watch.look() == [], "it gets a moment to give its memory back"
    small.end()
    large.end()


def test_memory_that_forks_share_is_counted_once(server):
    """12 processes with 190 MiB of their parent's: an honest pool of processes is no hog."""
    worker = server.fork()
    source = HOG + "fill(6)\nfor _ in range(12):\n    if os.fork() == 0:\n        time.sleep(60)\ntime.sleep(0.5)\n"
    assert worker.call("load", 20, **request(worker, source))["ok"]
    assert len(hostmemory.descendants(worker.supervisor)[0]) == 13
    time.sleep(0.3)
    worker.end()
    assert worker.why is None


def test_fork_bomb_is_bounded_and_ended(server):
    # A shell's processes are small: 500 copies of this one would take seconds to make.
    shell = "n=0; while [ $n -lt 700 ]; do sleep 60 & n=$((n+1)); done; sleep 1"
    source = f"import subprocess\nclass M:\n    pass\nsubprocess.run(['sh', '-c', {shell!r}])\n"
    worker = server.fork()
    try:
        assert worker.call("load", 30, **request(worker, source))["ok"]
        # Refused by the kernel where there is a limit of one's own ...
        assert server.isolation["process limit"] == "on"
        assert 400 < hostmemory.descendants(worker.supervisor)[1] <= 513
    except WorkerDied as died:
        # ... else counted by the watch.
        assert died.oom and "processes" in str(died)
    worker.end()
    assert hostmemory.descendants(worker.supervisor)[0] == []


def test_machine_reads_what_the_kernel_says():
    machine = hostmemory.Machine()
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    assert machine.available == pytest.approx(int(meminfo["MemAvailable"].split()[0]) << 10, rel=0.2)
    assert machine.floor >= 1 << 30
