"""Forks sandboxed workers from a process that has torch and triton imported (34 ms instead of 4 s each).

Runs as a process of its own, one a judge, started by `env.worker.ForkServer`. It never runs a torch operator, never
touches CUDA and keeps a single thread, since none of these survive a fork. Each worker stands behind a small supervisor
that makes the namespaces, waits for it, and dies with it:

    fork server ── supervisor (host PID namespace) ── worker (PID 1 of its own namespace, foreign code)
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from env import isolation
from env.wire import Wire, WireError

_EXIT_BY_SIGNAL = 128


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else _EXIT_BY_SIGNAL - code


def _worker(fd: int, request: dict, namespaces: dict[str, str]) -> NoReturn:
    code = 1
    try:
        isolation.close_descriptors({fd})
        os.chdir(request["scratch"])
        for name in ("HOME", "TMPDIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            os.environ[name] = request["scratch"]
        report = isolation.apply(request["scratch"], namespaces, request["host_memory_bytes"])
        from env.runner import serve

        serve(Wire(socket.socket(fileno=fd), accept_fds=True), request["device"], report)
        code = 0
    except BaseException:
        # Foreign code may raise anything, SystemExit included; the judge sees a closed channel and the exit code.
        traceback.print_exc()
    finally:
        os._exit(code)


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
        _kill_descendants()
    os._exit(code)


def _kill_descendants() -> None:
    """Without a PID namespace: end whatever was re-parented to this supervisor, until nothing is left."""
    while True:
        try:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        except OSError:
            return
        if not children:
            return
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _fork(fd: int, request: dict) -> dict:
    read_end, write_end = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        os.close(read_end)
        try:
            _supervisor(fd, write_end, request)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(write_end)
    os.close(fd)
    with os.fdopen(read_end) as pipe:
        line = pipe.readline()
    if not line:
        os.waitpid(supervisor, 0)
        return {"error": "the supervisor ended before it forked a worker"}
    return {"supervisor": supervisor, "worker": int(line)}


def main(control_fd: int, device: str) -> None:
    """Serve `fork` and `wait` requests until the judge closes the channel."""
    isolation.set_parent_death_signal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    import env.runner

    env.runner.preload(device)
    control = Wire(socket.socket(fileno=control_fd), accept_fds=True)
    control.send({"ready": os.getpid()})
    while True:
        try:
            request = control.recv(timeout_s=3600 * 24 * 365)
        except WireError:
            return
        if request["op"] == "fork":
            (fd,) = control.take_fds()
            control.send(_fork(fd, request))
        else:
            _, status = os.waitpid(request["supervisor"], 0)
            control.send({"code": _exit_code(status)})


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
