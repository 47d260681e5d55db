"""The pool keeps judging whatever is killed, judges equal answers once, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from env.pool import Pool, PoolError, visible_gpus
from env.records import Problem
from env.rules import Rules

pytestmark = pytest.mark.budget(150)

ROOT = Path(__file__).resolve().parents[2]
RULES = Rules(trials=1, compile_timeout_s=20, run_timeout_s=10)


def processes() -> dict[int, tuple[int, str]]:
    """{pid: (parent, command line)} of this machine's processes, zombies left out."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if state not in "ZX":
            found[int(entry.name)] = (int(parent), command)
    return found


def below(root: int) -> dict[int, str]:
    """{pid: command line} of all descendants of a process."""
    all_of_them, found, wave = processes(), {}, {root}
    while wave:
        wave = {pid for pid, (parent, _) in all_of_them.items() if parent in wave}
        found.update({pid: all_of_them[pid][1] for pid in wave})
    return found


def judging(root: int, module: str) -> list[int]:
    """Processes below `root` that were started as `python -m module`."""
    own = [pid for pid, command in below(root).items() if f"-m {module} " in command]
    # A fork keeps its command line: only those whose parent isn't one of them were started as such.
    parents = {pid: parent for pid, (parent, _) in processes().items()}
    return [pid for pid in own if parents.get(pid) not in own]


def fork_servers() -> list[int]:
    """Those of this process's evaluators: other modules' tests may have one of their own."""
    return [pid for evaluator in judging(os.getpid(), "env.evaluator") for pid in judging(evaluator, "env.forkserver")]


