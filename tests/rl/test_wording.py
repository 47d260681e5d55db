"""Templates: what they say, what is refused in them, a worked example that the judge itself finds right."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env.pool import Pool
from env.records import Problem
from rl.config import ConfigError, Prompts
from rl.wording import Wording, shorten

pytestmark = pytest.mark.budget(60)

SOURCE = "import torch\n\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return {0: x, '$': 1}[0]\n"
PROBLEM = Problem("p", SOURCE, entry_point="Net")


@pytest.mark.parametrize("name", ["default", "mini"])
def test_the_first_message_holds_the_source_verbatim_and_the_name_to_define(name):
    message = Wording.load(Prompts(templates=name)).first_message(PROBLEM)
    assert f"```python\n{SOURCE}```" in message and "NetNew" in message
    assert message == message.strip()


@pytest.mark.parametrize("name", ["default", "mini"])
def test_a_later_message_quotes_the_feedback(name):
    said = Wording.load(Prompts(templates=name)).next_message("status: hack\nit costs $5 {and} %s")
    assert "status: hack\nit costs $5 {and} %s" in said and len(said) > 45


def test_the_worked_example_is_right_and_faster():
    message = Wording.load(Prompts()).first_message(PROBLEM)
    reference, answer, own = re.findall(r"```python\n(.*?)```", message, re.DOTALL)
    assert own == SOURCE and "class Example(" in reference and "class ExampleNew(" in answer
    # The teacher and figures look for the problem's own reference: it must be the first that defines class Model.
    assert "class Model" not in message.replace(SOURCE, "")
    with Pool(device="cpu", slots=1, seed=1) as pool:
        problem = Problem("example", reference, entry_point="Example")
        verdict = pool.submit(problem, f"So:\n```python\n{answer}```", raw=True).result()
    assert verdict.status == "correct", verdict.message
    assert verdict.speedup > 1 and verdict.profiling_ratio == 1.0


def folder(tmp_path, first="$source $entry_point", following="$feedback"):
    (tmp_path / "first_turn.txt").write_text(first)
    (tmp_path / "next_turn.txt").write_text(following)
    return Prompts(templates=str(tmp_path))


def test_a_folder_of_ones_own_takes_their_place(tmp_path):
    wording = Wording.load(folder(tmp_path, "Do $entry_point for 5 $$: $source", "It said $feedback"))
    assert wording.first_message(Problem("p", "x = 1\n")) == "Do Model for 5 $: x = 1"
    assert wording.next_message("no") == "It said no"


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (("no reference",), ["first_turn.txt", "$source is missing"]),
        (("$source $referense",), ["first_turn.txt", "$referense", "$entry_point"]),
        (("$source for 5 $",), ["first_turn.txt", "$$"]),
        (("$source", "go on"), ["next_turn.txt", "$feedback is missing"]),
        (("$source", "$feedback $source"), ["next_turn.txt", "$source"]),
    ],
)
def test_a_template_that_can_not_be_meant_is_refused(tmp_path, texts, words):
    with pytest.raises(ConfigError) as refusal:
        Wording.load(folder(tmp_path, *texts))
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_a_folder_that_is_not_there_or_not_whole_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"prompts.templates = 'defautl'.*default, mini"):
        Wording.load(Prompts(templates="defautl"))
    folder(tmp_path)
    (tmp_path / "next_turn.txt").unlink()
    with pytest.raises(ConfigError, match=r"next_turn.txt: can't be read"):
        Wording.load(Prompts(templates=str(tmp_path)))


@given(st.lists(st.text(alphabet="ab\t ", max_size=30), max_size=30), st.integers(3, 9), st.integers(8, 20))
@settings(max_examples=100, deadline=None)
def test_feedback_stays_within_its_budget(lines, limit, columns):
    text = "\n".join(lines)
    short = shorten(text, limit, columns).split("\n")
    assert len(short) <= limit and all(len(line) <= columns for line in short)
    stripped = text.strip().split("\n")
    if len(stripped) <= limit and all(len(line) <= columns for line in stripped):
        assert short == stripped


def test_long_feedback_keeps_both_ends():
    text = "\n".join(f"line {i}" for i in range(100))
    short = shorten(text, 5, 40)
    assert short == "line 0\nline 1\n...\nline 98\nline 99"
