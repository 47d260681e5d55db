"""One step of RL with a made-up engine, judge and learner: what reaches the loss is what the settings say, by hand.

Nothing here is a default: two problems, three samples, two turns; gamma 0.5, grpo, a cap of 2, no profiling ratio in
the reward, MRS over trajectories with a lopsided band, PRS hard, importance weights, rejected rows out of the baseline.
"""

from __future__ import annotations

import math
import random
import re
import sys
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

from tiny import tiny_model, weights_of

from env.records import Problem, Verdict
from rl import colocated, modeling, seeding, train
from rl.batch import rows_of
from rl.colocated import Colocated
from rl.config import load_recipe
from rl.engines.base import Completion
from rl.idle import Idle
from rl.learner import Learner as RealLearner
from rl.plan import pick_problems
from rl.prompts import Chat
from rl.records import Trajectory, Turn, read_trajectories, step_path
from rl.rewards import reward

pytestmark = pytest.mark.budget(20)

SETTINGS = [
    "model.layers=1", "model.width=24", "model.heads=2", "model.kv_heads=1", "model.mlp=32", "model.vocab_size=300",
    "model.context=256", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=3", "rollout.max_new_tokens=6",
    "rollout.turns=2", "rollout.temperature=0.7", "advantage.gamma=0.5", "advantage.estimator=grpo",
    "reward.speedup_cap=2.0", "reward.profiling_ratio=false", "reward.earns.incorrect=0.25", "rejection.mrs=trajectory",
    "rejection.mrs_low=0.5", "rejection.mrs_high=1.1", "rejection.prs=hard", "rejection.prs_tau=0.3",
    "rejection.baseline=drop", "rejection.importance=token", "rejection.importance_cap=1.3",
]  # fmt: skip
# (problem, sample) -> speedup by turn; None: incorrect.
SPEEDUPS = {
    ("p0", 0): (0.5, 5.0), ("p0", 1): (1.0, 0.2), ("p0", 2): (None, 0.3),
    ("p1", 0): (0.4, 0.6), ("p1", 1): (0.8, 0.1), ("p1", 2): (0.2, 1.0),
}  # fmt: skip
REWARDS = {
    ("p0", 0): (1.5, 3.0), ("p0", 1): (2.0, 1.2), ("p0", 2): (0.25, 1.3),
    ("p1", 0): (1.4, 1.6), ("p1", 1): (1.8, 1.1), ("p1", 2): (1.2, 2.0),
}  # fmt: skip
LAZY = {("p1", 0, 0), ("p0", 1, 1), ("p0", 2, 0)}  # with a profiling ratio of 0.1; the last one is not correct
# Log-prob of the learner less that of the engine, of every token of a turn.
OFFSETS = {("p0", 1, 1): 0.4, ("p1", 2, 0): -0.3, ("p1", 2, 1): -0.3}
# w of p0's sample 1 is exp(0.2): too high for all of it. The other way round exp(-0.2) would be kept, and p1's sample 2
# rejected, with exp(0.3).
MASKS = {("p0", 1, 0): ["mrs"], ("p0", 1, 1): ["mrs", "prs"], ("p1", 0, 0): ["prs"]}
LOGPROBS = [-0.5, -0.25]


class Engine:
    takes = "ids"

    def __init__(self, stop):
        self.stop, self.sampling, self.now = stop, None, ""

    def stream(self, source, sampling):
        self.sampling = sampling
        while taken := source.take(1, wait=True):
            for request in taken:
                problem, sample, turn = re.fullmatch(r"problem (\w+), sample (\d+), turn (\d+)", request.name).groups()
                self.now = problem, int(sample), int(turn) - 1
                yield request, Completion([5, self.stop], LOGPROBS, "stop", request.prompt)


class Judge:
    def __init__(self, engine):
        self.engine = engine

    def submit(self, problem, response, raw=True):
        name, sample, turn = self.engine.now
        assert problem.id == name
        speedup = SPEEDUPS[name, sample][turn]
        ratio = 0.1 if (name, sample, turn) in LAZY else 0.9
        status = "incorrect" if speedup is None else "correct"
        future = Future()
        future.set_result(Verdict(status, speedup=speedup, profiling_ratio=ratio, values_match=True, feedback="go on"))
        return future


