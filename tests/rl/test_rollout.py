"""Rollouts with a scripted engine and judge: token-exact turns, early ends, overlap, resumable evaluation."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import pytest

from env.records import Problem, Verdict
from rl import prompts
from rl.config import Reward
from rl.engines.base import Completion, Sampling, in_order
from rl.modeling import train_tokenizer
from rl.records import read_trajectories
from rl.rollout import Plan, evaluate_problems, rollout

pytestmark = pytest.mark.budget(20)

SOURCE = "class Model:\n    pass\n"
PROBLEMS = [Problem(f"p{i}", f"{SOURCE}# {i}\n") for i in range(5)]


class Engine:
    """Answers with the seed in digits, last prompt first; every third answer is cut off."""

    def __init__(self, tokenizer, log):
        self.tokenizer, self.log, self.prompts = tokenizer, log, []

    def stream(self, batch, sampling, seeds):
        self.prompts.append([list(prompt) for prompt in batch])
        for index in reversed(range(len(batch))):
            self.log.append(f"sampled {index}")
            ids = self.tokenizer.encode(f"answer {seeds[index] % 1000}")
            cut = index % 3 == 2
            ids = ids if cut else [*ids, self.tokenizer.eos_token_id]
            yield index, Completion(ids, [-0.5] * len(ids), "length" if cut else "stop")


class Judge:
    def __init__(self, log=None, infra=()):
        self.log, self.infra, self.count = log if log is not None else [], infra, 0

    def submit(self, problem, response, raw=True):
        self.count += 1
        self.log.append(f"submitted {response}")
        status = "infra_error" if self.count in self.infra else "correct"
        verdict = Verdict(status, speedup=2.0, profiling_ratio=0.5, feedback=f"status: {status} of {response}")
        verdict.cost = {"total_s": self.count}
        future = Future()
        future.set_result(verdict)
        return future


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([SOURCE], 400)


def plan(**changes):
    return replace(Plan(3, 2, 1000, Sampling(20), Reward(), seed=5, step=7, policy_version=4), **changes)


def test_turns_are_token_exact_and_complete(tokenizer, tmp_path):
    engine = Engine(tokenizer, [])
    trajectories, seconds = rollout(engine, Judge(), tokenizer, PROBLEMS[:2], plan(), tmp_path / "t.jsonl")
    assert [(t.problem_id, t.sample_index) for t in trajectories] == [(p, i) for p in ("p0", "p1") for i in range(3)]
    for place, trajectory in enumerate(trajectories):
        first, second = trajectory.turns
        assert first.prompt_ids == engine.prompts[0][place] == prompts.first_prompt(tokenizer, first.prompt_text)
        expected = prompts.next_prompt(tokenizer, first.prompt_ids, first.completion_ids, second.prompt_text)
        assert second.prompt_ids == engine.prompts[1][place] == expected
        assert f"of {first.completion_text}" in second.prompt_text
        for turn in trajectory.turns:
            assert turn.logprobs == [-0.5] * len(turn.completion_ids) and turn.policy_version == 4
            assert turn.reward == pytest.approx(3.5) and "cost" not in turn.verdict
        assert trajectory.step == 7 and trajectory.ended == ""
    texts = {turn.completion_text for t in trajectories for turn in t.turns}
    assert len(texts) == 12  # every (problem, sample, turn) has a seed of its own
    assert seconds["seconds/judge_work"] == sum(range(1, 13))


def test_what_is_returned_is_on_disk(tokenizer, tmp_path):
    path = tmp_path / "deep" / "t.jsonl"
    trajectories, _ = rollout(Engine(tokenizer, []), Judge(), tokenizer, PROBLEMS[:1], plan(), path)
    assert list(read_trajectories(path)) == trajectories


def test_an_answer_is_judged_while_others_are_sampled(tokenizer, tmp_path):
    log = []
    judge, engine = Judge(log), Engine(tokenizer, log)
    rollout(engine, judge, tokenizer, PROBLEMS[:1], plan(turns=1), tmp_path / "t.jsonl")
    assert [entry.split()[0] for entry in log] == ["sampled", "submitted"] * 3


def test_a_trajectory_ends_where_the_context_does(tokenizer, tmp_path):
    longest = max(len(prompts.first_prompt(tokenizer, prompts.first_message(p))) for p in PROBLEMS[:1])
    tight = plan(context=longest + 20)
    trajectories, _ = rollout(Engine(tokenizer, []), Judge(), tokenizer, PROBLEMS[:1], tight, tmp_path / "a.jsonl")
    assert [(len(t.turns), t.ended) for t in trajectories] == [(1, "context")] * 3
    tight = plan(context=longest + 19)
    trajectories, _ = rollout(Engine(tokenizer, []), Judge(), tokenizer, PROBLEMS[:1], tight, tmp_path / "b.jsonl")
    assert [(len(t.turns), t.ended) for t in trajectories] == [(0, "context")] * 3


def test_a_verdict_that_is_nobodys_fault_ends_the_trajectory_unrewarded(tokenizer, tmp_path):
    judge = Judge(infra=(1,))  # the engine finishes the last sample first
    trajectories, _ = rollout(Engine(tokenizer, []), judge, tokenizer, PROBLEMS[:1], plan(), tmp_path / "t.jsonl")
    assert [(len(t.turns), t.ended) for t in trajectories] == [(2, ""), (2, ""), (1, "infra")]
    assert trajectories[2].turns[0].reward is None


def test_a_killed_evaluation_ends_in_the_same_bytes(tokenizer, tmp_path):
    def evaluate(path):
        judge = Judge()
        done = evaluate_problems(Engine(tokenizer, []), judge, tokenizer, PROBLEMS, plan(), path, problems_at_once=2)
        return done, judge.count

    whole, count = evaluate(tmp_path / "whole.jsonl")
    assert count == 5 * 3 * 2 and len(whole) == 15
    data = (tmp_path / "whole.jsonl").read_bytes()
    assert evaluate(tmp_path / "whole.jsonl") == (whole, 0)
    lines = data.splitlines(keepends=True)
    for kept in (0, 5, 6, 7, 13):  # whole groups are 6 lines, the last one 3
        path = tmp_path / f"cut{kept}.jsonl"
        path.write_bytes(b"".join(lines[:kept]) + lines[kept][:40])
        assert evaluate(path)[0] == whole and path.read_bytes() == data
    assert evaluate(path)[1] == 0


def test_in_order_sorts_a_stream():
    first, second = Completion([1], [0.0], "stop"), Completion([2], [0.0], "stop")
    assert in_order(iter([(1, second), (0, first)])) == [first, second]
