"""Runs that are killed end in the same bytes; runs of two ranks end where one process does."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

from ranks import run_ranks
from small_run import Judge, durable, ended, prepare, start

from rl import modeling, train
from rl.batch import rows_of
from rl.learner import Learner
from rl.records import read_trajectories

pytestmark = pytest.mark.budget(120)


def kill_at_fsync(number):
    """Kill this process when it is about to force its `number`-th file to disk: in the middle of writing something."""
    plain, count = os.fsync, [0]

    def fsync(descriptor):
        count[0] += 1
        if count[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        plain(descriptor)

    os.fsync = fsync


def kill_in_checkpoint(number, monkey=train.checkpoint):
    """The same, counting only what a checkpoint writes, renames and removes."""
    names, count = ("force", "_prepare", "_complete", "_prune", "clean"), [0]

    def counted(plain):
        def call(*arguments):
            count[0] += 1
            if count[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*arguments)

        return call

    for name in names:
        setattr(monkey, name, counted(getattr(monkey, name)))
    monkey.manifest.entry = counted(monkey.manifest.entry)


def test_killed_at_ten_random_moments_and_ends_in_the_same_bytes(tmp_path):
    """By the clock, in the middle of writing any file, and in that of a checkpoint, until ten kills have struck. A run
    that outlives its turn is complete, and another takes its place."""
    settings = ["train.steps=8", "train.checkpoint_every=1"]
    prepare(tmp_path / "whole", *settings)
    begun = time.monotonic()
    assert ended(start(tmp_path / "whole")) == 0
    took_s = time.monotonic() - begun
    draw, runs, kills, resumed = random.Random(4), [], 0, 0
    kinds = itertools.cycle(["file", "checkpoint", "clock", "checkpoint"])
    while kills < 10:
        if not runs or (runs[-1] / "rl" / "DONE").exists():
            runs.append(tmp_path / f"killed_{len(runs)}")
            prepare(runs[-1], *settings)
        resumed += any((runs[-1] / "rl" / "checkpoints").glob("step_*"))
        kind = next(kinds)
        if kind == "clock":
            child = start(runs[-1])
            time.sleep(draw.uniform(0.05, 0.4) * took_s)
            os.kill(child, signal.SIGKILL)
        elif kind == "file":
            child = start(runs[-1], first=functools.partial(kill_at_fsync, draw.randint(1, 30)))
        else:
            child = start(runs[-1], first=functools.partial(kill_in_checkpoint, draw.randint(1, 25)))
        status = ended(child)
        assert status in (-signal.SIGKILL, 0)
        kills += status != 0
    assert resumed >= 5
    for run in runs:
        assert ended(start(run)) == 0
        assert durable(run) == durable(tmp_path / "whole")


def test_n_steps_then_kill_then_n_more_are_2n_steps(tmp_path):
    prepare(tmp_path / "whole", "train.steps=4", "rollout.turns=3", 'rejection.mrs="trajectory"')
    prepare(tmp_path / "halves", "train.steps=4", "rollout.turns=3", 'rejection.mrs="trajectory"')
    assert ended(start(tmp_path / "whole")) == 0
    # Judged in order, 24 answers a step at most: the first of step 3 comes after the checkpoint of step 2.
    counts = [len(t.turns) for s in (1, 2) for t in read_trajectories(_trajectories(tmp_path / "whole", s))]
    assert ended(start(tmp_path / "halves", kill_at=sum(counts) + 1)) == -signal.SIGKILL
    assert [p.name for p in (tmp_path / "halves" / "rl" / "checkpoints").iterdir()] == ["step_00002"]
    assert ended(start(tmp_path / "halves")) == 0
    assert durable(tmp_path / "halves") == durable(tmp_path / "whole")


def _trajectories(run, step):
    return run / "rl" / "trajectories" / f"step_{step:05d}.jsonl"


def stage(run):
    train.make_pool = lambda config: Judge()
    train.main(run)


def test_two_ranks_write_the_metrics_of_one_process(tmp_path):
    for name in ("one", "two"):
        config = prepare(tmp_path / name, "train.steps=4", "optim.lr=0.002")
    assert ended(start(tmp_path / "one")) == 0
    run_ranks(2, stage, tmp_path / "two")
    one, two = (_lines(tmp_path / name / "rl" / "metrics.jsonl") for name in ("one", "two"))
    assert len(one) == len(two) == 4
    for line, other in zip(one, two):
        assert line == pytest.approx(other, rel=1e-3, abs=1e-5)
    for step in (1, 4):
        first, second = (list(read_trajectories(_trajectories(tmp_path / name, step))) for name in ("one", "two"))
        assert [[turn.completion_ids for turn in t.turns] for t in first] == [
            [turn.completion_ids for turn in t.turns] for t in second
        ]
    models = [modeling.load(tmp_path / name / "rl" / "model", "cpu")[0] for name in ("one", "two")]
    for a, b in zip(*(model.parameters() for model in models)):
        assert torch.allclose(a, b, atol=1e-4)
    rollout_logprobs_are_the_learners(tmp_path / "one", config)


def rollout_logprobs_are_the_learners(run, config):
    """To 1e-5 for every token of several turns, in fp32: what was sampled from is what is trained."""
    learner = Learner(modeling.load(run / "sft" / "model", "cpu")[0], config)
    rows = [row for t in read_trajectories(_trajectories(run, 1)) for row in rows_of(t)]
    assert {row.turn for row in rows} == {0, 1}
    for row, logprobs in zip(rows, learner.logprobs(rows), strict=True):
        assert logprobs.tolist() == pytest.approx(row.rollout_logprobs, abs=1e-5)


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
