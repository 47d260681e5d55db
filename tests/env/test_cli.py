"""The two commands: one verdict as text or JSON, many verdicts as lines that survive a kill."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest

from env import batch, evaluate
from env.records import STATUSES, Verdict

pytestmark = pytest.mark.budget(60)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def files(tmp_path, answers):
    """A folder with reference.py and a candidate of each status."""
    for name, source in vars(answers).items():
        (tmp_path / f"{name}.py").write_text(source)
    return tmp_path


def test_evaluate_prints_one_verdict_as_json(files):
    command = [
        sys.executable,
        "-m",
        "env.evaluate",
        str(files / "reference.py"),
        str(files / "correct.py"),
        "--json",
        "--seed",
        "1",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["status"] == "correct" and verdict["values_match"] is True
    assert verdict["speedup"] == pytest.approx(3.0)
    assert verdict["speedup_low"] <= verdict["speedup"] <= verdict["speedup_high"]
    assert verdict["speedup"] == pytest.approx(verdict["reference_us"] / verdict["candidate_us"])
    assert verdict["profiling_ratio"] == 1.0 and verdict["time_kind"] == "modelled"
    assert verdict["evidence"]["knockout"] == "changed" and verdict["evidence"]["launches"]["eval"][0]["own"] is True
    assert verdict["feedback"].startswith("status: correct\nspeedup: 3.00x (modelled)")
    assert verdict["problem_sha256"] and verdict["candidate_sha256"] and verdict["cost"]["total_s"] > 0
    assert verdict["profile"] == [{"name": "chain", "own": True, "count": 1, "time_us": verdict["candidate_us"]}]


class OneVerdict:
    """Stands in for a pool: what it says of a candidate is not what is tested here."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, problem, response, raw):
        message = f"{problem.entry_point} {'answer' if raw else 'source'} of {len(response)}"
        verdict = Verdict(status="hack", message=message, feedback=f"status: hack\n{message}", device="cpu")
        future = Future()
        future.set_result(verdict)
        return future


@pytest.mark.parametrize(("flags", "kind"), [([], "source"), (["--raw"], "answer")])
def test_evaluate_exits_0_whatever_the_verdict_is(files, capsys, monkeypatch, flags, kind):
    monkeypatch.setattr(evaluate, "Pool", OneVerdict)
    assert evaluate.main([str(files / "reference.py"), str(files / "hack.py"), *flags]) == 0
    text = capsys.readouterr().out
    length = len((files / "hack.py").read_text())
    assert text == f"status: hack\nModel {kind} of {length}\ndevice: cpu; 0.00 s\n"


def test_text_of_a_measured_verdict_names_its_times():
    verdict = Verdict(
        status="correct", speedup=2.0, speedup_low=1.9, speedup_high=2.1, reference_us=8.0, candidate_us=4.0
    )
    verdict.time_kind = "eager"
    text = evaluate.render_text(verdict)
    assert "eager times: reference 8.00 us, candidate 4.00 us, speedup 2.000 [1.900, 2.100]" in text


@pytest.mark.parametrize(
    ("reference", "candidate", "words"),
    [
        ("missing.py", "correct.py", "missing.py"),
        ("reference.py", "missing.py", "missing.py"),
        ("correct.py", "correct.py", "not a KernelBench problem"),
        (".", "correct.py", "directory"),
    ],
)
def test_evaluate_exits_2_where_there_is_no_question(files, capsys, reference, candidate, words):
    assert evaluate.main([str(files / reference), str(files / candidate)]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and words in shown.err and shown.err.startswith("env.evaluate: ")


def test_commands_exit_2_without_the_device(files, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert evaluate.main([str(files / "reference.py"), str(files / "correct.py"), "--device", "cuda"]) == 2
    assert "no GPU is visible" in capsys.readouterr().err
    questions = files / "in.jsonl"
    questions.write_text(json.dumps({"id": 1, "reference": "", "candidate": ""}) + "\n")
    assert batch.main([str(questions), str(files / "out.jsonl"), "--device", "cuda"]) == 2
    assert "no GPU is visible" in capsys.readouterr().err


def test_unknown_device_is_a_usage_error(files):
    with pytest.raises(SystemExit) as left:
        evaluate.main(["a", "b", "--device", "tpu"])
    assert left.value.code == 2


def ask(answers, **changes) -> dict:
    return {"reference": answers.reference, **changes}


def test_batch_judges_sources_and_answers_and_goes_on_after_a_kill(tmp_path, answers, capsys):
    questions, verdicts = tmp_path / "in.jsonl", tmp_path / "deep" / "out.jsonl"
    lines = [
        ask(answers, id="a", candidate=answers.correct),
        ask(answers, id=7, raw_response=f"```python\n{answers.incorrect}```"),
        ask(answers, id="none", raw_response="no code"),
        ask(answers, id="same", candidate=answers.correct),
        {"id": "net", "reference": answers.reference.replace("Model", "Net"), "entry_point": "Net",
         "candidate": answers.correct.replace("ModelNew", "NetNew")},
    ]  # fmt: skip
    questions.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert batch.main([str(questions), str(verdicts), "--slots", "1", "--seed", "1"]) == 0
    found = [json.loads(line) for line in verdicts.read_text().splitlines()]
    statuses = {answer["id"]: answer["verdict"]["status"] for answer in found}
    assert statuses == {"a": "correct", 7: "incorrect", "none": "compile_error", "same": "correct", "net": "correct"}
    assert len(found) == 5 and all(set(answer) == {"id", "verdict"} for answer in found)
    assert all(answer["verdict"]["status"] in STATUSES and answer["verdict"]["feedback"] for answer in found)

    # A kill in the middle of a line: that one is judged again, the others are not.
    whole = verdicts.read_bytes().splitlines(keepends=True)
    verdicts.write_bytes(b"".join(whole[:-1]) + whole[-1][:25])
    assert batch.main([str(questions), str(verdicts), "--slots", "1", "--seed", "1"]) == 0
    again = verdicts.read_bytes().splitlines(keepends=True)
    assert again[:-1] == whole[:-1] and len(again) == 5

    def without_cost(line: bytes) -> dict:
        answer = json.loads(line)
        answer["verdict"].pop("cost")
        return answer

    assert without_cost(again[-1]) == without_cost(whole[-1])

    # All there: nothing is started.
    assert batch.main([str(questions), str(verdicts)]) == 0
    assert verdicts.read_bytes().splitlines(keepends=True) == again
    capsys.readouterr()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "in.jsonl:2: not JSON"),
        ("[1]", "in.jsonl:2: needs 'id'"),
        ('{"id": 2, "reference": "x"}', "one of 'candidate' or 'raw_response'"),
        ('{"id": 2, "reference": "x", "candidate": "y", "raw_response": "z"}', "one of"),
        ('{"id": 2, "reference": 5, "candidate": "y"}', "in.jsonl:2"),
        ('{"reference": "x", "candidate": "y"}', "in.jsonl:2"),
        ('{"id": 2, "reference": "x", "candidate": 5}', "in.jsonl:2"),
        ('{"id": 1, "reference": "x", "candidate": "y"}', "in.jsonl:2: the id 1 stands on an earlier line"),
    ],
)
def test_bad_line_is_named_before_anything_is_judged(tmp_path, capsys, line, words):
    questions, verdicts = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    questions.write_text('{"id": 1, "reference": "x", "candidate": "y"}\n' + line + "\n")
    assert batch.main([str(questions), str(verdicts)]) == 2
    assert words in capsys.readouterr().err and not verdicts.exists()


