"""Writing files so that a kill at any instant leaves the old content or the new one. Runs everywhere."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` through a temporary file beside it: readers never see half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
