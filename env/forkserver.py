"""Forks sandboxed workers from a process that has torch and triton imported (34 ms instead of 4 s each), reaps them,
and ends those that fill the machine's memory.

Runs as a process of its own, one a judge, started by `env.worker.ForkServer`. It never runs a torch operator, never
touches CUDA and keeps a single thread, since none of these survive a fork. Each worker stands behind a small supervisor
that makes the namespaces, waits for it, and dies with it:

    fork server ── supervisor (host PID namespace) ── worker (PID 1 of its own namespace, foreign code)

One loop serves all: no request waits for another worker's slow end, and answers carry the number of their request.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from env import hostmemory, isolation
from env.files import remove_tree
from env.libc import signal_all
from env.own_uid import Slots
from env.wire import Wire, WireError, WireTimeout

_EXIT_BY_SIGNAL = 128
_CHANNEL = 3  # the worker's one descriptor beside the standard streams
_TRIAL_S = 20.0  # a worker that isn't set up by then never will be


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else _EXIT_BY_SIGNAL - code


# In the worker and its supervisor -----------------------------------------------------------------------------------


def _worker(fd: int, request: dict, namespaces: dict[str, str]) -> NoReturn:
    code = 1
    try:
        isolation.close_descriptors({fd})
        # The same number in every worker: how many the server had open is nobody's business.
        if fd != _CHANNEL:
            os.dup2(fd, _CHANNEL, inheritable=False)
            os.close(fd)
            fd = _CHANNEL
        os.chdir(request["scratch"])
        for name in ("HOME", "TMPDIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            os.environ[name] = request["scratch"]
        report = isolation.apply(request["scratch"], namespaces, request["host_memory_bytes"], request["uid"])
        report["nothing outlives it"] = request["nothing outlives it"]
        if request["op"] == "trial":
            _be_tried(fd, report)
        from env.runner import serve

        serve(Wire(socket.socket(fileno=fd), accept_fds=True), request["device"], report)
        code = 0
    except BaseException:
        # Foreign code may raise anything, SystemExit included; the judge sees a closed channel and the exit code.
        traceback.print_exc()
    finally:
        os._exit(code)


def _be_tried(fd: int, report: dict[str, str]) -> NoReturn:
    """Tell the report, and leave a process behind as a candidate would that wants to outlive its verdict."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(fd, json.dumps(report).encode() + b"\n")
            time.sleep(3600)
        os._exit(0)
    os.wait()
    time.sleep(3600)
    os._exit(0)


def _supervisor(fd: int, report_fd: int, request: dict) -> NoReturn:
    isolation.set_parent_death_signal()
    isolation.become_subreaper()
    os.setsid()
    namespaces = isolation.unshare_namespaces()
    worker = os.fork()
    if worker == 0:
        os.setsid()
        _worker(fd, request, namespaces)
    os.write(report_fd, f"{worker}\n".encode())
    # The worker alone may hold the channel: its end must be seen by the judge at once.
    isolation.close_descriptors(set())
    code = _exit_code(os.waitpid(worker, 0)[1])
    if namespaces.get("pid namespace") != "on":
        # By the host's /proc, which stays this supervisor's own.
        _end_descendants()
    os._exit(code)


def _end_descendants() -> None:
    """Without a PID namespace: end whatever was re-parented to this process, until nothing is left."""
    while True:
        below, _ = hostmemory.descendants(os.getpid())
        signal_all(below)
        try:
            while os.waitpid(-1, 0 if below else os.WNOHANG)[0]:
                below = []
        except ChildProcessError:
            return


# The server ---------------------------------------------------------------------------------------------------------


@dataclass
class _Forked:
    """One supervisor with its worker. `asked`: numbers of the requests that wait for its end."""

    scratch: str
    request: dict
    uid: int | None
    report: int  # read end of the pipe on which the supervisor names its worker; -1 once it has
    worker: int = 0
    code: int | None = None
    why: str | None = None
    own_fault: bool = False
    asked: list[int] = field(default_factory=list)


