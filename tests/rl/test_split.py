"""The split placement: one step stale and no more, the same bytes however it is timed or killed, nobody left behind."""

from __future__ import annotations

import contextlib
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

sys.path.append(str(Path(__file__).parent))

from small_run import Judge, durable, ended, in_child, prepare
from split_run import SPLIT, children, gone, rollouter_of, run_split, start

from rl import rollout_link, train
from rl.records import read_trajectories, step_path

pytestmark = pytest.mark.budget(150)


def lines(run, name="metrics.jsonl"):
    return [json.loads(line) for line in (run / "rl" / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run of 6 steps with a checkpoint behind each second one."""
    run = tmp_path_factory.mktemp("split") / "whole"
    prepare(run, *SPLIT, "train.steps=6")
    assert run_split(run) == 0
    return run


def test_every_step_is_sampled_from_the_weights_behind_the_step_before_the_last(whole):
    metrics = lines(whole)
    assert [line["policy/version"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert [line["policy/staleness_max"] for line in metrics] == [0, 1, 1, 1, 1, 1]
    assert [line["policy/staleness_mean"] for line in metrics] == [0, 1, 1, 1, 1, 1]
    for step in range(1, 7):
        versions = {turn.policy_version for t in read_trajectories(step_path(whole / "rl", step)) for turn in t.turns}
        assert versions == {max(0, step - 2)}
    # The learner's log-probs are the sampler's in step 1, of the same weights, and others one update later.
    assert metrics[0]["policy/logprob_gap"] < 1e-5 < 1e-4 < metrics[1]["policy/logprob_gap"]


def test_without_staleness_it_is_the_colocated_run(tmp_path):
    """Weights that went through shared memory to another process sample the very same, evaluation included."""
    more = ["rejection.mrs=off", "rejection.importance=token", "train.steps=4", "eval.every=2"]
    for name, settings in (("colocated", []), ("split", ["placement.kind=split", "placement.staleness=0"])):
        prepare(tmp_path / name, *more, *settings)
        heldout = (tmp_path / name / "problems" / "train.jsonl").read_bytes()
        (tmp_path / name / "problems" / "heldout.jsonl").write_bytes(heldout)
    assert in_child(tmp_path / "colocated", None) == 0 and run_split(tmp_path / "split") == 0
    assert durable(tmp_path / "split") == durable(tmp_path / "colocated")
    assert "eval/reward/mean" in lines(tmp_path / "split")[-1]


def test_evaluations_are_of_the_policy_behind_their_step(tmp_path, whole):
    """They come between rollouts, and change none."""
    run = tmp_path / "run"
    prepare(run, *SPLIT, "train.steps=6", "eval.every=3")
    (run / "problems" / "heldout.jsonl").write_bytes((run / "problems" / "train.jsonl").read_bytes())
    assert run_split(run) == 0
    for step, version in ((0, 0), (3, 3), (6, 6)):
        found = list(read_trajectories(step_path(run / "rl", step, "evaluation")))
        assert {turn.policy_version for t in found for turn in t.turns} == {version} and len(found) == 6
    assert [line["step"] for line in lines(run) if "eval/reward/mean" in line] == [0, 3, 6]
    for step in range(1, 7):
        assert step_path(run / "rl", step).read_bytes() == step_path(whole / "rl", step).read_bytes()


class SlowJudge(Judge):
    """Takes a moment, so that sampling a step isn't over before the learner has begun."""

    def submit(self, problem, response, raw=True):
        time.sleep(0.01)
        return super().submit(problem, response, raw)


def test_sampling_overlaps_the_update_and_says_by_how_much(tmp_path, whole):
    """By timestamps: both processes read one clock. And a slower judge changes no byte."""
    run = tmp_path / "run"
    prepare(run, *SPLIT, "train.steps=6")
    assert run_split(run, judge=SlowJudge) == 0
    assert durable(run) == durable(whole)
    wall = lines(run, "wall.jsonl")
    assert [line["step"] for line in wall] == [1, 2, 3, 4, 5, 6] and wall[0]["seconds/overlap"] == 0
    assert all(line["seconds/overlap"] > 0 for line in wall[1:])
    for line, before in zip(wall[1:], wall):
        assert line["seconds/overlap"] <= before["seconds/learn"] + 0.1
        assert line["seconds/step"] == pytest.approx(line["seconds/wait"] + line["seconds/learn"], abs=0.1)


def kill_at_fsync(number):
    """Kill this process when it is about to force its `number`-th file to disk."""
    plain, count = os.fsync, [0]

    def fsync(descriptor):
        count[0] += 1
        if count[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        plain(descriptor)

    os.fsync = fsync


def test_killed_on_either_side_at_many_instants_it_ends_in_the_same_bytes(tmp_path, whole):
    """In the middle of writing any file, of judging, and by the clock; the other side goes too, each time."""
    draw, runs, resumed, ways = random.Random(7), [], 0, itertools.cycle(["learner", "clock", "rollouts", "judge"])
    for kill in range(12):
        if not runs or (runs[-1] / "rl" / "DONE").exists():
            runs.append(tmp_path / f"killed_{len(runs)}")
            prepare(runs[-1], *SPLIT, "train.steps=6", "train.checkpoint_every=1")
        run, way = runs[-1], next(ways)
        resumed += any((run / "rl" / "checkpoints").glob("step_*"))
        if way == "learner":
            child = start(run, learner=functools.partial(kill_at_fsync, draw.randint(10, 60)))
        elif way == "rollouts":
            child = start(run, first=functools.partial(kill_at_fsync, draw.randint(2, 5)))
        elif way == "judge":
            child = start(run, judge=functools.partial(Judge, draw.randint(10, 60)))
        else:
            child = start(run)
        other = rollouter_of(child)
        if way == "clock":
            time.sleep(draw.uniform(0.0, 0.6))
            with contextlib.suppress(ProcessLookupError):  # it has come to its end
                os.kill(draw.choice([child, other]), signal.SIGKILL)
        status = ended(child)
        assert status in (-signal.SIGKILL, 1, 0) and gone(other), (kill, way)
        if status == 1:
            assert "the rollout process" in (run / "error.txt").read_text()
    assert resumed >= 4
    for run in runs:
        assert run_split(run) == 0
        assert durable(run) == durable(whole)


def test_a_rollout_process_that_dies_while_the_learner_computes_ends_the_run(tmp_path):
    """Nobody waits for it just then, and the update takes longer than a person would."""
    run = tmp_path / "run"
    prepare(run, *SPLIT)

    def hang_in_update():
        rollout_link.GRACE_S = 0.5
        train.Learner.update = lambda *given: time.sleep(300)

    child = start(run, learner=hang_in_update)
    other = rollouter_of(child)
    while not step_path(run / "rl", 1).exists():
        time.sleep(0.01)
    time.sleep(0.3)
    begun = time.monotonic()
    os.kill(other, signal.SIGKILL)
    assert ended(child) == 1 and time.monotonic() - begun < 20


def test_the_cause_comes_first_where_its_judge_fails(tmp_path):
    run = tmp_path / "run"
    prepare(run, *SPLIT)

    class Broken(Judge):
        def submit(self, problem, response, raw=True):
            raise RuntimeError("the GPU fell off the bus")

    assert run_split(run, judge=Broken) == 1
    said = (run / "error.txt").read_text()
    assert said.startswith("EngineError: the rollout process failed while waiting to sample step 1: ")
    assert said.endswith("RuntimeError: the GPU fell off the bus")


def test_a_rollout_process_that_says_nothing_is_given_up(tmp_path):
    run = tmp_path / "run"
    prepare(run, *SPLIT, "placement.rollout_timeout_s=1.0")

    class Stuck(Judge):
        def submit(self, problem, response, raw=True):
            time.sleep(300)

    child = start(run, judge=Stuck)
    other = rollouter_of(child)
    assert ended(child) == 1 and gone(other)
    assert "no sign for 1 s (placement.rollout_timeout_s)" in (run / "error.txt").read_text()


def test_weights_that_change_on_their_way_are_refused(tmp_path):
    run = tmp_path / "run"
    prepare(run, *SPLIT)

    def damage():
        from rl import shared_weights

        plain = shared_weights.write

        def write(plan, weights):
            descriptor, checksum = plain(plan, weights)
            os.pwrite(descriptor, b"\x01\x02\x03\x04", 64)
            return descriptor, checksum

        shared_weights.write = write

    assert run_split(run, learner=damage) == 1
    assert "weights changed on their way" in (run / "error.txt").read_text()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]), "of 8 trajectories are there"),
        (lambda path: path.write_text("".join(path.read_text().splitlines(True)[::-1])), "out of place"),
        (lambda path: path.write_text(path.read_text().replace('"policy_version": 1', '"policy_version": 2')), "polic"),
        (lambda path: path.write_text(path.read_text() + "\n"), "not a trajectory"),
        (lambda path: path.write_text(path.read_text().replace('"reward": ', '"reward": 1', 1)), "content has changed"),
    ],
)
def test_rollouts_ahead_of_a_checkpoint_must_be_there_whole(tmp_path, damage, words):
    """Step 3's were sampled from weights that the checkpoint of step 2 doesn't hold."""
    run = tmp_path / "run"
    prepare(run, *SPLIT)
    stop_behind_checkpoint(run, 2)
    path = step_path(run / "rl", 3)
    damage(path)
    assert run_split(run) == 1
    said = (run / "error.txt").read_text()
    assert said.startswith("CheckpointError: the rollouts of step 3") and words in said and str(path) in said


