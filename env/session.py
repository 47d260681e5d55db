"""A worker together with the buffers that the judge lends it: inputs in, outputs out, snapshots kept on this side.

Runs in the judge. The same class serves the reference and the candidate, so that both are treated alike.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from env import tensors
from env.buffers import Buffer, SharedMemoryError
from env.gate import DeviceGate
from env.launches import COMPILING
from env.worker import Worker

COMPARED_BYTES = 256 << 20
LARGE_BYTES = 1 << 30


class ForeignError(Exception):
    """Foreign code raised: `kind` is compile_error, runtime_error or oom; `lines` are those in its own file."""

    def __init__(self, reply: dict[str, Any]):
        kind = reply.get("kind")
        self.kind = kind if kind in ("compile_error", "runtime_error", "oom", "incorrect") else "runtime_error"
        self.message = str(reply.get("message", ""))[:4000]
        self.lines = [str(line)[:300] for line in reply.get("lines", [])[:6]]
        super().__init__(self.message)


class TooBig(Exception):
    """The device hasn't the memory for what a verdict of this problem needs."""


class ProtocolError(Exception):
    """The worker answered something that its runner would never say: foreign code wrote on the channel."""


@dataclass
class Outputs:
    """What a call returned: its layout, a private copy of its bytes, and the facts the runner reported beside it."""

    layout: dict[str, Any]
    data: torch.Tensor | None
    facts: dict[str, Any]
    mutated: list[bool]


