"""Rollouts with a scripted engine and judge: token-exact turns, early ends, schedules, resumable evaluation."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

import rl.rollout
from env.pool import PoolError
from env.records import Problem, Verdict
from rl.config import Prompts, Reward, load_recipe
from rl.engines.base import Completion, EngineError, Sampling
from rl.modeling import train_tokenizer
from rl.plan import Plan, schedule_of
from rl.prompts import Chat
from rl.records import DamagedRecords, read_trajectories
from rl.rollout import evaluate_problems, rollout
from rl.wording import Wording

pytestmark = pytest.mark.budget(20)

SOURCE = "class Model:\n    pass\n"
PROBLEMS = [Problem(f"p{i}", f"{SOURCE}# {i}\n") for i in range(5)]
WORDING = Wording.load(Prompts(templates="mini"))


class Engine:
    """Answers with the seed in digits, all that it can take, the last prompt first; every third is cut off."""

    takes = "ids"

    def __init__(self, chat, log=None):
        self.tokenizer, self.log, self.prompts = chat.tokenizer, log if log is not None else [], []

    def stream(self, source, sampling):
        while requests := source.take(source.most, wait=True):
            self.prompts.append({request.key: list(request.prompt) for request in requests})
            for request in reversed(requests):
                self.log.append(f"sampled {request.key}")
                ids = self.tokenizer.encode(f"answer {request.seed % 1000}")
                cut = request.key % 3 == 2
                ids = ids + [ids[0]] * (sampling.max_new_tokens - len(ids)) if cut else [*ids, sampling.stop_ids[0]]
                reason = "length" if cut else "stop"
                yield request, Completion(ids, [-0.5] * len(ids), reason, request.prompt)


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
def chat():
    return Chat(train_tokenizer([SOURCE], 400))


@pytest.fixture
def plan(chat):
    """Makes a Plan; context: its limit."""
    sampling = Sampling(20, stop_ids=chat.stop_ids)
    usual = Plan(3, 2, sampling, Reward(), WORDING, seed=5, step=7, policy_version=4)

    def make(context=1000, **changes):
        return replace(usual, sampling=replace(sampling, context=context), **changes)

    return make


@pytest.mark.parametrize("schedule", ["turns", "phases", "free"])
def test_turns_are_token_exact_and_complete(chat, plan, tmp_path, schedule):
    engine = Engine(chat)
    trajectories, seconds = rollout(engine, Judge(), chat, PROBLEMS[:2], plan(schedule=schedule), tmp_path / "t.jsonl")
    assert [(t.problem_id, t.sample_index) for t in trajectories] == [(p, i) for p in ("p0", "p1") for i in range(3)]
    for place, trajectory in enumerate(trajectories):
        first, second = trajectory.turns
        given = [prompt for batch in engine.prompts for key, prompt in batch.items() if key % 6 == place]
        assert [first.prompt_ids, second.prompt_ids] == given
        assert first.prompt_ids == chat.first_prompt(first.prompt_text)
        assert second.prompt_ids == chat.next_prompt([first], second.prompt_text)
        assert second.prompt_ids[: len(given[0]) + len(first.completion_ids)] == given[0] + first.completion_ids
        assert f"of {first.completion_text}" in second.prompt_text
        for turn in trajectory.turns:
            assert turn.logprobs == [-0.5] * len(turn.completion_ids) and turn.policy_version == 4
            assert turn.finish_reason == ("length" if place % 3 == 2 else "stop")
            assert turn.reward == pytest.approx(3.5) and "cost" not in turn.verdict
        assert trajectory.step == 7 and trajectory.ended == ""
    texts = {turn.completion_text for t in trajectories for turn in t.turns}
    assert len(texts) == 12  # every (problem, sample, turn) has a seed of its own
    assert seconds["seconds/judge_work"] == sum(range(1, 13))


def test_what_is_returned_is_on_disk(chat, plan, tmp_path):
    path = tmp_path / "deep" / "t.jsonl"
    trajectories, _ = rollout(Engine(chat), Judge(), chat, PROBLEMS[:1], plan(), path)
    assert list(read_trajectories(path)) == trajectories


def test_an_answer_is_judged_while_others_are_sampled(chat, plan, tmp_path):
    log = []
    rollout(Engine(chat, log), Judge(log), chat, PROBLEMS[:1], plan(turns=1), tmp_path / "t.jsonl")
    assert [entry.split()[0] for entry in log] == ["sampled", "submitted"] * 3


def test_nothing_is_sampled_while_the_judge_measures_on_the_same_gpu(chat, plan, tmp_path):
    log = []

    class Measuring(Judge):
        """Its verdict comes later, and until then it measures."""

        def __init__(self, log):
            super().__init__(log)
            self.threads, self.gate = ThreadPoolExecutor(1), threading.Event()

        def submit(self, problem, response, raw=True):
            future = super().submit(problem, response)
            return self.threads.submit(lambda: (self.log.append("measured"), future.result())[1])

    rollout(Engine(chat, log), Measuring(log), chat, PROBLEMS[:1], plan(schedule="phases"), tmp_path / "t.jsonl")
    kinds = [entry.split()[0] for entry in log]
    for half in (kinds[:9], kinds[9:]):  # all of a turn's sampling before the first verdict is asked for
        assert half[:3] == ["sampled"] * 3 and sorted(half[3:]) == ["measured"] * 3 + ["submitted"] * 3


def test_a_sample_goes_on_as_soon_as_its_own_verdict_is_in(chat, plan, tmp_path):
    """Sample 0's first verdict comes only after all other samples have taken all their turns."""
    taken, others_done = [], threading.Event()

    class Slow(Judge):
        def __init__(self):
            super().__init__()
            self.threads = ThreadPoolExecutor(8)

        def submit(self, problem, response, raw=True):
            verdict = super().submit(problem, response).result()
            taken.append(response)
            if len(taken) == 1 + 2 * 2 + 0:  # sample 0's first turn, and two turns of two others
                others_done.set()
            first_of_sample_0 = response == first

            def judge():
                if first_of_sample_0:
                    assert others_done.wait(10), "the others waited for sample 0"
                return verdict

            return self.threads.submit(judge)

    ordinary = rollout(Engine(chat), Judge(), chat, PROBLEMS[:1], plan(), tmp_path / "a.jsonl")[0]
    first = ordinary[0].turns[0].completion_text
    freely, _ = rollout(Engine(chat), Slow(), chat, PROBLEMS[:1], plan(schedule="free"), tmp_path / "b.jsonl")
    assert taken[-1] == freely[0].turns[1].completion_text and len(taken) == 6
    assert [t.turns[0].completion_ids for t in freely] == [t.turns[0].completion_ids for t in ordinary]
    assert all(len(t.turns) == 2 for t in freely)


