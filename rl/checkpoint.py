"""Checkpoints: one folder a step, complete or not there at all. Runs in every rank of a stage that trains.

    <folder>/step_00012/{__0_0.distcp, ..., .metadata, plain.pt, manifest.json}

Tensors are written by torch.distributed.checkpoint, every rank its shard, and can be loaded by any number of ranks;
plain.pt holds everything else. A folder is written under a temporary name, forced to disk and renamed, so the newest
one with a good manifest is the one to resume from; no pointer file that could disagree. The manifest, written last,
holds every file's size and SHA-256: what is cut or changed is never loaded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from env.files import existing, room, write_atomic
from rl import disk, distributed, manifest
from rl.manifest import MANIFEST

log = logging.getLogger(__name__)

TEMPORARY = ".tmp-"
PLAIN = "plain.pt"


class CheckpointError(RuntimeError):
    """A checkpoint can't be written, or none can be used though there should be one; the message says what to do."""


def save(folder: Path, step: int, tensors: Mapping[str, torch.Tensor], plain: dict[str, Any], keep: int) -> Path:
    """Write a checkpoint atomically; then remove all but the newest `keep`. Called by all ranks.

    tensors: by name, each whole or this rank's shard of it. plain: tensors, numbers, strings, and lists, tuples and
    dicts of these (read back with weights_only=True); rank 0's is kept.
    Returns the checkpoint's folder. An old one of the same step is replaced. Raises CheckpointError where the disk is
    full or the folder can't be written; earlier checkpoints stay as they are.
    """
    final = folder / f"step_{step:05d}"
    temporary = folder / f"{TEMPORARY}{final.name}"
    needed = sum(distributed.gather(_bytes(tensors)))
    try:
        distributed.agree(lambda: _prepare(folder, temporary, needed))
        with _alone():
            dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(temporary))
        mine = {path.name: manifest.entry(path) for path in temporary.glob(f"__{distributed.rank()}_*")}
        files = {name: entry for part in distributed.gather(mine) for name, entry in part.items()}
        distributed.agree(lambda: _complete(folder, final, temporary, step, files, plain))
        distributed.agree(lambda: _prune(folder, keep, final))
    except CheckpointError:
        raise
    except (CheckpointException, OSError, RuntimeError) as error:
        # RuntimeError: what torch.save makes of a full disk. The rest of a half-written folder only takes up room.
        if distributed.first():
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint {final} could not be written ({_cause(error)}); {room(folder)}, and run the same "
            "command again: it goes on from the checkpoint before"
        ) from error
    return final


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint; None where the folder has none at all. Called by all ranks.

    Leftovers of a killed save are removed. A damaged checkpoint is skipped with a warning; where all are damaged,
    CheckpointError is raised, since starting over silently would throw the run away.
    """
    return distributed.agree(lambda: _newest(folder))


def load(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Fill `tensors` in place, from a checkpoint that any number of ranks wrote, and return its plain part.

    Raises CheckpointError where names or shapes are others than those of the model that was saved.
    """
    try:
        with _alone():
            dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(path))
    except (CheckpointException, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not of this model and optimiser ({_cause(error)}): resume with the settings that it was made "
            f"with, or {_over(path.parent)}"
        ) from error
    return plain_part(path)


def plain_part(path: Path) -> dict[str, Any]:
    """What is beside the tensors in a checkpoint."""
    return torch.load(path / PLAIN, map_location="cpu", weights_only=True)


