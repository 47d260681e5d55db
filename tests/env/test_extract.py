"""Which code is judged: the last closed block that defines the class, whatever the answer around it looks like."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env.extract import clean_source, code_blocks, extract_code, inspect_source

pytestmark = pytest.mark.budget(15)

GOOD = "import torch\n\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return x + 1\n"
DRAFT = GOOD.replace("x + 1", "x + 2")
HELPER = "def helper():\n    return 1\n"


def fenced(code: str, tag: str = "python", mark: str = "```") -> str:
    return f"{mark}{tag}\n{code}{mark}\n"


def test_last_block_that_defines_the_class_wins():
    response = fenced(DRAFT) + "Better:\n" + fenced(GOOD) + "Usage:\n" + fenced("model = ModelNew()\nprint(model)\n")
    assert extract_code(response) == GOOD


def test_class_named_in_a_string_or_comment_is_not_a_definition():
    mention = '# class ModelNew\nTEXT = """\nclass ModelNew:\n    pass\n"""\n'
    assert extract_code(fenced(GOOD) + fenced(mention)) == GOOD
    assert extract_code(fenced(mention)) is None


def test_nested_definition_is_not_a_definition():
    nested = "def make():\n    class ModelNew:\n        pass\n    return ModelNew\n"
    assert extract_code(fenced(nested)) is None


def test_thinking_is_skipped():
    thought = f"<think>\nPerhaps\n{fenced(DRAFT)}\n</think>\n"
    assert extract_code(thought) is None
    assert extract_code(fenced(GOOD) + thought) == GOOD
    assert extract_code(thought + fenced(GOOD)) == GOOD


def test_thinking_whose_opening_tag_was_in_the_prompt_is_skipped():
    assert extract_code(fenced(DRAFT) + "</think>\n" + fenced(GOOD)) == GOOD
    assert extract_code(fenced(DRAFT) + "</think>\nDone.") is None


@pytest.mark.parametrize("mark", ["```", "````", "~~~", "~~~~~"])
@pytest.mark.parametrize("tag", ["", "python", "Python", "py", "python3", "triton"])
def test_fences_and_tags(mark, tag):
    assert extract_code("Here:\n" + fenced(GOOD, tag, mark) + "End.") == GOOD


def test_block_in_another_language_is_not_python():
    assert extract_code(fenced(GOOD, "cpp")) is None
    assert extract_code(fenced(DRAFT) + fenced(GOOD, "text")) == DRAFT


def test_fence_inside_another_fence_belongs_to_the_code():
    code = GOOD + 'DOC = """\n```\nnot the end\n```\n"""\n'
    assert extract_code(fenced(code, mark="````")) == code
    assert extract_code(fenced(code, mark="~~~")) == code


def test_info_string_behind_the_tag_is_ignored():
    assert extract_code(f"```python title=model.py\n{GOOD}```\n") == GOOD


@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_other_line_ends(end):
    assert extract_code(("Text\n" + fenced(GOOD)).replace("\n", end)) == GOOD


def test_byte_order_mark():
    assert extract_code("\ufeff" + fenced(GOOD)) == GOOD
    assert extract_code("\ufeff" + GOOD) == GOOD
    assert clean_source("\ufeff" + GOOD.replace("\n", "\r\n")) == GOOD
    assert inspect_source(clean_source("\ufeff" + GOOD)).error == ""


def test_block_that_never_closes_was_cut_off():
    cut = "```python\n" + GOOD
    assert extract_code(cut) is None
    assert extract_code(fenced(DRAFT) + cut) == DRAFT
    assert code_blocks(cut) == []


def test_block_inside_a_list_item_is_dedented():
    indented = "\n".join("  " + line if line else line for line in fenced(GOOD).split("\n"))
    assert extract_code("1. Code:\n" + indented) == GOOD


def test_answer_without_fence_is_taken_when_it_is_python():
    assert extract_code(GOOD) == GOOD
    assert extract_code("I would write a kernel.\n" + GOOD) is None
    assert extract_code(HELPER) is None
    assert extract_code("") is None


def test_broken_block_is_still_found_so_that_its_author_sees_the_error():
    broken = GOOD.replace("return x + 1", "return x +")
    assert extract_code(fenced(HELPER) + fenced(broken)) == broken
    assert "SyntaxError" in inspect_source(broken).error
    assert "line 5" in inspect_source(broken).error


def test_other_entry_points():
    code = GOOD.replace("ModelNew", "NetNew")
    assert extract_code(fenced(code), "Net") == code
    assert extract_code(fenced(code)) is None


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", "empty"),
        ("   \n\n", "empty"),
        ("def ModelNew():\n    pass\n", "is a function"),
        ("async def ModelNew():\n    pass\n", "is a function"),
        ("class Model:\n    pass\n", "No class ModelNew is defined at the top level (classes found: Model)"),
        ("x = 1\n", "No class ModelNew"),
        ("class ModelNew(:\n", "SyntaxError"),
        ("class ModelNew:\n  a\n b\n", "IndentationError|SyntaxError"),
        ("x = 1\0\n", "null|can't be parsed"),
        ("class ModelNew: x = " + "(" * 300 + ")" * 300 + "\n", "too many nested|can't be parsed"),
    ],
)
def test_sources_that_cannot_be_judged_say_why(source, words):
    error = inspect_source(source).error
    assert error and any(part in error for part in words.split("|")), error


def test_class_bound_by_assignment_is_accepted_and_the_last_binding_counts():
    assert inspect_source("class A:\n    pass\nModelNew = A\n").error == ""
    assert "function" in inspect_source(GOOD + "def ModelNew():\n    pass\n").error
    assert inspect_source("def ModelNew():\n    pass\n" + GOOD).error == ""


def test_kernels_are_found_through_the_syntax_tree():
    source = (
        "import triton\nfrom triton import jit\n"
        "@triton.jit\ndef a():\n    pass\n"
        "@jit\ndef b():\n    pass\n"
        "@triton.autotune(configs=[], key=[])\n@triton.jit(do_not_specialize=['n'])\ndef c():\n    pass\n"
        "def make():\n    @triton.jit\n    def d():\n        pass\n    return d\n"
        "# @triton.jit\ndef e():\n    pass\n"
        "TEXT = '@triton.jit\\ndef f(): pass'\n" + GOOD
    )
    assert sorted(inspect_source(source).kernels) == ["a", "b", "c", "d"]


def test_three_megabytes_are_read_in_time():
    filler = "# a comment that goes on and on, since nobody told it to stop before the context was full\n" * 34_000
    assert len(filler) > 3_000_000
    started = time.process_time()
    assert extract_code(fenced(filler + GOOD)) == filler + GOOD
    assert time.process_time() - started < 3


@pytest.mark.parametrize("piece", ["<think>", "```", "~~~python\n", "```````\n", " \t", "</think>"])
def test_a_megabyte_of_marks_is_read_in_time(piece):
    started = time.process_time()
    extract_code(piece * (1_000_000 // len(piece)))
    assert time.process_time() - started < 2


MARKS = ["```", "~~~", "````", "<think>", "</think>", "\n", "\r\n", " ", "\t", "\ufeff", "\ud800", "\0"]
WORDS = ["python", "class ModelNew:", "pass", "    ", "(", "'''", '"""', "ModelNew = ", "@triton.jit", "\\", "é", GOOD]
PIECES = st.sampled_from(MARKS + WORDS)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.one_of(PIECES, st.text(max_size=20)), max_size=30).map("".join))
def test_no_answer_raises(response):
    code = extract_code(response)
    report = inspect_source(response if code is None else code)
    assert isinstance(report.error, str)
    if code is not None:
        assert "ModelNew" in code


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(
        PIECES.filter(lambda piece: "`" not in piece and "~" not in piece and "think" not in piece), max_size=12
    ).map("".join)
)
def test_good_block_is_found_behind_any_garbage(garbage):
    assert extract_code(garbage.replace("\r", "") + "\n" + fenced(GOOD)) == GOOD
