"""The rollout side of the RL loop: pauses, evaluation during training, baselines, ids as they were sampled."""

from __future__ import annotations

import json
from concurrent.futures import Future

import pytest
import torch

from env.problems import write_jsonl
from env.records import Problem, Verdict
from rl import checkpoint, modeling, seeding, train
from rl.config import load_recipe
from rl.engines.base import generate
from rl.engines.hf import HFEngine
from rl.plan import training_plan
from rl.prompts import Chat
from rl.records import Trajectory, Turn, read_trajectories
from rl.rewards import TrainingPaused

pytestmark = pytest.mark.budget(60)

TRAIN = [Problem(f"p{i}", f"class Model:\n    n = {i}\n") for i in range(4)]
HELDOUT = [Problem(f"h{i}", f"class Model:\n    m = {i}\n") for i in range(3)]
SMALL = [
    "model.layers=1", "model.width=24", "model.heads=2", "model.kv_heads=1", "model.mlp=32", "model.vocab_size=300",
    "model.context=256", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=3", "rollout.max_new_tokens=6",
    "train.steps=4", "train.checkpoint_every=3", "optim.lr=0.02", "eval.every=2",
]  # fmt: skip


class Judge:
    """Judges by the text alone. With `broken_from`, it can't any more from that submission on."""

    def __init__(self, broken_from=None):
        self.count, self.broken_from, self.seen = 0, broken_from, []

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return None

    def submit(self, problem, response, raw=True):
        self.count += 1
        self.seen.append(problem.id)
        broken = self.broken_from is not None and self.count >= self.broken_from
        status = "infra_error" if broken else "correct" if len(response) % 2 else "incorrect"
        verdict = Verdict(status, speedup=1.0 + response.count("e"), profiling_ratio=1.0, feedback="go on")
        verdict.message = "the GPU fell off the bus" if broken else ""
        future = Future()
        future.set_result(verdict)
        return future


def prepare(run, *overrides):
    config = load_recipe("mini-cpu", [*SMALL, *overrides])
    run.mkdir()
    (run / "config.json").write_text(json.dumps(config.to_json()))
    write_jsonl(TRAIN, run / "problems" / "train.jsonl")
    write_jsonl(HELDOUT, run / "problems" / "heldout.jsonl")
    modeling.build_initial(config, ["class Model:\n", "go on\n"], run / "sft" / "model")
    return config


def run_with(monkeypatch, run, judge):
    monkeypatch.setattr(train, "make_pool", lambda config: judge)
    train.main(run)
    return judge


def lines(run):
    return [json.loads(line) for line in (run / "rl" / "metrics.jsonl").read_text().splitlines()]


def durable(run):
    files = [path for name in ("trajectories", "evaluation", "model") for path in (run / "rl" / name).iterdir()]
    return {str(p.relative_to(run)): p.read_bytes() for p in (*files, run / "rl" / "metrics.jsonl")}


def test_a_broken_judge_pauses_training_and_the_run_goes_on_from_there(tmp_path, monkeypatch):
    prepare(tmp_path / "whole")
    run_with(monkeypatch, tmp_path / "whole", Judge())
    prepare(tmp_path / "paused")
    # The judge breaks in step 3: 3 x 2 x 1 answers are judged in each evaluation, 2 x 3 x 2 in each step.
    with pytest.raises(TrainingPaused, match=r"6 of 6 answers.*fell off the bus.*same command"):
        run_with(monkeypatch, tmp_path / "paused", Judge(broken_from=6 + 12 + 12 + 6 + 1))
    folder = tmp_path / "paused" / "rl"
    assert not (folder / "DONE").exists()
    assert checkpoint.step_of(checkpoint.newest(folder / "checkpoints")) == 2  # not a step is lost
    assert [line["step"] for line in lines(tmp_path / "paused")] == [0, 1, 2]
    again = run_with(monkeypatch, tmp_path / "paused", Judge())
    assert again.count == 12 + 12 + 6
    assert durable(tmp_path / "paused") == durable(tmp_path / "whole")


def test_a_few_failures_are_masked_and_training_goes_on(tmp_path, monkeypatch):
    prepare(tmp_path / "run", "rollout.max_infra_share=0.5", "train.steps=1", "eval.every=0", "seed=5")
    run_with(monkeypatch, tmp_path / "run", Judge(broken_from=12))
    assert torch.initial_seed() == 5  # for what libraries draw by themselves
    assert checkpoint.step_of(checkpoint.newest(tmp_path / "run" / "rl" / "checkpoints")) == 1  # the last step is saved
    (line,) = lines(tmp_path / "run")
    assert 0 < line["status/infra_error"] < 0.2 and line["mask/infra"] >= line["status/infra_error"]
    assert line["group/size_mean_turn2"] < 3 and line["mask/trained"] < 1


