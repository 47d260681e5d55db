"""The judge's handles on its fork server and on the workers it forks.

Runs in the judge. A worker is asked one thing at a time with a deadline; whatever it answers is a claim. `Worker.end`
leaves nothing behind: the PID namespace (or the process group and all descendants) is killed and its scratch is
removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from env.wire import Wire, WireError, WireTimeout

ROOT = Path(__file__).resolve().parent.parent
# What a worker may know of this machine: no tokens, no user, no settings of ours.
_PASSED_ON = (
    "PATH",
    "LD_LIBRARY_PATH",
    "LANG",
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
    "PYTHONPATH",
)
CPU_ADDRESS_SPACE = 24 << 30


class WorkerDied(Exception):
    """The worker is gone or its channel is broken. `code`: exit status, 128 + signal where a signal ended it."""

    def __init__(self, code: int | None, why: str):
        super().__init__(why)
        self.code = code


class WorkerTimeout(Exception):
    """The worker did not answer within its budget."""


class ForkServer:
    """Owns the process that forks workers. Thread-safe: requests are answered one at a time."""

    def __init__(self, device: str, wait: bool = True):
        self.device = device
        self.home = Path(tempfile.mkdtemp(prefix="kernel-judge-"))
        self.lock = threading.Lock()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        environment.update(
            HOME=str(self.home), OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1",
            PYTHONDONTWRITEBYTECODE="1", TRITON_F32_DEFAULT="ieee",
            TORCHDYNAMO_DISABLE="1", HF_HUB_OFFLINE="1", PYTHONHASHSEED="0",
            TRITON_CACHE_DIR=str(self.home), TORCHINDUCTOR_CACHE_DIR=str(self.home), CUDA_MODULE_LOADING="LAZY",
        )  # fmt: skip
        environment["TRITON_INTERPRET"] = "0" if device == "cuda" else "1"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "env.forkserver", str(theirs.fileno()), device],
            cwd=ROOT, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        self.control = Wire(ours)
        if wait:
            self.wait_ready()

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Block until torch and triton are imported there. Raises WireError or WireTimeout where that fails."""
        self.control.recv(timeout_s)

    def fork(self) -> Worker:
        """A new sandboxed worker. Raises WireError or WireTimeout where the fork server is broken."""
        scratch = tempfile.mkdtemp(prefix="work-", dir=self.home)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        memory = 0 if self.device == "cuda" else CPU_ADDRESS_SPACE
        request = {"op": "fork", "scratch": scratch, "device": self.device, "host_memory_bytes": memory}
        try:
            with self.lock:
                self.control.send(request, fds=(theirs.fileno(),))
                reply = self.control.recv(30.0)
        finally:
            theirs.close()
        if "error" in reply:
            raise WireError(reply["error"])
        return Worker(self, Wire(ours), reply["supervisor"], reply["worker"], scratch)

    def alive(self) -> bool:
        """Whether there can be further workers."""
        return self.process.poll() is None

    def wait(self, supervisor: int) -> int:
        with self.lock:
            self.control.send({"op": "wait", "supervisor": supervisor})
            return self.control.recv(30.0)["code"]

    def close(self) -> None:
        self.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2.0)
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.home, ignore_errors=True)


class Worker:
    """One sandboxed process. Made by `ForkServer.fork`, used by one thread, ended exactly once."""

    def __init__(self, server: ForkServer, wire: Wire, supervisor: int, pid: int, scratch: str):
        self.server = server
        self.wire = wire
        self.supervisor = supervisor
        self.pid = pid
        self.scratch = scratch
        self.pending = 0
        self.isolation: dict[str, str] = {}
        self.ended = False
        # Time that this worker stood still for somebody else's timing: it doesn't count against its budget.
        self._stopped_s = 0.0
        self._stopped_at: float | None = None

    def post(self, op: str, fds: tuple[int, ...] = (), **request: Any) -> None:
        """Ask without waiting: `collect` later takes the answer."""
        try:
            self.wire.send({"op": op, **request}, fds)
        except (WireError, WireTimeout) as error:
            raise self._dead(str(error)) from error
        self.pending += 1

    def collect(self, timeout_s: float) -> dict[str, Any]:
        """The answer to the oldest question. Raises WorkerTimeout, WorkerDied."""
        end = time.monotonic() + timeout_s - self.stopped_s()
        while not self.wire.readable(max(0.0, end + self.stopped_s() - time.monotonic())):
            if time.monotonic() >= end + self.stopped_s():
                raise WorkerTimeout(f"no answer within {timeout_s:.0f} s")
        try:
            reply = self.wire.recv(max(1.0, end + self.stopped_s() - time.monotonic()))
        except WireTimeout as error:
            raise WorkerTimeout("half an answer") from error
        except WireError as error:
            raise self._dead(str(error)) from error
        self.pending -= 1
        return reply

    def call(self, op: str, timeout_s: float, fds: tuple[int, ...] = (), **request: Any) -> dict[str, Any]:
        """Ask and wait. Answers to earlier `post`s are taken first."""
        while self.pending:
            self.collect(timeout_s)
        self.post(op, fds, **request)
        return self.collect(timeout_s)

    def _dead(self, why: str) -> WorkerDied:
        return WorkerDied(self.end(), why)

    def stopped_s(self) -> float:
        """Seconds that this worker has been paused so far."""
        at = self._stopped_at
        return self._stopped_s + (time.monotonic() - at if at is not None else 0.0)

    def pause(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGSTOP)
            self._stopped_at = time.monotonic()

    def resume(self) -> None:
        if self._stopped_at is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
        self._stopped_s, self._stopped_at = self.stopped_s(), None

    def alive(self) -> bool:
        """Whether it can still be asked something."""
        return not self.ended and _alive(self.pid)

    def end(self) -> int | None:
        """Kill the worker and everything it started, reap it, remove its scratch. Returns its exit code, None if
        unknown.
        """
        if self.ended:
            return None
        self.ended = True
        code = None
        self.wire.close()
        # Killing the worker, PID 1 of its namespace, ends all processes in it. The supervisor then reports and exits.
        # A worker that just crashed gets a moment to be reaped, so that its own exit code is seen instead of our kill.
        for _ in range(20):
            if not _alive(self.pid):
                break
            time.sleep(0.001)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(WireError, WireTimeout, OSError):
            code = self.server.wait(self.supervisor)
        shutil.rmtree(self.scratch, ignore_errors=True)
        return code


def _alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"
