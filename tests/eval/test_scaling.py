"""Test-time scaling: what later turns are shown, curves with costs, parallel answers at equal budget; comparisons."""

from __future__ import annotations

import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from made_up import MadeUpJudge

from env.records import Verdict
from eval import compare, cost, evaluation, run, scaling
from eval.context import ContextChat, kept_turns
from eval.settings import RunError
from rl import modeling
from rl.config import load_recipe
from rl.prompts import Chat, TextChat
from rl.records import Trajectory, Turn, read_trajectories

pytestmark = pytest.mark.budget(60)

SMALL = [
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "model.kv_heads=1",
    "model.mlp=16",
    "model.vocab_size=400",
]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "model"
    modeling.build_initial(load_recipe("mini-cpu", [*SMALL, "model.context=900"]), ["import torch\n"], folder)
    return folder


@pytest.fixture(scope="module")
def chat(model_folder) -> Chat:
    return Chat(modeling.load(model_folder, "cpu")[1])


def conversation(chat, rewards) -> list[Turn]:
    """Turns as a vanilla rollout makes them: answer i is "a<i>", its feedback "f<i>"."""
    turns, message = [], "task"
    prompt = chat.first_prompt(message)
    for number, value in enumerate(rewards):
        ids = [*chat._encode(f"a{number}"), chat.layout.end_id] if isinstance(chat, Chat) else []
        given = list(prompt) if ids else []
        turns.append(Turn(given, ids, [], 0, "stop", message, f"a{number}", reward=value))
        message = f"f{number}"
        prompt = chat.next_prompt(turns, message)
    return turns


def test_the_best_turns_are_kept_in_their_order_and_the_later_of_equals():
    turns = [Turn([], [], [], 0, "stop", reward=value) for value in (1.0, 3.0, None, 1.0, 0.0, 2.0)]
    assert kept_turns(turns, 4) == [0, 1, 3, 5] and kept_turns(turns, 3) == [1, 3, 5]
    assert kept_turns(turns, 9) == list(range(6))


def test_messages_hold_the_kept_answers_each_with_its_own_feedback():
    turns = conversation(TextChat(), [0.0, 2.0, 0.0, 1.0])
    said = ContextChat(TextChat(), 2).next_prompt(turns, "f3")
    assert [message["content"] for message in said] == ["task", "a1", "f1", "a3", "f3"]
    assert [message["role"] for message in said] == ["user", "assistant"] * 2 + ["user"]
    said = ContextChat(TextChat(), 1).next_prompt(turns, "f3")
    assert [message["content"] for message in said] == ["task", "a1", "f1"]


def test_ids_are_those_that_were_sampled_and_the_first_turns_are_as_in_vanilla(chat):
    turns = conversation(chat, [0.0, 2.0, 0.0, 1.0, 0.5])
    managed = ContextChat(chat, 4)
    for count in range(1, 5):
        message = f"f{count - 1}"
        assert managed.next_prompt(turns[:count], message) == chat.next_prompt(turns[:count], message)
    prompt = managed.next_prompt(turns, "f4")
    text = chat.tokenizer.decode(prompt)
    assert [text.find(part) >= 0 for part in ("task", "a0", "a1", "f1", "a3", "a4", "f4")] == [
        True, False, True, True, True, True, True,
    ]  # fmt: skip
    assert "a2" in text and len(prompt) < len(chat.next_prompt(turns, "f4"))


def test_where_even_they_are_too_long_fewer_are_kept(chat):
    turns = conversation(chat, [0.0, 2.0, 0.0, 1.0])
    lengths = [len(ContextChat(chat, keep).next_prompt(turns, "f3")) for keep in (1, 2, 3, 4)]
    assert lengths == sorted(lengths)
    for keep, length in enumerate(lengths, 1):
        assert len(ContextChat(chat, 4, limit=length).next_prompt(turns, "f3")) == lengths[keep - 1]
    assert len(ContextChat(chat, 4, limit=1).next_prompt(turns, "f3")) == lengths[0]
    with pytest.raises(ValueError, match="keep = 0"):
        ContextChat(chat, 0)


def evaluated(out: Path, model, monkeypatch, *more: str) -> Path:
    monkeypatch.setattr(evaluation, "make_pool", lambda config: MadeUpJudge(reference=config.env.reference))
    run.main(
        run.parser().parse_args(["--model", str(model), "--problems", "generator:heldout:3", "--out", str(out),
                                 "--device", "cpu", "--recipe", "mini-cpu", *more])
    )  # fmt: skip
    return out


def test_a_model_with_a_small_context_goes_on_for_any_number_of_turns(tmp_path, model_folder, monkeypatch):
    options = (
        "--samples",
        "1",
        "--turns",
        "8",
        "--set",
        "rollout.max_new_tokens=40",
        "--set",
        "prompts.feedback_lines=3",
    )
    ended = {}
    for kind in ("vanilla", "context"):
        out = evaluated(tmp_path / kind, model_folder, monkeypatch, *options, "--scaling", kind, "--keep", "1")
        trajectories = list(read_trajectories(out / "trajectories.jsonl"))
        ended[kind] = [len(t.turns) for t in trajectories if t.ended != "infra"]
        longest = max(len(turn.prompt_ids) for t in trajectories for turn in t.turns)
        assert longest + 40 <= 900
    assert set(ended["context"]) == {8}
    assert max(ended["vanilla"]) < 8


