"""Calls of the C library that Python doesn't wrap, and their failures as OSError.

Runs in the fork server and in freshly forked workers.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable

LIBC = ctypes.CDLL(None, use_errno=True)


def last_error(where: str = "") -> OSError:
    """Why the last call failed, in the C library's words."""
    code = ctypes.get_errno()
    words = os.strerror(code)
    return OSError(code, f"{words} ({where})" if where else words)


def signal_all(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Signal each process; those that are gone already are passed over."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
