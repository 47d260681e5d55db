"""Frames between the judge, its fork server and the workers: length, JSON, and file descriptors beside them.

Runs at both ends. The far end may be hostile: a frame has a size limit, it is JSON and never pickle, every wait has a
deadline, and what breaks the framing is a `WireError`, after which the far end is not spoken to again.
"""

from __future__ import annotations

import array
import json
import select
import socket
import struct
import time
from typing import Any

MAX_FRAME = 8 << 20  # a profile table and a traceback are far smaller; more is an attempt to fill the judge's memory
# Bound before foreign code comes in: what it does to these modules must not cut its own worker off.
_DUMPS, _LOADS, _SELECT, _CLOCK = json.dumps, json.loads, select.select, time.monotonic
_RECEIVE, _SEND = socket.socket.recvmsg, socket.socket.send
_HEADER = struct.Struct("<4sI")
_MAGIC = b"KJ01"


class WireError(Exception):
    """The far end is gone or sent something that is not a frame."""


class WireTimeout(Exception):
    """The deadline passed before a whole frame came."""


class Wire:
    """One end of a Unix stream socket. Not thread-safe: one owner at a time."""

    def __init__(self, sock: socket.socket, accept_fds: bool = False):
        self.sock = sock
        # The judge takes no descriptors from a worker: they would fill its table.
        self.accept_fds = accept_fds
        self.fds: list[int] = []

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = (), timeout_s: float = 30.0) -> None:
        """Send one frame. Raises WireError where the far end is gone, WireTimeout where it doesn't read."""
        body = _DUMPS(message, allow_nan=True).encode("utf-8", "surrogatepass")
        if len(body) > MAX_FRAME:
            raise WireError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME}")
        data = memoryview(_HEADER.pack(_MAGIC, len(body)) + body)
        end = _CLOCK() + timeout_s
        try:
            self.sock.settimeout(timeout_s)
            if fds:
                control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                data = data[self.sock.sendmsg([data], control) :]
            while data:
                self.sock.settimeout(max(0.001, end - _CLOCK()))
                data = data[_SEND(self.sock, data) :]
        except TimeoutError as error:
            raise WireTimeout(f"the far end read nothing for {timeout_s:.0f} s") from error
        except OSError as error:
            raise WireError(f"the far end is gone ({error})") from error

    def _read(self, size: int, end: float) -> bytes:
        chunks = bytearray()
        while len(chunks) < size:
            left = end - _CLOCK()
            if left <= 0 or not _SELECT([self.sock], [], [], left)[0]:
                raise WireTimeout("no answer in time")
            try:
                space = socket.CMSG_SPACE(16 * 4) if self.accept_fds else 0
                data, ancillary, _, _ = _RECEIVE(self.sock, size - len(chunks), space)
            except OSError as error:
                raise WireError(f"the far end is gone ({error})") from error
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    received = array.array("i")
                    received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                    self.fds.extend(received)
            if not data:
                raise WireError("the far end closed the channel")
            chunks += data
        return bytes(chunks)

    def readable(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for the first byte of an answer (or the end of the channel)."""
        return bool(_SELECT([self.sock], [], [], timeout_s)[0])

    def recv(self, timeout_s: float) -> dict[str, Any]:
        """Receive one frame; descriptors that came with it are appended to `self.fds`.

        Raises WireTimeout after `timeout_s` seconds, WireError where the far end closed or broke the framing.
        """
        end = _CLOCK() + timeout_s
        magic, size = _HEADER.unpack(self._read(_HEADER.size, end))
        if magic != _MAGIC or size > MAX_FRAME:
            raise WireError("bytes on the channel that are not a frame")
        try:
            message = _LOADS(self._read(size, end).decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError) as error:  # a plain ValueError where a number has too many digits
            raise WireError(f"a frame that is not JSON ({type(error).__name__})") from error
        if not isinstance(message, dict):
            raise WireError("a frame that is not an object")
        return message

    def take_fds(self) -> list[int]:
        fds, self.fds = self.fds, []
        return fds

    def close(self) -> None:
        self.sock.close()
