"""The records of a rollout: a turn is one training row, a trajectory is one sample's turns.

Runs in the driver. JSON on disk, one trajectory a line, appended before it is used: the one source for training,
evaluation and analysis.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from env.files import append_durably
from env.records import STATUSES

log = logging.getLogger(__name__)

RECORD_VERSION = 1

# How a completion ended: `stop` (the model's end token), `length` (the turn's token limit), `context` (no room left).
FINISH_REASONS = ("stop", "length", "context")
# Why a trajectory has fewer turns than were asked for.
ENDS = ("", "context", "infra")

REMEDY = "restore the file or delete the line"


class DamagedRecords(ValueError):
    """A file of trajectories with a line that this program didn't write; the message names file and line."""


@dataclass
class Turn:
    """One prompt and the answer to it, as sampled: these ids are trained on, nothing is ever tokenised again.

    prompt_ids        [prompt tokens]      what the engine was given
    completion_ids    [completion tokens]  what it sampled, the end token included where it ended by itself
    logprobs          [completion tokens]  log-probability of each sampled token under the sampling distribution
    policy_version    optimiser steps behind the weights that sampled this turn
    verdict           env.records.Verdict as JSON, less `cost` (wall-clock goes to a file apart)
    reward            None until known, and where the verdict is nobody's fault (masked)
    advantage         filled by the learner's side, kept for the viewer
    masks             why the row does not count, e.g. ["infra_error"], ["mrs"], ["prs"]; empty: it counts
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    policy_version: int
    finish_reason: str
    prompt_text: str = ""
    completion_text: str = ""
    verdict: dict[str, Any] | None = None
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    advantage: float | None = None
    masks: list[str] = field(default_factory=list)


@dataclass
class Trajectory:
    """Sample `sample_index` of the group for one problem at one step; turns in order.

    ended     why there are fewer turns than were asked for: "context" (no room for another prompt and answer), "infra"
              (the last verdict is nobody's fault); "" where there are all
    """

    problem_id: str
    sample_index: int
    turns: list[Turn]
    step: int = 0
    ended: str = ""
    version: int = RECORD_VERSION

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Trajectory:
        turns = [Turn(**turn) for turn in data["turns"]]
        return cls(**{**data, "turns": turns})


def step_path(folder: Path, step: int, kind: str = "trajectories") -> Path:
    """The file of a step of RL below its `folder`; kind: "trajectories" or "evaluation"."""
    return folder / kind / f"step_{step:05d}.jsonl"


def utf8(text: str) -> str:
    """`text` with half surrogate pairs, which have no place in UTF-8, replaced."""
    return text.encode("utf-8", "replace").decode()


def append_trajectories(path: Path, trajectories: list[Trajectory]) -> None:
    """Append whole lines and force them to disk before returning: a trajectory is on disk before it is used."""
    lines = (json.dumps(trajectory.to_json(), sort_keys=True) + "\n" for trajectory in trajectories)
    append_durably(path, "".join(lines))


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a file, one a line. A last line cut short by a kill is left out, and said.

    Raises DamagedRecords naming file and line for any other line that is none.
    """
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        try:
            data = json.loads(line.decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError) as error:
            if number == len(lines) and not line.endswith(b"\n"):
                log.warning("%s: the last line is cut short, as a kill leaves it: it is left out", where)
                return
            raise DamagedRecords(f"{where}: not a trajectory ({error}); {REMEDY}") from error
        try:
            trajectory = Trajectory.from_json(data)
        except (TypeError, KeyError, AttributeError) as error:
            raise DamagedRecords(f"{where}: not a trajectory of this version ({error}); {REMEDY}") from error
        if fault := _fault(trajectory):
            raise DamagedRecords(f"{where}: {fault}; {REMEDY}")
        yield trajectory


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


# What a field must hold -> whether a value is that.
Kind = tuple[str, Callable[[Any], bool]]
TEXT: Kind = ("text", lambda value: isinstance(value, str))
TEXTS: Kind = ("a list of texts", lambda value: isinstance(value, list) and all(isinstance(v, str) for v in value))
COUNT: Kind = ("a whole number from 0", _is_count)
IDS: Kind = ("a list of token ids", lambda value: isinstance(value, list) and all(map(_is_count, value)))
NUMBERS: Kind = ("a list of numbers", lambda value: isinstance(value, list) and all(map(_is_number, value)))
NAMED: Kind = ("numbers by name", lambda value: isinstance(value, dict) and all(map(_is_number, value.values())))
MAYBE: Kind = ("a finite number or null", lambda value: value is None or _is_number(value))
VERDICT: Kind = (
    "a verdict with a known status, or null",
    lambda value: value is None or (isinstance(value, dict) and value.get("status") in STATUSES),
)
TRAJECTORY_FIELDS: dict[str, Kind] = {
    "problem_id": TEXT,
    "sample_index": COUNT,
    "step": COUNT,
    "ended": (f"one of {ENDS}", lambda value: value in ENDS),
    "version": (f"{RECORD_VERSION}", lambda value: value == RECORD_VERSION),
}
TURN_FIELDS: dict[str, Kind] = {
    "prompt_ids": IDS,
    "completion_ids": IDS,
    "logprobs": NUMBERS,
    "policy_version": COUNT,
    "finish_reason": (f"one of {FINISH_REASONS}", lambda value: value in FINISH_REASONS),
    "prompt_text": TEXT,
    "completion_text": TEXT,
    "verdict": VERDICT,
    "reward": MAYBE,
    "reward_parts": NAMED,
    "advantage": MAYBE,
    "masks": TEXTS,
}


def _fault(trajectory: Trajectory) -> str:
    """The first field that holds something else than its kind; "" where there is none."""
    parts: list[tuple[str, Any, dict[str, Kind]]] = [("", trajectory, TRAJECTORY_FIELDS)]
    parts += [(f" of turn {number}", turn, TURN_FIELDS) for number, turn in enumerate(trajectory.turns, 1)]
    for place, part, kinds in parts:
        for name, (words, right) in kinds.items():
            value = getattr(part, name)
            if not right(value):
                return f"{name}{place} must be {words}, and is {str(value)[:60]!r} ({type(value).__name__})"
    return ""
