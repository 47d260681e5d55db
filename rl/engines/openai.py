"""Any OpenAI-compatible server over HTTP: teachers and models to compare with. Runs in the driver.

Messages in, text out; there are no ids and no log-probs, so nothing can be trained on what comes from here. Servers are
slow, busy and wrong at times: what passes by itself is tried again with growing pauses, what doesn't is said at once.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import torch

from rl.config import Server
from rl.engines.base import Completion, EngineError, Request, Sampling, Source

# Busy, overloaded, or broken for the moment.
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
LONGEST_PAUSE_S = 60.0
POLL_S = 0.1
# What servers say where a conversation is longer than their context.
TOO_LONG = ("context_length_exceeded", "maximum context length", "context length", "too long")


class _Passing(Exception):
    """A failure that may be gone at the next try; `pause_s`: how long the server asks to wait, if it does."""

    def __init__(self, message: str, pause_s: float | None = None) -> None:
        super().__init__(message)
        self.pause_s = pause_s


class OpenAIEngine:
    """Chat completions of `server.model` at `server.url`, `server.parallel` at once. Raises EngineError for settings
    that name no server."""

    takes = "messages"

    def __init__(self, server: Server) -> None:
        if not (server.url and server.model):
            raise EngineError("server.url and server.model say which model to ask; set both, e.g. http://host:8000/v1")
        self.server = server
        self._address = server.url.rstrip("/") + "/chat/completions"
        self._closing = threading.Event()
        self._refused: set[str] = set()  # parameters that this server doesn't take

    def push(self, model: torch.nn.Module) -> None:
        raise EngineError("the weights of a model behind a server can't be changed from here")

    def stream(self, source: Source, sampling: Sampling) -> Iterator[tuple[Request, Completion]]:
        """Requests and their completions as they come (rl/engines/base.py). Raises EngineError for what won't pass."""
        self._closing.clear()
        threads = futures.ThreadPoolExecutor(self.server.parallel)
        flying: dict[futures.Future[Completion], Request] = {}
        try:
            while True:
                room = self.server.parallel - len(flying)
                for request in source.take(room, wait=not flying) if room else []:
                    flying[threads.submit(self._ask, request, sampling)] = request
                if not flying:
                    return
                done, _ = futures.wait(flying, timeout=POLL_S, return_when=futures.FIRST_COMPLETED)
                for future in done:
                    yield flying.pop(future), future.result()
        finally:
            self._closing.set()
            threads.shutdown(wait=False, cancel_futures=True)

    def _ask(self, request: Request, sampling: Sampling) -> Completion:
        """One completion, tried `server.attempts` times."""
        rng = random.Random(request.seed)
        for attempt in range(1, self.server.attempts + 1):
            last = attempt == self.server.attempts
            try:
                while (data := self._post(self._body(request, sampling))) is None:
                    continue  # without a parameter that this server doesn't take
                return self._complete(data, last)
            except _Passing as failure:
                if last:
                    raise EngineError(
                        f"{self._address}: no answer in {attempt} tries; the last time: {failure}. Wait and run again, "
                        "or raise server.attempts or server.timeout_s, or lower server.parallel"
                    ) from failure
                pause = min(2.0**attempt, LONGEST_PAUSE_S) * (0.5 + rng.random() / 2)
                if self._closing.wait(pause if failure.pause_s is None else min(failure.pause_s, LONGEST_PAUSE_S)):
                    raise EngineError("stopped") from failure
        raise AssertionError("the last attempt returns or raises")

    def _body(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        wanted = {
            "max_tokens": sampling.max_new_tokens,
            "max_completion_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": request.seed % 2**31,
        }
        left_out = self._refused if "max_tokens" in self._refused else {*self._refused, "max_completion_tokens"}
        parameters = {name: value for name, value in wanted.items() if name not in left_out}
        return {"model": self.server.model, "messages": list(request.prompt), **parameters}

    def _post(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """The server's answer; {} where the conversation is too long for it, None where it refuses a parameter."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self.server.key_variable):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self._address, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self.server.timeout_s) as response:
                text = _read(response, self.server.timeout_s)
        except urllib.error.HTTPError as error:
            return self._refusal(error, body)
        except (OSError, http.client.HTTPException) as error:  # refused, reset, cut off, timed out
            raise _Passing(f"{type(error).__name__}: {error}") from error
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _Passing(f"an answer that is no JSON: {text[:200]!r}") from error
        if not isinstance(data, dict) or not data:
            raise _Passing(f"an answer that is no completion: {text[:200]!r}")
        return data

    def _refusal(self, error: urllib.error.HTTPError, body: dict[str, Any]) -> dict[str, Any] | None:
        """What an HTTP status means: {} or None as `_post` returns them, or raises _Passing or EngineError."""
        try:
            said = _read(error, self.server.timeout_s).decode("utf-8", "replace")[:500]
        except (OSError, http.client.HTTPException) as failure:
            said = f"({failure})"
        if error.code in PASSING:
            raise _Passing(f"HTTP {error.code}: {said}", _seconds(error.headers.get("Retry-After")))
        if error.code in (400, 413, 422) and any(words in said for words in TOO_LONG):
            return {}
        if error.code in (400, 422):
            optional = ("max_tokens", "temperature", "top_p", "seed")
            named = [name for name in optional if name in body and name in said]
            if named:
                if named[0] not in self._refused:
                    print(f"{self._address} takes no {named[0]} as it is given; asking without it", flush=True)
                self._refused.add(named[0])
                return None
        hint = f"; is the key in ${self.server.key_variable} right?" if error.code in (401, 403) else ""
        hint = "; are server.url (up to and with /v1) and server.model right?" if error.code == 404 else hint
        raise EngineError(f"{self._address}: HTTP {error.code}: {said}{hint}")

    def _complete(self, data: dict[str, Any], last: bool) -> Completion:
        """A completion from the server's JSON. An empty answer is asked for again, and believed the last time."""
        if not data:
            return Completion([], [], "context")
        try:
            choice = data["choices"][0]
            text = choice["message"].get("content") or ""
            reason = choice.get("finish_reason")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise _Passing(f"an answer without a choice: {json.dumps(data)[:200]}") from error
        if not isinstance(text, str):
            raise _Passing(f"an answer whose content is no text: {json.dumps(data)[:200]}")
        if not text.strip() and reason != "length" and not last:
            raise _Passing("an empty answer")
        return Completion([], [], "length" if reason == "length" else "stop", text=text)


def _read(response: Any, timeout_s: float) -> bytes:
    """The whole body within so many seconds: the socket's own timeout begins anew with every byte, and a server may
    send blanks for ever while it works. Raises TimeoutError."""
    deadline, parts = time.monotonic() + timeout_s, []
    while part := response.read1():
        parts.append(part)
        if time.monotonic() > deadline:
            raise TimeoutError(f"no whole answer within {timeout_s:g} s")
    return b"".join(parts)


def _seconds(header: str | None) -> float | None:
    """A Retry-After header in seconds; None for none, and for a date."""
    try:
        return max(0.0, float(header)) if header else None
    except ValueError:
        return None
