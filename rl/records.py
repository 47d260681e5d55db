"""The records of a rollout: a turn is one training row, a trajectory is one sample's turns.

Runs in the driver. JSON on disk, one trajectory a line, appended before it is used: the one source for training,
evaluation and analysis.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from env.files import append_durably

RECORD_VERSION = 1

# How a completion ended: `stop` (the model's end token), `length` (the turn's token limit), `context` (no room left).
FINISH_REASONS = ("stop", "length", "context")


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


def append_trajectories(path: Path, trajectories: list[Trajectory]) -> None:
    """Append whole lines and force them to disk before returning: a trajectory is on disk before it is used."""
    lines = (json.dumps(trajectory.to_json(), sort_keys=True) + "\n" for trajectory in trajectories)
    append_durably(path, "".join(lines))


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a file. A last line cut short by a kill is dropped; any other bad line is an error.

    Raises ValueError naming the file and line.
    """
    with open(path, encoding="utf-8", errors="surrogatepass") as file:
        lines = file.readlines()
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) and not line.endswith("\n"):
                return
            raise ValueError(
                f"{path}:{number}: not a trajectory ({error}); restore the file or delete the line"
            ) from error
        try:
            yield Trajectory.from_json(data)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}:{number}: not a trajectory of this version ({error})") from error
