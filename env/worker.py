"""The judge's handles on its fork server and on the workers it forks.

Runs in the judge. A worker is asked one thing at a time with a deadline; whatever it answers is a claim. `Worker.end`
leaves nothing behind: the PID namespace (or the process group and all descendants) is killed and its scratch is
removed. Should the judge itself be killed, the fork server cleans up, and should both, the next fork server does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from env import isolation
from env.files import remove_tree
from env.hostmemory import descendants
from env.libc import signal_all
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
    isolation.LAYERS_OFF,
)
# Queues from the host to the GPU, 8 unless told otherwise. Making a context costs the driver, which makes them one by
# one, 0.25 s with 8, 0.12 s with 2, 0.085 s with 1 on an H200, and ending it 0.10, 0.05 and 0.03 s.
CUDA_CONNECTIONS = 2
CPU_ADDRESS_SPACE = 24 << 30
MAX_HOST_BYTES = 8 << 30
_REQUEST_S = 30.0
_HOME = re.compile(r"kernel-judge-(\d+)-(\d+)-(\d+)-")


class WeakIsolation(RuntimeError):
    """This machine can't keep foreign code in well enough. `missing`: what is missing, one text each."""

    def __init__(self, missing: list[str]):
        super().__init__(
            f"foreign code can't be run safely here; missing: {'; '.join(missing)}. `python -m env.doctor` says what "
            "each costs and how to get it. To go on all the same, on a machine that holds nothing you would miss: "
            "weak_isolation=True"
        )
        self.missing = missing


class WorkerDied(Exception):
    """The worker is gone or its channel is broken.

    code: exit status, 128 + signal where a signal ended it, None if unknown. oom: the fork server ended it for the host
    memory (or the processes) that it took. machine_short: not over its limit, but the largest when memory ran out.
    outside: killed by nothing that ran in it.
    """

    def __init__(
        self, code: int | None, why: str, oom: bool = False, machine_short: bool = False, outside: bool = False
    ):
        super().__init__(why)
        self.code = code
        self.oom = oom
        self.outside = outside
        self.machine_short = machine_short


class WorkerTimeout(Exception):
    """The worker did not answer within its budget."""


