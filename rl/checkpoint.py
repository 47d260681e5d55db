"""Checkpoints: one folder a step, complete or not there at all. Runs in the process that trains.

    <folder>/step_00012/{<name>.pt, ..., manifest.json}

A folder is written under a temporary name, forced to disk and renamed, so the newest one with a good manifest is the
one to resume from; no pointer file that could disagree. The manifest holds every file's size and SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from env.files import write_atomic

log = logging.getLogger(__name__)

TEMPORARY = ".tmp-"
MANIFEST = "manifest.json"


class CheckpointError(RuntimeError):
    """No checkpoint can be used though there should be one; the message says what to do."""


def save(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Save each entry of `state` as <name>.pt, atomically; then remove all but the newest `keep` checkpoints.

    state: tensors, numbers, strings, and lists, tuples and dicts of these (read back with weights_only=True).
    Returns the checkpoint's folder. An old one of the same step is replaced.
    """
    final = folder / f"step_{step:05d}"
    temporary = folder / f"{TEMPORARY}{final.name}"
    replaced = folder / f"{TEMPORARY}replaced-{final.name}"
    clean(folder)
    temporary.mkdir(parents=True)
    files = {}
    for name, value in state.items():
        path = temporary / f"{name}.pt"
        torch.save(value, path)
        force(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    manifest = temporary / MANIFEST
    manifest.write_text(json.dumps({"step": step, "files": files}, indent=1, sort_keys=True), encoding="utf-8")
    force(manifest)
    force(temporary)
    if final.exists():
        final.rename(replaced)  # a folder can't be renamed onto one that has files
    temporary.rename(final)
    force(folder)
    for old in _steps(folder)[keep:]:
        # Renamed first: removal takes a while, and a kill in its middle must not leave half a checkpoint by this name.
        doomed = folder / f"{TEMPORARY}old-{old.name}"
        old.rename(doomed)
        shutil.rmtree(doomed)
    clean(folder)
    return final


def load_newest(folder: Path, device: str = "cpu") -> tuple[int, dict[str, Any]] | None:
    """(step, state) of the newest whole checkpoint; None where the folder has none at all.

    Leftovers of a killed save are removed. A damaged checkpoint is skipped with a warning; where all are damaged,
    CheckpointError is raised, since starting over silently would throw the run away.
    """
    clean(folder)
    candidates = _steps(folder)
    for path in candidates:
        damage = verify(path)
        if damage is None:
            files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
            state = {Path(name).stem: torch.load(path / name, map_location=device, weights_only=True) for name in files}
            return _step(path), state
        log.warning("skipping the checkpoint %s: %s", path, damage)
    if candidates:
        raise CheckpointError(f"all checkpoints in {folder} are damaged; delete that folder to start this stage over")
    return None


def verify(path: Path) -> str | None:
    """What is wrong with a checkpoint folder, in words; None if every file is as the manifest says."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        expected = [(path / name, entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"no usable {MANIFEST} ({error})"
    for file, size, digest in expected:
        if not file.is_file():
            return f"{file.name} is missing"
        if file.stat().st_size != size:
            return f"{file.name} has {file.stat().st_size} bytes instead of {size}"
        if _sha256(file) != digest:
            return f"{file.name} has other content than was written"
    return None


def clean(folder: Path) -> None:
    """Remove what a killed save left behind."""
    for path in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path)


def force(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_folder(model, tokenizer, folder: Path) -> None:
    """Save model and tokenizer as a Hugging Face folder, which appears whole or not at all."""
    temporary = folder.with_name(f"{TEMPORARY}{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    for path in (*temporary.rglob("*"), temporary):
        force(path)
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)
    force(folder.parent)


def mark_done(folder: Path) -> None:
    """Write folder/DONE, the sign that a stage is complete: atomically, and after all its files."""
    write_atomic(folder / "DONE", "done\n")
    force(folder)


def _steps(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    return sorted((path for path in folder.glob("step_*") if path.is_dir()), key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