class Session:
    """One module loaded in one worker. Every method raises ForeignError, WorkerDied or WorkerTimeout."""

    def __init__(self, worker: Worker, device: str, gate: DeviceGate, run_timeout_s: float, compile_timeout_s: float):
        self.worker = worker
        self.gate = gate
        self.device = device
        self.run_timeout_s = run_timeout_s
        self.compile_timeout_s = compile_timeout_s
        self.buffers: dict[str, Buffer] = {}
        self.inputs_layout: dict[str, Any] = {}
        self.constants: dict[str, Any] = {}  # layout of what a replayed program finds in memory
        self.compiled = False
        self.tampered: list[str] = []
        self.seen = -1
        self.inputs: torch.Tensor | None = None  # what was set for the next call

    def ask(self, op: str, timeout_s: float, fds: tuple[int, ...] = (), **request: Any) -> dict[str, Any]:
        reply = self.worker.call(op, timeout_s, fds, **request)
        if reply.get("ok") is not True:
            raise ForeignError(reply)
        return reply

    def load(self, source: str, name: str, module: str, knockout: bool = False, watch: str = "") -> None:
        """Execute a source as a module. watch: name of the reference's class to lay baits under (`env.watch`)."""
        request = {"source": source, "path": f"{self.worker.scratch}/{module}.py", "module": module, "class": name}
        self.seen, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            reply = self.ask("load", self.compile_timeout_s, (theirs,), knockout=knockout, watch=watch, **request)
        finally:
            os.close(theirs)
        self.facts(reply)

    def facts(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Note what a reply says beside its answer: tampering, once seen, isn't forgotten."""
        found = reply.get("tampered")
        self._note(map(str, found[:16]) if isinstance(found, list) else ())
        self.look()
        return reply

    def look(self) -> None:
        """Note what the worker's watch has sent so far on its own way, which nobody there can take back."""
        if self.seen >= 0:
            with contextlib.suppress(BlockingIOError):
                self._note(os.read(self.seen, 4096).decode("utf-8", "replace").splitlines()[:16])

    def _note(self, found: Iterable[str]) -> None:
        self.tampered += [what for what in dict.fromkeys(text[:200] for text in found) if what not in self.tampered]
        del self.tampered[16:]

    def init_inputs(self) -> dict[str, Any]:
        return checked_layout(self.ask("init_inputs", self.run_timeout_s), 0)

    def build(self, name: str, layout: dict[str, Any], seed: int, compiled: bool = False) -> None:
        """Construct the model; a second time: another instance in the first one's place."""
        request = {"layout": layout, "seed": seed, "compile": compiled, "class": name}
        self.facts(self.ask("build", self.run_timeout_s, **request))

    def load_state(self, state: tuple[dict[str, Any], torch.Tensor]) -> tuple[str, list[int]]:
        """The reference's weights into the model. Returns (how the model's own were found to stand for them, empty
        where they weren't; how many numbers each tensor of the model's own state holds).
        """
        layout, data = state
        if not layout["items"]:
            return "by name", []
        self.fill("state", data)
        reply = self.ask("load_state", self.run_timeout_s, layout=layout, buffer="state")
        floats = reply.get("floats")
        if not isinstance(floats, list) or not all(type(n) is int and 0 <= n < 1 << 48 for n in floats):
            raise ProtocolError("weights that can't be counted")
        return str(reply.get("loaded") or "")[:80], floats

    def buffer(self, name: str, nbytes: int) -> Buffer:
        """The buffer of that name, replaced by a larger one where it is too small."""
        held = self.buffers.get(name)
        if held is None or held.nbytes < nbytes:
            made = Buffer.create(nbytes, self.device)
            reply = self.worker.call("attach", self.run_timeout_s, fds=(made.fd,), name=name, nbytes=made.nbytes)
            if reply.get("ok") is not True:
                made.close()
                short = reply.get("kind") == "oom"
                if reply.get("kind") == "no_descriptor" or self.worker.foreign:
                    # Before foreign code came in it could.
                    message = f"the process can't be given its tensors any more: {reply.get('message')}"
                    raise ForeignError({**reply, "kind": "oom" if short else "runtime_error", "message": message})
                raise SharedMemoryError(f"the worker could not map a buffer: {reply.get('message')}", short)
            if held is not None:
                held.close()
            self.buffers[name] = held = made
        return held

    def export(
        self, op: str, what: str, buffer: str, copies: int = 2, **request: Any
    ) -> tuple[dict[str, Any], torch.Tensor]:
        """Let the runner lay out a tree and copy it to a buffer. Returns (layout, private copy of the bytes).

        copies: of what is exported that a verdict needs at the same time. Raises TooBig where they don't fit.
        """
        reply = self.ask(op, self.run_timeout_s, **request)
        self._afford(copies * _size(reply))
        lent = self.buffer(buffer, _size(reply))
        self.ask("pack", self.run_timeout_s, name=what, buffer=buffer)
        layout = checked_layout(reply, lent.nbytes)
        with self.gate:
            return layout, lent.tensor[: _size(reply)].clone()

    def _afford(self, nbytes: int) -> None:
        if self.device != "cuda" or nbytes < LARGE_BYTES:
            return
        self.give_back(nbytes)
        free = torch.cuda.mem_get_info()[0]
        if nbytes > free:
            raise TooBig(f"too big here: it takes about {nbytes / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free")

    def set_inputs(self, layout: dict[str, Any], data: torch.Tensor, expected_bytes: int = 0) -> None:
        """Fill the worker's own copy of the inputs: whatever it did to the last one is gone. With `expected_bytes`, the
        outputs' buffer is poisoned as well: NaN in every float, so that what was never written, or written too late,
        can't look right.
        """
        self.buffer("inputs", data.numel())
        if expected_bytes:
            self.buffer("outputs", expected_bytes)
        with self.gate:
            self.buffers["inputs"].tensor[: data.numel()].copy_(data)
            if expected_bytes:
                self.buffers["outputs"].tensor.fill_(0xFF)
            self.synchronise()
        self.give_back(data.numel())
        self.inputs_layout, self.inputs = layout, data

    def give_back(self, nbytes: int) -> None:
        """Before a program runs on this much: what torch keeps of freed memory here is what it hasn't there."""
        if self.device == "cuda" and nbytes >= LARGE_BYTES:
            torch.cuda.empty_cache()

    def fill(self, name: str, data: torch.Tensor) -> None:
        """Copy bytes to a lent buffer; they have arrived when this returns."""
        buffer = self.buffer(name, data.numel())
        with self.gate:
            buffer.tensor[: data.numel()].copy_(data)
            self.synchronise()

    def call(self, op: str, expected_bytes: int = 0, **request: Any) -> Outputs:
        """An operation that returns the model's outputs for the inputs that were set. `expected_bytes`: of the
        reference's outputs, 0 for the reference itself: its outputs are fetched whatever their size.
        """
        timeout_s = self.run_timeout_s if self.compiled else self.compile_timeout_s + self.run_timeout_s
        reply = self.facts(self.ask(op, timeout_s, layout=self.inputs_layout, **request))
        self.compiled = True
        if not reply.get("packed") and not expected_bytes:
            self.buffer("outputs", _size(reply))
            self.ask("pack", self.run_timeout_s, name="outputs", buffer="outputs")
            reply["packed"] = True
        data = None
        if reply.get("packed"):
            buffer = self.buffers["outputs"]
            layout = checked_layout(reply, buffer.nbytes)
            with self.gate:
                data = buffer.tensor[: _size(reply)].clone()
        else:
            layout = checked_layout(reply, 1 << 62)
        with self.gate:
            mutated = self._mutated()
        self.inputs = None  # they may be gigabytes, which nobody else holds any more
        return Outputs(layout, data, reply, mutated)

    def _mutated(self) -> list[bool]:
        """Which input tensors differ from what was lent. Asked at once: each question to the device waits its turn."""
        current = self.buffers["inputs"].tensor
        nodes = tensors.tensor_nodes(self.inputs_layout)
        parts = [slice(node["offset"], node["offset"] + node["nbytes"]) for node in nodes]
        if not parts:
            return []
        return torch.stack([_differs(current[part], self.inputs[part]) for part in parts]).tolist()

    def compiling(self) -> str:
        """The kernel that the worker says it is compiling, empty where it says nothing. Its words, so only a name."""
        try:
            # Not through a link: it could point at what only the judge may read.
            fd = os.open(f"{self.worker.scratch}/{COMPILING}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return ""
        with os.fdopen(fd, "rb") as file:
            name = file.read(200).decode("utf-8", "replace")
        return name if re.fullmatch(r"[\w.<>]{1,120}", name) else "a kernel"

    def lent_bytes(self) -> int:
        """Memory of the buffers that this worker maps."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def synchronise(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def end(self) -> None:
        """End the worker and give its memory back."""
        self.worker.end()
        if self.seen >= 0:
            os.close(self.seen)
            self.seen = -1
        for buffer in self.buffers.values():
            buffer.close()
        self.buffers.clear()


def _differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether bytes differ, as a scalar that stays on the device; by chunks, since inputs may be gigabytes."""
    found = [(mine != theirs).any() for mine, theirs in zip(a.split(COMPARED_BYTES), b.split(COMPARED_BYTES))]
    return torch.stack(found).any() if found else torch.zeros((), dtype=torch.bool, device=a.device)


def _size(reply: dict[str, Any]) -> int:
    nbytes = reply.get("nbytes")
    if type(nbytes) is not int or not 0 < nbytes < 1 << 40:
        raise ProtocolError(f"a size of {nbytes!r} bytes")
    return nbytes


def checked_layout(reply: dict[str, Any], capacity: int) -> dict[str, Any]:
    """The layout in a reply, once it is known to lie within `capacity` bytes. Raises ProtocolError."""
    try:
        tensors.check_layout(reply.get("layout"), capacity)
    except tensors.LayoutError as error:
        raise ProtocolError(str(error)) from error
    return reply["layout"]
