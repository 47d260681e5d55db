"""Prepares a run folder: resolved settings, versions, problems. Runs once before the stages, in a process of its own.

`python -m scripts.prepare --recipe R --run DIR [--set a.b=c ...] [--dry-run]`. What cannot work (no GPU, a missing
folder, a folder that belongs to other settings, a full disk) is said here, before hours are spent.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from env import decontaminate
from env.files import file_limit, write_atomic
from env.pool import visible_gpus
from env.problems import ProblemError, load_folder, write_jsonl
from env.records import Problem
from rl import preflight
from rl.config import Config, ConfigError, load_recipe
from rl.rollout import policy_gpus
from rl.settings import differing
from scripts import machine, plan

ROOT = Path(__file__).resolve().parent.parent
# What says how far and how RL goes on, and nothing about what was made so far. Once RL is complete they are settled.
RESUMABLE = (
    "train.steps", "train.checkpoint_every", "train.keep_checkpoints", "train.max_skipped", "train.micro_batch_tokens",
    "env.slots",
)  # fmt: skip
# Groups of settings that nothing has read before the cold start is complete: its answers are kept as they came.
READ_LATER = ("collect.keep.", "server.", "sft.")
LARGEST_LOG = 64 * 2**20  # a file of trajectories or figures, roughly
ROOM_BYTES = 512 * 2**20  # trajectories, figures and TensorBoard files, roughly


class PrepareError(Exception):
    """Something that stands in the way of the run; the message is for the person who started it."""


def different_keys(old: dict[str, Any], new: dict[str, Any], allowed: Collection[str] = ()) -> list[str]:
    """Lines "key: old -> new" for every setting but the allowed ones that differs between two nested dicts."""
    return [f"{key}: {before!r} -> {after!r}" for key, before, after in differing(old, new) if key not in allowed]


def gpu_name() -> str | None:
    """Name of the first CUDA GPU that torch sees, or None."""
    import torch  # seconds to import: only once the settings are known to be right

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def cpu_name() -> str:
    """Model name of the processor, as Linux tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} ({os.cpu_count()} cores)"


def git_commit() -> str:
    """Hash of the checked-out commit, with "+changes" where tracked files differ from it; "unknown" without git."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def versions(device: str) -> dict[str, str]:
    """What a number of this run depends on besides its settings."""
    packages = ("torch", "triton", "transformers", "tokenizers", "numpy")
    return {
        "python": platform.python_version(),
        **{name: package_version(name) for name in packages},
        "commit": git_commit(),
        "device": gpu_name() or "no GPU" if device == "cuda" else cpu_name(),
        "platform": platform.platform(),
    }


def bytes_needed(config: Config) -> int:
    """Rough disk need: fp32 weights, two Adam moments and a safety copy, for every checkpoint that is kept."""
    return weight_bytes(config) * 3 * (config.train.keep_checkpoints + 2) + ROOM_BYTES


def weight_bytes(config: Config) -> int:
    """Bytes of the policy's weights in fp32, roughly."""
    model = config.model
    if model.path:
        return sum(file.stat().st_size for file in Path(model.path).glob("*.safetensors")) * 2  # bf16 -> fp32
    layer = model.width * (4 * model.width + 3 * model.mlp)
    return 4 * (model.layers * layer + model.vocab_size * model.width)


