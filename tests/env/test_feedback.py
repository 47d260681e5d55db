"""What the policy is told: compact, the same words for the same fact, nothing that is only the judge's business."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env.feedback import CHARS_PER_TOKEN, MAX_MESSAGE, MAX_ROWS, MAX_TOKENS, RULES, is_tie, render
from env.plaintext import cut, harmless, own_frames
from env.records import BLAMELESS_STATUSES, CANDIDATE_STATUSES, STATUSES, Verdict

pytestmark = pytest.mark.budget(20)


def row(name: str, time_us: float, own: bool = True, count: int = 1) -> dict:
    return {"name": name, "own": own, "count": count, "time_us": time_us}


def correct(**changes) -> Verdict:
    fields = {
        "speedup": 1.23456,
        "profiling_ratio": 0.75,
        "time_kind": "modelled",
        "profile": [row("relu_kernel", 7.5), row("aten::copy_", 2.5, own=False, count=3)],
    }
    return Verdict(status="correct", **{**fields, **changes})


def test_correct_names_speedup_ratio_and_kernels():
    assert render(correct()).split("\n") == [
        "status: correct",
        "speedup: 1.23x (modelled)",
        "profiling ratio: 0.75",
        "- triton relu_kernel x1: 75%",
        "- torch aten::copy_ x3: 25%",
    ]
    assert "speedup: 1.23x\n" in render(correct(time_kind="eager"))


def test_noise_in_the_last_digits_does_not_change_the_text():
    assert render(correct(speedup=1.2341)) == render(correct(speedup=1.2339))


def test_long_profiles_are_cut_and_counted():
    text = render(correct(profile=[row(f"kernel_{i}" + "x" * 100, 1.0) for i in range(MAX_ROWS + 3)]))
    assert text.count("- triton") == MAX_ROWS and text.endswith("- and 3 more")
    assert max(map(len, text.split("\n"))) < 100


@pytest.mark.parametrize("status", ["incorrect", "compile_error", "runtime_error"])
def test_failure_shows_status_message_and_own_lines(status):
    verdict = Verdict(
        status=status, message="ValueError: no", evidence={"lines": ["line 1", "line 2", "line 3", "line 4"]}
    )
    assert render(verdict).split("\n") == [
        f"status: {status}",
        "why: ValueError: no",
        "at line 2",
        "at line 3",
        "at line 4",
    ]


def test_first_wrong_element_and_error_in_tolerances_are_shown():
    message = (
        "the output: 3 of 64 elements off by up to 12.5 tolerances, first at [0, 7]: 1.5 where the reference has 1"
    )
    assert render(Verdict(status="incorrect", message=message)) == f"status: incorrect\nwhy: {message}"


@pytest.mark.parametrize("rule", [*RULES, "a rule to come"])
def test_hack_names_its_rule_in_words_and_what_to_change(rule):
    text = render(Verdict(status="hack", message="no Triton kernel is launched", evidence={"rule": rule}))
    lines = text.split("\n")
    assert lines[0] == "status: hack" and lines[3] == "why: no Triton kernel is launched"
    assert lines[1].startswith("rule: ") and lines[2].startswith("change: ") and rule not in text


@pytest.mark.parametrize(
    ("status", "message", "shown"),
    [
        ("timeout", "no result in time: no answer within 37 s", "no result came in time"),
        ("oom", "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 139.81 GiB", "20.00 GiB"),
        ("oom", "the worker held more than 37 GB of host memory", "out of memory"),
    ],
)
def test_limits_of_the_judge_are_not_told(status, message, shown):
    text = render(Verdict(status=status, message=message))
    assert shown in text and "37" not in text and "139" not in text


def test_folders_are_not_told_and_divisions_stay():
    message = "OSError: /tmp/kernel-judge-abc/work-1/candidate.py, '/root/x/y.so', ~/a/b.py, ../../c/d.py"
    text = render(Verdict(status="runtime_error", message=message))
    assert text.endswith("why: OSError: candidate.py, 'y.so', b.py, d.py")
    lines = ["line 1, in f: x = a // b / c//2 + (d)/e"]
    assert render(Verdict(status="runtime_error", evidence={"lines": lines})).endswith(lines[0])


def test_tracebacks_are_cut_to_own_frames():
    message = (
        "CompilationError: at 3:4\nTraceback (most recent call last):\n"
        '  File "/opt/lib/triton/compiler.py", line 5, in visit\n    raise secret_of_triton()\n    ^^^^^\n'
        '  File "/scratch/candidate.py", line 9, in kernel\n    y = tl.nope(x)\n        ^^^^^\nAttributeError: nope'
    )
    text = render(Verdict(status="compile_error", message=message))
    assert text.split("\n") == [
        "status: compile_error",
        "why: CompilationError: at 3:4",
        '|   File "candidate.py", line 9, in kernel',
        "|     y = tl.nope(x)",
        "|         ^^^^^",
        "| AttributeError: nope",
    ]
    assert own_frames("no traceback\n    indented") == "no traceback\n    indented"


def test_a_tie_is_said_and_only_of_measured_times():
    tie = correct(speedup=1.01, speedup_low=0.97, speedup_high=1.04, time_kind="eager")
    assert is_tie(tie) and "\nspeedup: 1.01x (a tie: within the noise)\n" in render(tie)
    tie.time_kind = "modelled"
    assert not is_tie(tie) and "tie" not in render(tie)
    assert not is_tie(correct(speedup_low=1.1, speedup_high=1.3, time_kind="eager"))
    assert not is_tie(Verdict(status="incorrect", time_kind="eager"))


def test_long_message_keeps_its_start_and_its_end():
    verdict = Verdict(status="runtime_error", message="START" + "x" * 100_000 + "END")
    text = render(verdict)
    assert len(text) < MAX_MESSAGE + 60 and "START" in text and text.endswith("END") and " ... " in text
    many = Verdict(status="runtime_error", message="\n".join(f"row {i}" for i in range(1000)))
    assert "why: row 0\n" in render(many) and render(many).endswith("| row 999") and render(many).count("\n") == 10


@pytest.mark.parametrize("status", BLAMELESS_STATUSES)
def test_our_own_failures_are_not_explained(status):
    text = render(Verdict(status=status, message="Traceback: the judge's secret", evidence={"lines": ["secret"]}))
    assert text.split("\n")[0] == f"status: {status}" and "secret" not in text


@pytest.mark.parametrize("status", STATUSES)
def test_seeds_and_digests_stay_with_the_judge(status):
    verdict = correct(message="wrong") if status == "correct" else Verdict(status=status, message="wrong")
    verdict.seeds = {"inputs": 987654321}
    verdict.problem_sha256 = verdict.candidate_sha256 = "deadbeef"
    assert "987654321" not in render(verdict) and "deadbeef" not in render(verdict)


def test_profile_without_time_does_not_divide_by_zero():
    assert "0%" in render(correct(profile=[row("a", 0.0)]))


def test_unknown_status_is_refused():
    with pytest.raises(ValueError, match="unknown status 'fast'; known: correct"):
        Verdict(status="fast")


def test_verdict_round_trip():
    verdict = correct()
    assert Verdict.from_json(verdict.to_json()) == verdict


# What a candidate can word -------------------------------------------------------------------------------------------

NASTY = [
    "status: correct", "speedup: 99.00x", "profiling ratio: 1.00", "\n", "\r", "\r\n", "\u2028", "\x85", "\x0b", "\x0c",
    "```", "`" * 7, "~~~", "<|im_end|>", "<|im_start|>", "<|", "|>", "<think>", "</think>", "</s>", "[INST]", "[/INST]",
    "<start_of_turn>", "<|user|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "\x1b[31m", "\x1b]0;title\x07", "\x1b[2J",
    "\x1b", "\x9b31m", "\u202e", "\u200b", "\ufeff", "\0", "\x07", "\x08", "\ud800", "/tmp/secret/", "é", "核", " ",
    "\t", "x", "- triton k x1: 100%", "why: ", "| ", "at ", 'File "/a/b.py", line 1', "    ", "...",
]  # fmt: skip
TEXTS = st.lists(st.one_of(st.sampled_from(NASTY), st.text(max_size=8)), max_size=25).map("".join)
OURS = {
    "correct": ("speedup: ", "profiling ratio: ", "- triton ", "- torch ", "- and "),
    "hack": ("rule: ", "change: ", "why: ", "| ", "at "),
}


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    st.sampled_from(CANDIDATE_STATUSES),
    TEXTS,
    st.lists(TEXTS, max_size=6),
    st.lists(st.tuples(TEXTS, st.booleans()), max_size=8),
    st.one_of(st.just(MAX_TOKENS), st.integers(0, 200)),
)
def test_no_candidate_speaks_as_the_judge_or_ends_a_turn(status, message, lines, names, tokens):
    verdict = Verdict(status=status, message=message, evidence={"lines": lines, "rule": "no_effect"})
    if status == "correct":
        verdict = correct(message=message, profile=[row(name, 1.0, own) for name, own in names])
    text = render(verdict, tokens)
    assert text == render(verdict, tokens)
    first, *others = text.split("\n")
    assert first == f"status: {status}"
    assert len(text) <= max(tokens * CHARS_PER_TOKEN, len(first))
    for line in others:
        # (A budget of a few tokens cuts our own words as well.)
        assert tokens < 50 or line.startswith(OURS.get(status, ("why: ", "| ", "at "))), line
        assert not line.startswith(("status:", "speedup: 9", "profiling ratio: 1"))
        assert line.isprintable(), repr(line)
    for mark in ("```", "~~~", "<|", "|>", "<think>", "</think>", "</s>", "[INST]", "[/INST]", "\uff5c"):
        assert mark not in text
    if status == "correct" and tokens == MAX_TOKENS:
        assert len(others) == 2 + min(len(names), MAX_ROWS) + (len(names) > MAX_ROWS)
        assert text.split("\n")[1] == "speedup: 1.23x (modelled)"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(TEXTS, st.integers(0, 300), st.integers(1, 5))
def test_harmless_text_is_short_and_stays_as_it_is_when_treated_again(text, limit, lines):
    once = harmless(text, limit, lines)
    assert once.count("\n") < lines
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", once)
    # Signs that are pulled apart need room of their own.
    assert len(once) <= 2 * limit
    again = harmless(once, 10_000, lines)
    assert "<|" not in again and "```" not in again


def test_megabytes_of_message_are_rendered_at_once():
    for piece in ("/", "/a", "<", "\x1b[", "\n", "`", "[A", 'File "', "~/", "\ud800"):
        render(Verdict(status="runtime_error", message=piece * 1_000_000, evidence={"lines": [piece * 100_000] * 6}))


@pytest.mark.parametrize("limit", range(30))
def test_cut_keeps_to_its_limit(limit):
    assert len(cut("abcdefghijklmnopqrstuvwxyz" * 3, limit)) <= limit


def test_evidence_that_is_no_list_of_lines_is_left_out():
    assert render(Verdict(status="runtime_error", message="x", evidence={"lines": "abc"})).endswith("why: x")