def wait_until(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


def folders(where: Path) -> set[str]:
    return {path.name for path in where.glob("kernel-judge-*")}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Where judges of this module keep their scratch."""
    folder = tmp_path_factory.mktemp("scratch")
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    os.environ["TMPDIR"] = str(folder)
    yield folder
    tempfile.tempdir = before
    del os.environ["TMPDIR"]


@pytest.fixture(scope="module")
def pool(home):
    with Pool("cpu", slots=2, seed=3, rules=RULES) as pool:
        yield pool


def problem(answers, name: str = "p", suffix: str = "") -> Problem:
    return Problem(id=name, source=answers.reference + suffix)


def without_cost(verdict) -> dict:
    data = verdict.to_json()
    data.pop("cost")
    return data


STATUSES = ["correct", "incorrect", "hack", "compile_error", "runtime_error"]


def test_two_slots_and_every_status(pool, answers):
    assert len(pool) == 2 and len(judging(os.getpid(), "env.evaluator")) == 2
    futures = {status: pool.submit(problem(answers), getattr(answers, status), raw=False) for status in STATUSES}
    broken = pool.submit(Problem(id="b", source=answers.problem_error), answers.correct, raw=False)
    assert {status: future.result().status for status, future in futures.items()} == dict(zip(STATUSES, STATUSES))
    assert broken.result().status == "problem_error" and broken.result().blameless
    verdict = futures["correct"].result()
    assert verdict.speedup == pytest.approx(3.0) and verdict.profiling_ratio == 1.0 and verdict.time_kind == "modelled"
    assert verdict.problem_sha256 == problem(answers).sha256 and verdict.versions["torch"] and "cpu" in verdict.device
    assert "reference" not in futures["hack"].result().evidence["rule"]


def test_whole_answers_and_answers_without_code(pool, answers):
    found = pool.submit(problem(answers), f"Here it is:\n```python\n{answers.correct}```\n")
    nothing = pool.submit(problem(answers), "I can't do that.")
    assert found.result().status == "correct"
    assert nothing.result().status == "compile_error" and "No closed Python code block" in nothing.result().feedback


def test_equal_answers_are_judged_once(pool, answers):
    unique = answers.correct + "# once\n"
    first = pool.submit(problem(answers), unique, raw=False)
    again = pool.submit(problem(answers, "another name"), unique, raw=False)
    assert again is first
    assert pool.submit(problem(answers), unique, raw=True) is not first, "a source isn't an answer"
    assert pool.submit(problem(answers, suffix="# other\n"), unique, raw=False) is not first
    assert first.result().status == "correct"
    assert pool.submit(problem(answers), unique, raw=False) is first, "also after the verdict"


def test_both_slots_work_at_once(pool, answers):
    pool.submit(problem(answers), answers.correct, raw=False).result()
    started = time.monotonic()
    sleepers = [pool.submit(problem(answers), f"{answers.slow}# both {i}\n", raw=False) for i in range(2)]
    costs = [future.result().cost["total_s"] for future in sleepers]
    assert all(future.result().status == "correct" for future in sleepers)
    assert time.monotonic() - started < 0.8 * sum(costs)


def in_flight(pool, answers, tag: str):
    """A future whose candidate runs right now."""
    future = pool.submit(problem(answers), answers.slow + f"# {tag}\n", raw=False)
    time.sleep(0.7)
    assert not future.done()
    return future


def test_same_seed_same_verdict_and_a_close_that_leaves_nothing(pool, answers, home):
    before, known = folders(home), set(below(os.getpid()))
    other = Pool("cpu", slots=1, seed=3, rules=RULES)
    assert len(folders(home) - before) == 1
    for status in STATUSES:
        mine = pool.submit(problem(answers), getattr(answers, status), raw=False)
        theirs = other.submit(problem(answers), getattr(answers, status), raw=False)
        assert without_cost(mine.result()) == without_cost(theirs.result()), status

    running = in_flight(other, answers, "running")
    waiting = [other.submit(problem(answers), f"{answers.slow}# {i}\n", raw=False) for i in range(3)]
    born = set(below(os.getpid())) - known
    assert len(born) >= 4, "evaluator, fork server, supervisors, workers"
    started = time.monotonic()
    other.close()
    other.close()
    assert time.monotonic() - started < 20
    assert all(future.done() for future in [running, *waiting]) and all(future.cancelled() for future in waiting)
    assert wait_until(lambda: not born & set(processes()), 2)
    assert folders(home) == before, "its scratch is gone, the other pool's is there"
    with pytest.raises(PoolError, match="closed"):
        other.submit(problem(answers), answers.correct)


def test_killed_evaluator_is_replaced_and_its_job_judged(pool, answers, home):
    evaluators = judging(os.getpid(), "env.evaluator")
    futures = [
        in_flight(pool, answers, "evaluator 1"),
        pool.submit(problem(answers), answers.slow + "# e 2\n", raw=False),
    ]
    doomed = {child for pid in evaluators for child in below(pid)}
    for pid in evaluators:
        os.kill(pid, signal.SIGKILL)
    assert [future.result(timeout=60).status for future in futures] == ["correct", "correct"]
    replaced = judging(os.getpid(), "env.evaluator")
    assert replaced and not set(replaced) & set(evaluators)
    assert wait_until(lambda: not doomed & set(processes()), 5), "what belonged to the dead evaluators is gone"
    assert wait_until(lambda: len(folders(home)) == 2, 30), "their scratch as well"


def test_killed_fork_server_is_replaced_and_its_job_judged(pool, answers):
    assert wait_until(lambda: len(fork_servers()) == 2, 30)
    # One job in each evaluator, so that whichever fork server is killed loses one.
    futures = [pool.submit(problem(answers), f"{answers.slow}# fork server {i}\n", raw=False) for i in range(2)]
    time.sleep(0.7)
    assert not any(future.done() for future in futures)
    doomed = fork_servers()[0]
    os.kill(doomed, signal.SIGKILL)
    verdicts = [future.result(timeout=60) for future in futures]
    assert [verdict.status for verdict in verdicts] == ["correct"] * 2, [verdict.message for verdict in verdicts]
    assert wait_until(lambda: len(fork_servers()) == 2, 30) and doomed not in fork_servers()


def test_who_costs_an_evaluator_its_life_twice_is_remembered(answers, home):
    """Judged again alone, so that nobody beside it is suspected; then not tried again."""
    before = set(judging(os.getpid(), "env.evaluator"))
    with Pool("cpu", slots=1, lanes=2, seed=3, rules=RULES) as pool:
        guilty = pool.submit(problem(answers), answers.slow.replace("0.5", "3.0"), raw=False)
        innocent = pool.submit(problem(answers), answers.slow + "# beside it\n", raw=False)
        for _ in range(2):
            pid = one_serving(before)
            time.sleep(1.5)
            os.kill(pid, signal.SIGKILL)
            assert wait_until(lambda: not serving(before), 10)
        assert guilty.result(timeout=60).status == "infra_error"
        assert innocent.result(timeout=60).status == "correct"
        again = pool.submit(problem(answers), answers.slow.replace("0.5", "3.0"), raw=False)
        assert again.done() and "not tried again" in again.result().message


def serving(before: set[int]) -> list[int]:
    """Evaluators, but for those known before, that have workers."""
    mine = set(judging(os.getpid(), "env.evaluator")) - before
    return [pid for pid in mine if any(below(server) for server in judging(pid, "env.forkserver"))]


def one_serving(before: set[int]) -> int:
    """Asked until there is one: between two candidates it may have no worker for a moment."""
    end = time.monotonic() + 30
    while not (found := serving(before)):
        assert time.monotonic() < end, "no evaluator serves"
        time.sleep(0.05)
    return found[0]


def test_one_that_stands_by_takes_over_at_once(answers, home):
    before = set(judging(os.getpid(), "env.evaluator"))
    with Pool("cpu", slots=1, seed=3, rules=RULES, standby=True) as pool:
        assert pool.submit(problem(answers), answers.correct + "# first\n", raw=False).result(60).status == "correct"
        assert len(set(judging(os.getpid(), "env.evaluator")) - before) == 2
        time.sleep(8.0)  # it has imported everything by then
        pid = one_serving(before)
        started = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        verdict = pool.submit(problem(answers), answers.correct + "# second\n", raw=False).result(60)
        allowed_s = 3.0 * float(os.environ.get("TEST_BUDGET_SCALE", "1"))
        assert verdict.status == "correct" and time.monotonic() - started < allowed_s
        assert wait_until(lambda: len(set(judging(os.getpid(), "env.evaluator")) - before) == 2, 30)


DRIVER = """
import sys, time
from env.pool import Pool
from env.problems import load_jsonl
from env.rules import Rules

pool = Pool("cpu", slots=1, seed=1, rules=Rules(trials=1))
problem = load_jsonl(sys.argv[1])[0]
pool.submit(problem, open(sys.argv[2]).read(), raw=False)
time.sleep(0.5)
print("running", flush=True)
time.sleep(60)
"""


def test_killed_driver_leaves_no_process(answers, tmp_path):
    from env.problems import write_jsonl

    write_jsonl([problem(answers)], tmp_path / "problems.jsonl")
    (tmp_path / "slow.py").write_text(answers.slow)
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "problems.jsonl"), str(tmp_path / "slow.py")]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    driver = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout.readline() == "running\n"
        family = set(below(driver.pid))
        assert len(family) >= 4, "evaluator, fork server, supervisor, worker"
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
    assert wait_until(lambda: not family & set(processes()), 5), family & set(processes())


def test_devices_that_are_not_there(monkeypatch):
    with pytest.raises(PoolError, match="unknown device 'tpu'"):
        Pool("tpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
    with pytest.raises(PoolError, match="no GPU is visible"):
        Pool("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert visible_gpus() == ["0", "3"]
    with pytest.raises(PoolError, match="3 evaluators were asked for, but only 2 GPUs"):
        Pool("cuda", slots=3)


def test_evaluator_that_cannot_start_says_why(monkeypatch):
    monkeypatch.setattr("env.pool.sys.executable", "/bin/false")
    with pytest.raises(PoolError, match="could not start on cpu"):
        Pool("cpu", slots=1)
