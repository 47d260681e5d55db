"""The split placement with a learner of two ranks, and what is too old to be learned from."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

from ranks import run_ranks
from small_run import Judge, prepare
from split_run import SPLIT, fork_rollouters, run_split

from rl import train
from rl.records import Trajectory, Turn, read_trajectories, step_path
from rl.rewards import TrainingPaused
from rl.split import Split
from rl.staleness import refuse_stale, staleness_metrics

pytestmark = pytest.mark.budget(90)


def metrics_of(run):
    return [json.loads(line) for line in (run / "rl" / "metrics.jsonl").read_text().splitlines()]


def sampled(run, step):
    return [[turn.completion_ids for turn in t.turns] for t in read_trajectories(step_path(run / "rl", step))]


def alone():
    """A forked rollout process inherits the group of the learner's ranks; a started program doesn't."""
    torch.distributed.is_initialized = lambda: False


def rank_of_stage(run, judge=Judge):
    fork_rollouters(judge, first=alone)
    train.main(run)


def test_two_ranks_learn_while_another_process_samples_as_in_one_process(tmp_path):
    """Shards are put together for each push, and rank 0 alone talks to the rollout process."""
    one, two = tmp_path / "one", tmp_path / "two"
    for run in (one, two):
        prepare(run, *SPLIT, "train.steps=4")
    assert run_split(one) == 0
    run_ranks(2, rank_of_stage, two)
    assert [line["policy/staleness_max"] for line in metrics_of(two)] == [0, 1, 1, 1]
    for step in range(1, 5):
        assert sampled(two, step) == sampled(one, step)
    for line, wanted in zip(metrics_of(two), metrics_of(one), strict=True):
        assert line == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    assert metrics_of(two)[-1]["policy/version"] == 4
    assert len(list((two / "rl" / "checkpoints" / "step_00004").glob("*.distcp"))) == 2


class Broken(Judge):
    def submit(self, problem, response, raw=True):
        raise RuntimeError("the GPU fell off the bus")


def test_a_rollout_process_that_fails_ends_every_rank_with_the_cause(tmp_path):
    run = tmp_path / "run"
    prepare(run, *SPLIT)
    with pytest.raises(AssertionError) as failed:
        run_ranks(2, rank_of_stage, run, Broken)
    cause = "the rollout process failed while waiting to sample step 1: RuntimeError: the GPU fell off the bus"
    said = str(failed.value)
    assert f"EngineError: {cause}" in said and f"RankError: rank 0 failed: EngineError: {cause}" in said


def trajectory(*versions):
    return Trajectory("p", 0, [turn(version) for version in versions], step=4)


def turn(version):
    return Turn([1], [2], [-0.5], version, "stop", "")


@pytest.mark.parametrize(("versions", "most"), [((2, 3), 1), ((3, 3), 0), ((), 0), ((1,), 2)])
def test_what_is_young_enough_is_learned_from(versions, most):
    refuse_stale([trajectory(*versions)], 3, most)
    ages = [3 - version for version in versions]
    wanted = {"policy/staleness_mean": sum(ages) / len(ages), "policy/staleness_max": max(ages)} if ages else {}
    assert staleness_metrics([trajectory(*versions)], 3) == wanted


@pytest.mark.parametrize(("versions", "most", "named"), [((3, 1), 1, 1), ((2,), 0, 2), ((4,), 1, 4)])
def test_what_is_too_old_or_from_the_future_is_refused(versions, most, named):
    words = rf"step 4 holds rollouts of policy version {named}, and the learner is at 3: at most {most} optimiser steps"
    with pytest.raises(TrainingPaused, match=words):
        refuse_stale([trajectory(3), trajectory(*versions)], 3, most)


def test_a_run_that_is_given_older_rollouts_pauses_and_goes_on(tmp_path):
    """A step later than it may be: nothing is learned from them, and what was learned is kept."""
    run = tmp_path / "run"
    prepare(run, *SPLIT)

    def age():
        plain = Split._take

        def take(self, step):
            trajectories, wall = plain(self, step)
            for each in (turn for t in trajectories for turn in t.turns if step == 3):
                each.policy_version -= 1
            return trajectories, wall

        Split._take = take

    assert run_split(run, learner=age) == 1
    said = (run / "error.txt").read_text()
    wanted = "TrainingPaused: step 3 holds rollouts of policy version 0, and the learner is at 2: at most 1"
    assert said.startswith(wanted)
    assert [line["step"] for line in metrics_of(run)] == [1, 2]
    assert run_split(run) == 0
    assert [line["step"] for line in metrics_of(run)] == [1, 2, 3, 4, 5]
    assert max(line["policy/staleness_max"] for line in metrics_of(run)) == 1
