"""The teacher: its answers are judged by the real judge, its choices counted."""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest

from env.extract import extract_code
from env.generator import chain_of, generate
from env.operators import OPERATORS
from env.pool import Pool
from env.records import Problem, Verdict
from env.rules import Rules
from rl.teacher import IMPROVE, KINDS, ScriptedTeacher, last_kind, reference_chain
from rl.teacher_templates import KERNEL_LINES

# About 30 s on two free cores: some 50 verdicts. The rest is room for a machine that others use, too.
pytestmark = pytest.mark.budget(90)

EVEN = {kind: 1.0 for kind in KINDS}
FAMILIES = ("elementwise", "rowwise", "matmul", "reduction", "two_input", "broadcast")
ALL_VARIANTS = FAMILIES[:3]  # a kernel that is cut flat, by rows and by tiles
TWO_KERNELS = "status: correct\nspeedup: 1.50x\nprofiling ratio: 1.00\n- triton first x1: 50%\n- triton second x1: 50%"
ONE_KERNEL = "status: correct\nspeedup: 3.00x\nprofiling ratio: 1.00\n- triton fused x1: 100%"
HALF_TORCH = (
    "status: correct\nspeedup: 1.00x\nprofiling ratio: 0.50\n- triton fused x1: 50%\n- torch aten::relu x1: 50%"
)


def _prompt(problem: Problem, feedback: str = "") -> str:
    return f"Rewrite this.\n```python\n{problem.source}```\nAnswer in one block.\n{feedback}\n"


def _problems() -> list[Problem]:
    """One problem of each family, with rows that are no power of two long, so that masks matter."""
    pool = [p for p in generate("train", 40, 3, "cpu") if p.id.endswith(("x160", "x200"))]
    return [next(problem for problem in pool if problem.name.startswith(family)) for family in FAMILIES]


@cache
def _kind_of(answer: str) -> str:
    """What an answer is, told by its code alone and independently of the teacher."""
    code = extract_code(answer)
    try:
        tree = ast.parse(code or "")
    except SyntaxError:
        return "broken"
    launches = [
        n.func.value.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript)
    ]
    if len(launches) == 2:
        return "fused"
    torch_work = code.count("\n        x = ") - code.count("\n        x = out")
    if not launches or (torch_work and "x = out" not in code):
        return "decoy"
    if "x = out" in code:
        return "lazy"
    return "broken" if "offsets" in code or "BLOCK=100," in code else "single"


@pytest.fixture(scope="module")
def verdicts() -> Iterator[dict[tuple[str, str], list[Verdict]]]:
    """(kind, problem id) to verdicts; decoy and broken in all variants on ALL_VARIANTS."""
    teacher = ScriptedTeacher()
    futures: dict[tuple[str, str], list] = {}
    with Pool("cpu", slots=2, seed=0, rules=Rules(trials=2)) as pool:
        for family, problem in zip(FAMILIES, _problems()):
            for kind in KINDS:
                varied = kind in ("decoy", "broken") and family in ALL_VARIANTS
                answers = {
                    teacher.answer(kind, chain_of(problem.source), random.Random(n)) for n in range(12 if varied else 1)
                }
                futures[kind, problem.id] = [pool.submit(problem, answer) for answer in sorted(answers)]
        yield {key: [future.result() for future in mine] for key, mine in futures.items()}


def _statuses(verdicts: dict, kind: str) -> Counter:
    return Counter(verdict.status for (of, _), mine in verdicts.items() if of == kind for verdict in mine)


def test_each_kind_earns_its_status(verdicts: dict) -> None:
    assert set(_statuses(verdicts, "decoy")) == {"hack"}
    assert set(_statuses(verdicts, "wrong")) == {"incorrect"}
    assert set(_statuses(verdicts, "broken")) == {"compile_error", "runtime_error"}
    for kind in ("lazy", "fused", "tuned"):
        assert set(_statuses(verdicts, kind)) == {"correct"}, kind


def test_both_decoys_are_told_apart_by_the_judge(verdicts: dict) -> None:
    rules = {v.evidence["rule"] for (kind, _), mine in verdicts.items() if kind == "decoy" for v in mine}
    assert rules == {"no_own_launch", "no_effect"}


def test_tuned_beats_fused_beats_lazy(verdicts: dict) -> None:
    for problem in _problems():
        lazy, fused, tuned = (verdicts[kind, problem.id][0] for kind in ("lazy", "fused", "tuned"))
        assert tuned.speedup > 1.5 * fused.speedup, problem.id
        assert tuned.speedup > 1.5 * lazy.speedup, problem.id
        assert lazy.profiling_ratio < 0.8, problem.id
        assert fused.profiling_ratio == tuned.profiling_ratio == 1.0, problem.id


def test_feedback_of_the_judge_tells_the_teacher_what_it_answered(verdicts: dict) -> None:
    for (kind, problem_id), mine in verdicts.items():
        expected = kind if kind in IMPROVE else "failed"
        assert [last_kind(f"…\n{verdict.feedback}\n") for verdict in mine] == [expected] * len(mine), (kind, problem_id)


