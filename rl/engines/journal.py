"""A server that is never asked the same twice: its answers are kept in a file. Runs in the driver.

A collection that is killed has paid for every answer that came in; started again, it takes those from the file and asks
for the others alone.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from env.files import explained
from env.records import sha256
from rl.config import Server
from rl.engines.base import Completion, EngineError, Request, Sampling
from rl.engines.openai import OpenAIEngine
from rl.records import FINISH_REASONS

REMEDY = "restore the file, or delete the line: that answer is asked for again"


class JournalEngine(OpenAIEngine):
    """OpenAIEngine with its answers in `path`, one a line; a last line that a kill cut short is asked for again."""

    def __init__(self, server: Server, path: Path) -> None:
        super().__init__(server)
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, str]] = {}
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = b""
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True) if path.is_file() else [], 1):
            if line.endswith(b"\n"):
                key, answer = _entry(line, f"{path}:{number}")
                self._known[key] = answer
                kept += line
        self._file = open(path, "r+b" if path.is_file() else "wb")  # noqa: SIM115
        self._file.truncate(len(kept))
        self._file.seek(len(kept))

    def _ask(self, request: Request, sampling: Sampling) -> Completion:
        key = sha256(json.dumps([self.server.model, request.seed, list(request.prompt), repr(sampling)]))
        entry = self._known.get(key)
        if entry is None:
            completion = super()._ask(request, sampling)
            entry = {"text": completion.text, "finish_reason": completion.finish_reason}
            line = json.dumps({"key": key, **entry}) + "\n"
            with self._lock, explained(self._path):
                self._file.write(line.encode("ascii"))
                self._file.flush()
                os.fsync(self._file.fileno())
        return Completion([], [], entry["finish_reason"], text=entry["text"])


def _entry(line: bytes, where: str) -> tuple[str, dict[str, str]]:
    """(key, answer) of a whole line. Raises EngineError that names it where it is none of ours."""
    try:
        entry = json.loads(line)
        key, text, reason = entry["key"], entry["text"], entry["finish_reason"]
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{where}: no answer of the server ({error}); {REMEDY}") from error
    if not (isinstance(key, str) and isinstance(text, str) and reason in FINISH_REASONS):
        raise EngineError(f"{where}: no answer of the server (key, text or finish_reason is of another kind); {REMEDY}")
    return key, {"text": text, "finish_reason": reason}
