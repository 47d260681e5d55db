"""Rollouts that are older than the policy they train: how old, how old they may be, and what a checkpoint must remember
of those that were sampled ahead of it. Runs in rank 0 of rl.train.

With placement.kind = split, step n + 1 has been sampled from weights that checkpoint n doesn't hold. So a checkpoint
names the version and the SHA-256 of such rollouts, and a resumed run uses the ones on disk, or refuses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from env.records import Problem
from rl.checkpoint import CheckpointError
from rl.records import DamagedRecords, Trajectory, read_trajectories
from rl.rewards import TrainingPaused
from rl.rollout import refuse_others


def staleness_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """policy/staleness_*: optimiser steps between the weights that sampled a turn and the present `version`."""
    ages = [version - turn.policy_version for trajectory in trajectories for turn in trajectory.turns]
    if not ages:
        return {}
    return {"policy/staleness_mean": sum(ages) / len(ages), "policy/staleness_max": float(max(ages))}


def refuse_stale(trajectories: Sequence[Trajectory], version: int, most: int) -> None:
    """Raise TrainingPaused where a turn was sampled more than `most` optimiser steps ago, or by a later policy."""
    for trajectory in trajectories:
        for turn in trajectory.turns:
            if not 0 <= version - turn.policy_version <= most:
                raise TrainingPaused(
                    f"step {trajectory.step} holds rollouts of policy version {turn.policy_version}, and the learner "
                    f"is at {version}: at most {most} optimiser steps may lie between (placement.staleness). Run the "
                    "same command again: it goes on from the newest checkpoint"
                )


def as_sampled(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The same without what the learner adds to their turns."""
    for trajectory in trajectories:
        for turn in trajectory.turns:
            turn.advantage, turn.masks = None, []
    return list(trajectories)


def entry(trajectories: Sequence[Trajectory], step: int, version: int) -> dict[str, Any]:
    """What a checkpoint says of a step that was sampled ahead of it."""
    return {"step": step, "version": version, "sha256": _digest(trajectories)}


def kept(path: Path, said: Mapping[str, Any], problems: Sequence[Problem], samples: int) -> list[Trajectory]:
    """The rollouts in `path`, as sampled. Raises CheckpointError where they aren't the ones that a checkpoint names
    (`said`, of `entry`), whole: `samples` of each of these problems."""
    try:
        found = as_sampled(list(read_trajectories(path)))
        fault = _fault(found, said, problems, samples, path)
    except (OSError, DamagedRecords) as error:
        fault = str(error)
    if fault:
        step = said["step"]
        raise CheckpointError(
            f"the rollouts of step {step}, which were sampled before the checkpoint of step {step - 1} was written and "
            f"belong to it, can't be used: {fault}. Put {path} back from a copy, or remove that checkpoint to go on "
            "from the one before"
        )
    return found


def _fault(
    found: Sequence[Trajectory], said: Mapping[str, Any], problems: Sequence[Problem], samples: int, path: Path
) -> str:
    if len(found) != len(problems) * samples:
        return f"{len(found)} of {len(problems) * samples} trajectories are there"
    refuse_others(found, problems, samples, path)
    if other := {t.step for t in found} - {said["step"]}:
        return f"trajectories of step {min(other)} are among them"
    versions = {turn.policy_version for t in found for turn in t.turns} - {said["version"]}
    if versions:
        return f"policy version {min(versions)} sampled some, and {said['version']} should have"
    return "" if _digest(found) == said["sha256"] else "their content has changed"


def _digest(trajectories: Sequence[Trajectory]) -> str:
    """SHA-256 of trajectories, without what the learner adds."""
    digest = hashlib.sha256()
    for trajectory in trajectories:
        data = trajectory.to_json()
        for turn in data["turns"]:
            del turn["advantage"], turn["masks"]
        digest.update(json.dumps(data, sort_keys=True).encode())
    return digest.hexdigest()
