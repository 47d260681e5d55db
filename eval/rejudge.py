"""The same answers before another judge: a second reference, other rules, another machine. Runs in the driver.

Resumable like a rollout: groups of fixed size, each forced to disk; one that a kill cut short is done again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from env.records import Problem
from rl.config import Reward
from rl.records import Trajectory, append_trajectories, read_trajectories
from rl.rewards import reward
from rl.rollout import Judge, write_trajectories

GROUP = 64


def rejudge(
    trajectories: Sequence[Trajectory],
    problems: Mapping[str, Problem],
    judge: Judge,
    earns: Reward,
    out_path: Path,
    raw: bool = True,
) -> list[Trajectory]:
    """Copies of the trajectories with this judge's verdicts and their rewards, in `out_path`.

    Prompts are those of the first judge. raw: answers are a model's whole text, else plain source. Raises KeyError for
    a trajectory of a problem that isn't given.
    """
    done = list(read_trajectories(out_path)) if out_path.is_file() else []
    whole = len(trajectories) if len(done) == len(trajectories) else len(done) // GROUP * GROUP
    done = done[:whole]
    if out_path.is_file():
        write_trajectories(out_path, done)
    for begin in range(whole, len(trajectories), GROUP):
        group = trajectories[begin : begin + GROUP]
        waiting = [
            [judge.submit(problems[trajectory.problem_id], turn.completion_text, raw) for turn in trajectory.turns]
            for trajectory in group
        ]
        judged = []
        for trajectory, futures in zip(group, waiting, strict=True):
            turns = []
            for turn, future in zip(trajectory.turns, futures, strict=True):
                record = future.result().to_json()
                del record["cost"]  # wall-clock
                value, parts = reward(record, earns)
                turns.append(replace(turn, verdict=record, reward=value, reward_parts=parts))
            judged.append(replace(trajectory, turns=turns))
        append_trajectories(out_path, judged)
        done += judged
    return done
