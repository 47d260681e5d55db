"""Runs in which nothing can train: they pause with the cause, are not DONE, and go on once it is mended."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from small_run import Judge, durable, prepare

from rl import train
from rl.config import load_recipe
from rl.engines.hf import HFEngine
from rl.idle import Idle, causes
from rl.rewards import TrainingPaused

pytestmark = pytest.mark.budget(60)


class Strict(Judge):
    """Nothing is correct: all answers earn the same."""

    def submit(self, problem, response, raw=True):
        future = super().submit(problem, response, raw)
        future.result().status = "incorrect"
        return future


def zero_logprobs(monkeypatch):
    plain = HFEngine.stream

    def stream(self, source, sampling):
        for request, completion in plain(self, source, sampling):
            yield request, replace(completion, logprobs=[0.0] * len(completion.ids))

    monkeypatch.setattr(HFEngine, "stream", stream)


def infinite_loss(monkeypatch):
    plain = train.Learner.backward
    monkeypatch.setattr(train.Learner, "backward", lambda self, loss: plain(self, loss * float("inf")))


def run_with(monkeypatch, run, judge):
    monkeypatch.setattr(train, "make_pool", lambda config: judge)
    train.main(run)


@pytest.mark.parametrize(
    ("damage", "judge", "words"),
    [
        (zero_logprobs, Judge, r"log-probs are not the learner's.*logprob_gap [1-9]"),
        (infinite_loss, Judge, r"gradient was not finite.*lower optim.lr"),
        (lambda monkeypatch: None, Strict, r"earned the same \(reward/mean 0\)"),
    ],
)
def test_a_run_that_trains_nothing_pauses_and_goes_on_once_mended(tmp_path, monkeypatch, damage, judge, words):
    settings = ["train.max_skipped=3", "train.steps=4", "train.checkpoint_every=1"]
    for name in ("whole", "idle"):
        prepare(tmp_path / name, *settings)
    run_with(monkeypatch, tmp_path / "whole", Judge())
    folder = tmp_path / "idle" / "rl"
    with monkeypatch.context() as patch:
        damage(patch)
        for _ in range(2):  # the same command again, nothing mended
            with pytest.raises(TrainingPaused, match=rf"last 3 steps trained nothing; mostly .*{words}.*same command"):
                run_with(patch, tmp_path / "idle", judge())
            assert not (folder / "DONE").exists() and not (folder / "model").exists()
            assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step_00001", "step_00002"]
    run_with(monkeypatch, tmp_path / "idle", Judge())
    assert (folder / "DONE").exists()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["policy/skipped"]) for line in lines] == [(1, 1), (2, 1), (3, 0), (4, 0)]
    assert durable(tmp_path / "idle") != durable(tmp_path / "whole")


def test_all_steps_of_a_short_run_are_too_many_unless_rewards_are_equal(tmp_path, monkeypatch):
    prepare(tmp_path / "short", "train.steps=2")
    with monkeypatch.context() as patch:
        zero_logprobs(patch)
        with pytest.raises(TrainingPaused, match="last 2 steps"):
            run_with(patch, tmp_path / "short", Judge())
    assert not (tmp_path / "short" / "rl" / "DONE").exists()
    prepare(tmp_path / "equal", "train.steps=2")
    run_with(monkeypatch, tmp_path / "equal", Strict())
    assert (tmp_path / "equal" / "rl" / "DONE").exists()


def test_the_count_is_of_steps_in_a_row_and_the_cause_the_largest():
    config = load_recipe("mini-cpu", ["train.max_skipped=3"])
    bad = {"policy/skipped": 1.0, "mask/prs": 0.6, "mask/mrs": 0.1, "mask/trained": 0.3}
    good = {"policy/skipped": 0.0, "mask/trained": 1.0, "policy/loss": 0.1}
    idle = Idle()
    for metrics in (bad, bad, good, bad, bad):
        idle = idle.after(metrics)
        idle.refuse(metrics, config)
    idle = Idle.restored(json.loads(json.dumps(idle.state())))
    with pytest.raises(TrainingPaused, match=r"last 3 steps.*rejection\.prs_tau"):
        idle.after(bad).refuse(bad, config)
    idle.after(bad).refuse(bad, load_recipe("mini-cpu", ["train.max_skipped=0"]))
    assert causes(bad) == {"prs": 0.6, "mrs": 0.1, "equal": 0.3}
    assert causes({**bad, "policy/loss": 1.0}) == {"prs": 0.6, "mrs": 0.1, "gradient": 0.3}
