"""eval/degenerate.py on made-up outputs, and eval/audit.py on references with one fault each, run as the judge does."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from env.records import Problem
from env.tensors import pack, plan
from eval import audit, degenerate, scores
from eval.settings import RunError

pytestmark = pytest.mark.budget(60)

SOURCE = """import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, x):
        {forward}


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
"""
LINEAR = "self.linear = nn.Linear(16, 16)"


def problem(id: str, forward: str, init: str = "pass", inputs: str = "torch.rand(8, 16)") -> Problem:
    return Problem(id, SOURCE.format(init=init, forward=forward, inputs=inputs))


SOUND = [
    problem("relu", "return torch.relu(x - 0.5)"),
    problem("linear", "return self.linear(x)", LINEAR),
    problem("loss", "return (20 * x.sum()).sin()"),  # a scalar is no constant output
]
FAULTY = {
    "zero": problem("zero", "return torch.relu(-x)"),
    "constant": problem("constant", "return torch.clamp(self.linear(x) + 100.0, max=3.0)", LINEAR),
    "inputs_fixed": problem("inputs_fixed", "return torch.relu(x)", inputs="torch.arange(128.0).reshape(8, 16) - 64"),
    "independent_of_inputs": problem("independent_of_inputs", "return self.linear(x - x)", LINEAR),
    "independent_of_weights": problem("independent_of_weights", "return x * 2 + 0 * self.linear(x)", LINEAR),
    "random": problem("random", "return torch.nn.functional.dropout(x, 0.5, True)"),
    "shortcut": problem("shortcut", "return x + 1e-7 * torch.sin(x)"),
    "nan": problem("nan", "return torch.log(-x - 1)"),
    "fails": problem("fails", "return torch.no_such_function(x)"),
}


@pytest.fixture(scope="module")
def auditor():
    with audit.Auditor("cpu", seed=3) as made:
        yield made


@pytest.mark.parametrize("kind", FAULTY)
def test_each_fault_is_found_in_a_reference_that_has_it(auditor, kind):
    found = auditor.audit(FAULTY[kind])["reasons"]
    assert kind in {reason["kind"] for reason in found}, found
    assert {reason["kind"] for reason in found} <= set(degenerate.KINDS)


@pytest.mark.parametrize("sound", SOUND, ids=lambda problem: problem.id)
def test_sound_references_are_left_alone(auditor, sound):
    assert auditor.audit(sound) == {"reasons": []}


def test_what_changes_from_run_to_run_is_random(auditor):
    found = auditor.audit(problem("clock", "import time; return x + time.time() % 1"))["reasons"]
    assert [reason["kind"] for reason in found] == ["random"]


def test_a_shortcut_says_whose_tolerance_lets_it_pass(auditor):
    # Off by up to 5e-3: within the paper's 1e-2, outside of both others.
    found = auditor.audit(problem("small", "return 0.005 * torch.sin(40 * x)"))["reasons"]
    zeros = next(reason for reason in found if "zeros" in reason["detail"])
    assert (zeros["kind"], zeros["passes"]) == ("shortcut", ["paper"])
    unchanged = auditor.audit(FAULTY["shortcut"])["reasons"]
    (entry,) = [reason for reason in unchanged if "input 0" in reason["detail"]]
    assert entry["passes"] == ["default", "kernelbench", "paper"]


def test_the_list_is_written_resumed_and_left_out_of_scores(tmp_path, auditor, monkeypatch):
    problems, out = [SOUND[0], FAULTY["zero"], FAULTY["fails"]], tmp_path / "list.json"
    calls = []
    real = auditor.audit

    def counted(one):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(one.id)
        return real(one)

    monkeypatch.setattr(auditor, "audit", counted)
    with pytest.raises(KeyboardInterrupt):
        audit.audit(problems, out, auditor, "made up")
    assert not out.exists()
    with open(out.with_name("list.json.partial.jsonl"), "a", encoding="utf-8") as file:
        file.write('\n{"cut short')
    calls.clear()
    data = audit.audit(problems, out, auditor, "made up")
    assert calls == ["fails"] and list(data["problems"]) == ["zero", "fails"]
    assert json.loads(out.read_text()) == scores.read_list(out) == data
    assert scores.listed(data, problems) == (["zero", "fails"], [])
    text = audit.describe(data)
    assert "2 of 3 problems are degenerate" in text and "zero: zero: all outputs are zero" in text
    partial = out.with_name("list.json.partial.jsonl")
    partial.write_text(partial.read_text().replace('"cpu"', '"another"'))
    with pytest.raises(RunError, match="begun on another"):
        audit.audit(problems, out, auditor, "made up")


def test_lanes_find_the_same_and_what_was_too_big_beside_others_is_tried_again_alone(tmp_path, monkeypatch):
    problems = [SOUND[0], *FAULTY.values()]
    with audit.Auditor("cpu", seed=3, lanes=3) as made:
        real, lock, tried, beside, under_way = made.audit, threading.Lock(), threading.Event(), [], []

        def crowded(one):
            with lock:
                under_way.append(one.id)
                beside.append(len(under_way))
                refused = one.id == "zero" and not tried.is_set()
                if one.id == "zero":
                    tried.set()
            try:
                return {"not_audited": "too big here"} if refused else real(one)
            finally:
                with lock:
                    under_way.remove(one.id)

        monkeypatch.setattr(made, "audit", crowded)
        data = audit.audit(problems, tmp_path / "list.json", made, "made up")
    assert max(beside) > 1 and beside[-1] == 1 and len(beside) == len(problems) + 1
    assert list(data["problems"]) == list(FAULTY) and data["not_audited"] == {}
    for kind, entry in data["problems"].items():
        assert kind in {reason["kind"] for reason in entry["reasons"]}


def test_a_fault_of_ours_in_one_lane_ends_all_of_them(tmp_path, auditor, monkeypatch):
    asked = []

    def failing(one):
        asked.append(one.id)
        raise RuntimeError("no more workers")

    monkeypatch.setattr(auditor, "audit", failing)
    with pytest.raises(RuntimeError, match="no more workers"):
        audit.audit(list(FAULTY.values()), tmp_path / "list.json", auditor, "made up")
    assert len(asked) == 1 and not (tmp_path / "list.json").exists()


def test_what_this_machine_can_not_run_is_said_and_not_listed(tmp_path, auditor):
    bf16 = problem("bf16", "return torch.relu(x)", inputs="torch.rand(8, 16, dtype=torch.bfloat16)")
    data = audit.audit([bf16], tmp_path / "list.json", auditor, "made up")
    assert data["problems"] == {} and "bfloat16" in data["not_audited"]["bf16"]


# Pure ----------------------------------------------------------------------------------------------------------------


def seen(outputs: list[dict[str, torch.Tensor]], inputs: torch.Tensor, **changes) -> degenerate.Observed:
    def laid_out(tree):
        layout, tensors, nbytes = plan(tree, keep_strides=False)
        data = torch.zeros(nbytes, dtype=torch.uint8)
        pack(layout, tensors, data)
        return layout, data

    layout, first = laid_out(outputs[0])
    given = [laid_out([inputs + trial])[1] for trial in range(len(outputs))]
    inputs_layout = laid_out([inputs])[0]
    data = [laid_out(output)[1] for output in outputs]
    return degenerate.Observed(**{
        "layout": layout, "outputs": data, "inputs_layout": inputs_layout, "inputs": given,
        "moved": None, "reseeded": first,
    } | changes)  # fmt: skip


def kinds(observed: degenerate.Observed) -> list[str]:
    return [reason["kind"] for reason in degenerate.reasons(observed, degenerate.tolerances())]


def test_several_outputs_are_constant_only_if_all_are():
    draws = [torch.rand(4, 5) for _ in range(3)]
    assert kinds(seen([{"a": torch.full((3,), float(i + 1)), "b": d} for i, d in enumerate(draws)], draws[0])) == []
    constant = [{"a": torch.full((3,), i + 1.0), "b": torch.full((2, 2), i - 5.0)} for i in range(3)]
    assert kinds(seen(constant, draws[0])) == ["constant"]


def test_a_scalar_that_differs_between_trials_is_no_constant():
    assert kinds(seen([torch.tensor(float(i)) for i in range(1, 4)], torch.rand(4))) == []


def test_integer_outputs_must_be_equal_to_pass():
    trials = [torch.arange(6).reshape(2, 3) * i for i in (1, 2, 3)]
    assert kinds(seen(trials, torch.rand(2, 3))) == []
    same = [torch.arange(6).reshape(2, 3)] * 3
    assert "independent_of_inputs" in kinds(seen(same, torch.rand(2, 3)))


def test_one_row_for_the_batch_is_a_shortcut_where_the_batch_holds_it():
    row = torch.arange(5.0)
    trials = [row.expand(4, 5) + 1e-6 * torch.rand(4, 5) for _ in range(3)]
    details = [r["detail"] for r in degenerate.reasons(seen(trials, torch.rand(4, 5)), degenerate.tolerances())]
    assert any("one row" in detail for detail in details) and not any("zeros" in detail for detail in details)


def test_a_guess_must_pass_in_every_trial():
    near_zero, far = torch.full((8,), 1e-6) * torch.rand(8), torch.rand(8) + 1
    observed = seen([near_zero, far, far + 1], torch.rand(8))
    assert kinds(observed) == []


def test_the_shipped_list_can_be_read():
    path = Path(scores.__file__).parent / "data" / "kernelbench_degenerate.json"
    if path.is_file():
        assert scores.read_list(path)["device"] != "cpu"
