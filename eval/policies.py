"""Who is evaluated: a model folder, a checkpoint or run of ours, a server, or the scripted teacher. In the driver.

`find` says what a --model means without loading anything; `open_policy` loads it.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval.settings import RunError
from rl import checkpoint
from rl.config import Config, load_run
from rl.engines.base import Completion, Engine, EngineError, Request, Sampling, Source
from rl.engines.folder import folder_engine
from rl.prompts import Chat, TextChat
from rl.teacher import ScriptedTeacher

TEACHER = "teacher"
HASHED_BYTES = 64 << 20  # of a file, from its beginning and from its end


@dataclass(frozen=True)
class Policy:
    """kind: "folder", "checkpoint", "server" or "teacher". path: the model folder; of a checkpoint, the folder that it
    was trained from. config: that of the run it lies in, if any."""

    kind: str
    path: str
    weights: str = ""
    name: str = ""
    config: Config | None = None

    def identity(self) -> dict[str, Any]:
        """What tells this policy from another one, for settings.json. A server's weights can't be seen."""
        if self.kind in ("server", TEACHER):
            return {"kind": self.kind, "path": self.path, "name": self.name}
        files = sorted(file for file in Path(self.path).iterdir() if file.is_file())
        if self.weights:
            files = [*files, *sorted(file for file in Path(self.weights).iterdir() if file.is_file())]
        digest = hashlib.sha256()
        for file in files:
            digest.update(f"{file.name} {file.stat().st_size} ".encode() + _ends(file))
        return {"kind": self.kind, "path": self.weights or self.path, "sha256": digest.hexdigest()}


def find(spec: str, name: str = "") -> Policy:
    """What `--model SPEC [--name NAME]` means. Raises RunError for what is none."""
    if spec == TEACHER:
        return Policy(TEACHER, TEACHER)
    if re.match(r"https?://", spec):
        if not name:
            raise RunError(f"{spec} is a server: say which of its models to ask with --name")
        return Policy("server", spec, name=name)
    path = Path(spec)
    if re.fullmatch(r"step_\d+", path.name) and path.is_dir():
        if fault := checkpoint.verify(path):
            raise RunError(f"{path}: {fault}; use another checkpoint of that run")
        run = path.absolute().parent.parent.parent
        return Policy("checkpoint", str(run / "sft" / "model"), str(path), config=_config_of(run))
    for model, run in (
        (path, path.absolute().parent.parent),  # <run>/rl/model, or a folder from anywhere
        (path / "model", path.absolute().parent),  # <run>/rl
        (path / "rl" / "model", path.absolute()),  # <run>
    ):
        if (model / "config.json").is_file() and not (model / "problems").is_dir():
            return Policy("folder", str(model), config=_config_of(run))
    raise RunError(
        f"{spec}: no model there. Give a Hugging Face folder (with config.json), a run's folder, one of its "
        "rl/checkpoints/step_*, a server's address (http://host:8000/v1 with --name), or teacher"
    )


def open_policy(policy: Policy, config: Config) -> tuple[Engine, Chat | TextChat]:
    """The engine and its chat format. Raises RunError, EngineError or ConfigError for a model that can't be used."""
    if policy.kind == TEACHER:
        return TeacherEngine(asdict(config.collect.shares)), TextChat()
    if policy.kind == "server":
        from rl.engines.openai import OpenAIEngine

        return OpenAIEngine(config.server), TextChat()
    weights = Path(policy.weights) if policy.weights else None
    return folder_engine(Path(policy.path), config, bf16=config.device == "cuda", weights=weights)


def context_limit(policy: Policy) -> int | None:
    """Positions that a model folder was made for; None where that can't be seen."""
    if policy.kind in ("server", TEACHER):
        return None
    try:
        shape = json.loads((Path(policy.path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{policy.path}/config.json can't be read ({error}): get the model folder anew") from error
    limit = shape.get("max_position_embeddings") if isinstance(shape, dict) else None
    return limit if isinstance(limit, int) else None


class TeacherEngine:
    """The scripted teacher behind an engine's interface: it answers problems of the built-in generator."""

    takes = "messages"

    def __init__(self, shares: dict[str, float]) -> None:
        self.teacher, self.shares = ScriptedTeacher(), shares

    def push(self, model: Any) -> None:
        raise EngineError("the scripted teacher has no weights")

    def stream(self, source: Source, sampling: Sampling) -> Iterator[tuple[Request, Completion]]:
        """Each request's answer, from the conversation's text and the request's seed alone."""
        while requests := source.take(16, wait=True):
            for request in requests:
                text = "\n".join(message["content"] for message in request.prompt)
                try:
                    answer = self.teacher.respond(text, random.Random(request.seed), self.shares)
                except ValueError as error:
                    raise EngineError(
                        f"the scripted teacher can't answer this problem ({error}); it knows the generator's only: "
                        "--problems generator:heldout:20"
                    ) from error
                yield request, Completion([], [], "stop", text=answer)


def _config_of(run: Path) -> Config | None:
    return load_run(run) if (run / "config.json").is_file() and (run / "problems").is_dir() else None


def _ends(file: Path) -> bytes:
    """A digest of a file's first and last bytes: large weight files aren't read whole each time."""
    digest, size = hashlib.sha256(), file.stat().st_size
    with open(file, "rb") as opened:
        digest.update(opened.read(HASHED_BYTES))
        if size > HASHED_BYTES:
            opened.seek(max(HASHED_BYTES, size - HASHED_BYTES))
            digest.update(opened.read())
    return digest.digest()
