"""The two commands: one verdict as text or JSON, many verdicts as lines that survive a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from env import batch, evaluate
from env.extract import clean_source
from env.records import STATUSES, Problem, Verdict, sha256
from env.rules import rules_for
from tests.env.cli_fakes import OneVerdict

pytestmark = pytest.mark.budget(120)

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
    assert (
        verdict["evidence"]["without_kernels"] == "changed"
        and verdict["evidence"]["launches"]["eval"][0]["own"] is True
    )
    assert verdict["feedback"].startswith("status: correct\nspeedup: 3.00x (modelled)")
    assert verdict["problem_sha256"] and verdict["candidate_sha256"] and verdict["cost"]["total_s"] > 0
    assert verdict["profile"] == [{"name": "chain", "own": True, "count": 1, "time_us": verdict["candidate_us"]}]


@pytest.fixture
def one_verdict(monkeypatch):
    """What the pool was asked for, newest last."""
    monkeypatch.setattr(evaluate, "Pool", OneVerdict)
    monkeypatch.setattr(batch, "Pool", OneVerdict)
    monkeypatch.setattr(OneVerdict, "asked", [])
    return OneVerdict.asked


@pytest.mark.parametrize(("flags", "kind"), [([], "source"), (["--raw"], "answer")])
def test_evaluate_exits_0_whatever_the_verdict_is(files, capsys, one_verdict, flags, kind):
    assert evaluate.main([str(files / "reference.py"), str(files / "hack.py"), *flags]) == 0
    text = capsys.readouterr().out
    length = len((files / "hack.py").read_text())
    assert text == f"status: incorrect\nwhy: Model {kind} of {length}\ndevice: cpu\ntook: 0.00 s\n"


def measured(**changes) -> Verdict:
    fields = {
        "speedup": 2.0, "speedup_low": 1.9, "speedup_high": 2.1, "reference_us": 8.0, "candidate_us": 4.0,
        "time_kind": "eager", "profiling_ratio": 0.75, "device": "H200", "versions": {"torch": "2", "triton": "3"},
        "profile": [
            {"name": "mine", "own": True, "count": 2, "time_us": 3.0},
            {"name": "aten::add", "own": False, "count": 1, "time_us": 1.0},
        ],
        "evidence": {"isolation_missing": ["seccomp", "own user"], "rules": "default, float32 as ieee"},
        "cost": {"reference_s": 0.25, "timing_s": 1.5, "total_s": 1.75},
    }  # fmt: skip
    return Verdict(status="correct", **{**fields, **changes})


def test_text_of_a_verdict_has_times_kernels_isolation_and_cost():
    assert evaluate.render_text(measured()).split("\n") == [
        "status: correct",
        "speedup: 2.000x [1.900, 2.100]",
        "eager times: reference 8.00 us, candidate 4.00 us",
        "kernel            calls     time us   share",
        "triton mine           2        3.00   75.0%",
        "torch  aten::add      1        1.00   25.0%",
        "profiling ratio: 0.750 (time in the candidate's own kernels)",
        "isolation missing: seccomp, own user",
        "rules: default, float32 as ieee",
        "device: H200 (torch 2, triton 3)",
        "took: 1.75 s (reference 0.25, timing 1.50)",
    ]


def test_text_says_a_tie_and_why_there_are_no_times():
    assert "[0.970, 1.040]: a tie, the interval spans 1" in evaluate.render_text(
        measured(speedup=1.0, speedup_low=0.97, speedup_high=1.04)
    )
    assert "tie" not in evaluate.render_text(measured(speedup_low=0.9, time_kind="modelled"))
    broken = Verdict(status="problem_error", message="the reference failed: NameError: x")
    assert evaluate.render_text(broken).split("\n")[:2] == ["status: problem_error", broken.message]


def test_text_moves_no_cursor():
    hostile = "\x1b[2J\x1b]0;owned\x07\rstatus: correct\nstatus: correct\x9b"
    for verdict in (
        Verdict(status="runtime_error", message=hostile, evidence={"lines": [hostile]}),
        Verdict(status="problem_error", message=hostile.replace("status", "x")),
        measured(profile=[{"name": hostile, "own": own, "count": 1, "time_us": 1.0} for own in (True, False)] * 30),
    ):
        text = evaluate.render_text(verdict)
        assert text.replace("\n", "").isprintable() and text.count("\nstatus:") == 0 and len(text) < 6000


# Options -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["evaluate", "batch"])
def test_options_choose_the_rules_of_both_commands(files, one_verdict, command):
    questions = files / "in.jsonl"
    questions.write_text(_row() + "\n")
    first = [str(files / "reference.py"), str(files / "correct.py")]
    if command == "batch":
        first = [str(questions), str(files / "out.jsonl")]
    main = {"evaluate": evaluate, "batch": batch}[command].main
    assert main(first) == 0
    (asked,) = one_verdict
    assert asked["device"] == "cpu" and asked["gpus"] is None and asked["seed"] is None
    assert asked["rules"] == rules_for("default", "cpu")
    options = ["--profile", "paper", "--precision", "tf32", "--reference", "compile", "--weak-isolation", "--seed", "5"]
    (files / "out.jsonl").unlink(missing_ok=True)
    assert main([*first, *options, "--device", "cuda", "--time", "device"]) == 0
    changes = {"precision": "tf32", "reference": "compile", "rewarded_time": "device", "weak_isolation": True}
    assert one_verdict[-1]["rules"] == rules_for("paper", "cuda", **changes)
    assert one_verdict[-1]["seed"] == 5 and one_verdict[-1]["device"] == "cuda"


@pytest.mark.parametrize(
    "options",
    [
        ["--profile", "mine"], ["--precision", "fp8"], ["--reference", "none"], ["--time", "wall"], ["--seed", "x"],
        ["--device", "tpu"], ["--entry-point", "a b"], ["--entry-point", ""],
    ],
)  # fmt: skip
def test_options_that_mean_nothing_are_usage_errors(files, one_verdict, options, capsys):
    with pytest.raises(SystemExit) as left:
        evaluate.main([str(files / "reference.py"), str(files / "correct.py"), *options])
    assert left.value.code == 2 and not one_verdict
    assert options[0] in capsys.readouterr().err


def test_device_times_need_a_device(files, one_verdict, capsys):
    assert evaluate.main([str(files / "reference.py"), str(files / "correct.py"), "--time", "device"]) == 2
    assert "modelled" in capsys.readouterr().err and not one_verdict


def test_other_entry_point_is_checked_as_well(files, one_verdict, capsys):
    net = files / "net.py"
    net.write_text((files / "reference.py").read_text().replace("class Model", "class Net"))
    candidate = str(files / "correct.py")
    assert evaluate.main([str(net), candidate, "--entry-point", "Net"]) == 0
    assert "Net source" in capsys.readouterr().out
    assert evaluate.main([str(files / "reference.py"), candidate, "--entry-point", "Net"]) == 2
    assert "it has no 'class Net'" in capsys.readouterr().err
    net.write_text(net.read_text().replace("def get_inputs", "def inputs"))
    assert evaluate.main([str(net), candidate, "--entry-point", "Net"]) == 2
    assert "it has no 'def get_inputs'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "device", "gpus"),
    [([], "cpu", None), (["--gpus", "all"], "cuda", None), (["--gpus", "0, 3"], "cuda", ["0", "3"]),
     (["--gpus", "1", "--device", "cuda"], "cuda", ["1"]), (["--device", "cuda"], "cuda", None)],
)  # fmt: skip
def test_gpus_choose_the_device(tmp_path, one_verdict, options, device, gpus):
    questions = tmp_path / "in.jsonl"
    questions.write_text(_row() + "\n")
    assert batch.main([str(questions), str(tmp_path / "out.jsonl"), "--slots", "1", *options]) == 0
    assert (one_verdict[-1]["device"], one_verdict[-1]["gpus"], one_verdict[-1]["slots"]) == (device, gpus, 1)


@pytest.mark.parametrize(
    "options", [["--gpus", "0,0"], ["--gpus", ""], ["--gpus", "0,"], ["--gpus", "0", "--device", "cpu"]]
)
def test_gpus_that_make_no_sense_are_usage_errors(tmp_path, one_verdict, options, capsys):
    with pytest.raises(SystemExit) as left:
        batch.main([str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), *options])
    assert left.value.code == 2 and "--gpus" in capsys.readouterr().err and not one_verdict


def test_gpu_that_is_not_there_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    questions = tmp_path / "in.jsonl"
    questions.write_text(_row() + "\n")
    assert batch.main([str(questions), str(tmp_path / "out.jsonl"), "--gpus", "0,7"]) == 2
    assert "no such GPU: 7; visible: 0, 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reference", "candidate", "words"),
    [
        ("missing.py", "correct.py", "missing.py"),
        ("reference.py", "missing.py", "missing.py"),
        ("correct.py", "correct.py", "not a KernelBench problem"),
        (".", "correct.py", "a folder, not a file"),
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
        ('{"id": 2, "reference": "x", "candidate": "y", "entry_point": "a b"}', "in.jsonl:2: entry_point is 'a b'"),
        ('{"id": 2, "reference": "x", "candidate": "y", "entry_point": 5}', "in.jsonl:2: entry_point is 5"),
        ('{"id": 2, "reference": "x", "candidate": "y", "entry_point": null}', "in.jsonl:2: entry_point is None"),
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
    assert batch.read_done(path) == {'"a"': {}, "7": {}}
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


# Resuming ------------------------------------------------------------------------------------------------------------

QUESTIONS = [
    {"id": "a", "reference": "class Model: ...", "candidate": "\ufeffclass ModelNew: ...\r\n"},
    {"id": "b", "reference": "class Model: ...", "raw_response": "Here:\n```python\nclass ModelNew: ...\n```\n"},
    {"id": "c", "reference": "class Model: ...", "raw_response": "no code"},
]


def verdict_of(question: dict, **changes) -> dict:
    codes = {"a": clean_source(QUESTIONS[0]["candidate"]), "b": "class ModelNew: ...\n", "c": "no code"}
    fields = {
        "time_kind": "modelled", "evidence": {"rules": rules_for("default", "cpu").describe()},
        "problem_sha256": Problem(id="", source=question["reference"]).sha256,
        "candidate_sha256": sha256(codes[question["id"]]),
    }  # fmt: skip
    return Verdict(status="incorrect", **{**fields, **changes}).to_json()


@pytest.fixture
def stopped_after_two(tmp_path):
    """(IN.jsonl with three questions, OUT.jsonl with the verdicts of two)."""
    questions, verdicts = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    questions.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    verdicts.write_text(
        "".join(json.dumps({"id": q["id"], "verdict": verdict_of(q)}) + "\n" for q in (QUESTIONS[2], QUESTIONS[1]))
    )
    return questions, verdicts


def test_batch_judges_only_what_is_left_in_any_order(stopped_after_two, one_verdict):
    questions, verdicts = stopped_after_two
    before = verdicts.read_text()
    assert batch.main([str(questions), str(verdicts)]) == 0
    assert verdicts.read_text().startswith(before)
    assert [json.loads(line)["id"] for line in verdicts.read_text().splitlines()] == ["c", "b", "a"]
    assert batch.main([str(questions), str(verdicts)]) == 0 and len(one_verdict) == 1


def test_verdict_that_says_little_of_itself_is_kept(stopped_after_two, one_verdict):
    """What came to nothing before it reached a judge has neither times nor rules."""
    questions, verdicts = stopped_after_two
    bare = {"status": "infra_error", "evidence": {}, "problem_sha256": "", "candidate_sha256": "", "time_kind": ""}
    verdicts.write_text("".join(json.dumps({"id": key, "verdict": bare}) + "\n" for key in "abc"))
    assert batch.main([str(questions), str(verdicts)]) == 0 and not one_verdict


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({"reference": "class Model: pass"}, [], "another reference"),
        ({"entry_point": "Net"}, [], "another reference"),
        ({"raw_response": "```python\nclass ModelNew: pass\n```\n"}, [], "another candidate"),
        ({}, ["--profile", "paper"], "other rules (default, "),
        ({}, ["--precision", "tf32"], "other rules (default, "),
        ({}, ["--device", "cuda"], "another device than cuda"),
    ],
)
def test_verdicts_on_something_else_are_not_taken_over(stopped_after_two, one_verdict, capsys, change, options, words):
    questions, verdicts = stopped_after_two
    changed = [QUESTIONS[0], {**QUESTIONS[1], **change}]
    questions.write_text("".join(json.dumps(question) + "\n" for question in changed))
    before = verdicts.read_bytes()
    assert batch.main([str(questions), str(verdicts), *options]) == 2
    error = capsys.readouterr().err
    assert 'the verdict of id "b"' in error and words in error and "another OUT.jsonl" in error
    assert verdicts.read_bytes() == before and not one_verdict


def test_two_batches_do_not_write_to_one_file(stopped_after_two, one_verdict, capsys):
    questions, verdicts = stopped_after_two
    with batch._alone_on(verdicts):
        assert batch.main([str(questions), str(verdicts)]) == 2
    assert "another batch is writing to it" in capsys.readouterr().err and not one_verdict


# Ctrl-C and SIGTERM --------------------------------------------------------------------------------------------------


class NeverReady(OneVerdict):
    """Answers the first question; then comes the signal, and the second answer just before the pool is closed."""

    number = signal.SIGTERM

    def submit(self, problem, response, raw):
        self.count = getattr(self, "count", 0) + 1
        if self.count == 1:
            threading.Timer(0.3, self._stop).start()
            return super().submit(problem, response, raw)
        self.last = Future()
        return self.last

    def _stop(self):
        for _ in range(3):  # an impatient user
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(("number", "code", "name"), [("SIGINT", 130, "Ctrl-C"), ("SIGTERM", 143, "SIGTERM")])
def test_batch_that_is_stopped_keeps_what_it_has_and_says_so(tmp_path, monkeypatch, capsys, number, code, name):
    monkeypatch.setattr(batch, "Pool", NeverReady)
    monkeypatch.setattr(NeverReady, "number", getattr(signal, number))
    handlers = [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]
    questions, verdicts = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    questions.write_text(_row() + "\n" + _row(id="b") + "\n")
    assert batch.main([str(questions), str(verdicts)]) == code
    error = capsys.readouterr().err
    assert f"env.batch: stopped by {name}; the verdicts so far are in {verdicts}" in error and "Traceback" not in error
    assert [json.loads(line)["id"] for line in verdicts.read_text().splitlines()] == ["a"]
    assert [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)] == handlers


def _processes_of(folder: Path) -> list[str]:
    """Processes whose environment or command names a folder: the fork server and its workers live in it."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                text = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in text:
                found.append(f"{process.name} {(process / 'cmdline').read_bytes()!r}" if process.exists() else "")
    return [process for process in found if process]


