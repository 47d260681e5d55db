"""The RL loop: it learns, it ends in the same bytes whenever it was killed, masks and advantages reach the rows."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from small_run import PROBLEMS, Judge, durable, in_child, prepare

from env.records import Problem
from rl import checkpoint, modeling, train
from rl.config import ConfigError, load_recipe
from rl.metrics import MetricsWriter
from rl.plan import pick_problems
from rl.prompts import Chat
from rl.records import Trajectory, Turn, read_trajectories
from rl.rewards import TrainingPaused
from rl.wording import Wording

pytestmark = pytest.mark.budget(60)

LONG = Problem("long", "class Model:\n" + "    n = 1 + 1\n" * 40)


def test_a_run_that_is_killed_again_and_again_ends_in_the_same_bytes(tmp_path):
    prepare(tmp_path / "whole")
    assert in_child(tmp_path / "whole", None) == 0
    prepare(tmp_path / "killed")
    per_step = 2 * 4 * 2
    # In step 1 (no checkpoint yet), in step 4 (its third lies after the checkpoint), in the last step.
    for kill_at in (per_step // 2, 3 * per_step + 5, 3 * per_step - 1):
        assert in_child(tmp_path / "killed", kill_at) == -signal.SIGKILL
    assert not (tmp_path / "killed" / "rl" / "DONE").exists()
    assert in_child(tmp_path / "killed", None) == 0
    expected = durable(tmp_path / "whole")
    assert durable(tmp_path / "killed") == expected
    assert [json.loads(line)["step"] for line in expected["rl/metrics.jsonl"].splitlines()] == [1, 2, 3, 4, 5]
    assert sum("step_" in name for name in expected) == 5
    assert in_child(tmp_path / "killed", 1) == 0  # DONE: nothing is submitted


def test_the_policy_learns_what_is_rewarded(tmp_path, monkeypatch):
    config = prepare(
        tmp_path / "run", "train.steps=30", "optim.lr=0.05", "rollout.turns=1", "rollout.samples_per_prompt=16"
    )
    monkeypatch.setattr(train, "make_pool", lambda config: Judge())
    train.main(tmp_path / "run")
    metrics = [json.loads(line) for line in (tmp_path / "run" / "rl" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward/mean"] for line in metrics]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 1.0
    assert max(line["policy/logprob_gap"] for line in metrics) < 1e-5  # what is sampled from is what is trained
    assert all(line["mask/mrs"] == line["mask/veto"] == 0 for line in metrics) and metrics[-1]["policy/version"] > 25
    last = list(read_trajectories(tmp_path / "run" / "rl" / "trajectories" / "step_00030.jsonl"))
    assert len(last) == 2 * 16 and all(turn.advantage is not None for t in last for turn in t.turns)
    assert {turn.policy_version for t in last for turn in t.turns} == {int(metrics[-2]["policy/version"])}
    # PRS drops about half of the correct rows with PR 0.35, and no other.
    dropped = [turn for line in range(1, 31) for t in _step(tmp_path, line) for turn in t.turns if turn.masks]
    assert dropped and all(
        turn.masks == ["prs"] and turn.verdict["profiling_ratio"] == 0.35 and turn.reward > 0 for turn in dropped
    )
    assert config.train.steps == len(metrics)


def _step(tmp_path, number):
    return read_trajectories(tmp_path / "run" / "rl" / "trajectories" / f"step_{number:05d}.jsonl")


def test_every_problem_comes_once_an_epoch():
    seen = [pick_problems(PROBLEMS, 2, 3, step) for step in range(1, 7)]
    for epoch in (seen[:3], seen[3:]):
        assert sorted(problem.id for batch in epoch for problem in batch) == sorted(p.id for p in PROBLEMS)
    assert seen[:3] != seen[3:]
    assert all(len({p.id for p in pick_problems(PROBLEMS, 4, 3, step)}) == 4 for step in range(1, 9))
    with pytest.raises(ValueError, match="only 6"):
        pick_problems(PROBLEMS, 7, 3, 1)


def test_rows_without_a_return_are_masked_and_leave_the_group():
    def trajectory(index, rewards):
        turns = [Turn([1], [2], [-1.0], 0, "stop", verdict={}, reward=value) for value in rewards]
        return Trajectory("p", index, turns)

    group = [trajectory(0, [1.0, 2.0]), trajectory(1, [0.0, None]), trajectory(2, [0.0, 1.0])]
    train.set_advantages(group, load_recipe("mini-cpu"))
    # Returns of turn 1: 3 and 1 (the second has none); of turn 2: 2 and 1. TRLOO of two: the difference.
    assert [[turn.advantage for turn in t.turns] for t in group] == [[2.0, 1.0], [None, None], [-2.0, -1.0]]
    assert [[turn.masks for turn in t.turns] for t in group] == [[[], []], [["infra"], ["infra"]], [[], []]]


def test_a_run_goes_on_with_more_steps_and_says_where_fewer_are_asked_for(tmp_path):
    run = tmp_path / "run"
    config = prepare(run, "train.steps=4")
    assert in_child(run, None) == 0

    def again(steps):
        (run / "rl" / "DONE").unlink()
        data = config.to_json()
        data["train"]["steps"] = steps
        (run / "config.json").write_text(json.dumps(data))

    again(2)
    with pytest.raises(ConfigError, match=r"train\.steps = 2, but .* holds 4 steps"):
        train.main(run)
    (run / "rl" / "DONE").touch()
    again(6)
    assert in_child(run, None) == 0
    lines = (run / "rl" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    (run / "rl" / "model" / "config.json").unlink()
    with pytest.raises(checkpoint.CheckpointError, match="DONE is there, but"):
        train.main(run)


def test_a_context_without_room_is_told_before_anything_is_sampled(tmp_path, capsys):
    run = tmp_path / "run"
    config = prepare(run)
    chat = Chat(modeling.load(run / "sft" / "model", "cpu")[1])
    wording = Wording.load(config.prompts)
    lengths = {p.id: len(chat.first_prompt(wording.first_message(p))) for p in [*PROBLEMS, LONG]}
    least = max(length for name, length in lengths.items() if name != LONG.id) + config.rollout.max_new_tokens
    assert lengths[LONG.id] + config.rollout.max_new_tokens > least

    def with_context(tokens):
        return replace(config, model=replace(config.model, context=tokens))

    train.refuse_short_context(chat, [*PROBLEMS, LONG], with_context(least))
    assert "RL: 1 of 7 problems are never asked" in capsys.readouterr().out
    train.refuse_short_context(chat, PROBLEMS, with_context(least))
    assert capsys.readouterr().out == ""
    with pytest.raises(TrainingPaused, match=rf"the shortest first prompt has {lengths['long']} tokens"):
        train.refuse_short_context(chat, [LONG], with_context(least))
    (run / "config.json").write_text(json.dumps(with_context(12).to_json()))
    with pytest.raises(TrainingPaused, match=r"model\.context = 12 is too small.*nothing would ever be asked"):
        train.main(run)
    assert not list((run / "rl").glob("*.jsonl"))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda lines: [lines[0], *lines[2:]], "no line of step 2, though 4 were taken"),
        (lambda lines: lines[:2], "no line of step 3, 4, though 4 were taken"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], "steps are there twice or out of order"),
        (lambda lines: [lines[0], *lines], "steps are there twice or out of order"),
        (lambda lines: lines, ""),
        (None, "is missing: of steps 1 to 4 there will be no values"),
    ],
)
def test_steps_without_a_line_are_said_at_a_resume(tmp_path, caplog, damage, words):
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 6):
            writer.write(step, {"reward/mean": 1.0})
    path = tmp_path / "metrics.jsonl"
    (tmp_path / "wall.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(5)))
    if damage:
        path.write_text("".join(damage(path.read_text().splitlines(keepends=True))))
    else:
        path.unlink()
    with MetricsWriter(tmp_path, resume_step=5):
        pass
    assert (f"{path}: {words}" if damage and words else words) in caplog.text and bool(words) == bool(caplog.text)
    assert not path.exists() or [json.loads(line)["step"] for line in path.read_text().splitlines()][-1] <= 4


def test_a_disk_too_full_for_tensorboard_is_told_with_its_folder(tmp_path, monkeypatch):
    def full(self, *arguments):
        raise OSError(28, "No space left on device")

    with MetricsWriter(tmp_path) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(type(writer.board), "flush", full)
            with pytest.raises(OSError, match=r"MiB are free there: make room.*/tb'"):
                writer.write(1, {"reward/mean": 1.0})
        writer.write(2, {"reward/mean": 1.0})
