"""What an evaluation is asked to do, resolved to the last value, and the folder that belongs to exactly that.

Runs in the driver. A folder holds settings.json; one that was begun with other settings is refused, and the difference
named: numbers of two questions never end up in one file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from env.files import write_atomic
from env.problems import ProblemError, load
from env.records import Problem, sha256
from rl import settings as setting_texts
from rl.checkpoint import changed_settings
from rl.config import Config, ConfigError, load_recipe

SETTINGS = "settings.json"
VERSION = 1
REFERENCES = ("eager", "compile")
SCALINGS = ("vanilla", "context")


class RunError(RuntimeError):
    """An evaluation that can't be done as asked: what is wrong and what to do."""


@dataclass(frozen=True)
class Settings:
    """One evaluation. `config` holds sampling, wording, reward and the judge's rules as training has them.

    model, problems: what they are (`identity`), so that a changed file is another evaluation. references: the first
    one's feedback is what the model is shown; under the others the same answers are judged again. scaling, keep: how
    later turns are prompted (eval/context.py). best_of: so many one-turn samples a problem beside (0: none).
    degenerate: a list of eval/audit.py, {} for none.
    """

    model: dict[str, Any]
    problems: dict[str, Any]
    references: tuple[str, ...]
    scaling: str
    keep: int
    best_of: int
    degenerate: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    version: int = VERSION

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))


def resolve_config(base: Config | str | None, changes: Sequence[str], overrides: Sequence[str]) -> Config:
    """The config: a run's own, a recipe by name, or the defaults; then what the options say; then every --set a.b=c.

    Raises ConfigError for an unknown key, a wrong type, or values that contradict each other.
    """
    if isinstance(base, str):
        return load_recipe(base, [*changes, *overrides])
    data, origins = (base or Config()).to_json(), {}
    if base is None:
        # Of the paper's evaluation; training's own defaults leave less.
        data["model"]["context"] = 32768
    for text in [*changes, *overrides]:
        setting_texts.override(data, text, origins)
    where = "; ".join(origins.values()) or "settings"
    return Config.from_json(data, where)


def check_references(references: Sequence[str], device: str) -> None:
    """Raises RunError for a reference that this device can't have."""
    if "compile" in references and device == "cpu":
        raise RunError(
            "--reference compile needs a GPU: on the CPU times are modelled from operators, and a compiled reference "
            "has no measured time to compare with. Use --reference eager here, or --device cuda"
        )


SKIP_BROKEN = "go on without files, lines or rows that are no problem, and say which; without this they are an error"


def load_problems(spec: str | Path, skip_broken: bool = False) -> list[Problem]:
    """Problems, as `env.problems.load`; with skip_broken what isn't one is left out, and said on standard error."""
    broken: list[str] = []
    problems = load(spec, broken if skip_broken else None)
    for fault in broken:
        print(f"left out: {fault}", file=sys.stderr)
    return problems


def problem_identity(spec: str, problems: Sequence[Problem]) -> dict[str, Any]:
    """A problem set by its content: how many, and a digest of their ids and sources in order."""
    if not problems:
        raise ProblemError(f"{spec}: holds no problem")
    text = "\n".join(f"{problem.id} {problem.sha256}" for problem in problems)
    return {"spec": str(spec), "count": len(problems), "sha256": sha256(text)}


def claim(folder: Path, settings: Settings) -> None:
    """Make `folder` this evaluation's, or check that it is. Raises RunError naming each setting that differs."""
    path = folder / SETTINGS
    present = settings.to_json()
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (folder / "trajectories.jsonl").exists():
            raise RunError(
                f"{folder} holds trajectories but no {SETTINGS}: not begun here; use another --out"
            ) from None
        write_json(path, present)
        return
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: can't be read ({error}); restore it, or use another --out") from error
    if not isinstance(saved, dict):
        raise RunError(f"{path}: no settings; restore it, or use another --out")
    # Where a file lies or how a server is reached is no setting: what it holds is.
    # A folder of an earlier version lacks the settings that came since.
    usual = _what_counts({"config": Config().to_json()})
    lines = changed_settings(*map(_what_counts, (saved, present)), usual)
    if lines:
        raise RunError(
            f"{folder} was begun with other settings: {'; '.join(lines)}. Use these settings again to go on, or "
            "another --out to begin anew"
        )


def _what_counts(settings: dict[str, Any]) -> dict[str, Any]:
    kept = json.loads(json.dumps(settings))
    for section, names in (("model", ("path",)), ("problems", ("spec",)), ("degenerate", ("path",))):
        for name in names:
            kept.get(section, {}).pop(name, None)
    config = kept.get("config", {})
    for name in ("key_variable", "timeout_s", "attempts", "parallel", "url"):
        config.get("server", {}).pop(name, None)
    config.get("env", {}).pop("slots", None)
    return kept


def write_json(path: Path, data: Any) -> None:
    """Atomically, keys sorted, numbers only that JSON has."""
    write_atomic(path, json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n")


def read(folder: Path) -> dict[str, Any]:
    """A finished or unfinished evaluation's settings. Raises RunError where there are none."""
    path = folder / SETTINGS
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {**data, "config": Config.from_json(data["config"], str(path))}
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        raise RunError(f"{folder} is no evaluation's folder ({path.name}: {error}); eval.run makes them") from error