def test_stopped_commands_leave_no_process_and_no_folder(tmp_path, answers):
    """A batch while a candidate hangs, and an evaluate before its evaluator is ready; both at once to save time."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for name in ("reference", "correct"):
        (tmp_path / f"{name}.py").write_text(getattr(answers, name))
    questions, verdicts = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    hang = answers.correct.replace("y = torch.empty_like(x)", "import time; time.sleep(1000)")
    lines = [ask(answers, id="good", candidate=answers.correct), ask(answers, id="hang", candidate=hang)]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def start(*command: object) -> subprocess.Popen:
        environment = {**os.environ, "TMPDIR": str(scratch)}
        return subprocess.Popen(
            [sys.executable, "-m", *map(str, command)], cwd=ROOT, env=environment, text=True, stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip

    judging = start("env.batch", questions, verdicts, "--slots", 1)
    starting = start("env.evaluate", tmp_path / "reference.py", tmp_path / "correct.py")
    until = time.monotonic() + 60
    while not _processes_of(scratch / "kernel-judge-") and time.monotonic() < until:
        time.sleep(0.05)
    starting.send_signal(signal.SIGINT)
    while not (verdicts.exists() and verdicts.read_text()) and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(0.5)
    judging.send_signal(signal.SIGTERM)
    _, said = judging.communicate(timeout=40)
    assert judging.returncode == 143 and "stopped by SIGTERM" in said and "Traceback" not in said, said
    out, said = starting.communicate(timeout=40)
    assert (starting.returncode, out) == (130, "") and "there is no verdict" in said and "Traceback" not in said, said
    assert [json.loads(line)["id"] for line in verdicts.read_text().splitlines()] == ["good"]
    until = time.monotonic() + 5
    while (_processes_of(scratch) or list(scratch.iterdir())) and time.monotonic() < until:
        time.sleep(0.1)
    assert _processes_of(scratch) == [] and list(scratch.iterdir()) == []
