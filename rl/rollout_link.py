"""The learner's end of the rollout process (rl/rollouter.py): starts it, talks to it, and never outlives it unnoticed.

Runs in rank 0 of rl.train. Messages are plain dicts over a socket pair, one a process where several GPUs sample; memory
with weights travels as a descriptor. Every wait ends: with an answer, with the process, or with its timeout. A process
that dies while the learner computes is noticed by a thread, which ends this process if nobody else does.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from rl import shared_weights
from rl.engines.base import EngineError
from rl.roles import Roles

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 900.0  # loading and compiling a large model
END_TIMEOUT_S = 10.0
GRACE_S = 20.0  # for this process to notice by itself that the other one is gone
# What torchrun tells its ranks: the rollout processes are none of them, and form a group of their own.
TORCHRUN = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
)  # fmt: skip


def launch(arguments: Sequence[str], theirs: Connection, environment: dict[str, str]) -> subprocess.Popen:
    """Start a rollout process that owns the connection `theirs`."""
    command = [sys.executable, "-m", "rl.rollouter", "--connection", str(theirs.fileno()), *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment
    )  # fmt: skip


class Link:
    """A context manager: the rollout processes of a run. `dtype` and `probe` are there after `ready`."""

    dtype: torch.dtype

    def __init__(self, run: Path, roles: Roles, shapes: Sequence[tuple[str, Sequence[int]]]) -> None:
        """shapes: names and shapes of the weights that will be pushed, in their order."""
        self._shapes = shapes
        self._doing, self._closing, self._noticed = "starting", False, False
        self._probe: list[int] = []
        self._processes: list[subprocess.Popen] = []
        self._connections: list[Connection] = []
        count = max(1, len(roles.sample))
        try:
            for rank, environment in enumerate(_environments(count)):
                ours, theirs = multiprocessing.Pipe()
                arguments = ["--run", str(run.resolve()), "--parent", str(os.getpid())]
                if roles.sample:
                    arguments += ["--gpu", roles.sample[rank], "--judge-gpus", ",".join(roles.judge)]
                self._connections.append(ours)
                self._processes.append(launch(arguments, theirs, environment))
                theirs.close()
        except BaseException:
            self.close(abruptly=True)
            raise
        threading.Thread(target=self._watch, daemon=True).start()

    def ready(self) -> None:
        """Wait until it can sample. Raises EngineError."""
        message = self.hear(START_TIMEOUT_S)
        self._probe, self.dtype = message["probe"], getattr(torch, message["dtype"])

    def probe(self) -> list[int]:
        """The fixed prompt by which the engine there checks its weights (as an engine's)."""
        return self._probe

    def push_named(self, weights: Iterator[tuple[str, torch.Tensor]], expected: Sequence[float]) -> None:
        """Send weights under their names; the engine takes them over behind what it was asked before, and checks them.
        Raises EngineError where they can't be sent."""
        plan = shared_weights.layout(self._shapes, self.dtype)
        descriptor, checksum = shared_weights.write(plan, weights)
        try:
            self.send({"do": "load", "layout": plan, "checksum": checksum, "expected": list(expected)}, descriptor)
        finally:
            os.close(descriptor)

    def send(self, message: dict[str, Any], descriptor: int | None = None) -> None:
        """A message to every rollout process. Raises EngineError where one is gone."""
        try:
            for connection, process in zip(self._connections, self._processes):
                connection.send(message)
                if descriptor is not None:
                    reduction.send_handle(connection, descriptor, process.pid)
        except OSError as error:
            raise self._lost(f"it takes no messages ({error})") from error

    def hear(self, timeout_s: float, doing: str = "") -> dict[str, Any]:
        """The next message from it. doing: what it is at, for messages. Raises EngineError where it failed, ended or
        says nothing for so long."""
        self._doing = doing or self._doing
        end = time.monotonic() + timeout_s
        while True:
            for connection in wait(self._connections, timeout=1.0):
                try:
                    message = connection.recv()
                except (EOFError, OSError):
                    raise self._lost() from None
                if "failed" in message:
                    self._noticed = True
                    raise EngineError(f"the rollout process failed while {self._doing}: {message['failed']}")
                return message
            if self._ended():
                raise self._lost()
            if time.monotonic() > end:
                raise self._lost(f"it gave no sign for {timeout_s:.0f} s (placement.rollout_timeout_s)")

    def close(self, abruptly: bool = False) -> None:
        """End the processes and what they started: at once, or, without `abruptly`, when they have nothing to do."""
        self._closing = True
        if not abruptly:
            with contextlib.suppress(EngineError):  # it is gone already
                self.send({"do": "stop"})
        for process in self._processes if abruptly else []:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in self._connections:
            connection.close()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(abruptly=kind is not None)

    def _ended(self) -> subprocess.Popen | None:
        return next((process for process in self._processes if process.poll() is not None), None)

    def _lost(self, why: str = "") -> EngineError:
        """What to raise where it is gone; the first word is the cause."""
        self._noticed = True
        deadline = time.monotonic() + 2.0  # a process that closed its connection is about to end
        while (ended := self._ended()) is None and not why and time.monotonic() < deadline:
            time.sleep(0.02)
        if ended is not None:
            code = ended.returncode
            why = f"it ended with exit code {code}, its last words are above" if code >= 0 else _killed(-code)
        return EngineError(
            f"the rollout process is lost while {self._doing}: {why or 'it closed its connection'}. What was learned "
            "up to the newest checkpoint is kept: run the same command again"
        )

    def _watch(self) -> None:
        """End this process where the other one is gone and nothing here takes notice, e.g. in a long update."""
        while not self._ended():
            if self._closing:
                return
            time.sleep(0.2)
        time.sleep(GRACE_S)
        if not (self._closing or self._noticed):
            print(f"rl.train: {self._lost()}", file=sys.stderr, flush=True)
            os._exit(1)


def _killed(number: int) -> str:
    return f"signal {number} ended it" + (" (if nobody sent it: host memory was full, dmesg says)" * (number == 9))


def _environments(count: int) -> list[dict[str, str]]:
    """Of each rollout process: without torchrun's words, and with such of their own where there are several."""
    plain = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    if count == 1:
        return [plain]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    # Each sees one GPU, its own: number 0.
    own = {"TORCHELASTIC_RUN_ID": "rollout", "LOCAL_RANK": "0"}
    return [plain | group | own | {"RANK": str(rank)} for rank in range(count)]