def test_missing_questions(tmp_path, capsys):
    assert batch.main([str(tmp_path / "none.jsonl"), str(tmp_path / "out.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    "tail", [b"", b'{"id"', b'{"id": "b", "verdict": {"sta', b"\0\0\0", b"\xff\xfe", b'{"other": 1}\n', b'{"id": "b"}']
)
def test_reading_what_is_done(tmp_path, tail):
    """A cut last line is taken off, also where the cut left something that could be read."""
    path = tmp_path / "out.jsonl"
    good = b'{"id": "a", "verdict": {}}\n{"id": 7, "verdict": {}}\n'
    path.write_bytes(good + tail)
    assert batch.read_done(path) == {'"a"', "7"}
    assert path.read_bytes() == good


def test_nothing_in_env_needs_the_trainer():
    for file in (ROOT / "env").glob("*.py"):
        for line in file.read_text().splitlines():
            words = line.split()
            assert not (words[:1] in (["import"], ["from"]) and words[1].split(".")[0] in ("rl", "eval", "analysis")), (
                file
            )


def _row(**changes):
    return json.dumps({"id": "a", "reference": "class Model: ...", "candidate": "class ModelNew: ...", **changes})


@pytest.mark.parametrize(
    "content", ["my notes\n", "my notes", '{"id": "a"}\n', '{"x": 1}\n{"id": "a", "verdict": {}}\n']
)
def test_batch_leaves_a_file_that_is_not_its_own(tmp_path, content, capsys):
    questions, out = tmp_path / "in.jsonl", tmp_path / "notes.txt"
    questions.write_text(_row() + "\n")
    out.write_text(content)
    assert batch.main([str(questions), str(out)]) == 2
    assert "not a verdict" in capsys.readouterr().err
    assert out.read_text() == content


@pytest.mark.parametrize("end", ["", "\n"])
def test_batch_refuses_to_write_over_its_questions(tmp_path, end, capsys):
    questions = tmp_path / "in.jsonl"
    questions.write_text(_row() + end)
    assert batch.main([str(questions), str(questions)]) == 2
    assert "same file" in capsys.readouterr().err
    assert questions.read_text() == _row() + end


def test_batch_reads_line_separators_inside_strings(tmp_path):
    questions = tmp_path / "in.jsonl"
    questions.write_text(json.dumps(json.loads(_row(candidate="a\u2028b\u0085c")), ensure_ascii=False) + "\n")
    (question,) = batch.read_questions(questions)
    assert question["candidate"] == "a\u2028b\u0085c"


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"[" * 200_000])
def test_batch_names_a_file_that_is_no_question(tmp_path, data, capsys):
    questions = tmp_path / "in.jsonl"
    questions.write_bytes(data)
    assert batch.main([str(questions), str(tmp_path / "out.jsonl")]) == 2
    assert "in.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("extra", [[], ["--entry-point", "Net"]])
def test_evaluate_names_a_reference_that_is_no_text(tmp_path, extra, capsys):
    reference, candidate = tmp_path / "r.py", tmp_path / "c.py"
    reference.write_bytes(b"\xff\xfe\x00")
    candidate.write_text("class ModelNew: ...")
    assert evaluate.main([str(reference), str(candidate), *extra]) == 2
    assert "env.evaluate:" in capsys.readouterr().err


def test_fewer_than_no_slots_are_refused(tmp_path, capsys):
    questions = tmp_path / "in.jsonl"
    questions.write_text(_row() + "\n")
    assert batch.main([str(questions), str(tmp_path / "out.jsonl"), "--slots", "-3"]) == 2
    assert "slots = -3" in capsys.readouterr().err
