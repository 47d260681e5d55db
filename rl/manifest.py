"""What was written into a folder: the size and SHA-256 of every file, in a manifest.json among them. Runs wherever
checkpoints and model folders are written or read: what is cut or changed since is never loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from env.files import write_atomic

MANIFEST = "manifest.json"


def entry(path: Path) -> dict[str, Any]:
    """{"bytes": size, "sha256": hexadecimal digest} of a file."""
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def write(folder: Path, files: Mapping[str, dict[str, Any]], **more: Any) -> None:
    """The manifest of `folder`: entries by name, relative to it, and what else it is to say. Atomic."""
    write_atomic(folder / MANIFEST, json.dumps({**more, "files": files}, indent=1, sort_keys=True))


def read(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`. Raises ValueError where there is none that can be used."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for name, expected in manifest["files"].items():
            if not (type(expected["bytes"]) is int and isinstance(expected["sha256"], str)):
                raise ValueError(f"the entry of {name} is none")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no usable {MANIFEST} ({error})") from error
    return manifest


def damage(folder: Path, files: Mapping[str, dict[str, Any]], contents: bool = True) -> str | None:
    """The first file of `folder` that isn't as its entry says, in words; None where all are. contents: compare digests
    too, which reads all of them; sizes alone take no time."""
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
        if contents and _sha256(path) != expected["sha256"]:
            return f"{name} has other content than was written"
    return None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