def _started(pid: int | str) -> str:
    """When a process was started, in ticks since boot: with the process id it names one process for good."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]


def _owner() -> str:
    # Process ids mean something within one PID namespace only; containers may share a folder for temporary files.
    return f"{Path('/proc/self/ns/pid').stat().st_ino}-{os.getpid()}-{_started('self')}"


def sweep(folder: str | None = None) -> list[Path]:
    """Remove what judges that were killed together with their fork servers have left behind. Returns what it was."""
    removed = []
    namespace = str(Path("/proc/self/ns/pid").stat().st_ino)
    for path in Path(folder or tempfile.gettempdir()).glob("kernel-judge-*"):
        named = _HOME.match(path.name)
        if named is None or named[1] != namespace:
            continue
        try:
            if path.lstat().st_uid != os.geteuid() or _started(named[2]) == named[3]:
                continue
        except FileNotFoundError:
            pass  # the owner is gone
        except OSError:
            continue
        remove_tree(path)
        removed.append(path)
    return removed


class ForkServer:
    """Owns the process that forks workers. Thread-safe: several may ask at once, and none waits for another's answer.

    max_host_bytes: host memory of one worker with all that it starts; whoever takes more is ended (see
    `env.hostmemory`). weak_isolation: go on where `isolation.minimum` isn't reached. After `wait_ready`, `.isolation`
    says which layers workers have.
    """

    def __init__(
        self, device: str, wait: bool = True, max_host_bytes: int = MAX_HOST_BYTES, weak_isolation: bool = False
    ):
        self.device = device
        self.weak_isolation = weak_isolation
        self.isolation: dict[str, str] = {}
        sweep()
        self.home = Path(tempfile.mkdtemp(prefix=f"kernel-judge-{_owner()}-"))
        # A worker with a uid of its own must get to its scratch, and see nothing of the others on the way.
        self.home.chmod(0o711 if os.geteuid() == 0 else 0o700)
        self._numbers = itertools.count(1)
        self._starting, self._sending = threading.Lock(), threading.Lock()
        self._ready = False
        self._changed = threading.Condition()
        self._answers: dict[int, dict[str, Any] | None] = {}
        self._lost: Exception | None = None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        environment.update(
            HOME=str(self.home), OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1",
            PYTHONDONTWRITEBYTECODE="1", TRITON_F32_DEFAULT="ieee",
            TORCHDYNAMO_DISABLE="1", HF_HUB_OFFLINE="1", PYTHONHASHSEED="0",
            TRITON_CACHE_DIR=str(self.home), TORCHINDUCTOR_CACHE_DIR=str(self.home), CUDA_MODULE_LOADING="LAZY",
            CUDA_DEVICE_MAX_CONNECTIONS=str(CUDA_CONNECTIONS), CUDA_DEVICE_MAX_COPY_CONNECTIONS="1",
        )  # fmt: skip
        environment["TRITON_INTERPRET"] = "0" if device == "cuda" else "1"
        arguments = [str(theirs.fileno()), device, str(self.home), str(max_host_bytes)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "env.forkserver", *arguments],
            cwd=ROOT, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        self.control = Wire(ours)
        if wait:
            try:
                self.wait_ready()
            except BaseException:
                self.close()
                raise

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Block until torch and triton are imported there and a first worker was tried.

        Raises WeakIsolation where that worker had less than the minimum; WireError or WireTimeout where there was none.
        """
        with self._starting:
            if self._ready:
                return
            if not self.isolation:
                self.isolation = self.control.recv(timeout_s)["isolation"]
            missing = isolation.minimum(self.isolation)
            if missing and not self.weak_isolation:
                raise WeakIsolation(missing)
            # Ends with the channel: see `close`.
            threading.Thread(target=self._listen, name="fork server", daemon=True).start()
            self._ready = True

    def _listen(self) -> None:
        """Hand answers to whoever asked. An answer that nobody waits for any more is dropped here."""
        # A Wire of its own: its time limits are not those of the senders.
        wire = Wire(self.control.sock.dup())
        try:
            while True:
                reply = wire.recv(timeout_s=3600 * 24 * 365)
                with self._changed:
                    number = reply.pop("id")
                    if number in self._answers:
                        self._answers[number] = reply
                    self._changed.notify_all()
        except (WireError, WireTimeout, OSError) as error:
            with self._changed:
                self._lost = error
                self._changed.notify_all()
        finally:
            wire.close()

    def _ask(self, request: dict[str, Any], fds: tuple[int, ...] = ()) -> dict[str, Any]:
        number = next(self._numbers)
        with self._changed:
            self._answers[number] = None
        try:
            with self._sending:
                self.control.send({**request, "id": number}, fds)
            end = time.monotonic() + _REQUEST_S
            with self._changed:
                while self._answers[number] is None:
                    if self._lost is not None:
                        raise WireError(f"the fork server is gone ({self._lost})")
                    if not self._changed.wait(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                        raise WireTimeout(f"the fork server gave no answer within {_REQUEST_S:.0f} s")
                return self._answers[number]
        finally:
            with self._changed:
                del self._answers[number]

    def fork(self) -> Worker:
        """A new sandboxed worker. Raises WireError or WireTimeout where the fork server is broken."""
        self.wait_ready()
        scratch = tempfile.mkdtemp(prefix="work-", dir=self.home)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        memory = 0 if self.device == "cuda" else CPU_ADDRESS_SPACE
        try:
            reply = self._ask({"op": "fork", "scratch": scratch, "host_memory_bytes": memory}, (theirs.fileno(),))
            if "error" in reply:
                raise WireError(reply["error"])
        except BaseException:
            # A worker that comes too late finds its channel closed and ends.
            ours.close()
            remove_tree(scratch)
            raise
        finally:
            theirs.close()
        return Worker(self, Wire(ours), reply["supervisor"], reply["worker"], scratch)

    def alive(self) -> bool:
        """Whether there can be further workers."""
        return self.process.poll() is None

    def wait(self, supervisor: int) -> dict[str, Any]:
        """Block until a worker and all that it started are gone.

        Returns {"code": its exit code, "why": why the fork server ended it, if it did, "own_fault": whether it was over
        its own limit}. Raises WireError, WireTimeout.
        """
        reply = self._ask({"op": "wait", "supervisor": supervisor})
        if "error" in reply:
            raise WireError(reply["error"])
        return reply

    def close(self) -> None:
        """End the fork server and with it all workers; remove everything they have written."""
        with contextlib.suppress(OSError):
            self.control.sock.shutdown(socket.SHUT_RDWR)
        self.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        self.process.kill()
        self.process.wait()
        remove_tree(self.home)


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
        # Until then nobody but us runs in it: it has started nothing that would have to be found.
        self.foreign = False
        # Set by `end` where the fork server had ended it before: see WorkerDied.
        self.why: str | None = None
        self.oom = False
        self.machine_short = False
        # Time that this worker stood still for somebody else's timing: it doesn't count against its budget.
        self._stopped_s = 0.0
        self._stopped_at: float | None = None
        self._stopped: set[int] = set()

    def post(self, op: str, fds: tuple[int, ...] = (), **request: Any) -> None:
        """Ask without waiting: `collect` later takes the answer."""
        self.foreign = self.foreign or op in ("load", "program")
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
        # A worker that just crashed gets a moment to be reaped, so that its own exit code is seen instead of our kill.
        for _ in range(20):
            if self.ended or not is_running(self.pid):
                break
            time.sleep(0.001)
        # One that lives closed its channel: foreign code did that, and the kill that follows is ours. A dead PID 1 was
        # not killed by anything in its namespace.
        lives = self.alive()
        code = self.end()
        killed = code == 128 + signal.SIGKILL and not lives and self.isolation.get("pid namespace") == "on"
        return WorkerDied(code, self.why or why, self.oom, self.machine_short, outside=killed and not self.oom)

    def stopped_s(self) -> float:
        """Seconds that this worker has been paused so far."""
        at = self._stopped_at
        return self._stopped_s + (time.monotonic() - at if at is not None else 0.0)

    def pause(self) -> None:
        """Stop the worker and all that it has started."""
        if self.ended:
            return
        # The one that is known first; then again until nobody new is found: a process may fork until it is stopped.
        found = {self.pid}
        while found:
            signal_all(found, signal.SIGSTOP)
            self._stopped |= found
            found = self._below() - self._stopped
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()

    def resume(self) -> None:
        if self._stopped_at is None:
            return
        if not self.ended:
            # Those that were stopped, and nobody else: what is stopped forks nobody.
            signal_all(self._stopped, signal.SIGCONT)
        self._stopped.clear()
        self._stopped_s, self._stopped_at = self.stopped_s(), None

    def _below(self) -> set[int]:
        return set(descendants(self.supervisor)[0] if self.foreign else ())

    def alive(self) -> bool:
        """Whether it can still be asked something."""
        return not self.ended and is_running(self.pid)

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
        signal_all([self.pid])
        with contextlib.suppress(WireError, WireTimeout, OSError):
            end = self.server.wait(self.supervisor)
            code, self.why = end["code"], end["why"]
            self.oom, self.machine_short = self.why is not None, self.why is not None and not end["own_fault"]
        remove_tree(self.scratch)
        return code


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"
