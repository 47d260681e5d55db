"""Cold start: order, texts, resumption, filtering and export, with a fake judge and teacher."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from env.generator import generate
from env.problems import write_jsonl
from env.records import Problem, Verdict
from rl import collect as stage
from rl import export
from rl.checkpoint import CheckpointError
from rl.collect import collect, filtered, main, make_teacher
from rl.config import ConfigError, Keep, Server, load_recipe
from rl.engines import openai
from rl.engines.base import Completion, EngineError, Sampling
from rl.engines.base import generate as ask
from rl.engines.journal import JournalEngine
from rl.records import DamagedRecords, Trajectory, Turn, read_trajectories
from rl.teacher import ScriptedEngine, ScriptedTeacher

pytestmark = pytest.mark.budget(30)

PROBLEMS = [Problem(f"p{i}", f"class Model:\n    number = {i}\n") for i in range(3)]
SERVER = Server("http://host:1/v1", "strong")
CONFIG = load_recipe("mini-cpu", ["collect.trajectories=50", "collect.turns=2"])


class Teacher:
    """Says what it was shown: how many messages, and a draw."""

    takes = "messages"

    def __init__(self, same=False):
        self.asked, self.same = 0, same

    def stream(self, source, sampling):
        while requests := source.take(5, wait=True):
            for request in requests:
                self.asked += 1
                shown = [message["content"] for message in request.prompt]
                text = "the same" if self.same else f"draw {request.seed % 99991} to {len(shown)}: {shown[-1][:24]}"
                yield request, Completion([], [], "stop", text=text)


class Judge:
    """Verdicts from threads, so that they come in any order; equal answers share a future, as in the pool."""

    def __init__(self, kill_after=None, infra=lambda problem, response: False):
        self.threads, self.known = ThreadPoolExecutor(4), {}
        self.count, self.kill_after, self.infra = 0, kill_after, infra

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return None

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


def collected(folder):
    return list(read_trajectories(folder / "trajectories.jsonl"))


def test_samples_are_spread_over_the_problems_and_see_the_conversation(tmp_path):
    collect(Teacher(), Judge(), PROBLEMS, CONFIG, tmp_path)
    found = collected(tmp_path)
    assert [(t.problem_id, t.sample_index) for t in found] == [(f"p{i // 17}", i % 17) for i in range(50)]
    for trajectory in found:
        first, second = trajectory.turns
        assert "class Model" in first.prompt_text and second.prompt_text.startswith("status: incorrect")
        assert "to 1: Write a faster" in first.completion_text and "to 3: status: incorrect" in second.completion_text
        assert first.reward == 0.0 and "cost" not in first.verdict and first.prompt_ids == first.logprobs == []
    assert len({turn.completion_text for t in found for turn in t.turns}) == 100  # a draw of its own each
    assert (tmp_path / "asked.jsonl").read_text().count("\n") == 51  # equal numbers a problem; what is over is left


def test_equal_runs_and_killed_runs_have_equal_bytes(tmp_path):
    names = ("asked.jsonl", "trajectories.jsonl", "messages.jsonl")
    collect(Teacher(), Judge(), PROBLEMS, CONFIG, tmp_path / "whole")
    whole = {name: (tmp_path / "whole" / name).read_bytes() for name in names}
    path = tmp_path / "killed" / "asked.jsonl"
    with pytest.raises(KeyboardInterrupt):
        collect(Teacher(), Judge(kill_after=90), PROBLEMS, CONFIG, tmp_path / "killed")
    kept = path.read_bytes()
    assert 0 < len(kept) < len(whole["asked.jsonl"])
    path.write_bytes(kept + whole["asked.jsonl"][:50])  # a kill in the middle of a line
    resumed = Teacher()
    collect(resumed, Judge(), PROBLEMS, CONFIG, tmp_path / "killed")
    assert whole == {name: (tmp_path / "killed" / name).read_bytes() for name in names}
    assert resumed.asked == 2 * (51 - kept.count(b"\n"))


def test_equal_answers_are_each_their_own_sample(tmp_path):
    collect(Teacher(same=True), Judge(), PROBLEMS, CONFIG, tmp_path)
    assert len(collected(tmp_path)) == 50


def test_what_could_not_be_judged_is_left_out(tmp_path, capsys):
    judge = Judge(infra=lambda problem, response: problem.id == "p1")
    collect(Teacher(), judge, PROBLEMS, CONFIG, tmp_path)
    assert {t.problem_id for t in collected(tmp_path)} == {"p0", "p2"}
    assert "17 of 50 samples were dropped" in capsys.readouterr().out
    late = Judge(infra=lambda problem, response: "to 3" in response and problem.id == "p0")  # in the last turn
    collect(Teacher(), late, PROBLEMS, CONFIG, tmp_path / "late")
    assert {t.problem_id for t in collected(tmp_path / "late")} == {"p1", "p2"}


def test_a_judge_that_judges_nothing_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="not one of 50"):
        collect(Teacher(), Judge(infra=lambda problem, response: True), PROBLEMS, CONFIG, tmp_path)


# Filtering and export ------------------------------------------------------------------------------------------------


def some(count: int) -> list[Trajectory]:
    """`count` trajectories whose last turns are in turn hack, correct and incorrect."""
    statuses = ("hack", "correct", "incorrect")
    return [
        Trajectory(f"p{i}", 0, [Turn([], [], [], 0, "stop", "ask", "say", {"status": statuses[i % 3]}, 0.0)])
        for i in range(count)
    ]


def test_shares_are_kept_by_the_last_status():
    found = some(300)
    kept = filtered(found, Keep(hack=0.25, incorrect=0.0), seed=1)
    assert Counter(t.turns[-1].verdict["status"] for t in kept) == {"correct": 100, "hack": 25}
    assert kept == sorted(kept, key=found.index) == filtered(found, Keep(hack=0.25, incorrect=0.0), seed=1)
    assert kept != filtered(found, Keep(hack=0.25, incorrect=0.0), seed=2)
    assert filtered(found, Keep(), seed=1) == found


def test_shares_reach_what_sft_reads(tmp_path):
    config = replace(CONFIG, collect=replace(CONFIG.collect, keep=Keep(incorrect=0.5)))
    collect(Teacher(), Judge(), PROBLEMS, config, tmp_path)
    assert len(collected(tmp_path)) == 25
    nothing = replace(CONFIG, collect=replace(CONFIG.collect, keep=Keep(incorrect=0.0)))
    with pytest.raises(RuntimeError, match=r"collect\.keep leaves nothing of 50"):
        collect(Teacher(), Judge(), PROBLEMS, nothing, tmp_path)


def test_tables_hold_the_conversations(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    trajectories = some(4)
    trajectories[0].turns[0].completion_text = "half a pair: \ud83d"
    lines, table = export.export(trajectories, tmp_path / "out")
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert rows == parquet.read_table(table).to_pylist()
    assert rows[1]["messages"] == [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "say"}]
    assert [row["status"] for row in rows] == [["hack"], ["correct"], ["incorrect"], ["hack"]]
    assert rows[0]["speedup"] == [None] and rows[0]["reward"] == [0.0]


def a_line_taken_out(path):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))


def a_line_changed(path):
    lines = path.read_bytes().splitlines(keepends=True)
    data = json.loads(lines[2])
    data["turns"][0]["verdict"] = None
    path.write_bytes(b"".join([*lines[:2], json.dumps(data).encode() + b"\n", *lines[3:]]))


def a_line_cut(path):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], lines[2][:50] + b"\n", *lines[3:]]))


def a_file_of_others(path):
    path.write_bytes(path.read_bytes().replace(b'"problem_id": "p0"', b'"problem_id": "other"'))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            a_line_taken_out,
            "3: problem p0, sample 3, is out of place: a line is missing or moved",
        ),
        (a_line_changed, "3: a turn without a verdict"),
        (a_line_cut, "3: not a trajectory"),
        (a_file_of_others, "1: problem other, sample 0, is out of place"),
    ],
)
def test_damaged_answers_are_told_with_file_and_line(tmp_path, damage, words):
    collect(Teacher(), Judge(), PROBLEMS, CONFIG, tmp_path)
    path = tmp_path / "asked.jsonl"
    damage(path)
    before = path.read_bytes()
    with pytest.raises(DamagedRecords, match=f"{path}:{words}"):
        collect(Teacher(), Judge(), PROBLEMS, CONFIG, tmp_path)
    assert path.read_bytes() == before


def test_a_finished_collection_without_its_result_is_told(tmp_path):
    (tmp_path / "collect").mkdir()
    (tmp_path / "collect" / "DONE").touch()
    with pytest.raises(CheckpointError, match=r"DONE is there, but trajectories\.jsonl isn't: remove DONE"):
        main(tmp_path)


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"key": "a"}', '{"key": "a", "text": null, "finish_reason": "stop"}', "\xff"]
)
def test_a_damaged_answer_of_a_server_is_told_with_file_and_line(tmp_path, line):
    path = tmp_path / "answers.jsonl"
    good = json.dumps({"key": "k", "text": "t", "finish_reason": "stop"})
    path.write_text(f"{good}\n{line}\n", encoding="latin-1")
    with pytest.raises(EngineError, match=rf"{path}:2: no answer of the server .* asked for again"):
        JournalEngine(SERVER, path)


class FullDisk:
    """A file that takes nothing more."""

    def write(self, data):
        raise OSError(28, "No space left on device")


def test_answers_and_tables_say_where_the_disk_is_full(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(openai.OpenAIEngine, "_ask", lambda *_: Completion([], [], "stop", text="paid for"))
    engine = JournalEngine(SERVER, tmp_path / "answers.jsonl")
    engine._file = FullDisk()
    with pytest.raises(OSError, match=r"MiB are free there.*answers\.jsonl"):
        ask(engine, [[{"role": "user", "content": "?"}]], Sampling(10), [1])

    def full(table, path):
        path.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet, "write_table", full)
    with pytest.raises(OSError, match=r"MiB are free there.*out\.parquet"):
        export.export(some(2), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.jsonl", "out.jsonl"]


def test_what_sft_and_others_read_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    forced, renamed, fsync, replace_file = [], {}, os.fsync, os.replace

    def noted_fsync(descriptor):
        forced.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def noted_replace(source, target):
        renamed[Path(target).name] = str(source) in forced
        replace_file(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    collect(Teacher(), Judge(), PROBLEMS, CONFIG, tmp_path)
    names = ["trajectories.jsonl", "manifest.json", "messages.jsonl", "messages.parquet"]
    assert renamed == dict.fromkeys(names, True)


# Teachers ------------------------------------------------------------------------------------------------------------


def test_the_script_answers_as_an_engine(tmp_path):
    problems = generate("train", 3, 0, "cpu")
    shares = {"tuned": 1.0}
    prompts = [[{"role": "user", "content": f"```python\n{p.source}```"}] for p in problems]
    texts = [c.text for c in ask(ScriptedEngine(shares), prompts, Sampling(10), [5, 6, 7])]
    teacher = ScriptedTeacher()
    said = [prompt[0]["content"] for prompt in prompts]
    assert texts == [teacher.respond(text, random.Random(n), shares) for text, n in zip(said, [5, 6, 7])]
    with pytest.raises(EngineError, match="no weights"):
        ScriptedEngine(shares).push(None)


def test_the_script_refuses_problems_that_it_does_not_know(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_json()))
    write_jsonl([Problem("foreign", "class Model:\n    def forward(self, x):\n        return x @ x\n")],
        tmp_path / "problems" / "train.jsonl")  # fmt: skip
    with pytest.raises(ConfigError, match=r"problem foreign.*collect.teacher=server"):
        main(tmp_path)
    assert not (tmp_path / "collect" / "asked.jsonl").exists()


def test_a_server_is_asked_once_for_each_answer(tmp_path, monkeypatch):
    asked = []

    def answer(self, request, sampling):
        asked.append(request.seed)
        if len(asked) == 5:
            raise EngineError("the server is gone")
        return Completion([], [], "stop", text=f"answer {request.seed % 997} ü")

    monkeypatch.setattr(openai.OpenAIEngine, "_ask", answer)
    server = ["collect.teacher=server", "server.url=http://x/v1", "server.model=m", "server.parallel=2"]
    config = load_recipe("mini-cpu", [*server, "collect.trajectories=6", "collect.turns=2"])
    monkeypatch.setattr(stage, "make_pool", lambda config: Judge())
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    write_jsonl(PROBLEMS, tmp_path / "problems" / "train.jsonl")
    with pytest.raises(EngineError, match="gone"):
        main(tmp_path)
    path = tmp_path / "collect" / "answers.jsonl"
    before = path.read_bytes()
    assert 3 <= before.count(b"\n") <= 5
    path.write_bytes(before + b'{"key": "cut sho')
    main(tmp_path)
    assert len(asked) <= 6 * 2 + 2  # the one that failed, and one beside it
    assert path.read_bytes().startswith(before) and path.read_bytes().count(b"\n") == 12
    assert len(collected(tmp_path / "collect")) == 6 and (tmp_path / "collect" / "DONE").exists()
    again = make_teacher(PROBLEMS, config, tmp_path / "collect")
    assert isinstance(again, JournalEngine) and len(again._known) == 12


def test_empty_answers_are_dropped_and_said(tmp_path, capsys):
    """A reasoning model that spends its budget on thinking: an empty answer would teach to say nothing."""

    class Silent(Teacher):
        def stream(self, source, sampling):
            for request, completion in super().stream(source, sampling):
                silent = "sample 3," in request.name and request.name.endswith("turn 2")
                yield request, (replace(completion, text=" \n", finish_reason="length") if silent else completion)

    collect(Silent(), Judge(), PROBLEMS, CONFIG, tmp_path)
    assert "3 of 50 samples were dropped: an answer is empty" in capsys.readouterr().out
    assert len(collected(tmp_path)) == 47 and 3 not in {t.sample_index for t in collected(tmp_path)}


def test_a_teacher_that_never_says_anything_is_an_error(tmp_path):
    class Mute(Teacher):
        def stream(self, source, sampling):
            for request, completion in super().stream(source, sampling):
                yield request, replace(completion, text="")

    with pytest.raises(RuntimeError, match="all of 50 samples have an empty answer"):
        collect(Mute(), Judge(), PROBLEMS, CONFIG, tmp_path)


@pytest.mark.parametrize("turn, left", [(1, 0), (2, 1)])
def test_a_server_without_room_ends_the_conversation_there(tmp_path, turn, left):
    class Small(Teacher):
        def stream(self, source, sampling):
            for request, completion in super().stream(source, sampling):
                full = "sample 5," in request.name and request.name.endswith(f"turn {turn}")
                yield request, (replace(completion, text="", finish_reason="context") if full else completion)

    collect(Small(), Judge(), PROBLEMS, CONFIG, tmp_path)
    asked = [t for t in read_trajectories(tmp_path / "asked.jsonl") if t.sample_index == 5]
    assert [(len(t.turns), t.ended) for t in asked] == [(left, "context")] * 3
    assert sum(t.sample_index == 5 for t in collected(tmp_path)) == (3 if left else 0)


def test_trajectories_that_were_cut_after_the_cold_start_are_not_trained_on(tmp_path, monkeypatch):
    from rl import sft

    collect(Teacher(), Judge(), PROBLEMS, CONFIG, tmp_path / "collect")
    monkeypatch.setattr(sft, "load_run", lambda run: CONFIG)
    monkeypatch.setattr(sft, "_stage", lambda *_: None)
    sft.main(tmp_path)
    path = tmp_path / "collect" / "trajectories.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:25]))  # at a line's end: nothing else shows it
    with pytest.raises(ConfigError, match=r"trajectories\.jsonl has \d+ bytes instead of \d+.*/DONE: then"):
        sft.main(tmp_path)
    (tmp_path / "collect" / "manifest.json").unlink()  # on purpose
    sft.main(tmp_path)