def check(config: Config, run: Path) -> list[str]:
    """Everything that stands in the way, one message each; an empty list means go."""
    faults = []
    if config.device == "cuda":
        faults += gpu_faults(config)
    if config.problems.source == "folder" and not Path(config.problems.path).is_dir():
        faults.append(
            f"problems.path {config.problems.path!r} is not a folder; give one with KernelBench-format .py files, "
            "or set problems.source=generator"
        )
    faults += preflight.faults(config)
    faults += settings_faults(config, run)
    existing = next(parent for parent in [run, *run.resolve().parents] if parent.exists())
    if not os.access(existing, os.W_OK):
        faults.append(f"{existing} can't be written to; choose another folder: --run PATH")
    needed, free = bytes_needed(config), shutil.disk_usage(existing).free
    if free < needed:
        faults.append(
            f"{existing} has {free / 2**30:.1f} GiB free and the run needs about {needed / 2**30:.1f}; make room, or "
            "set train.keep_checkpoints lower"
        )
    weights, limit = weight_bytes(config), file_limit()
    # An exported model, or a rank's part of a checkpoint.
    largest = max(weights, 3 * weights // policy_gpus()) + LARGEST_LOG
    if limit is not None and limit < largest:
        faults.append(
            f"no file may have more than {limit / 2**20:,.1f} MiB here, and the run writes some of about "
            f"{largest / 2**20:,.0f}: raise that limit (ulimit -f unlimited)"
        )
    return faults


def settings_faults(config: Config, run: Path) -> list[str]:
    """What keeps these settings from going on in a run folder that has some already."""
    path = run / "config.json"
    if not path.is_file():
        return lost_settings(run)
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        return [f"{path} is damaged ({error}); remove {run} or choose another folder: --run NAME"]
    if not isinstance(old, dict) or not old:
        return [f"{path} holds no settings; remove {run} or choose another folder: --run NAME"]
    done = (run / "rl" / "DONE").is_file()
    allowed = () if done else RESUMABLE
    later = () if (run / "collect" / "DONE").is_file() or (run / "sft").exists() else READ_LATER
    changed = [line for line in different_keys(old, config.to_json(), allowed) if not line.startswith(later)]
    if not changed:
        return []
    lines = "\n    ".join(changed)
    more = "" if done else f" (only {', '.join(RESUMABLE)} may change while RL goes on)"
    return [
        f"{run} belongs to a run with other settings:\n    {lines}\n  Choose another folder (--run NAME), or give the "
        f"settings that the run was started with{more}"
    ]


def lost_settings(run: Path) -> list[str]:
    """What a run folder without config.json says of an earlier run. Problems, trajectories and an SFT model may be
    brought from elsewhere; the rest only a run of its own writes."""
    written = [name for name in ("versions.json", "rl", "eval") if (run / name).exists()]
    if not written:
        return []
    return [
        f"{run} has no config.json, but {' and '.join(written)} of an earlier run, whose results would be mixed with "
        "those of other settings. Put its config.json back (plain.pt of a checkpoint holds the settings: 'config'), "
        f"remove {run}, or choose another folder: --run NAME"
    ]


def gpu_faults(config: Config) -> list[str]:
    """What keeps a run from the GPUs that it asks for."""
    visible = visible_gpus()
    if not visible and os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        reason = "CUDA_VISIBLE_DEVICES is empty"
    elif not visible:
        reason = "nvidia-smi lists none: there is no GPU, or no driver for it"
    elif gpu_name() is None:
        import torch

        why = f"was built for CUDA {torch.version.cuda}: is the driver older?" if torch.version.cuda else "is CPU-only"
        reason = f"nvidia-smi lists {len(visible)}, but torch {torch.__version__} sees none: it {why}"
    else:
        found = machine.gpus(visible)
        return machine.faults(found) + mixed(found) + (plan.faults(config, found) if model_readable(config) else [])
    return [f"device is cuda, but no GPU can be used ({reason}); on this machine use the recipe mini-cpu"]


def mixed(found: list[machine.Gpu]) -> list[str]:
    """What to do about GPUs of different kinds: a time would depend on which of them judged."""
    kinds = {gpu.name: [other.index for other in found if other.name == gpu.name] for gpu in found}
    if len(kinds) < 2:
        return []
    said = "; ".join(f"{name}: {', '.join(indices)}" for name, indices in kinds.items())
    most = max(kinds.values(), key=len)
    return [
        f"GPUs of different kinds ({said}): measured times, and so rewards, would depend on which one judged. Show it "
        f"one kind only, e.g. CUDA_VISIBLE_DEVICES={','.join(most)}"
    ]


def model_readable(config: Config) -> bool:
    """Whether the sizes of the policy can be known: what is wrong with its folder, others say."""
    return not config.model.path or not preflight.model_faults(Path(config.model.path), config.model.context)


def make_problems(config: Config) -> tuple[list[Problem], list[Problem]]:
    """Training and held-out problems. Raises PrepareError where there are too few, or one is in both lists.

    A folder's problems are shuffled with the run's seed; the held-out ones are taken first, so that a longer training
    list doesn't move them.
    """
    wanted = config.problems
    if wanted.source == "generator":
        from env.generator import generate

        train = generate("train", wanted.train, config.seed, wanted.size)
        heldout = generate("heldout", wanted.heldout, config.seed, wanted.size)
    else:
        found = list({problem.sha256: problem for problem in load_folder(Path(wanted.path))}.values())
        if len(found) < wanted.train + wanted.heldout:
            raise PrepareError(
                f"{wanted.path} holds {len(found)} different problems; problems.train + problems.heldout ask for "
                f"{wanted.train + wanted.heldout}"
            )
        found.sort(key=lambda problem: problem.id)
        random.Random(config.seed).shuffle(found)
        heldout, train = found[: wanted.heldout], found[wanted.heldout : wanted.heldout + wanted.train]
    shared = {problem.sha256 for problem in train} & {problem.sha256 for problem in heldout}
    if shared:
        names = [problem.id for problem in heldout if problem.sha256 in shared]
        raise PrepareError(f"held-out problems that are trained on as well: {', '.join(names[:5])}; change the seed")
    check_training(train, heldout, wanted.allow_kernelbench)
    return train, heldout


def check_training(train: list[Problem], heldout: list[Problem], allow_kernelbench: bool) -> None:
    """Refuse training problems that evaluation asks for as well, however they are written: held-out ones, and, unless
    that is wanted, KernelBench's at any size. Raises PrepareError naming them."""
    if twice := decontaminate.same_problems(train, heldout):
        pairs = ", ".join(f"{ours} is {theirs}" for ours, theirs in twice[:5])
        raise PrepareError(f"training problems that are held out under another name: {pairs}; take them out")
    if allow_kernelbench:
        return
    folder = os.environ.get("KERNELBENCH_DIR", "")
    found = decontaminate.kernelbench_among(train, load_folder(folder) if folder and Path(folder).is_dir() else [])
    if found:
        pairs = ", ".join(f"{ours} is {theirs}" for ours, theirs in found[:5])
        raise PrepareError(
            f"{len(found)} training problems are KernelBench's, which are for evaluation: {pairs}. Take them out, or "
            "set problems.allow_kernelbench=true and report no KernelBench figures of this run"
        )


def note_versions(path: Path, now: dict[str, str]) -> None:
    """Keeps the versions that the run was started with, and adds those it is resumed with where they differ."""
    if not path.is_file():
        write_atomic(path, json.dumps(now, indent=1, sort_keys=True) + "\n")
        return
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(noted, dict):
            raise ValueError(f"it holds {type(noted).__name__}")
    except ValueError as error:
        raise PrepareError(
            f"{path} is damaged ({error}); delete it to go on: the versions that the run was started with "
            "are lost then, nothing else"
        ) from error
    resumed = noted.get("resumed_with", [])
    before = {**noted, **(resumed[-1] if resumed else {})}
    changed = {key: value for key, value in now.items() if before.get(key) != value}
    if changed:
        print(f"prepare: this run was started with other versions; now {changed}. Its numbers may not be comparable.")
        text = json.dumps({**noted, "resumed_with": [*resumed, changed]}, indent=1, sort_keys=True)
        write_atomic(path, text + "\n")


def prepare(config: Config, run: Path) -> None:
    """Write the run folder's first files. Safe to repeat, and after a kill at any instant."""
    targets = {name: run / "problems" / f"{name}.jsonl" for name in ("train", "heldout")}
    # Problems before settings: a folder without problems must not claim the run folder for the settings that named it.
    made = None if all(path.is_file() for path in targets.values()) else make_problems(config)
    write_atomic(run / "config.json", json.dumps(config.to_json(), indent=1, sort_keys=True) + "\n")
    note_versions(run / "versions.json", versions(config.device))
    for name, problems in zip(targets, made or ()):
        write_jsonl(problems, targets[name])
        print(f"prepare: {len(problems)} {name} problems")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts.prepare", description="Prepare a run folder.")
    parser.add_argument("--recipe", required=True, help="a name in rl/recipes/ or a .toml file")
    parser.add_argument("--run", required=True, type=Path, help="the run folder")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--dry-run", action="store_true", help="check and print, write nothing")
    options = parser.parse_args(arguments)
    try:
        config = load_recipe(options.recipe, options.overrides)
        if options.dry_run:
            print(f"Settings ({options.recipe}):\n{json.dumps(config.to_json(), indent=1)}")
            if model_readable(config) or not Path(config.model.path).exists():  # then by the settings' sizes
                found = machine.gpus(visible_gpus()) if config.device == "cuda" else []
                print(*plan.describe(config, found), sep="\n")
                print(f"Disk: about {bytes_needed(config) / 2**30:.1f} GiB for {options.run}.", flush=True)
        faults = check(config, options.run)
        if faults:
            raise PrepareError("\n".join(faults))
        found = machine.gpus(visible_gpus()) if config.device == "cuda" else []
        host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        for doubt in preflight.doubts(config) + plan.doubts(config, found, host):
            print(f"prepare: note: {doubt}", file=sys.stderr)
        if options.dry_run:
            make_problems(config)
            print("Checks: recipe, folders, problems, device and disk space are fine.")
        else:
            prepare(config, options.run)
    except (ConfigError, OSError, PrepareError, ProblemError) as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