class Learner:
    version, vocabulary = 7, 300

    def evaluate(self, rows):
        logprobs = [torch.tensor(row.rollout_logprobs) + OFFSETS.get(place(row), 0.0) for row in rows]
        return SimpleNamespace(logprobs=logprobs, entropy=lambda: 0.75)

    def update(self, rows, old_logprobs, weights):
        self.rows, self.old, self.weights = list(rows), list(old_logprobs), list(weights)
        self.version += 1
        return {"policy/skipped": 0.0}


def place(row):
    return row.problem_id, row.sample_index, row.turn


def expected_advantages():
    """By hand: G = R1 + 0.5 R2 and R2; mean-centred over the group's rows without a mask, a masked row added alone."""
    found = {}
    for problem in ("p0", "p1"):
        for turn in (0, 1):
            group = {}
            for sample in range(3):
                first, second = REWARDS[problem, sample]
                group[sample] = first + 0.5 * second if turn == 0 else second
            kept = [value for sample, value in group.items() if (problem, sample, turn) not in MASKS]
            for sample, value in group.items():
                own = kept if (problem, sample, turn) not in MASKS else [*kept, value]
                found[problem, sample, turn] = value - sum(own) / len(own)
    return found


def test_what_reaches_the_loss_is_what_the_settings_say(tmp_path, monkeypatch):
    config = load_recipe("mini-cpu", SETTINGS)
    modeling.build_initial(config, ["class Model:\n", "go on\n"], tmp_path / "model")
    chat = Chat(modeling.load(tmp_path / "model", "cpu")[1])
    engine, learner, pushed = Engine(chat.stop_ids[0]), Learner(), []
    monkeypatch.setattr(colocated.weight_sync, "push", lambda *given: pushed.append((*given, learner.version)) or 0.125)
    problems = [Problem(name, "class Model:\n") for name in ("p0", "p1")]
    path = step_path(tmp_path, 3)
    sampler = Colocated(learner, engine, Judge(engine), chat, problems, [], config, tmp_path)
    metrics, wall = train.train_step(3, learner, sampler, config, path)

    asked = engine.sampling
    assert (asked.temperature, asked.max_new_tokens, asked.vocabulary, asked.context) == (0.7, 6, 300, 256)
    assert len(learner.rows) == 12 and {row.step for row in learner.rows} == {3}
    assert {place(row): row.masks for row in learner.rows if row.masks} == MASKS
    advantages = expected_advantages()
    for row, old, weight in zip(learner.rows, learner.old, learner.weights, strict=True):
        offset = OFFSETS.get(place(row), 0.0)
        assert row.advantage == pytest.approx(advantages[place(row)], abs=1e-9), place(row)
        assert row.rollout_logprobs == LOGPROBS
        assert old.tolist() == pytest.approx([value + offset for value in LOGPROBS], abs=1e-6)
        assert weight.tolist() == pytest.approx([min(math.exp(offset), 1.3)] * 2, abs=1e-6)
    written = {
        (t.problem_id, t.sample_index, number): turn
        for t in read_trajectories(path)
        for number, turn in enumerate(t.turns)
    }
    for (problem, sample, turn), found in written.items():
        assert found.reward == pytest.approx(REWARDS[problem, sample][turn])
        assert found.advantage == pytest.approx(advantages[problem, sample, turn])
        assert found.masks == MASKS.get((problem, sample, turn), [])
        assert found.policy_version == 7
    differences = [0.4] * 2 + [-0.3] * 4 + [0.0] * 18  # the learner's log-prob less the engine's, token by token
    said = -sum(LOGPROBS) / 2
    expected = {
        "policy/logprob_gap": (2 * 0.4 + 4 * 0.3) / 24,
        "policy/kl": sum(math.exp(x) - 1 - x for x in differences) / 24,  # of the engine from the learner, not back
        "policy/ppl_rollout": math.exp(said),
        "policy/ppl_learner": math.exp(said - sum(differences) / 24),
        "policy/importance_mean": sum(min(math.exp(x), 1.3) for x in differences) / 24,
        "policy/importance_capped": 2 / 24,
        "policy/entropy": 0.75,
        "policy/version": 8,
        "policy/staleness_mean": 0,
        "policy/staleness_max": 0,
        "policy/skipped": 0.0,
        "mask/trained": 9 / 12,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    tokens = sum(len(turn.prompt_ids) + len(turn.completion_ids) for turn in written.values())
    assert wall["tokens_per_s"] * wall["seconds/step"] == pytest.approx(tokens)
    assert wall["tokens_per_s/rollout"] * wall["seconds/rollout"] == pytest.approx(24)
    assert wall["seconds/step"] >= wall["seconds/learn"] > 0 and wall["seconds/push"] == 0.125
    assert pushed == [(learner, engine, 8)]  # the weights behind the update


def test_what_is_left_of_an_older_file_of_the_step_is_replaced(tmp_path, monkeypatch):
    """A kill behind the sampling leaves it, and sampling appends."""
    config = load_recipe("mini-cpu", SETTINGS)
    modeling.build_initial(config, ["class Model:\n", "go on\n"], tmp_path / "model")
    chat = Chat(modeling.load(tmp_path / "model", "cpu")[1])
    monkeypatch.setattr(colocated.weight_sync, "push", lambda learner, engine: 0.0)
    engine, path = Engine(chat.stop_ids[0]), step_path(tmp_path, 3)
    path.parent.mkdir()
    path.write_text("rubbish\n")
    problems = [Problem(name, "class Model:\n") for name in ("p0", "p1")]
    appended = []
    plain, plain_evaluation = colocated.rollout, colocated.evaluate_problems
    monkeypatch.setattr(colocated, "rollout", lambda *given: (appended.append(path.exists()), plain(*given))[1])
    sampler = Colocated(Learner(), engine, Judge(engine), chat, problems, problems, config, tmp_path)
    train.train_step(3, sampler.learner, sampler, config, path)
    assert appended == [False] and len(list(read_trajectories(path))) == 6
    monkeypatch.setattr(
        colocated,
        "evaluate_problems",
        lambda *given: (appended.append(given[5].exists()), plain_evaluation(*given))[1],
    )
    for _ in range(2):  # an evaluation begins anew too: it would take what is there for its own
        metrics, wall = sampler.evaluate(3)
    evaluated = read_trajectories(step_path(tmp_path, 3, "evaluation"))
    assert appended == [False] * 3 and {t.sample_index for t in evaluated} == {0}
    assert metrics["eval/reward/mean_turn1"] == pytest.approx((1.5 + 1.4) / 2) and wall["seconds/evaluate"] > 0


def test_what_a_checkpoint_holds_is_taken_over(tmp_path):
    """Steps, version, idle steps and the global generators: the draws behind it come again."""
    settings = load_recipe("mini-cpu")
    learner = RealLearner(tiny_model(), settings)
    learner.version = 9
    seeding.seed_everything(3)
    train.save(learner, tmp_path, 4, settings, Idle(2, Counter({"prs": 1.5})))
    drawn = torch.rand(3), random.random()
    for name in ("trajectories/step_00004.jsonl", "trajectories/step_00005.jsonl", "evaluation/step_00006.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    other = RealLearner(tiny_model(seed=1), settings)
    assert train.resume(other, tmp_path, settings) == (4, Idle(2, Counter({"prs": 1.5})), [])
    assert other.version == 9 and torch.equal(weights_of(other.model), weights_of(learner.model))
    assert torch.equal(torch.rand(3), drawn[0]) and random.random() == drawn[1]
    left = sorted(path.name for name in ("trajectories", "evaluation") for path in (tmp_path / name).iterdir())
    assert left == ["step_00004.jsonl"]  # what is behind the checkpoint is made again


def test_rows_of_other_steps_are_in_no_baseline():
    config = load_recipe("mini-cpu")
    turns = [Turn([1], [2], [-1.0], 0, "stop", verdict={}, reward=value) for value in (3.0, 1.0, 7.0)]
    trajectories = [Trajectory("p", i, [turn], step) for i, (turn, step) in enumerate(zip(turns, (1, 1, 2)))]
    train.set_advantages(trajectories, config)
    assert [turn.advantage for turn in turns] == [2.0, -2.0, 7.0]


def test_a_row_without_a_return_is_marked_once():
    """Where baselines leave rejected rows out, advantages are set twice."""
    turns = [Turn([1], [2], [-1.0], 0, "stop", verdict={}, reward=value) for value in (None, 1.0, 2.0)]
    trajectories = [Trajectory("p", i, [turn]) for i, turn in enumerate(turns)]
    for _ in range(2):
        train.set_advantages(trajectories, load_recipe("mini-cpu", ["rejection.baseline=drop"]))
    assert [turn.masks for turn in turns] == [["infra"], [], []]
    assert [turn.advantage for turn in turns] == [None, -1.0, 1.0]


def test_the_order_of_problems_is_the_seeds_and_the_step_is_all_it_needs():
    problems = [Problem(f"p{i}", "class Model:\n") for i in range(12)]
    orders = {seed: [pick_problems(problems, 4, seed, step) for step in (1, 2, 3)] for seed in (1, 2)}
    assert orders[1] != orders[2] and orders[1] == [pick_problems(problems, 4, 1, step) for step in (1, 2, 3)]
    for order in orders.values():
        assert sorted(p.id for batch in order for p in batch) == sorted(p.id for p in problems)


def judged(status, ratio, values_match=True):
    return Verdict(status, speedup=2.0, profiling_ratio=ratio, values_match=values_match).to_json()


def rewarded(config, step, verdicts, problem="p0"):
    """A sample of one turn for every verdict, rewarded by the settings, and their rows."""
    trajectories = []
    for index, verdict in enumerate(verdicts):
        value, parts = reward(verdict, config.reward)
        turn = Turn([1], [2], [-1.0], 0, "stop", verdict=verdict, reward=value, reward_parts=parts)
        trajectories.append(Trajectory(problem, index, [turn], step))
    return trajectories, [row for t in trajectories for row in rows_of(t)]


def masks_of(config, step, verdicts, problem="p0"):
    trajectories, rows = rewarded(config, step, verdicts, problem)
    train.set_masks(rows, [torch.tensor(row.rollout_logprobs) for row in rows], trajectories, config)
    assert [turn.masks for t in trajectories for turn in t.turns] == [row.masks for row in rows]
    return [row.masks for row in rows]


# Verdict -> what PRS says with the hack check, and without it: a hack that is right is then rewarded as correct.
PRS_TABLE = [
    (judged("correct", 0.1), ["prs"], ["prs"]),
    (judged("correct", 0.9), [], []),
    (judged("hack", 0.1), [], ["prs"]),
    (judged("hack", 0.9), [], []),
    (judged("hack", None), [], []),
    (judged("hack", 0.1, values_match=False), [], []),
    (judged("hack", 0.1, values_match=None), [], []),
    (judged("incorrect", 0.1), [], []),
    (judged("infra_error", 0.1), [], []),
]


@pytest.mark.parametrize("in_the_reward", ["true", "false"])
@pytest.mark.parametrize("hack_check", [True, False])
def test_prs_rejects_what_was_rewarded_as_correct_by_the_measured_ratio(hack_check, in_the_reward):
    """Whether the ratio is a part of the reward has no say, and neither has what a wrong answer earns."""
    checks = [f"reward.hack_check={str(hack_check).lower()}", f"reward.profiling_ratio={in_the_reward}"]
    earned = ["reward.earns.incorrect=1.0", "reward.earns.hack=0.5"]
    config = load_recipe("mini-cpu", ["rejection.prs=hard", *checks, *earned])
    expected = [checked if hack_check else unchecked for _, checked, unchecked in PRS_TABLE]
    assert masks_of(config, 3, [verdict for verdict, *_ in PRS_TABLE]) == expected


def test_every_row_has_a_draw_of_its_own_for_prs():
    """Rows that are kept with a chance of one half: by (seed, step, problem, sample, turn), and always the same."""
    verdicts = [judged("correct", 0.35)] * 40

    def fates(seed=1, step=3, problem="p0"):
        return masks_of(load_recipe("mini-cpu", [f"seed={seed}"]), step, verdicts, problem)

    usual = fates()
    assert 8 < usual.count(["prs"]) < 32 and usual == fates()
    assert all(other != usual for other in (fates(seed=2), fates(step=4), fates(problem="p1")))
    config = load_recipe("mini-cpu", ["seed=1"])
    trajectories = [Trajectory("p0", 0, [t.turns[0] for t in rewarded(config, 3, verdicts)[0]], 3)]
    rows = rows_of(trajectories[0])  # the same verdicts as turns of one sample
    train.set_masks(rows, [torch.tensor(row.rollout_logprobs) for row in rows], trajectories, config)
    by_turn = [row.masks for row in rows]
    assert 8 < by_turn.count(["prs"]) < 32 and by_turn != usual and by_turn[0] == usual[0]
