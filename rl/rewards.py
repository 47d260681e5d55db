"""From a verdict to a reward, and from a trajectory's rewards to its returns. Runs in the driver. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from env.pool import PoolError
from env.records import BLAMELESS_STATUSES, STATUSES
from rl.config import Reward
from rl.records import Trajectory


class BadVerdict(PoolError, ValueError):
    """A verdict that no working judge gives: nothing may be learned from it."""


def reward(verdict: dict[str, Any], config: Reward) -> tuple[float | None, dict[str, float]]:
    """R = C + C * min(speedup, cap) + C * PR and its parts {"correct", "speedup", "profiling_ratio"}; arXiv 2602.05885.

    verdict: env.records.Verdict as JSON. C is 1 for `correct`, else 0, and then the reward is what `config.earns` says
    for the status (0 in the paper). With `config.hack_check` off (ablation) a hack whose values match counts as
    correct. The PR term is there only with `config.profiling_ratio`. A speedup or PR that was not measured adds 0.
    Returns (None, {}) where the verdict is nobody's fault: such a turn is masked, not punished.
    Raises BadVerdict for an unknown status and for a speedup or PR that can't be one.
    """
    status = verdict["status"]
    if status not in STATUSES:
        raise BadVerdict(f"unknown status {status!r}; known: {', '.join(STATUSES)}")
    if status in BLAMELESS_STATUSES:
        return None, {}
    correct = status == "correct" or (status == "hack" and not config.hack_check and verdict["values_match"] is True)
    if not correct:
        return getattr(config.earns, status), {"correct": 0.0, "speedup": 0.0, "profiling_ratio": 0.0}
    parts = {
        "correct": 1.0,
        "speedup": min(_measured(verdict, "speedup"), config.speedup_cap),
        "profiling_ratio": _measured(verdict, "profiling_ratio") if config.profiling_ratio else 0.0,
    }
    return sum(parts.values()), parts


class TrainingPaused(RuntimeError):
    """Training stops before it takes a step that it shouldn't; the run can be continued by the same command."""


def refuse_broken_step(trajectories: Sequence[Trajectory], max_share: float) -> None:
    """Raise TrainingPaused where a step holds no turn, or where more than `max_share` of its turns have a verdict that
    is nobody's fault.

    A few are masked and cost nothing. Many mean that the judge or a problem is broken, and that the rest is no fair
    sample: what crashes the judge is not drawn at random.
    """
    verdicts = [turn.verdict for trajectory in trajectories for turn in trajectory.turns]
    blameless = [verdict for verdict in verdicts if verdict["status"] in BLAMELESS_STATUSES]
    if not verdicts:
        raise TrainingPaused(
            "not one prompt of this step leaves room for an answer in the context; raise model.context, or lower "
            "rollout.max_new_tokens, rollout.min_new_tokens, or the length of the templates (prompts.templates)"
        )
    if len(blameless) > max_share * len(verdicts):
        said = Counter(f"{verdict['status']}: {verdict['message']}" for verdict in blameless)
        (most, times), *_ = said.most_common(1)
        raise TrainingPaused(
            f"{len(blameless)} of {len(verdicts)} answers of this step could not be judged, more than "
            f"rollout.max_infra_share = {max_share:g} allows; {times} times: {most}. Mend the judge (python -m "
            "env.doctor says what this machine lacks) and run the same command again: it goes on from here"
        )


def returns_to_go(rewards: Sequence[float | None], gamma: float) -> list[float | None]:
    """G_t = sum over t' >= t of gamma^(t' - t) * R_t', for one trajectory's turns in order.

    A turn without a reward has no return, and neither has any turn before it, since their returns contain it; with
    gamma = 0 they don't, and keep theirs. None marks a turn that is masked and not counted in its group.
    """
    returns: list[float | None] = []
    following: float | None = 0.0
    for value in reversed(rewards):
        if value is None:
            following = None
        elif gamma == 0:
            following = value
        elif following is not None:
            following = value + gamma * following
        returns.append(following)
    return returns[::-1]


def _measured(verdict: dict[str, Any], name: str) -> float:
    value = verdict[name]
    if value is None:
        return 0.0
    most = 1.0 if name == "profiling_ratio" else math.inf
    if not isinstance(value, float | int) or not math.isfinite(value) or not 0 <= value <= most + 1e-6:
        allowed = "from 0 to 1" if most == 1 else ">= 0"
        raise BadVerdict(
            f"its verdict has {name} = {value!r}; the judge must give a finite number {allowed}, or None where nothing "
            "was measured. The judge is broken; python -m env.doctor says what this machine lacks"
        )
    return min(float(value), most)
