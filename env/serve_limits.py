"""Who may ask, how often and how much: the token, rate limits and the gate in front of the HTTP server's routes.

Runs in the driver. Standard library only.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import math
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

TOKEN_VARIABLE = "ENV_SERVE_TOKEN"
MIN_TOKEN_CHARS = 16
CLIENTS_REMEMBERED = 10_000
OPEN_PATHS = ("/health",)  # without the token it says no more than the status

Asgi = Callable[[dict, Callable[[], Awaitable[dict]], Callable[[dict], Awaitable[None]]], Awaitable[None]]


class LimitError(ValueError):
    """A setting that would leave the server open or useless: what to do instead."""


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own. A name other than localhost isn't looked up: it may change."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_token(file: Path | None) -> str:
    """The token from `file`, else from the environment variable ENV_SERVE_TOKEN; "" where there is none.

    The variable is removed, so that no process that is started later inherits it. Raises LimitError for a token that is
    short or holds blanks, and for a file that others may read.
    """
    from_environment = os.environ.pop(TOKEN_VARIABLE, "")
    if file is None:
        token, source = from_environment.strip(), TOKEN_VARIABLE
        if not token:
            return ""
    else:
        try:
            with open(file, encoding="utf-8", errors="replace") as opened:
                mode, token = os.fstat(opened.fileno()).st_mode, opened.read(4097).strip()
        except OSError as error:
            raise LimitError(
                f"--token-file {file}: can't be read ({error.strerror}); give a file of mode 600 that holds the token"
            ) from error
        if stat.S_ISREG(mode) and mode & 0o077:
            raise LimitError(f"--token-file {file}: others may read it; chmod 600 {file}")
        source = f"--token-file {file}"
    if (
        len(token) < MIN_TOKEN_CHARS
        or len(token) > 4096
        or not token.isascii()
        or not token.isprintable()
        or " " in token
    ):
        raise LimitError(
            f"{source}: a token has {MIN_TOKEN_CHARS} to 4096 printable ASCII characters and no blanks; make one with\n"
            "  python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    return token


def check_address(host: str, token: str) -> None:
    """Raises LimitError where strangers could submit code without a token."""
    if not token and not is_loopback(host):
        raise LimitError(
            f"--host {host}: other machines could run code here; give a token with --token-file or in "
            f"{TOKEN_VARIABLE}, or bind to 127.0.0.1"
        )


class Rates:
    """A token bucket a client: `rate` candidates or requests a second, `burst` at once. rate = 0: no limit."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic):
        self.rate, self.burst, self._clock = rate, burst, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str, count: int = 1) -> float:
        """Seconds until that much may be taken; 0 means it was."""
        if not self.rate:
            return 0.0
        now = self._clock()
        left, at = self._buckets.pop(client, (float(self.burst), now))
        left = min(float(self.burst), left + (now - at) * self.rate)
        # One that asks for more than a full bucket gets it from a full one, and pays afterwards.
        need = min(count, self.burst)
        wait = (need - left) / self.rate if left < need else 0.0
        self._buckets[client] = (left if wait else left - count, now)
        while len(self._buckets) > CLIENTS_REMEMBERED:
            self._buckets.popitem(last=False)
        return wait


class Gate:
    """ASGI: rate, host, token and announced size are looked at before a byte of the body is.

    note: told of each answer: (path template or "", status). A request whose token was right (or needs none) has
    scope["state"]["trusted"].
    """

    def __init__(
        self, app: Asgi, token: str, rates: Rates, max_body: int, note: Callable[[str, int], None] = lambda *_: None
    ):
        self.app, self.rates, self.max_body, self._note = app, rates, max_body, note
        self._expected = f"Bearer {token}".encode() if token else b""

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        trusted, refusal = self._look(scope)
        scope.setdefault("state", {})["trusted"] = trusted

        async def noting(message: dict) -> None:
            if message["type"] == "http.response.start":
                self._note(getattr(scope.get("route"), "path", ""), message["status"])
            await send(message)

        if refusal is not None:
            await _answer(noting, *refusal)
        else:
            await self.app(scope, receive, noting)

    def _look(self, scope: dict) -> tuple[bool, tuple[int, str, dict[str, str]] | None]:
        """(whether the asker is trusted, how to refuse: status, why, headers)."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        client = (scope.get("client") or ("",))[0]
        if wait := self.rates.take(client):
            return False, (429, "too many requests from this address", {"retry-after": str(math.ceil(wait))})
        if self._expected:
            trusted = hmac.compare_digest(headers.get(b"authorization", b""), self._expected)
            if not trusted and scope["path"] not in OPEN_PATHS:
                why = "a token is needed: Authorization: Bearer TOKEN"
                if b"authorization" in headers:
                    why = "wrong token"
                return False, (401, why, {"www-authenticate": "Bearer"})
        else:
            # Without a token only this machine's programs may ask; a web page that is open in a browser here is none,
            # and reaches us under its own name, or from its own origin.
            trusted = True
            name = headers.get(b"host", b"").decode("latin-1")
            name = name[: name.index("]") + 1] if name.startswith("[") and "]" in name else name.partition(":")[0]
            if name and not is_loopback(name):
                return False, (
                    403,
                    f"this server has no token and answers to this machine's own names, not {name!r}",
                    {},
                )
        if scope["method"] == "POST":
            kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            if kind != b"application/json":
                return trusted, (415, "send JSON, with Content-Type: application/json", {})
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > self.max_body:
            return trusted, (413, f"the body has {int(length[:20])} bytes, the limit is {self.max_body}", {})
        return trusted, None


async def _answer(send: Callable, status: int, why: str, headers: dict[str, str]) -> None:
    body = json.dumps({"detail": why}).encode()
    lines: dict[str, Any] = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    if status == 413:
        lines["connection"] = "close"  # what it has sent is not read
    encoded = [(key.encode("latin-1"), value.encode("latin-1")) for key, value in lines.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
