"""Which code is judged: the last closed block that defines the class, whatever the answer around it looks like."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env.extract import MAX_CODE_CHARS, clean_source, code_blocks, extract_code, inspect_source

pytestmark = pytest.mark.budget(30)

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


NESTED = "def make():\n    class ModelNew:\n        pass\n    return ModelNew\n"


def test_block_that_only_may_define_the_class_is_the_second_choice():
    assert extract_code(fenced(GOOD) + fenced(NESTED)) == GOOD
    assert extract_code(fenced(HELPER) + fenced(NESTED)) == NESTED
    usage = "from kernels import ModelNew\nmodel = ModelNew()\nprint(vars(model), getattr(model, 'x'))\n"
    assert extract_code(fenced(GOOD) + fenced(usage)) == GOOD
    hidden = "exec('class ModelNew: pass')\n"
    assert extract_code(fenced(HELPER) + fenced(hidden)) == hidden


def test_thinking_is_skipped():
    thought = f"<think>\nPerhaps\n{fenced(DRAFT)}\n</think>\n"
    assert extract_code(thought) is None
    assert extract_code(fenced(GOOD) + thought) == GOOD
    assert extract_code(thought + fenced(GOOD)) == GOOD


def test_thoughts_that_never_end_hold_no_answer():
    assert extract_code(f"<think>\nPerhaps\n{fenced(DRAFT)}") is None
    assert extract_code(f"<think>a</think>\n<think>\n{fenced(DRAFT)}So") is None
    assert extract_code("<think>\n" + GOOD) is None
    assert extract_code(fenced(GOOD) + f"<think>\nBut\n{fenced(DRAFT)}") == GOOD


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
        ("x = 1\ny = 2\0\n", "a null byte in line 2"),
        ("x = 1\ny = '\ud800'\n", "half a surrogate pair in line 2"),
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


A = "class A:\n    pass\n"


@pytest.mark.parametrize(
    "source",
    [
        A + "ModelNew: type = A\n",
        A + "ModelNew, other = A, 1\n",
        A + "[*rest, ModelNew] = 1, A\n",
        A + "x = y = ModelNew = A\n",
        A + "(ModelNew := A)\n",
        A + "for ModelNew in (A,):\n    pass\n",
        A + "if True:\n    ModelNew = A\n",
        "if True:\n    class ModelNew:\n        pass\n",
        "try:\n    import triton\nexcept ImportError:\n    pass\nelse:\n    class ModelNew:\n        pass\n",
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    class ModelNew:\n        pass\n",
        "with open('/dev/null') as f:\n    class ModelNew:\n        pass\n",
        "for _ in range(1):\n    class ModelNew:\n        pass\n",
        "while True:\n    class ModelNew:\n        pass\n    break\n",
        "match 1:\n    case _:\n        class ModelNew:\n            pass\n",
        A + "match A:\n    case ModelNew:\n        pass\n",
        "from kernels import ModelNew\n",
        "from kernels import A as ModelNew\n",
        "from kernels import *\n",
        A + "globals()['ModelNew'] = A\n",
        A + "globals()['Model' + 'New'] = A\n",
        A + "import sys\nsys.modules[__name__].ModelNew = A\n",
        A + "import sys\nsetattr(sys.modules[__name__], 'ModelNew', A)\n",
        "exec('class ModelNew: pass')\n",
        "def make():\n    global ModelNew\n    class ModelNew:\n        pass\nmake()\n",
        NESTED + "ModelNew = make()\n",
        "def as_class(f):\n    return type('M', (), {})\n@as_class\ndef ModelNew():\n    pass\n",
        "def ModelNew():\n    pass\nif True:\n    class ModelNew:\n        pass\n",
        "def ModelNew():\n    pass\nglobals()['ModelNew'] = type('A', (), {})\n",
        "if False:\n    def ModelNew():\n        pass\n",
    ],
)
def test_what_only_running_can_tell_is_left_to_the_loader(source):
    assert inspect_source(source).error == ""


@pytest.mark.parametrize(
    "source",
    [
        "x = [ModelNew for ModelNew in (1, 2)]\n",
        "print(ModelNew)\n",
        "TEXT = 'class ModelNew: pass'\n",
        "class ModelNewer:\n    pass\n",
        "x.y = 'ModelNew'\n",
    ],
)
def test_class_that_nothing_can_bind_is_missed_at_once(source):
    assert "No class ModelNew" in inspect_source(source).error


@pytest.mark.parametrize(
    ("head", "decorators"),
    [
        ("from triton import jit as j", "@j"),
        ("from triton import jit as j", "@j(debug=True)"),
        ("import triton as t", "@t.jit"),
        ("import triton as t", "@t.jit()"),
        ("import triton.runtime", "@triton.runtime.jit"),
        ("from triton.runtime.jit import jit", "@jit"),
        ("from triton import *", "@jit"),
        ("import triton\nmine = triton.jit", "@mine"),
        ("import triton\nmine = triton.jit(debug=True)", "@mine"),
        ("import triton\nfrom functools import partial", "@partial(triton.jit, debug=True)"),
        ("from triton.experimental import gluon", "@gluon.jit"),
        ("import triton", "@triton.autotune(configs=[], key=[])\n@triton.heuristics({})\n@triton.jit"),
        ("import triton", "@triton.heuristics(values={'B': lambda a: 1})\n@triton.jit(do_not_specialize=['n'])"),
        ("import importlib\nt = importlib.import_module('triton')", "@t.jit"),
    ],
)
@pytest.mark.parametrize("async_", ["", "async "])
def test_kernels_under_other_names_and_in_stacks_of_decorators(head, decorators, async_):
    assert inspect_source(f"{head}\n{decorators}\n{async_}def kernel(x):\n    pass\n{GOOD}").kernels == ["kernel"]
    nested = "\n".join("        " + line for line in f"{decorators}\n{async_}def inner():\n    pass".split("\n"))
    assert inspect_source(f"{head}\n{GOOD}\n    def make(self):\n{nested}\n").kernels == ["inner"]


def test_kernel_made_by_a_call():
    source = "import triton\ndef body(x):\n    pass\nkernel = triton.jit(body)\nfast = triton.jit(debug=True)(body)\n"
    assert inspect_source(source + GOOD).kernels == ["body"]


@pytest.mark.parametrize(
    "source",
    [
        "import numba\n@numba.jit\ndef k():\n    pass\n",
        "from numba import jit\n@jit\ndef k():\n    pass\n",
        "import jax as triton_\n@triton_.jit\ndef k():\n    pass\n",
        "import torch\n@torch.jit.script\ndef k():\n    pass\n",
        "def jit(f):\n    return f\n@jit\ndef k():\n    pass\n",
    ],
)
def test_what_other_compilers_take_is_no_triton_kernel(source):
    assert inspect_source(source + GOOD).kernels == []


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


def test_three_megabytes_of_comments_are_read_in_time():
    filler = "# a comment that goes on and on, since nobody told it to stop before the context was full\n" * 34_000
    assert len(filler) > 3_000_000
    started = time.process_time()
    assert extract_code(fenced(filler + GOOD)) == filler + GOOD
    assert inspect_source(filler + GOOD).error == ""
    assert time.process_time() - started < 3


@pytest.mark.parametrize(
    ("filler", "words"),
    [
        ("x = 1\n" * 1_000_000, "4,194,304"),
        ("x=1\n" * 1_000_000, "outside comments"),
        ("x=1;" * 1_000_000 + "\n", "outside comments"),
        ("# comment\n" * 500_000, "4,194,304"),
        ("x = '" + "a" * 3_000_000 + "'\n", "outside comments"),
        ("\n" * 5_000_000, "4,194,304"),
    ],
)
def test_source_of_megabytes_is_refused_at_once(filler, words):
    started = time.process_time()
    source = extract_code(fenced(filler + GOOD))
    assert source == filler + GOOD
    error = inspect_source(source).error
    assert error.startswith("The source is too large to be judged") and words in error
    assert time.process_time() - started < 2


def test_a_source_just_within_the_limit_is_read_in_time():
    source = "x=1\n" * ((MAX_CODE_CHARS - len(GOOD)) // 4) + GOOD
    started = time.process_time()
    assert inspect_source(source).error == ""
    assert time.process_time() - started < 3


def test_many_large_drafts_are_not_all_parsed():
    draft = "x=1\n" * 20_000 + "print(ModelNew)\n"
    started = time.process_time()
    assert extract_code(fenced(GOOD) + fenced(draft) * 40) == GOOD
    assert time.process_time() - started < 3


N = 20_000


@pytest.mark.parametrize(
    ("code", "left_to_loader"),
    [
        ("(" * N + "1" + ")" * N, False),
        ("[" * N, False),
        ("-" * N + "1", True),
        ("not " * N + "1", True),
        ("a" + ".b" * N, True),
        ("a" + "()" * N, True),
        ("1" + "+1" * N, True),
        ("lambda:" * 10_000 + "1", True),
        ("1 if 1 else " * 8_000 + "1", True),
        ("f'{" * N, False),
        ("f'" + "{a}" * N + "'", True),
        ("1" * 50_000, False),
        ("0x" + "f" * 50_000, True),
        ("a\0b", False),
        ("'\ud800'", False),
        ("''\n" + "if 1:\n pass\n" + "elif 1:\n pass\n" * 6_000, True),
        ("''\n" + "".join(" " * i + "if 1:\n" for i in range(200)), False),
    ],
    ids=lambda value: value[:12].encode("ascii", "backslashreplace").decode() if isinstance(value, str) else str(value),
)
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_code_that_parsers_choke_on(code, left_to_loader):
    """Neither a crash nor a conviction of what a loader on another machine might take."""
    source = f"{GOOD}x = {code}\n"
    started = time.process_time()
    extract_code(fenced(source))
    error = inspect_source(source).error
    assert (error == "") == left_to_loader, error
    assert len(error) < 400 and time.process_time() - started < 5  # 2 s on a quiet core


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
