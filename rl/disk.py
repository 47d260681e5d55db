"""What a person has to know where a file could not be written. Runs in every process that writes."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

from env.files import existing

MIB = 2**20
# The system's words in exceptions of safetensors and tokenizers, and torch's own, which leaves them out.
SIGNS = ("os error", "PytorchStreamWriter", "inline_container")


def failed(error: BaseException) -> bool:
    """Whether an exception says that a write failed: each library that writes for us has a kind of its own."""
    return isinstance(error, OSError) or any(sign in str(error) for sign in SIGNS)


def cause(error: BaseException) -> str:
    """The first line of what it says. torch's own words of a write that stopped half-way are about itself."""
    text = str(error).partition("\n")[0] or type(error).__name__
    return "the write stopped half-way" if any(sign in text for sign in SIGNS[1:]) else text


def file_limit() -> int | None:
    """Bytes that a file of this process may have (ulimit -f); None where there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def room(folder: Path) -> str:
    """How much can be written to `folder`, or where it will be, and what to do if that is too little."""
    free = f"{shutil.disk_usage(existing(folder)).free / MIB:,.0f} MiB are free there"
    limit = file_limit()
    if limit is None:
        return f"{free}: make room or mend the folder"
    return f"{free}, but no file may have more than {limit / MIB:,.1f} MiB: raise that limit (ulimit -f), or make room"