def test_where_sampling_and_judging_may_overlap():
    def schedule(*overrides):
        return schedule_of(load_recipe(*overrides))

    assert schedule("mini-cpu") == "turns"
    assert schedule("mini-gpu") == "phases"
    assert schedule("mini-gpu", ["env.placement=apart"]) == "free"


@pytest.mark.parametrize("schedule", ["turns", "free"])
def test_a_trajectory_ends_where_the_context_does(chat, plan, tmp_path, schedule):
    longest = len(chat.first_prompt(WORDING.first_message(PROBLEMS[0])))

    def ends(name, context, **changes):
        tight = plan(context=context, schedule=schedule, **changes)
        found, _ = rollout(Engine(chat), Judge(), chat, PROBLEMS[:1], tight, tmp_path / name)
        return [(len(t.turns), t.ended) for t in found]

    assert ends("a", longest + 20) == [(1, "context")] * 3
    assert ends("b", longest + 19) == [(0, "context")] * 3
    assert ends("c", longest + 1000) == [(2, "")] * 3


def test_a_turn_may_begin_with_less_room_than_a_whole_answer(chat, plan, tmp_path):
    longest = len(chat.first_prompt(WORDING.first_message(PROBLEMS[0])))

    class Long(Engine):
        """Fills whatever room there is."""

        def stream(self, source, sampling):
            for request in source.take(source.most, wait=True):
                room = sampling.limit(len(request.prompt))
                reason = sampling.reason(5, room)
                yield request, Completion([5] * room, [-1.0] * room, reason, request.prompt)

    def ends(name, room, least):
        tight = plan(context=longest + room, min_new_tokens=least, turns=1)
        found, _ = rollout(Long(chat), Judge(), chat, PROBLEMS[:1], tight, tmp_path / name)
        return [(t.ended, [(len(turn.completion_ids), turn.finish_reason) for turn in t.turns]) for t in found]

    assert ends("a", 8, 5) == [("", [(8, "context")])] * 3
    assert ends("b", 4, 5) == [("context", [])] * 3
    assert ends("c", 30, 5) == [("", [(20, "length")])] * 3