def changed_settings(
    saved: Mapping[str, Any], present: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> list[str]:
    """What differs between the resolved settings of a checkpoint and the present ones: "optim.lr: 0.1 -> 0.2", ...

    defaults: what a setting was before there was one of that name; nothing is known of others that are missing.
    """
    lines, usual = [], defaults or {}
    for key in sorted(saved.keys() | present.keys()):
        before, now = saved.get(key, usual.get(key)), present.get(key)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            inner = usual.get(key) if isinstance(usual.get(key), Mapping) else None
            lines += [f"{key}.{line}" for line in changed_settings(before, now, inner)]
        elif before != now:
            lines.append(f"{key}: {before} -> {now}")
    return lines


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    return int(path.name.removeprefix("step_"))


def verify(path: Path) -> str | None:
    """What is wrong with a checkpoint folder, in words; None if every file is as the manifest says."""
    try:
        written = manifest.read(path)
    except ValueError as error:
        return str(error)
    if not {PLAIN, ".metadata"} <= written["files"].keys():
        return f"its {MANIFEST} is not of this version of the program"
    if written.get("step") != step_of(path):
        return f"it is of step {written.get('step')}: somebody renamed it"
    return manifest.damage(path, written["files"])


def _prepare(folder: Path, temporary: Path, needed: int) -> None:
    """An empty temporary folder, if there is room for what will be in it."""
    clean(folder)
    free = shutil.disk_usage(existing(folder)).free
    if free < needed:
        raise CheckpointError(
            f"the disk of {folder} is too full for a checkpoint: it takes {needed / 2**20:,.1f} MiB, "
            f"{free / 2**20:,.1f} MiB are free; make room and run the same command again, it goes on from the "
            "checkpoint before"
        )
    temporary.mkdir(parents=True)


def _complete(
    folder: Path, final: Path, temporary: Path, step: int, files: dict[str, dict], plain: dict[str, Any]
) -> None:
    """Add the plain part and the manifest, and give the folder its name."""
    torch.save(plain, temporary / PLAIN)
    files |= {name: manifest.entry(temporary / name) for name in (PLAIN, ".metadata")}
    manifest.write(temporary, files, step=step, ranks=distributed.world())
    for path in (*temporary.iterdir(), temporary):
        force(path)
    if final.exists():
        final.rename(folder / f"{TEMPORARY}replaced-{final.name}")  # a folder can't be renamed onto one that has files
    temporary.rename(final)
    force(folder)


def _prune(folder: Path, keep: int, written: Path) -> None:
    """Keeps the one just written and the newest before it. Later ones were found damaged when this run went on from an
    earlier one: counted as kept, they would push out the only good ones.
    """
    steps = _steps(folder)
    at = steps.index(written)
    for old in steps[:at] + steps[at + keep :]:
        # Renamed first: removal takes a while, and a kill in its middle must not leave half a checkpoint by this name.
        old.rename(folder / f"{TEMPORARY}old-{old.name}")
    clean(folder)


def _newest(folder: Path) -> Path | None:
    clean(folder)
    candidates = _steps(folder)
    for path in candidates:
        damage = verify(path)
        if damage is None:
            return path
        log.warning("skipping the checkpoint %s: %s", path, damage)
    if candidates:
        raise CheckpointError(
            f"all checkpoints in {folder} are damaged: put whole ones back from a copy, or {_over(folder)}"
        )
    return None


def _over(folder: Path) -> str:
    """How the stage whose checkpoints are in `folder` is started over. Without these alone RL would refuse to."""
    return f"remove {folder.parent} to start this stage over (its metrics go too, and in RL its trajectories)"


def _bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """What this rank writes: its shards, and on rank 0 the tensors that all ranks have whole."""
    own = (t.to_local() if isinstance(t, DTensor) else t for t in tensors.values())
    shared = distributed.first()
    return sum(t.numel() * t.element_size() for t, given in zip(own, tensors.values()) if shared or t is not given)


def _cause(error: BaseException) -> str:
    """The first failure inside torch.distributed.checkpoint's own exception, without its tracebacks."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return disk.cause(error)


def _alone() -> warnings.catch_warnings:
    """Saving without a process group is what a single process means to do: no warning about it."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


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


def save_folder(model, tokenizer, folder: Path, weights: dict[str, torch.Tensor] | None = None) -> None:
    """Save model and tokenizer as a Hugging Face folder with a manifest of its files; it appears whole or not at all.

    weights: by name, saved in place of the model's own (which may be bf16 copies). Raises CheckpointError where the
    disk is full or the folder can't be written; what was there before stays.
    """
    temporary = folder.with_name(f"{TEMPORARY}{folder.name}")
    with _whole(temporary, folder):
        shutil.rmtree(temporary, ignore_errors=True)
        model.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)
        names = sorted(str(path.relative_to(temporary)) for path in temporary.rglob("*") if path.is_file())
        manifest.write(temporary, {name: manifest.entry(temporary / name) for name in names})
        for path in (*temporary.rglob("*"), temporary):
            force(path)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
        force(folder.parent)


@contextlib.contextmanager
def _whole(temporary: Path, folder: Path) -> Iterator[None]:
    """Where writing fails, the half-written folder goes, and a person is told about the disk."""
    try:
        yield
    except Exception as error:
        if not disk.failed(error):
            raise
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"the model folder {folder} could not be written ({_cause(error)}); {room(folder)}, and run the same "
            "command again: it goes on from the newest checkpoint"
        ) from error


def folder_damage(folder: Path, contents: bool = True) -> str | None:
    """What is wrong with a model folder of `save_folder`, in words; None where all files are as they were written, and
    for a folder without a manifest, which came from elsewhere. contents: as in rl/manifest.py."""
    if not (folder / MANIFEST).is_file():
        return None
    try:
        return manifest.damage(folder, manifest.read(folder)["files"], contents)
    except ValueError as error:
        return str(error)


def mark_done(folder: Path) -> None:
    """Write folder/DONE, the sign that a stage is complete: atomically, and after all its files."""
    write_atomic(folder / "DONE", "done\n")
    force(folder)


def is_done(folder: Path, result: str) -> bool:
    """Whether a stage is complete. Raises CheckpointError where it says so and its `result`, a file or a model folder,
    is missing or not whole."""
    if not (folder / "DONE").is_file():
        return False
    path = folder / result
    if not (path.is_file() or (path / "config.json").is_file()):
        fault = f"{result} isn't"
    elif damage := folder_damage(path, contents=False):
        fault = f"{result} is damaged ({damage})"
    else:
        return True
    raise CheckpointError(f"{folder}/DONE is there, but {fault}: remove DONE, and the stage makes it again")


def _steps(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first. What a person put beside them (step_00005.bak) is none."""
    named = (path for path in folder.glob("step_*") if re.fullmatch(r"step_\d{5,}", path.name))
    return sorted((path for path in named if path.is_dir()), key=step_of, reverse=True)
