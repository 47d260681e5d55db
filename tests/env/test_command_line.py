"""What the judge's commands say where they are asked wrongly: which argument, which file or line, and what to do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from env import batch, decontaminate, evaluate, serve
from env.pool import Pool
from env.questions import KEYS, QuestionError, misread, read_questions
from env.records import Problem, Verdict
from env.rules import rules_for
from env.tickets import Tickets
from tests.env.cli_fakes import OneVerdict

pytestmark = pytest.mark.budget(40)

ROOT = Path(__file__).resolve().parents[2]
QUESTION = {"id": "a", "reference": "class Model: ...", "candidate": "class ModelNew: ..."}


def compile_error(self, problem, response, raw):
    future = Future()
    future.set_result(Verdict(status="compile_error", message="SyntaxError: invalid syntax"))
    return future


@pytest.fixture
def asked(monkeypatch) -> list[dict]:
    """What the pool was opened with, newest last: empty where the command refused before."""
    monkeypatch.setattr(evaluate, "Pool", OneVerdict)
    monkeypatch.setattr(batch, "Pool", OneVerdict)
    monkeypatch.setattr(OneVerdict, "asked", [])
    return OneVerdict.asked


@pytest.fixture
def reference(tmp_path, answers) -> Path:
    path = tmp_path / "reference.py"
    path.write_text(answers.reference)
    return path


@pytest.fixture
def candidate(tmp_path, answers) -> Path:
    path = tmp_path / "candidate.py"
    path.write_text(answers.correct)
    return path


def lines(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Files that aren't there, or aren't files ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ("reference.py", ("REFERENCE", "no such file; give a file with class Model, get_inputs")),
        ("candidate.py", ("CANDIDATE", "no such file; give a Python file with class ModelNew, or with --raw")),
    ],
)
def test_a_file_that_is_not_there_is_named_with_its_argument(reference, candidate, asked, capsys, gone, words):
    (reference.parent / gone).unlink()
    assert evaluate.main([str(reference), str(candidate)]) == 2
    error = capsys.readouterr().err
    assert f"{words[0]} {reference.parent / gone}: {words[1]}" in error and "Errno" not in error and not asked


def test_questions_that_are_not_there_are_named_whether_or_not_there_is_an_out(tmp_path, asked, capsys):
    out = lines(tmp_path / "out.jsonl")
    for verdicts in (out, tmp_path / "new.jsonl"):
        assert batch.main([str(tmp_path / "in.jsonl"), str(verdicts)]) == 2
        error = capsys.readouterr().err
        assert f"IN.jsonl {tmp_path / 'in.jsonl'}: no such file; give a file of JSON lines" in error
        assert "Errno" not in error and not asked
    assert batch.main([str(tmp_path), str(out)]) == 2
    assert "a folder, not a file" in capsys.readouterr().err


@pytest.mark.parametrize("make", ["folder", "below a file", "pipe"])
def test_out_that_can_not_be_written_is_found_at_start(tmp_path, asked, capsys, make):
    questions, out = lines(tmp_path / "in.jsonl", QUESTION), tmp_path / "out.jsonl"
    if make == "folder":
        out.mkdir()
    elif make == "pipe":
        os.mkfifo(out)
    else:
        out = questions / "out.jsonl"
    words = {"folder": "a folder", "below a file": "is no folder", "pipe": "no ordinary file"}
    assert batch.main([str(questions), str(out)]) == 2
    error = capsys.readouterr().err
    assert f"OUT.jsonl {out}: " in error and words[make] in error and "Errno" not in error and not asked


def test_a_folder_that_is_made_for_out_is_said(tmp_path, asked, capsys):
    questions, out = lines(tmp_path / "in.jsonl", QUESTION), tmp_path / "new" / "deep" / "out.jsonl"
    assert batch.main([str(questions), str(out)]) == 0
    assert f"made the folder {out.parent} for OUT.jsonl" in capsys.readouterr().err and out.read_text()
    assert batch.main([str(questions), str(out)]) == 0
    error = capsys.readouterr().err
    assert "made the folder" not in error and f"all 1 have a verdict in {out} already" in error


def test_a_candidate_that_is_no_text_is_said(reference, candidate, asked, capsys):
    candidate.write_bytes(b"\x7fELF\xff\xfe\x00")
    assert evaluate.main([str(reference), str(candidate)]) == 2
    error = capsys.readouterr().err
    assert f"CANDIDATE {candidate}: not text in UTF-8" in error and "at byte 4" in error and not asked


def test_a_reference_that_is_no_python_is_shown_its_line(reference, candidate, asked, capsys):
    reference.write_text(reference.read_text().replace("def get_inputs():", "de get_inputs():"))
    assert evaluate.main([str(reference), str(candidate)]) == 2
    error = capsys.readouterr().err
    assert "SyntaxError: invalid syntax (line 10: 'de get_inputs():')" in error and not asked


# Whole answers and plain source --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_whole_answer_that_is_given_as_source_gets_a_hint(reference, candidate, asked, monkeypatch, capsys, form):
    monkeypatch.setattr(OneVerdict, "submit", compile_error)
    source = candidate.read_text()
    candidate.write_text(f"Here is my kernel:\n\n```python\n{source}```\n")
    assert evaluate.main([str(reference), str(candidate), *form]) == 0
    shown = capsys.readouterr()
    assert f"{candidate}: this looks like a model's whole answer: with --raw" in shown.err
    assert "--raw" not in shown.out
    candidate.write_text(source.replace("class ModelNew(nn.Module):", "class ModelNew(nn.Module)"))
    assert evaluate.main([str(reference), str(candidate), *form]) == 0
    assert capsys.readouterr().err == ""


def test_who_is_taken_for_what():
    broken = Verdict(status="compile_error")
    answer = "Here:\n```python\nclass ModelNew: ...\n```\n"
    assert misread(broken, answer, raw=False) == "answer" and misread(broken, answer, raw=True) == ""
    assert misread(broken, answer, raw=False, entry_point="Net") == ""
    assert misread(broken, "class ModelNew:", raw=True) == "source" and misread(broken, "words", raw=True) == ""
    assert misread(Verdict(status="correct"), answer, raw=False) == ""


def test_a_batch_names_whole_answers_that_were_given_as_source(tmp_path, asked, monkeypatch, capsys):
    monkeypatch.setattr(OneVerdict, "submit", compile_error)
    answer = {**QUESTION, "id": "b", "candidate": "Here:\n```python\nclass ModelNew: ...\n```\n"}
    questions = lines(tmp_path / "in.jsonl", QUESTION, answer)
    assert batch.main([str(questions), str(tmp_path / "out.jsonl")]) == 0
    assert '1 compile_error (ids "b"): a whole answer goes under raw_response' in capsys.readouterr().err


# Lines ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_file_without_lines_is_refused(tmp_path, asked, capsys, text):
    questions, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    questions.write_text(text)
    assert batch.main([str(questions), str(out)]) == 2
    assert f"{questions}: no lines" in capsys.readouterr().err and not out.exists() and not asked


def test_a_misspelt_key_is_said_with_its_line_and_the_known_ones(tmp_path, asked, capsys):
    typo = {**QUESTION, "id": "b", "entry_pont": "Net"}
    questions = lines(tmp_path / "in.jsonl", QUESTION, typo, {**QUESTION, "id": "c", "xyz": 1, "canditate": "y"})
    assert batch.main([str(questions), str(tmp_path / "out.jsonl")]) == 2
    error = capsys.readouterr().err
    assert f"{questions}:2: unknown key 'entry_pont' (did you mean 'entry_point'?)" in error
    assert f"{questions}:3: unknown keys 'xyz', 'canditate' (did you mean 'candidate'?)" in error, "all bad lines"
    assert ", ".join(KEYS) in error and not asked


def test_what_is_the_askers_own_stands_under_meta(tmp_path):
    (question,) = read_questions(str(lines(tmp_path / "in.jsonl", {**QUESTION, "meta": {"any": [1]}})))
    assert question["meta"] == {"any": [1]}


def test_a_key_that_stands_twice_is_said(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": 1, "reference": "x", "candidate": "y", "candidate": "z"}\n')
    with pytest.raises(QuestionError, match=r"in\.jsonl:1: the key 'candidate' stands there twice"):
        read_questions(path)


# Options -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["batch", "serve"])
@pytest.mark.parametrize("slots", ["0", "-3", "x", "1.5"])
def test_no_slots_are_a_usage_error(tmp_path, asked, capsys, command, slots):
    files = {"batch": [str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")], "serve": []}[command]
    with pytest.raises(SystemExit) as left:
        {"batch": batch, "serve": serve}[command].main([*files, "--slots", slots])
    error = capsys.readouterr().err
    assert left.value.code == 2 and f"--slots: {slots}" in error.replace("'", "") and not asked
    assert "at least 1; leave it out" in error or "no whole number" in error


@pytest.mark.parametrize(
    "option",
    [["--rate", "x"], ["--rate", "-1"], ["--rate", "nan"], ["--keep-days", "inf"], ["--port", "65536"],
     ["--port", "http"], ["--port", "-1"], ["--queue", "0"], ["--max-body-mb", "0"]],
)  # fmt: skip
def test_numbers_that_mean_nothing_to_the_server_are_usage_errors(capsys, option):
    with pytest.raises(SystemExit) as left:
        serve.main(option)
    error = capsys.readouterr().err
    assert left.value.code == 2 and f"argument {option[0]}: " in error and "invalid _" not in error


@pytest.mark.parametrize("wrong", ["--store", "--token-file"])
def test_files_of_the_server_are_named_with_their_option(tmp_path, capsys, monkeypatch, wrong):
    monkeypatch.setattr(serve, "missing_packages", list)
    path = tmp_path if wrong == "--store" else tmp_path / "missing"
    assert serve.main(["--port", "0", wrong, str(path)]) == 2
    error = capsys.readouterr().err
    assert f"{wrong} {path}: " in error and "; give " in error and "Errno" not in error


def test_digests_of_a_folder_that_is_not_there(tmp_path, capsys):
    assert decontaminate.main([str(tmp_path / "nowhere")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("env.decontaminate: ") and "nowhere: no such folder" in error


@pytest.mark.parametrize("module", ["evaluate", "batch", "serve", "doctor", "decontaminate"])
def test_help_names_what_is_taken(module):
    done = subprocess.run(
        [sys.executable, "-m", f"env.{module}", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and f"usage: python -m env.{module}" in done.stdout
    assert ("--slots" in done.stdout) == (module in ("batch", "serve"))


def test_help_of_the_batch_says_what_a_line_has(capsys):
    with pytest.raises(SystemExit):
        batch.main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert all(key in told for key in KEYS) and "a file without any line are refused" in told


# What the times of a verdict are -------------------------------------------------------------------------------------


def test_modelled_times_are_not_called_measured():
    for profile in ("default", "kernelbench", "paper"):
        on_cpu, on_gpu = rules_for(profile, "cpu").describe(), rules_for(profile, "cuda").describe()
        assert on_cpu.endswith(", modelled time") and "calls" not in on_cpu
        assert on_gpu.endswith(", eager time" if profile == "default" else ", mean of 100 warm calls")
    assert "float32 with the tolerance of tf32" in rules_for("paper", "cpu", precision="tf32").describe()
    assert "float32 as tf32" in rules_for("paper", "cuda", precision="tf32").describe()


# Stopped -------------------------------------------------------------------------------------------------------------


class StoppedAtOnce(OneVerdict):
    def submit(self, problem, response, raw):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        return Future()


def test_a_batch_that_is_stopped_without_a_verdict_does_not_claim_one(tmp_path, asked, monkeypatch, capsys):
    monkeypatch.setattr(batch, "Pool", StoppedAtOnce)
    questions, out = lines(tmp_path / "in.jsonl", QUESTION), tmp_path / "out.jsonl"
    assert batch.main([str(questions), str(out)]) == 130
    error = capsys.readouterr().err
    assert "stopped by Ctrl-C; there is no verdict yet" in error and "so far are in" not in error


# From Python ---------------------------------------------------------------------------------------------------------

PROBLEM = Problem(id="p", source="class Model: ...")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("class Model: ...", "x", False), "it has to be an env.records.Problem"),
        (([PROBLEM], "x", False), "problem is [Problem"),
        ((PROBLEM, None, False), "response is None, nothing: it has to be text"),
        ((PROBLEM, b"class ModelNew", False), "a bytes: it has to be text"),
        ((PROBLEM, Path("candidate.py"), False), "it has to be text"),
        ((PROBLEM, "x", "no"), "raw is 'no', a str: it has to be True"),
        ((Problem(id="p", source=None), "x", True), "problem.source is None"),
        ((Problem(id=1, source="x"), "x", True), "problem.id is 1, a int"),
    ],
)
def test_what_is_no_question_is_a_type_error_at_the_call(arguments, words):
    with pytest.raises(TypeError) as error:
        Tickets().issue(*arguments)  # what submit of both pools begins with
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"slots": "2"}, "slots is '2', a str"),
        ({"lanes": 1.5}, "lanes is 1.5, a float"),
        ({"seed": "x"}, "seed is 'x', a str"),
        ({"rules": "paper"}, "rules is 'paper', a str: give env.rules.rules_for"),
        ({"gpus": "0,1"}, "gpus is '0,1': it has to be a list"),
        ({"gpus": [0]}, "gpus is [0]: it has to be a list of names"),
    ],
)
def test_settings_of_a_pool_that_are_none_are_type_errors(settings, words):
    with pytest.raises(TypeError) as error:
        Pool("cpu", **settings)
    assert words in str(error.value)
