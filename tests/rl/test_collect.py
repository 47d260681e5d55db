"""Cold start: order, texts, resumption and dropped samples, with a fake judge and teacher."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from env.problems import write_jsonl
from env.records import Problem, Verdict
from rl.collect import collect, collect_from_server, main
from rl.config import ConfigError, load_recipe
from rl.engines.base import Completion
from rl.records import read_trajectories

pytestmark = pytest.mark.budget(20)

PROBLEMS = [Problem(f"p{i}", f"class Model:\n    number = {i}\n") for i in range(3)]
CONFIG = load_recipe("mini-cpu", ["collect.trajectories=50", "collect.turns=2"])


def teacher(text, rng):
    """Says what it was shown: how many messages, and a draw."""
    return f"answer to {text.count('Improve it')} of {text.count('class Model')}, draw {rng.random():.6f}"


class Judge:
    """Verdicts from threads, so that they come in any order; equal answers share a future, as in the pool."""

    def __init__(self, kill_after=None, infra=lambda problem, response: False):
        self.threads, self.known = ThreadPoolExecutor(4), {}
        self.count, self.kill_after, self.infra = 0, kill_after, infra

    def submit(self, problem, response, raw=True) -> Future:
        self.count += 1
        if self.count == self.kill_after:
            raise KeyboardInterrupt
        key = problem.id, response
        if key not in self.known:
            self.known[key] = self.threads.submit(self._judge, problem, response)
        return self.known[key]

    def _judge(self, problem, response):
        status = "infra_error" if self.infra(problem, response) else "incorrect"
        return Verdict(status, feedback=f"status: {status}", cost={"total_s": 0.1})


def test_samples_take_problems_in_turn_and_see_the_conversation(tmp_path):
    collect(teacher, Judge(), PROBLEMS, CONFIG, tmp_path)
    found = list(read_trajectories(tmp_path / "trajectories.jsonl"))
    assert [(t.problem_id, t.sample_index) for t in found] == [(f"p{i % 3}", i // 3) for i in range(50)]
    for trajectory in found:
        first, second = trajectory.turns
        assert "class Model" in first.prompt_text and second.prompt_text.startswith("status: incorrect")
        assert first.completion_text.startswith("answer to 0 of 1,")
        assert second.completion_text.startswith("answer to 1 of 1,")
        assert first.reward == 0.0 and "cost" not in first.verdict
    assert len({turn.completion_text for t in found for turn in t.turns}) == 100  # a draw of its own each


def test_equal_runs_and_killed_runs_have_equal_bytes(tmp_path):
    collect(teacher, Judge(), PROBLEMS, CONFIG, tmp_path / "whole")
    whole = (tmp_path / "whole" / "trajectories.jsonl").read_bytes()
    path = tmp_path / "killed" / "trajectories.jsonl"
    with pytest.raises(KeyboardInterrupt):
        collect(teacher, Judge(kill_after=90), PROBLEMS, CONFIG, tmp_path / "killed")
    kept = path.read_bytes()
    assert 0 < len(kept) < len(whole)
    path.write_bytes(kept + whole[:50])  # a kill in the middle of a line
    resumed = Judge()
    collect(teacher, resumed, PROBLEMS, CONFIG, tmp_path / "killed")
    assert path.read_bytes() == whole and resumed.count == 100 - 2 * kept.count(b"\n")


def test_equal_answers_are_each_their_own_sample(tmp_path):
    collect(lambda text, rng: "the same", Judge(), PROBLEMS, CONFIG, tmp_path)
    assert len(list(read_trajectories(tmp_path / "trajectories.jsonl"))) == 50


def test_what_could_not_be_judged_is_left_out(tmp_path, capsys):
    judge = Judge(infra=lambda problem, response: problem.id == "p1")
    collect(teacher, judge, PROBLEMS, CONFIG, tmp_path)
    found = list(read_trajectories(tmp_path / "trajectories.jsonl"))
    assert {t.problem_id for t in found} == {"p0", "p2"} and all(len(t.turns) == 2 for t in found)
    assert "17 of 50 samples were dropped" in capsys.readouterr().out


class Strong:
    """A model behind a server: says what it was shown; requests come when samples are ready for them."""

    takes = "messages"

    def __init__(self):
        self.asked = 0

    def stream(self, source, sampling):
        while requests := source.take(5, wait=True):
            for request in requests:
                self.asked += 1
                shown = [message["content"] for message in request.prompt]
                text = f"answer {request.seed % 997} to {len(shown)}: {shown[-1][:24]}"
                yield request, Completion([], [], "stop", text=text)


def test_a_model_behind_a_server_is_a_teacher_too(tmp_path):
    config = replace(CONFIG, collect=replace(CONFIG.collect, trajectories=10))
    engine = Strong()
    collect_from_server(engine, Judge(), PROBLEMS, config, tmp_path)
    found = list(read_trajectories(tmp_path / "trajectories.jsonl"))
    assert [t.problem_id for t in found] == ["p0"] * 4 + ["p1"] * 4 + ["p2"] * 2
    for trajectory in found:
        first, second = trajectory.turns
        assert "to 1: Write a faster" in first.completion_text and "to 3: status: incorrect" in second.completion_text
        assert second.prompt_text.startswith("status: incorrect") and first.prompt_ids == first.logprobs == []
    again = Strong()
    collect_from_server(again, Judge(), PROBLEMS, config, tmp_path)  # all there: nothing is asked
    assert engine.asked == 12 * 2 and again.asked == 0
    judge = Judge(infra=lambda problem, response: problem.id != "p1")
    collect_from_server(Strong(), judge, PROBLEMS, config, tmp_path / "broken")
    assert {t.problem_id for t in read_trajectories(tmp_path / "broken" / "trajectories.jsonl")} == {"p1"}
    with pytest.raises(RuntimeError, match="not one of 10"):
        judge = Judge(infra=lambda problem, response: True)
        collect_from_server(Strong(), judge, PROBLEMS, config, tmp_path / "nothing")


def test_the_script_refuses_problems_that_it_does_not_know(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_json()))
    write_jsonl([Problem("foreign", "class Model:\n    def forward(self, x):\n        return x @ x\n")],
        tmp_path / "problems" / "train.jsonl")  # fmt: skip
    with pytest.raises(ConfigError, match=r"problem foreign.*collect.teacher=server"):
        main(tmp_path)
    assert not (tmp_path / "collect" / "trajectories.jsonl").exists()


def test_a_judge_that_judges_nothing_is_an_error(tmp_path):
    config = replace(CONFIG, collect=replace(CONFIG.collect, trajectories=4))
    with pytest.raises(RuntimeError, match="not one of 4"):
        collect(teacher, Judge(infra=lambda problem, response: True), PROBLEMS, config, tmp_path)