def test_a_verdict_that_is_nobodys_fault_ends_the_trajectory_unrewarded(chat, plan, tmp_path):
    judge = Judge(infra=(1,))  # the engine finishes the last sample first
    trajectories, _ = rollout(Engine(chat), judge, chat, PROBLEMS[:1], plan(), tmp_path / "t.jsonl")
    assert [(len(t.turns), t.ended) for t in trajectories] == [(2, ""), (2, ""), (1, "infra")]
    assert trajectories[2].turns[0].reward is None


def test_an_engine_without_logprobs_is_refused_before_anything_is_written(chat, plan, tmp_path):
    class Mute(Engine):
        def stream(self, source, sampling):
            for request, completion in super().stream(source, sampling):
                yield request, replace(completion, logprobs=[])

    with pytest.raises(EngineError, match="0 log-probs"):
        rollout(Mute(chat), Judge(), chat, PROBLEMS[:1], plan(), tmp_path / "t.jsonl")
    assert not (tmp_path / "t.jsonl").exists()


@pytest.mark.parametrize("schedule", ["turns", "phases", "free"])
@pytest.mark.parametrize("turn", [1, 2])
def test_a_sample_that_gets_no_answer_stops_the_rollout(chat, plan, tmp_path, schedule, turn):
    """Else the answer and the verdict of the turn before would be trained on twice, or the sample end short."""

    class Dropping(Engine):
        def stream(self, source, sampling):
            for request, completion in super().stream(source, sampling):
                if request.name.endswith(f"turn {turn}") and "sample 2" in request.name:
                    continue
                yield request, completion

    words = rf"without an answer: problem p0, sample 2, turn {turn}; problem p1, sample 2, turn {turn}$"
    with pytest.raises(EngineError, match=words):
        rollout(Dropping(chat), Judge(), chat, PROBLEMS[:2], plan(schedule=schedule), tmp_path / "t.jsonl")
    assert not (tmp_path / "t.jsonl").exists()


def test_a_verdict_that_no_judge_gives_names_whose_it_is(chat, plan, tmp_path):
    class Odd(Judge):
        def submit(self, problem, response, raw=True):
            future = super().submit(problem, response)
            future.result().profiling_ratio = float("inf")
            return future

    with pytest.raises(PoolError, match="problem p0, sample 0, turn 1: its verdict has profiling_ratio = inf"):
        rollout(Engine(chat), Odd(), chat, PROBLEMS[:1], plan(), tmp_path / "t.jsonl")
    assert not (tmp_path / "t.jsonl").exists()


@pytest.mark.parametrize("schedule", ["turns", "free"])
def test_an_answer_to_another_turn_stops_the_rollout(chat, plan, tmp_path, schedule):
    class Stale(Engine):
        """Says the first turn's answer once more in place of the second's."""

        def stream(self, source, sampling):
            first = getattr(self, "first", None)
            for request, completion in super().stream(source, sampling):
                self.first = first = first or (request, completion)
                yield first if request.name.endswith("turn 2") else (request, completion)

    with pytest.raises(EngineError, match=r"answered twice|never asked"):
        rollout(Stale(chat), Judge(), chat, PROBLEMS[:1], plan(schedule=schedule), tmp_path / "t.jsonl")
    assert not (tmp_path / "t.jsonl").exists()


