"""Plans: every setting of a rollout and of an evaluation arrives at what it is for."""

from __future__ import annotations

import pytest

from env.records import Problem
from rl.config import Earns, load_recipe
from rl.modeling import train_tokenizer
from rl.plan import evaluation_plan, training_plan
from rl.prompts import Chat
from rl.wording import Wording

pytestmark = pytest.mark.budget(10)

# No two of them are equal, and none is a default.
SETTINGS = [
    "seed=11", "model.context=700", "rollout.samples_per_prompt=5", "rollout.turns=4", "rollout.max_new_tokens=70",
    "rollout.min_new_tokens=30", "rollout.temperature=0.7", "eval.turns=6", "eval.temperature=0.4", "eval.top_p=0.8",
    "eval.samples=9", "reward.speedup_cap=2.5", "reward.earns.hack=-0.5", "prompts.templates=default",
    "prompts.feedback_lines=7",
]  # fmt: skip


def settings(*overrides):
    return load_recipe("mini-cpu", [*SETTINGS, *overrides])


def said(wording):
    """The messages of both kinds; the second one shows how much is quoted."""
    feedback = "\n".join(f"line {number}" for number in range(20))
    messages = wording.first_message(Problem("p", "class Model:\n    pass\n")), wording.next_message(feedback)
    assert "line 1\n" in messages[1] and "line 10" not in messages[1]
    return messages


@pytest.fixture(scope="module")
def chat():
    return Chat(train_tokenizer(["class Model:\n"], 400))


def test_a_training_step_samples_as_the_rollout_settings_say(chat):
    config = settings()
    plan = training_plan(config, chat, step=3, policy_version=2, vocabulary=400)
    assert (plan.samples, plan.turns, plan.seed, plan.step, plan.policy_version) == (5, 4, 11, 3, 2)
    assert (plan.min_new_tokens, plan.schedule) == (30, "turns")
    sampling = plan.sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p) == (70, 0.7, 1.0)
    assert (sampling.stop_ids, sampling.context, sampling.vocabulary) == (chat.stop_ids, 700, 400)
    assert plan.reward == config.reward and plan.reward.speedup_cap == 2.5 and plan.reward.earns == Earns(hack=-0.5)
    assert said(plan.wording) == said(Wording.load(config.prompts))


def test_an_evaluation_samples_as_its_own_settings_say(chat):
    config = settings()
    plan = evaluation_plan(config, chat.stop_ids, samples=9, policy_version=2)
    assert (plan.samples, plan.turns, plan.policy_version) == (9, 6, 2)
    assert (plan.min_new_tokens, plan.schedule) == (30, "turns")
    sampling = plan.sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p) == (70, 0.4, 0.8)
    assert (sampling.stop_ids, sampling.context) == (chat.stop_ids, 700)
    assert plan.reward == config.reward and said(plan.wording) == said(Wording.load(config.prompts))


def test_policies_of_one_run_are_evaluated_under_the_same_draws_and_those_of_another_seed_under_others(chat):
    """Neither the policy nor how often it is evaluated moves a draw; they are none of training's."""
    plans = [evaluation_plan(settings(), chat.stop_ids, 9, version) for version in (0, 5)]
    assert plans[0].seed == plans[1].seed and plans[0].step == plans[1].step
    assert evaluation_plan(settings("eval.every=3", "train.steps=77"), chat.stop_ids, 1).seed == plans[0].seed
    other = [evaluation_plan(settings(f"seed={seed}"), chat.stop_ids, 9).seed for seed in (12, 13)]
    seeds = {plans[0].seed, *other, *(training_plan(settings(), chat, step, 0).seed for step in (1, 2))}
    assert len(seeds) == 4


def test_where_judge_and_policy_are_on_one_gpu_they_take_turns(chat):
    for placement, schedule in (("shared", "phases"), ("apart", "free")):
        config = load_recipe("mini-gpu", [f"env.placement={placement}"])
        assert training_plan(config, chat, 1, 0).schedule == schedule
        assert evaluation_plan(config, chat.stop_ids, 1).schedule == schedule
