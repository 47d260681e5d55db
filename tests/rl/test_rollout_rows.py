"""What a rollout notes: costs once an answer, how a sample ended, when a turn may begin."""

from __future__ import annotations

import sys
import time
from concurrent.futures import Future

import pytest

from env.records import Problem, Verdict
from rl.config import Prompts, Reward
from rl.engines.base import Completion, Sampling
from rl.modeling import train_tokenizer
from rl.plan import Plan
from rl.prompts import Chat
from rl.rollout import rollout
from rl.wording import Wording

pytestmark = pytest.mark.budget(10)

PROBLEM = Problem("p0", "class Model:\n    pass\n")
WORDING = Wording.load(Prompts(templates="mini"))
SCHEDULES = pytest.mark.parametrize("schedule", ["turns", "phases", "free"])


class Engine:
    takes = "ids"

    def stream(self, source, sampling):
        while requests := source.take(source.most, wait=True):
            for request in requests:
                yield request, Completion([5, sampling.stop_ids[0]], [-0.5, -0.25], "stop", request.prompt)


class Judge:
    """A verdict of the status that belongs to the submission's number; one cost of 3 s for all equal answers."""

    def __init__(self, *statuses, shared=False):
        self.statuses, self.shared, self.futures = statuses, shared, []

    def submit(self, problem, response, raw=True):
        assert raw and problem is PROBLEM
        if self.shared and self.futures:
            return self.futures[0]
        verdict = Verdict(self.statuses[len(self.futures) % len(self.statuses)], speedup=2.0, feedback="go on")
        verdict.cost = {"total_s": 3.0}
        self.futures.append(Future())
        self.futures[-1].set_result(verdict)
        return self.futures[-1]


@pytest.fixture(scope="module")
def chat():
    return Chat(train_tokenizer(["class Model:\n"], 400))


@pytest.fixture
def sampled(chat, tmp_path):
    def run(judge, room=1000, **changes):
        context = len(chat.first_prompt(WORDING.first_message(PROBLEM))) + room
        sampling = Sampling(20, stop_ids=chat.stop_ids, context=context)
        plan = Plan(**{"samples": 3, "turns": 2, "schedule": "turns"} | changes, sampling=sampling, reward=Reward(),
                    wording=WORDING, seed=5)  # fmt: skip
        return rollout(Engine(), judge, chat, [PROBLEM], plan, tmp_path / "t.jsonl")

    return run


@SCHEDULES
def test_what_a_verdict_cost_counts_once_however_many_answers_share_it(sampled, schedule):
    assert sampled(Judge("correct"), schedule=schedule)[1]["seconds/judge_work"] == 18.0
    assert sampled(Judge("correct", shared=True), schedule=schedule)[1]["seconds/judge_work"] == 3.0


class Late(Future):
    """A verdict that is waited for."""

    def result(self, timeout=None):
        time.sleep(0.02)
        return super().result(timeout)


@pytest.mark.parametrize("schedule", ["turns", "phases"])
def test_seconds_of_sampling_and_of_waiting_for_verdicts_are_told_apart(sampled, monkeypatch, schedule):
    plain = Engine.stream

    def slow(self, source, sampling):
        time.sleep(0.05)
        yield from plain(self, source, sampling)

    monkeypatch.setattr(Engine, "stream", slow)
    monkeypatch.setattr(sys.modules[__name__], "Future", Late)
    begun = time.perf_counter()
    seconds = sampled(Judge("correct"), schedule=schedule)[1]
    whole = time.perf_counter() - begun
    assert seconds["seconds/rollout"] >= 2 * 0.05 and seconds["seconds/judge"] >= 2 * 3 * 0.02
    assert seconds["seconds/rollout"] + seconds["seconds/judge"] <= whole


@SCHEDULES
def test_a_sample_with_all_its_turns_did_not_end_early_whatever_the_last_verdict_is(sampled, schedule):
    statuses = ["correct"] * 3 + ["infra_error", "problem_error", "correct"]
    trajectories, _ = sampled(Judge(*statuses), schedule=schedule)
    assert [(len(t.turns), t.ended) for t in trajectories] == [(2, "")] * 3
    assert sorted(t.turns[1].reward is None for t in trajectories) == [False, True, True]


@SCHEDULES
def test_one_that_could_not_be_judged_before_its_last_turn_ended_there(sampled, schedule):
    trajectories, _ = sampled(Judge("infra_error"), schedule=schedule)
    assert [(len(t.turns), t.ended) for t in trajectories] == [(1, "infra")] * 3


@pytest.mark.parametrize(("least", "room", "begins"), [(0, 20, True), (0, 19, False), (5, 5, True), (5, 4, False),
                                                      (50, 20, True), (50, 19, False)])  # fmt: skip
def test_a_turn_begins_where_the_least_fits_and_never_asks_for_more_than_a_whole_answer(sampled, least, room, begins):
    trajectories, _ = sampled(Judge("correct"), room, min_new_tokens=least, turns=1)
    assert [(len(t.turns), t.ended) for t in trajectories] == [(1, "") if begins else (0, "context")] * 3