class Server:
    """The loop: requests of the judge, ends of children, looks at memory."""

    def __init__(self, control: Wire, device: str, home: str, max_host_bytes: int):
        self.control = control
        self.device = device
        self.home = home
        self.watch = hostmemory.Watch(max_host_bytes, isolation.MAX_PROCESSES)
        self.slots = Slots() if os.geteuid() == 0 else None
        self.forked: dict[int, _Forked] = {}
        self.outlives = "off: not tried yet"
        self.stopping = False
        # A signal wakes the loop by a byte in this pipe, so that none is lost between a look and the next wait.
        self.signals, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, *_: object) -> None:
        self.stopping = True

    # One turn of the loop

    def run(self) -> None:
        """Serve until the judge closes the channel or this process is told to stop."""
        while not self.stopping:
            wait_s = self.watch.wait_s()
            sources = [self.control.sock, self.signals]
            sources += [forked.report for forked in self.forked.values() if forked.report >= 0]
            ready = select.select(sources, [], [], wait_s)[0]
            self._turn(ready)
            if self.control.sock in ready:
                try:
                    self._answer(self.control.recv(timeout_s=10.0))
                except (WireError, WireTimeout):
                    return

    def _turn(self, ready: list) -> None:
        """Everything but requests."""
        if self.signals in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self.signals, 4096)
        for supervisor, forked in list(self.forked.items()):
            if forked.report in ready:
                self._named(supervisor, forked)
        self._reap()
        for supervisor, why, own_fault in self.watch.look():
            forked = self.forked[supervisor]
            forked.why, forked.own_fault = why, own_fault
            self._kill(supervisor, forked)

    def _answer(self, request: dict) -> None:
        if request["op"] == "fork":
            fds = self.control.take_fds()
            try:
                supervisor = self._fork(fds[0], request)
                self.forked[supervisor].asked = [request["id"]]
            except OSError as error:
                self._reply(request["id"], error=f"no process could be forked: {error.strerror or error}")
            finally:
                for fd in fds:
                    os.close(fd)
        elif request["op"] == "wait":
            forked = self.forked.get(request["supervisor"])
            if forked is None:
                self._reply(request["id"], error="no such worker")
            elif forked.code is not None:
                self._tell_end(request["supervisor"], forked, [request["id"]])
            else:
                forked.asked.append(request["id"])

    def _reply(self, number: int, **facts: object) -> None:
        with contextlib.suppress(WireError, WireTimeout):
            self.control.send({"id": number, **facts})

    # Children

    def _fork(self, fd: int, request: dict) -> int:
        """Start a supervisor. Returns its process id; the worker's follows on its pipe."""
        uid: int | None = None
        reason = "off: needs root"
        if self.slots is not None:
            try:
                uid = self.slots.take()
            except OSError as error:
                reason = f"off: {error.strerror}"
        request = {
            "device": self.device, **request, "uid": reason if uid is None else uid,
            "nothing outlives it": self.outlives,
        }  # fmt: skip
        read_end, write_end = os.pipe()
        try:
            supervisor = os.fork()
        except OSError:
            os.close(read_end)
            os.close(write_end)
            if uid is not None:
                self.slots.give_back(uid)
            raise
        if supervisor == 0:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.close(read_end)
                _supervisor(fd, write_end, request)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(write_end)
        self.forked[supervisor] = _Forked(request["scratch"], request, uid, read_end)
        return supervisor

    def _named(self, supervisor: int, forked: _Forked) -> None:
        """The supervisor has named its worker, or has ended before it could."""
        line = os.read(forked.report, 64)
        os.close(forked.report)
        forked.report = -1
        asked, forked.asked = forked.asked, []
        if line.endswith(b"\n"):
            forked.worker = int(line)
            self.watch.add(supervisor, forked.worker, hostmemory.anonymous_bytes("self"))
        for number in asked:
            if forked.worker:
                self._reply(number, supervisor=supervisor, worker=forked.worker)
            else:
                self._reply(number, error="the supervisor ended before it forked a worker")

    def _kill(self, supervisor: int, forked: _Forked) -> None:
        """End a worker and, where no PID namespace takes them along, all that it has started."""
        named = [forked.worker] if forked.worker else []  # (a signal to 0 would reach this very process)
        signal_all([*named, *hostmemory.descendants(supervisor)[0]])

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            forked = self.forked.get(pid)
            if forked is None:
                self._end_orphans()  # one that came to us when its supervisor was killed; it may have had others
                continue
            if forked.report >= 0:
                self._named(pid, forked)
            forked.code = _exit_code(status)
            self.watch.remove(pid)
            self._end_orphans()
            if forked.uid is not None:
                self.slots.give_back(forked.uid)
            if not forked.worker:
                self.forked.pop(pid)  # nobody has a handle on it
            elif forked.asked:
                self._tell_end(pid, forked, forked.asked)

    def _end_orphans(self) -> None:
        """What a killed supervisor left behind has this process as its parent now."""
        signal_all(pid for pid in hostmemory.children(os.getpid())[0] if pid not in self.forked)

    def _tell_end(self, supervisor: int, forked: _Forked, asked: list[int]) -> None:
        self.forked.pop(supervisor, None)
        for number in asked:
            self._reply(number, code=forked.code, why=forked.why, own_fault=forked.own_fault)

    # Start and end

    def trial(self) -> dict[str, str]:
        """Fork one worker that says which layers it has and leaves a process behind, end it, and see what is left."""
        scratch = Path(self.home) / "trial"
        scratch.mkdir(mode=0o700)
        ours, theirs = os.pipe()
        # Only this server and the worker hold the pipe: its end of file says that all processes of the worker are gone.
        supervisor = self._fork(theirs, {"op": "trial", "scratch": str(scratch), "host_memory_bytes": 0})
        os.close(theirs)
        report: dict[str, str] = {}
        text, gone, end = b"", False, time.monotonic() + _TRIAL_S
        forked = self.forked[supervisor]
        while time.monotonic() < end and not (gone and forked.code is not None) and not self.stopping:
            pipes = [forked.report] if forked.report >= 0 else []
            ready = select.select([self.signals, *pipes, *([] if gone else [ours])], [], [], 0.1)[0]
            self._turn(ready)
            if ours in ready:
                data = os.read(ours, 65536)
                text, gone = text + data, not data
            if text.endswith(b"\n") and forked.worker and not report:
                report = json.loads(text)
                os.kill(forked.worker, signal.SIGKILL)
                end = time.monotonic() + 5.0
        os.close(ours)
        if not report and not self.stopping:
            raise RuntimeError("no worker could be set up on this machine; the reason is in the lines above")
        left = "off: what a worker had started was still there 5 s after its end"
        self.outlives = report["nothing outlives it"] = "on" if gone and forked.code is not None else left
        self.forked.pop(supervisor, None)
        remove_tree(scratch)
        return report

    def shut_down(self) -> None:
        """End all workers and remove everything that this server and they have written."""
        for supervisor, forked in self.forked.items():
            if forked.code is None:
                self._kill(supervisor, forked)
        end = time.monotonic() + 5.0
        while time.monotonic() < end and any(forked.code is None for forked in self.forked.values()):
            pipes = [forked.report for forked in self.forked.values() if forked.report >= 0]
            self._turn(select.select([self.signals, *pipes], [], [], 0.1)[0])
            for supervisor, forked in list(self.forked.items()):
                if forked.code is None and forked.worker:
                    self._kill(supervisor, forked)
        remove_tree(self.home)


def main(control_fd: int, device: str, home: str, max_host_bytes: int) -> None:
    """Serve `fork` and `wait` requests until the judge closes the channel."""
    # Not killed with the judge, but told, so that the home folder is removed.
    isolation.set_parent_death_signal(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    isolation.read_layers_off()
    isolation.become_subreaper()
    server = Server(Wire(socket.socket(fileno=control_fd), accept_fds=True), device, home, max_host_bytes)
    code = 1
    try:
        import env.runner

        env.runner.preload(device)
        with contextlib.suppress(WireError, WireTimeout):
            server.control.send({"ready": os.getpid(), "isolation": server.trial()})
            server.run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        server.shut_down()
        os._exit(code)  # torch's own tear-down takes most of a second and has nothing to save


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