def test_curves_have_costs_beside_each_point(tmp_path, monkeypatch, capsys):
    out = evaluated(tmp_path / "a", "teacher", monkeypatch, "--samples", "2", "--turns", "8", "--best-of", "9",
                    "--scaling", "context")  # fmt: skip
    scaling.main([out], 1.2)
    printed = capsys.readouterr().out
    assert "best 4 turns in the prompt" in printed and "N=1: " in printed
    result = json.loads((out / "scaling.json").read_text())
    points = result["points"]["1.2"]
    assert [point["turn"] for point in points] == list(range(1, 9))
    best = [point["best"]["value"] for point in points]
    assert best == sorted(best) and best[-1] > 0
    verdicts = [point["cost"]["verdicts"] for point in points]
    assert verdicts[0] == 1 and verdicts == sorted(verdicts)
    judged = [result["seconds"][f"turn{turn}"]["judge_s"] for turn in range(1, 9)]
    assert judged == [pytest.approx(0.5 * count) for count in verdicts]


def turn(speedup: float | None, tokens: int, asked: int = 10) -> Turn:
    verdict = Verdict(status="correct" if speedup else "incorrect", speedup=speedup).to_json()
    return Turn([0] * asked, [0] * tokens, [], 0, "stop", "", str(tokens), verdict, 0.0)


def test_the_curve_and_its_equal_budget_have_their_closed_form():
    sequence = [
        Trajectory("a", 0, [turn(None, 10), turn(1.5, 25, 40), turn(0.9, 25, 80)]),
        Trajectory("a", 1, [turn(2.0, 10), turn(None, 25, 40), turn(3.0, 25, 80)]),
    ]
    single = [Trajectory("a", i, [turn(1.3 if i < 2 else None, 10)]) for i in range(6)]
    points = scaling.curve(sequence, single, 3, 1.2)
    assert [point["last"]["value"] for point in points] == [0.5, 0.5, 0.5]
    assert [point["best"]["value"] for point in points] == [0.5, 1.0, 1.0]
    assert [point["cost"]["new_tokens"] for point in points] == [10, 35, 60]
    assert [point["cost"]["all_tokens"] for point in points] == [20, 85, 190]
    # 10, 35 and 60 new tokens buy 1, 3 and 6 answers; 20, 85 and 190 in all buy 1, 4 and 9, and nobody has 9.
    draws = {
        n: sum(any(i < 2 for i in d) for d in itertools.combinations(range(6), n)) / math.comb(6, n)
        for n in (1, 3, 4, 6)
    }
    for point, n in zip(points, (1, 3, 6)):
        beside = point["parallel"]["new_tokens"]
        assert (beside["n"], beside["value"]) == (n, pytest.approx(draws[n]))
    assert points[1]["parallel"]["all_tokens"]["value"] == pytest.approx(draws[4])
    assert points[2]["parallel"]["all_tokens"]["n"] == 9 and points[2]["parallel"]["all_tokens"]["value"] is None


def test_costs_add_up_over_turns_and_a_plan_is_plain_arithmetic(tmp_path):
    sample = Trajectory("a", 0, [turn(1.0, 5), turn(1.0, 7, 20)])
    costs = cost.by_turn([sample, replace(sample, turns=sample.turns[:1])], 2)
    assert costs["turn2"]["new_tokens"] == (5 + 7 + 5) / 2 and costs["turn2"]["verdicts"] == 1.5
    hours, text = cost.plan(250, 8, 3, 9.0, 8, 1, "measured", best_of=2)
    assert hours == pytest.approx((6000 + 500) * 9 / 8 / 3600) and "6500 verdicts x 9 s (measured)" in text
    with pytest.raises(ValueError, match="no verdict's cost"):
        cost.measured_verdict(tmp_path / "wall.jsonl")


def test_two_evaluations_are_compared_problem_by_problem(tmp_path, monkeypatch):
    options = ("--samples", "3", "--turns", "2")
    a = evaluated(tmp_path / "a", "teacher", monkeypatch, *options)
    b = evaluated(tmp_path / "b", "teacher", monkeypatch, *options, "--set", "seed=9")
    found = compare.of_runs(a, b)
    assert found["settings"] == ["config.seed: 1 -> 9"]
    assert len(found["per_problem"]) == 3 and found["left_out"] == []
    for name, difference in found["differences"].items():
        pairs = [row[name] for row in found["per_problem"].values() if None not in row[name]]
        mean = sum(after - before for before, after in pairs) / len(pairs) if pairs else None
        assert difference["value"] == (pytest.approx(mean) if pairs else None)
    text = compare.tables(found)
    assert all(id in text for id in found["per_problem"]) and "differs: config.seed: 1 -> 9" in text
    same = compare.of_runs(a, a)["differences"]
    assert all(entry["value"] in (0.0, None) and entry["low"] in (0.0, None) for entry in same.values())


def test_what_can_not_be_compared_is_refused(tmp_path, monkeypatch):
    options = ("--samples", "1", "--turns", "1")
    a = evaluated(tmp_path / "a", "teacher", monkeypatch, *options)
    b = evaluated(tmp_path / "b", "teacher", monkeypatch, *options)
    lines = (b / "problems.jsonl").read_text().splitlines()
    other = json.loads(lines[0])
    other["source"] += "# changed\n"
    (b / "problems.jsonl").write_text("\n".join([json.dumps(other), *lines[1:]]))
    with pytest.raises(RunError, match="another problem"):
        compare.of_runs(a, b)
    (b / "problems.jsonl").write_text(json.dumps({**other, "id": "alone"}))
    with pytest.raises(RunError, match="no problem in common"):
        compare.of_runs(a, b)
    with pytest.raises(RunError, match="no evaluation's folder"):
        compare.of_runs(a, tmp_path / "nothing")
