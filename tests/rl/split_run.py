"""Runs with placement.kind = split, small and forked, for tests: learner and rollout process import nothing again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

from small_run import Judge, ended

from rl import rollout_link, rollouter, train

SPLIT = [
    "placement.kind=split", "placement.rollout_timeout_s=60", "rejection.mrs=off", "rejection.importance=token",
]  # fmt: skip


class Forked:
    """A process with what rollout_link needs of subprocess.Popen."""

    def __init__(self, function):
        self.returncode, self._lock = None, threading.Lock()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                status = function()
            except SystemExit as error:
                status = error.code or 0
            finally:
                os._exit(status)

    def poll(self):
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout=600.0):
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("rollouter", timeout)
            time.sleep(0.01)
        return self.returncode

    def terminate(self):
        self._signal(signal.SIGTERM)

    def kill(self):
        self._signal(signal.SIGKILL)

    def _signal(self, number):
        with self._lock:
            if self.returncode is None:
                os.kill(self.pid, number)  # a zombie takes it too


def fork_rollouters(judge=Judge, first=lambda: None):
    """From now on rollout processes are forked from this one. judge: makes theirs; first: called before they begin."""

    def launch(arguments, theirs, environment):
        options = dict(zip(arguments[::2], arguments[1::2]))

        def main():
            for path in Path("/proc/self/fd").iterdir():  # a started program doesn't inherit the run's lock
                with contextlib.suppress(OSError):
                    if path.readlink().name == ".lock":
                        os.close(int(path.name))
            os.environ.clear()
            os.environ.update(environment)
            rollouter.make_pool = lambda config, gpus: judge()
            first()
            return rollouter.main(theirs, Path(options["--run"]), parent=int(options["--parent"]))

        return Forked(main)

    rollout_link.launch = launch


def start(run, judge=Judge, first=lambda: None, learner=lambda: None):
    """Run the stage in a forked process; returns its id. judge, first: as above; learner: called in the learner."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            fork_rollouters(judge, first)
            learner()
            train.main(run)
            status = 0
        except BaseException as error:
            (run / "error.txt").write_text(f"{type(error).__name__}: {error}")
        os._exit(status)
    return child


def run_split(run, **given):
    return ended(start(run, **given))


def children(pid, word=""):
    """Process ids below a process, of those that have `word` in their command."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, path.read_text().split())
    return [child for child in found if word in Path(f"/proc/{child}/cmdline").read_text()]


def rollouter_of(learner, word="", within_s=20.0):
    """The process id of a learner's rollout process; word: in its command."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if found := children(learner, word):
            return found[0]
        time.sleep(0.005)
    raise AssertionError("no rollout process was started")


def gone(pid, within_s=20.0):
    """Whether a process ends (a zombie has)."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False