def test_a_killed_evaluation_ends_in_the_same_bytes(chat, plan, tmp_path, monkeypatch):
    monkeypatch.setitem(rl.rollout.AT_ONCE, "turns", 6)

    def evaluate(path):
        judge = Judge()
        done = evaluate_problems(Engine(chat), judge, chat, PROBLEMS, plan(), path)
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


class Slow(Judge):
    """Gives a verdict when told to: the oldest outstanding one, or the newest."""

    def __init__(self, newest):
        super().__init__()
        self.newest, self.waiting, self.most = newest, [], 0

    def submit(self, problem, response, raw=True):
        verdict, future = super().submit(problem, response).result(), Future()
        self.waiting.append((future, verdict))
        self.most = max(self.most, len(self.waiting))
        return future

    def give(self):
        future, verdict = self.waiting.pop(-1 if self.newest else 0)
        future.set_result(verdict)


@pytest.mark.parametrize("newest", [False, True])
def test_a_free_evaluation_keeps_its_window_full_and_writes_what_is_finished(chat, plan, tmp_path, monkeypatch, newest):
    monkeypatch.setitem(rl.rollout.AT_ONCE, "free", 4)
    path, judge, sizes = tmp_path / "t.jsonl", Slow(newest), []

    def wait(verdicts, return_when):
        judge.give()
        sizes.append(len(list(read_trajectories(path))) if path.is_file() else 0)

    monkeypatch.setattr(rl.rollout.futures, "wait", wait)
    done = evaluate_problems(Engine(chat), judge, chat, PROBLEMS, plan(schedule="free"), path)
    assert judge.most == 4 and judge.count == 5 * 3 * 2
    assert [(t.problem_id, t.sample_index) for t in done] == [(p.id, i) for p in PROBLEMS for i in range(3)]
    assert list(read_trajectories(path)) == done and all(len(t.turns) == 2 for t in done)
    # The oldest verdict first: all but the window is on disk at any time. The newest first: the oldest sample holds up
    # the others, but what is begun goes before what is new.
    assert sizes == sorted(sizes) and len(set(sizes)) >= (6 if not newest else 2)


def test_a_killed_free_evaluation_ends_in_the_same_bytes(chat, plan, tmp_path, monkeypatch):
    monkeypatch.setitem(rl.rollout.AT_ONCE, "free", 4)

    def evaluate(path):
        judge = Judge()
        return evaluate_problems(Engine(chat), judge, chat, PROBLEMS, plan(schedule="free"), path), judge.count

    whole, count = evaluate(tmp_path / "whole.jsonl")
    assert count == 5 * 3 * 2
    data = (tmp_path / "whole.jsonl").read_bytes()
    lines = data.splitlines(keepends=True)
    for kept in (0, 3, 4, 14):
        path = tmp_path / f"cut{kept}.jsonl"
        path.write_bytes(b"".join(lines[:kept]) + lines[kept][:40])
        found, count = evaluate(path)
        assert found == whole and path.read_bytes() == data and count == 2 * (15 - kept)
    assert evaluate(path) == (whole, 0)


@pytest.mark.parametrize("schedule", ["turns", "free"])
def test_a_line_missing_in_the_middle_stops_an_evaluation(chat, plan, tmp_path, schedule):
    """Else all behind it would count for the sample before."""
    path = tmp_path / "t.jsonl"
    evaluate_problems(Engine(chat), Judge(), chat, PROBLEMS, plan(schedule=schedule), path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:7] + lines[8:]))
    with pytest.raises(DamagedRecords, match=r"t\.jsonl:8: problem p2, sample 2, is out of place"):
        evaluate_problems(Engine(chat), Judge(), chat, PROBLEMS, plan(schedule=schedule), path)