def test_a_context_without_room_for_any_prompt_is_said(tmp_path, monkeypatch):
    prepare(tmp_path / "run", "model.context=20", "eval.every=0")
    with pytest.raises(TrainingPaused, match=r"model\.context"):
        run_with(monkeypatch, tmp_path / "run", Judge())


def test_the_policy_is_evaluated_before_and_during_training(tmp_path, monkeypatch):
    config = prepare(tmp_path / "run")
    judge = run_with(monkeypatch, tmp_path / "run", Judge())
    found = {line["step"]: line for line in lines(tmp_path / "run")}
    assert sorted(found) == [0, 1, 2, 3, 4]
    evaluated = [step for step, line in found.items() if any(name.startswith("eval/") for name in line)]
    assert evaluated == [0, 2, 4] and set(found[0]) <= {"step", *(n for n in found[4] if n.startswith("eval/"))}
    for step in evaluated:
        trajectories = list(read_trajectories(tmp_path / "run" / "rl" / "evaluation" / f"step_{step:05d}.jsonl"))
        assert [t.problem_id for t in trajectories] == [p.id for p in HELDOUT]
        rewards = [turn.reward for t in trajectories for turn in t.turns]
        assert found[step]["eval/reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
        assert {turn.policy_version for t in trajectories for turn in t.turns} == {found[step].get("policy/version", 0)}
    assert "eval/fast/1.2_turn2" in found[2] and config.eval.every == 2
    trained = {t.problem_id for n in range(1, 5) for t in _step(tmp_path, n)}
    assert trained == {p.id for p in TRAIN} and judge.seen.count("h0") == 3 * 2


def _step(tmp_path, number):
    return read_trajectories(tmp_path / "run" / "rl" / "trajectories" / f"step_{number:05d}.jsonl")


def test_the_rows_are_what_the_engine_was_given_and_sampled(tmp_path, monkeypatch):
    """The first step again, prompt by prompt with a fresh engine: the same ids and log-probs, turn by turn."""
    config = prepare(tmp_path / "run", "train.steps=1", "eval.every=0")
    run_with(monkeypatch, tmp_path / "run", Judge())
    model, tokenizer = modeling.load(tmp_path / "run" / "sft" / "model", "cpu")
    engine, chat = HFEngine(model, 1), Chat(tokenizer)
    plan = training_plan(config, chat, 1, 0)
    for trajectory in _step(tmp_path, 1):
        for number, turn in enumerate(trajectory.turns):
            before = trajectory.turns[:number]
            given = chat.next_prompt(before, turn.prompt_text) if before else chat.first_prompt(turn.prompt_text)
            seed = seeding.derive(config.seed, "sample", 1, trajectory.problem_id, trajectory.sample_index, number)
            (again,) = generate(engine, [given], plan.sampling, [seed])
            assert turn.prompt_ids == given and turn.completion_ids == again.ids
            assert turn.logprobs == pytest.approx(again.logprobs, abs=1e-5)
            if before:
                said = before[-1].prompt_ids + before[-1].completion_ids
                assert turn.prompt_ids[: len(said)] == said


def test_importance_weights_reach_the_loss_and_the_metrics(tmp_path, monkeypatch):
    given = []
    update = train.Learner.update
    monkeypatch.setattr(
        train.Learner,
        "update",
        lambda self, rows, old, weights=None: given.append((rows, weights)) or update(self, rows, old, weights),
    )
    prepare(tmp_path / "run", "rejection.importance=sequence", "train.steps=1", "eval.every=0")
    run_with(monkeypatch, tmp_path / "run", Judge())
    ((rows, weights),) = given
    assert [len(w) for w in weights] == [len(row.rollout_logprobs) for row in rows]
    (line,) = lines(tmp_path / "run")
    assert line["policy/importance_mean"] == pytest.approx(1.0, abs=1e-4) and line["policy/importance_capped"] == 0


@pytest.mark.parametrize(
    ("baseline", "expected"), [("keep", [3.0 - 1.5, 1.0 - 2.5, 2.0 - 2.0]), ("drop", [3.0 - 1.0, 1.0 - 3.0, 2.0 - 2.0])]
)
def test_whether_rejected_rows_count_in_the_baseline_is_an_option(baseline, expected):
    config = load_recipe("mini-cpu", [f"rejection.baseline={baseline}"])
    turns = [Turn([1], [2], [-1.0], 0, "stop", verdict={}, reward=value) for value in (3.0, 1.0, 2.0)]
    trajectories = [Trajectory("p", i, [turn]) for i, turn in enumerate(turns)]
    train.set_advantages(trajectories, config)
    assert [turn.advantage for turn in turns] == [1.5, -1.5, 0.0]
    turns[2].masks.append("prs")
    train.set_advantages(trajectories, config)
    assert [turn.advantage for turn in turns] == expected and turns[2].masks == ["prs"]