def stop_behind_checkpoint(run, step):
    """Kill the learner when the checkpoint of a step has been written."""

    def after():
        plain = train.save

        def save(learner, folder, number, *more):
            plain(learner, folder, number, *more)
            if number == step:
                os.kill(os.getpid(), signal.SIGKILL)

        train.save = save

    assert run_split(run, learner=after) == -signal.SIGKILL


def test_a_checkpoint_waits_for_the_rollouts_that_it_needs_and_they_are_used_as_they_are(tmp_path, whole):
    run = tmp_path / "run"
    prepare(run, *SPLIT, "train.steps=6")
    stop_behind_checkpoint(run, 4)
    path = step_path(run / "rl", 5)
    (run / "rl" / "trajectories" / ".sampling-step_00006.jsonl").write_text("rubbish")
    before = path.stat().st_ino, len(list(read_trajectories(path)))

    class Asked(Judge):
        def submit(self, problem, response, raw=True):
            (run / "judged.txt").open("a").write(f"{problem.id}\n")
            return super().submit(problem, response, raw)

    assert before[1] == 8
    assert run_split(run, judge=Asked) == 0
    assert durable(run) == durable(whole)
    assert len((run / "judged.txt").read_text().splitlines()) == 2 * 4 * 2  # step 6, and no other
    assert "seconds/rollout" not in lines(run, "wall.jsonl")[4]