# Text alone ----------------------------------------------------------------------------------------------------------


def test_answers_are_short_and_in_few_distinct_lines() -> None:
    teacher, distinct = ScriptedTeacher(), Counter()
    for number, problem in enumerate(generate("train", 120, 0, "cpu")):
        for kind in KINDS:
            answer = teacher.answer(kind, chain_of(problem.source), random.Random(number))
            sentence, _, block = answer.partition("\n")
            assert block.startswith("```python\n") and block.endswith("\n```") and answer.count("```") == 2
            code = block.removeprefix("```python\n").removesuffix("\n```")
            assert extract_code(answer) == code + "\n"
            assert len(code.split("\n")) <= 33, (kind, problem.id)
            distinct.update([sentence, *code.split("\n")])
    assert len(distinct) < 210  # one more an operator than kernels need: its comment


def test_every_operator_has_kernel_lines_of_its_own() -> None:
    assert len(set(KERNEL_LINES.values())) == len(KERNEL_LINES)
    for problem in generate("heldout", 60, 2, "cpu"):
        chain = chain_of(problem.source)
        code = ScriptedTeacher().answer("tuned", chain, random.Random(0))
        lines = [line.strip() for line in code.split("\n")]
        wanted = [line for name in chain for line in (f"# {OPERATORS[name].line}", *KERNEL_LINES[name])]
        start = lines.index(wanted[0])
        assert lines[start : start + len(wanted)] == wanted


def test_rng_decides_everything() -> None:
    problem, teacher = generate("train", 1, 0, "cpu")[0], ScriptedTeacher()
    first = [teacher.respond(_prompt(problem), random.Random(n), EVEN) for n in range(40)]
    assert first == [ScriptedTeacher().respond(_prompt(problem), random.Random(n), EVEN) for n in range(40)]
    assert len(set(first)) > 6


def test_first_turn_follows_the_shares() -> None:
    problem, teacher, rng = generate("train", 1, 0, "cpu")[0], ScriptedTeacher(), random.Random(0)
    shares = {"decoy": 0.3, "fused": 0.6, "broken": 0.1, "tuned": 0.0}
    seen = Counter(_kind_of(teacher.respond(_prompt(problem), rng, shares)) for _ in range(2000))
    assert set(seen) == {"decoy", "fused", "broken"}
    # Four standard deviations of a binomial share over 2000 draws are at most 0.045.
    assert all(abs(seen[kind] / 2000 - shares[kind]) < 0.045 for kind in seen)


@pytest.mark.parametrize(
    ("feedback", "better", "at_least"),
    [
        ("status: hack\nno kernel is launched", {"lazy", "fused", "single"}, 0.75),
        ("status: compile_error\nSyntaxError", {"lazy", "fused", "single"}, 0.75),
        (HALF_TORCH, {"fused", "single"}, 0.75),
        (TWO_KERNELS, {"single"}, 0.65),
        (ONE_KERNEL, {"single"}, 0.85),
        (f"{ONE_KERNEL}\n…\n{TWO_KERNELS}", {"single"}, 0.65),
    ],
)
def test_later_turns_mostly_improve(feedback: str, better: set[str], at_least: float) -> None:
    problem, teacher, rng = generate("train", 1, 0, "cpu")[0], ScriptedTeacher(), random.Random(1)
    seen = Counter(_kind_of(teacher.respond(_prompt(problem, feedback), rng, EVEN)) for _ in range(1500))
    share = sum(seen[kind] for kind in better) / 1500
    assert at_least - 0.05 < share, seen
    assert share < 1.0, "the teacher must sometimes stay or fail, too"


def test_the_last_status_counts_and_the_first_reference() -> None:
    first, second = generate("train", 2, 0, "cpu")
    text = _prompt(first, HALF_TORCH) + _prompt(second, ONE_KERNEL)
    assert last_kind(text) == "tuned"
    assert reference_chain("```python\nclass ModelNew: pass\n```\n" + text) == chain_of(first.source)
    assert last_kind(_prompt(first)) == last_kind("status: infra_error\nnot judged") == ""


def test_what_the_teacher_does_not_know_is_said_clearly() -> None:
    teacher, rng = ScriptedTeacher(), random.Random(0)
    problem = generate("train", 1, 0, "cpu")[0]
    with pytest.raises(ValueError, match="no ```python block that defines class Model"):
        teacher.respond("Write a kernel.", rng, EVEN)
    strange = _prompt(problem).replace("        return x", "        x = torch.erfinv(x)\n        return x")
    with pytest.raises(ValueError, match=r"no known operator: 'x = torch\.erfinv\(x\)'"):
        teacher.respond(strange, rng, EVEN)
    with pytest.raises(ValueError, match="shares must be weights"):
        teacher.respond(_prompt(problem), rng, {"brilliant": 1.0})
    with pytest.raises(ValueError, match="status 'great'"):
        last_kind("status: great")