class BreaksAt(Judge):
    """Can't judge any more from a submission on."""

    def submit(self, problem, response, raw=True):
        future = super().submit(problem, response, raw)
        if self.count >= 40:
            future.result().status, future.result().message = "infra_error", "no GPU"
        return future


def test_a_judge_that_breaks_pauses_training_and_its_rollouts_are_made_again(tmp_path):
    """Step 3's verdicts are nobody's fault. The checkpoint of step 2 doesn't hold on to them: they'd pause again."""
    run = tmp_path / "run"
    prepare(run, *SPLIT)
    assert run_split(run, judge=BreaksAt) == 1
    assert (run / "error.txt").read_text().startswith("TrainingPaused: ")
    assert [p.name for p in (run / "rl" / "checkpoints").iterdir()] == ["step_00002"]
    assert run_split(run) == 0
    metrics = lines(run)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5]
    # Sampled again from the checkpoint's own weights, as at a start.
    assert [line["policy/staleness_max"] for line in metrics] == [0, 1, 0, 1, 1]


def test_the_program_itself(tmp_path):
    """Real processes: the rollout process with its pool, and not a child is left where the learner is killed."""
    import subprocess

    run = tmp_path / "run"
    prepare(run, *SPLIT, "train.steps=1", "rollout.turns=1", "env.slots=1")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "rl.train", "--run", str(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    learner = subprocess.Popen(command, cwd=root, env=environment, stderr=subprocess.PIPE, text=True)
    other = rollouter_of(learner.pid, "rl.rollouter", 60)
    end = time.monotonic() + 60
    while not (below := children(other, "env.evaluator")):
        assert time.monotonic() < end and learner.poll() is None
        time.sleep(0.05)
    learner.kill()
    learner.communicate()
    assert gone(other) and all(gone(pid) for pid in below)
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (run / "rl" / "DONE").exists() and len(list(read_trajectories(step_path(run / "rl", 1)))) == 8
