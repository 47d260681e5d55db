"""The judge over HTTP: what was accepted gets its verdict whatever is killed, and strangers get nothing.

Most of it runs with a pool that stands in for the real one; the HTTP part needs requirements-serve.txt.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib.util
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from env import serve, serve_gym
from env.records import STATUSES, Verdict
from env.rules import Rules, rules_for
from env.serve_cases import NoReference, reference_of
from env.serve_front import Front, Stopping, finite
from env.serve_limits import LimitError, Rates, check_address, is_loopback, read_token
from env.serve_requests import BadRequest, batch_of, job_of, parse, wait_of
from env.store import IdTaken, Question, QueueFull, State, Store, StoreError

pytestmark = pytest.mark.budget(120)

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-of-the-tests-0123456789"
missing = [name for name in serve.NEEDED if importlib.util.find_spec(name) is None]
needs_fastapi = pytest.mark.skipif(
    bool(missing), reason=f"{' and '.join(missing)} not installed: pip install -r requirements-serve.txt"
)


class FakePool:
    """Gives verdicts at once, or when `release` is called. A candidate's text says which status it gets."""

    def __init__(self, hold: bool = False):
        self.asked: list[str] = []
        self.info = {"device": "a fake", "versions": {}}
        self._held: list[tuple[Future, str]] | None = [] if hold else None

    def __len__(self) -> int:
        return 2

    def submit(self, problem, response, raw=True) -> Future:
        self.asked.append(response)
        future: Future = Future()
        if self._held is None:
            future.set_result(self._verdict(response))
        else:
            self._held.append((future, response))
        return future

    def release(self) -> None:
        held, self._held = self._held, None
        for future, response in held:
            future.set_result(self._verdict(response))

    def close(self) -> None:
        for future, _ in self._held or []:
            future.cancel()

    def _verdict(self, response: str) -> Verdict:
        status = next((status for status in STATUSES if status in response.split()), "correct")
        verdict = Verdict(status=status, message=f"it was {status}", feedback=f"status: {status}", device="a fake")
        if status == "correct":
            verdict.speedup, verdict.reference_us, verdict.candidate_us = 2.0, 40.0, 20.0
        return verdict


def question(text: str = "candidate", **changes) -> Question:
    return Question(reference="reference", response=text, **changes)


def wait_for(what, timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


@pytest.fixture
def store(tmp_path):
    with contextlib.closing(Store(tmp_path / "store.sqlite")) as opened:
        yield opened


# The store ------------------------------------------------------------------------------------------------------------


def test_accepted_jobs_are_on_the_disk_when_answered_and_survive(tmp_path):
    path = tmp_path / "new folder" / "store.sqlite"
    store = Store(path)
    store.submit([("a", question("one")), ("b", question("two \ud800 \0 \u2028"))]).result(5)
    # Another connection sees what a process that is started after a kill would see.
    with contextlib.closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT count(*) FROM job").fetchone() == (2,)
    store.finish(store.state("a").work, "correct", '{"status": "correct"}').result(5)
    store.close()
    with contextlib.closing(Store(path)) as again:
        assert again.queued == 1
        assert [asked for _, asked in again.waiting(0, 10)] == [question("two \ud800 \0 \u2028")]
        assert again.state("a").verdict == '{"status": "correct"}' and again.state("b").verdict is None
        assert again.finished() == {"correct": 1}


def test_equal_questions_are_one_work_under_two_ids(store):
    first = store.submit([("a", question())]).result(5)[0]
    second = store.submit([("b", question()), ("c", question("other")), ("d", question("other"))]).result(5)
    assert (first.known, [receipt.known for receipt in second]) == (False, [True, False, True])
    assert second[0].work == first.work and second[1].work == second[2].work
    assert store.queued == 2 and store.position(second[1].work) == 1
    assert store.submit([("a", question())]).result(5)[0] == store.submit([("a", question())]).result(5)[0]
    for changed in (question(raw=True), question(entry_point="Net"), Question("other reference", "candidate")):
        assert changed.key != question().key


def test_an_id_keeps_its_question(store):
    store.submit([("a", question())]).result(5)
    with pytest.raises(IdTaken, match="'a' belongs to another question"):
        store.submit([("new", question("x")), ("a", question("changed"))]).result(5)
    with pytest.raises(IdTaken):
        store.submit([("twice", question("x")), ("twice", question("y"))]).result(5)
    assert store.state("new") is None and store.state("twice") is None and store.queued == 1
    with pytest.raises(IdTaken):  # it waits for its verdict
        store.submit([("a", question("changed"))], rename=True).result(5)
    store.finish(store.state("a").work, "correct", "first").result(5)
    with pytest.raises(IdTaken):
        store.submit([("a", question("changed"))]).result(5)
    assert store.submit([("a", question())], rename=True).result(5)[0].known
    assert not store.submit([("a", question("changed"))], rename=True).result(5)[0].known
    assert store.state("a").verdict is None and store.queued == 1


def test_a_full_queue_accepts_nothing_of_a_batch_but_knows_what_it_has(tmp_path):
    with contextlib.closing(Store(tmp_path / "s", queue_limit=2)) as store:
        store.submit([("a", question("1"))]).result(5)
        with pytest.raises(QueueFull, match="the limit is 2"):
            store.submit([("b", question("2")), ("c", question("3"))]).result(5)
        assert store.queued == 1 and store.state("b") is None
        store.submit([("b", question("2"))]).result(5)
        assert store.submit([("again", question("1"))]).result(5)[0].known
        store.finish(store.state("a").work, "correct", "{}").result(5)
        store.submit([("c", question("3"))]).result(5)


def test_what_the_machine_failed_is_judged_again_when_asked_again(store):
    first = store.submit([("a", question()), ("b", question())]).result(5)[0]
    store.finish(first.work, "infra_error", "{}").result(5)
    again = store.submit([("a", question())]).result(5)[0]
    assert not again.known and again.work != first.work
    assert store.state("a").finished is None and store.state("b").status == "infra_error"


def test_a_second_verdict_changes_nothing(store):
    work = store.submit([("a", question())]).result(5)[0].work
    store.finish(work, "correct", "first").result(5)
    store.finish(work, "hack", "second").result(5)
    assert store.state("a").verdict == "first" and store.queued == 0


def test_old_verdicts_are_forgotten_and_waiting_work_never(store):
    done, waiting = store.submit([("done", question("1")), ("waiting", question("2"))]).result(5)
    store.finish(done.work, "correct", "{}").result(5)
    assert store.forget(time.time() - 60).result(5) == 0
    assert store.forget(time.time() + 60).result(5) == 1
    assert store.state("done") is None and store.state("waiting").work == waiting.work
    assert not store.submit([("done", question("1"))]).result(5)[0].known


def test_many_threads_submit_at_once(store):
    futures: list[Future] = []

    def flood(thread: int) -> None:
        futures.extend(store.submit([(f"{thread}-{i}", question(f"{i}"))]) for i in range(50))

    threads = [threading.Thread(target=flood, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(not future.result(10)[0].known for future in futures) == store.queued == 50


def test_refuses_what_is_not_its_file(tmp_path):
    path = tmp_path / "store.sqlite"
    with contextlib.closing(Store(path, "rules A")), pytest.raises(StoreError, match="another server uses it"):
        Store(path, "rules A")
    with pytest.raises(StoreError, match="other rules"):
        Store(path, "rules B")
    Store(path, "rules A").close()
    (tmp_path / "text").write_text("no database at all, but long enough to be looked at as one\n" * 20)
    with pytest.raises(StoreError, match="not a readable store"):
        Store(tmp_path / "text")
    with contextlib.closing(sqlite3.connect(tmp_path / "foreign")) as foreign:
        foreign.execute("CREATE TABLE theirs (x)")
    with pytest.raises(StoreError, match="not a store of this version"):
        Store(tmp_path / "foreign")


def test_a_failing_disk_is_told_and_nothing_half_written(store):
    store.submit([("a", question())]).result(5)
    store._write.execute("PRAGMA max_page_count = 1")  # it can't shrink: no page more is to be had
    with pytest.raises(StoreError, match="could not be written"):
        store.submit([("big", question("x" * 1_000_000))]).result(5)
    assert store.queued == 1 and store.state("big") is None
    store._write.execute("PRAGMA max_page_count = 1000000")
    store.submit([("big", question("x" * 1_000_000))]).result(5)
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.submit([("late", question())]).result(5)


# Between store and pool -----------------------------------------------------------------------------------------------


def test_front_judges_in_order_once_and_tells_who_waits(store):
    pool = FakePool(hold=True)
    front = Front(store, pool)

    async def ask() -> list[State]:
        await front.submit([(f"job {i}", question(str(i % 3))) for i in range(9)])
        waiting = [asyncio.create_task(front.wait(f"job {i}", 10)) for i in range(9)]
        assert (await front.wait("job 0", 0.01)).finished is None
        await asyncio.to_thread(wait_for, lambda: len(pool.asked) == 3)
        assert front.in_flight == 3 and front.running(store.state("job 1").work)
        pool.release()
        return await asyncio.gather(*waiting)

    states = asyncio.run(ask())
    assert pool.asked == ["0", "1", "2"]
    assert [state.id for state in states] == [f"job {i}" for i in range(9)]
    assert all(json.loads(state.verdict)["status"] == "correct" for state in states)
    assert asyncio.run(front.wait("unknown", 5)) is None
    assert front.stop(5) and front.verdicts == {"correct": 3} and front.in_flight == 0


def test_front_holds_back_what_the_pool_need_not_know_yet(store):
    pool = FakePool(hold=True)
    front = Front(store, pool)
    asyncio.run(front.submit([(str(i), question(str(i))) for i in range(50)]))
    wait_for(lambda: len(pool.asked) == 4)
    time.sleep(0.2)
    assert len(pool.asked) == 4 and store.queued == 50
    pool.release()
    wait_for(lambda: store.queued == 0)
    assert pool.asked == [str(i) for i in range(50)]
    assert front.stop(5)


def test_work_that_a_closing_pool_gives_back_is_judged_after_the_next_start(tmp_path):
    path = tmp_path / "store.sqlite"
    pool = FakePool(hold=True)
    front = Front(Store(path), pool)

    async def stopped_while_waiting() -> None:
        await front.submit([("a", question())])
        waiting = asyncio.create_task(front.wait("a", 30))
        await asyncio.to_thread(wait_for, lambda: pool.asked)
        front.begin_stop()
        with pytest.raises(Stopping):
            await waiting
        with pytest.raises(Stopping):
            await front.submit([("b", question())])

    asyncio.run(stopped_while_waiting())
    assert front.stop(5) and front.trouble() == "stopping"
    second = Front(Store(path), FakePool())
    wait_for(lambda: second.store.queued == 0)
    assert json.loads(second.store.state("a").verdict)["status"] == "correct"
    assert second.stop(5)


def test_a_verdict_that_the_disk_refuses_is_offered_again(store):
    pool = FakePool(hold=True)
    front = Front(store, pool)
    asyncio.run(front.submit([("a", question())]))
    wait_for(lambda: pool.asked)
    finish, calls = store.finish, []

    def failing(work: int, status: str, verdict: str) -> Future:
        calls.append(status)
        if len(calls) > 1:
            return finish(work, status, verdict)
        broken: Future = Future()
        broken.set_exception(StoreError("the disk is full"))
        return broken

    store.finish = failing
    pool.release()
    wait_for(lambda: front.trouble() == "the disk is full" or len(calls) > 1)
    wait_for(lambda: store.queued == 0 and front.trouble() == "")
    assert calls == ["correct", "correct"] and front.stop(5)


def test_numbers_that_json_does_not_know():
    assert finite({"a": [float("nan"), 1.5], "b": (float("inf"), "x")}) == {"a": [None, 1.5], "b": [None, "x"]}


# Limits ---------------------------------------------------------------------------------------------------------------


def test_rates_are_by_address_and_refill():
    now = [0.0]
    rates = Rates(10, 5, clock=lambda: now[0])
    assert [rates.take("a") for _ in range(6)] == [0, 0, 0, 0, 0, pytest.approx(0.1)]
    assert rates.take("b") == 0
    now[0] = 0.1
    assert rates.take("a") == 0 and rates.take("a") > 0
    now[0] = 10.0
    assert rates.take("a", 20) == 0  # a full bucket, and then in debt for it
    assert rates.take("a") == pytest.approx(1.6)
    assert all(Rates(0, 1).take("a", 1000) == 0 for _ in range(3))


def test_addresses(monkeypatch):
    assert all(map(is_loopback, ("127.0.0.1", "localhost", "::1", "[::1]", "127.8.9.1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "", "localhost.example.org")))
    check_address("127.0.0.1", "")
    check_address("0.0.0.0", TOKEN)
    with pytest.raises(LimitError, match="other machines could run code here"):
        check_address("0.0.0.0", "")


def test_token_from_file_or_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("ENV_SERVE_TOKEN", TOKEN)
    assert read_token(None) == TOKEN and "ENV_SERVE_TOKEN" not in os.environ
    assert read_token(None) == ""
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o644)
    with pytest.raises(LimitError, match="others may read it; chmod 600"):
        read_token(file)
    file.chmod(0o600)
    assert read_token(file) == TOKEN
    for bad in ("short", "", "a blank in a token of this length", "ümläute-are-not-ascii-at-all"):
        file.write_text(bad)
        with pytest.raises(LimitError, match="printable ASCII"):
            read_token(file)
    with pytest.raises(LimitError, match="No such file"):
        read_token(tmp_path / "nothing")


# Requests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ([], "the body is a list, not an object"),
        ({"reference": "r"}, "give one of 'candidate'"),
        ({"reference": "r", "candidate": "c", "raw_response": "c"}, "give one of 'candidate'"),
        ({"candidate": "c"}, "'reference' is missing"),
        ({"reference": 3, "candidate": "c"}, "'reference' is a number"),
        ({"reference": "r", "candidate": " "}, "'candidate' is empty text"),
        ({"reference": "r", "candidate": "x" * ((4 << 20) + 1)}, "the limit is"),
        ({"reference": "r", "candidate": "c", "id": 7}, "'id' has to be text"),
        ({"reference": "r", "candidate": "c", "id": "a\nb"}, "'id' has to be text"),
        ({"reference": "r", "candidate": "c", "id": "\ud800"}, "'id' has to be text"),
        ({"reference": "r", "candidate": "c", "id": "x" * 201}, "'id' has to be text"),
        ({"reference": "r", "candidate": "c", "entry_point": "a b"}, "not the name of a class"),
        ({"reference": "r", "candidate": "c", "entry_point": "class"}, "not the name of a class"),
    ],
)
def test_what_is_wrong_with_a_request_is_said(data, why):
    with pytest.raises(BadRequest, match=why):
        job_of(data)


def test_requests_of_several_say_which_one_is_wrong():
    good = {"reference": "r", "raw_response": "c", "entry_point": "Net"}
    assert batch_of({"jobs": [good]})[0][1] == Question("r", "c", True, "Net")
    assert len({job for job, _ in batch_of([good, good])}) == 2  # ids of their own
    with pytest.raises(BadRequest, match="job 1: 'reference' is missing"):
        batch_of([good, {"candidate": "c"}])
    for bad in ({}, {"jobs": []}, {"jobs": "x"}):
        with pytest.raises(BadRequest, match="at least one job"):
            batch_of(bad)
    with pytest.raises(BadRequest, match="the limit is 256"):
        batch_of([good] * 257)


def test_bodies_and_waits():
    assert parse(b'{"a": 1}') == {"a": 1}
    for bad in (b"", b"{", b"\xff\xfe", b"[" * 100_000, b"1" * 5000):
        with pytest.raises(BadRequest, match="not JSON") as caught:
            parse(bad)
        assert caught.value.status == 400
    assert wait_of(None, 3.0) == 3.0 and wait_of("2.5", 0) == 2.5
    for bad in (-1, "soon", True, "nan", 1e9, []):
        with pytest.raises(BadRequest, match="number of seconds"):
            wait_of(bad, 0)


# KernelGYM's names ----------------------------------------------------------------------------------------------------


def state_of(status: str, **verdict) -> State:
    text = json.dumps(Verdict(status=status, **verdict).to_json())
    return State("task", 1, 100.0, 101.5, status, text)


def test_results_have_the_documented_fields():
    row = serve_gym.result_of(state_of("correct", speedup=2.0, reference_us=40.0, candidate_us=20.0))
    assert (row["task_id"], row["status"], row["compiled"], row["correctness"]) == ("task", "completed", True, True)
    assert (row["speedup"], row["reference_runtime"], row["kernel_runtime"]) == (2.0, 0.04, 0.02)  # ms
    assert row["processing_time"] == 1.5 and row["submitted_at"] == "1970-01-01T00:01:40.000Z"
    expected = {  # status, compiled, correctness, decoy_kernel, error_code
        "incorrect": ("failed", True, False, False, "CORRECTNESS_ERROR"),
        "hack": ("failed", True, False, True, "CORRECTNESS_ERROR"),
        "compile_error": ("failed", False, False, False, "COMPILATION_ERROR"),
        "runtime_error": ("failed", True, False, False, "RUNTIME_ERROR"),
        "timeout": ("timeout", None, False, False, "TIMEOUT_ERROR"),
        "oom": ("failed", None, False, False, "RESOURCE_ERROR"),
        "problem_error": ("failed", None, None, None, "VALIDATION_ERROR"),
        "infra_error": ("failed", None, None, None, "SYSTEM_ERROR"),
    }
    assert set(expected) | {"correct"} == set(STATUSES)
    for status, values in expected.items():
        row = serve_gym.result_of(state_of(status, message="why", speedup=9.0, values_match=True))
        assert (row["status"], row["compiled"], row["correctness"], row["decoy_kernel"], row["error_code"]) == values
        assert row["speedup"] is None and row["error_message"] == "why"  # a cheat's speed is none
    waiting = serve_gym.result_of(State("task", 1, 100.0, None, None, None))
    assert waiting["status"] == "pending" and waiting["correctness"] is None


def test_a_judge_of_triton_kernels_refuses_what_it_would_judge_otherwise():
    good = {"task_id": "t", "reference_code": "r", "kernel_code": "k"}
    assert serve_gym.evaluation_of({**good, "backend": "triton", "reference_backend": "pytorch"}, Rules())[0] == "t"
    compiled = rules_for(device="cuda", reference="compile")
    for name in ("compile", "torch_compile"):
        assert serve_gym.evaluation_of({**good, "reference_backend": name}, compiled)
        with pytest.raises(BadRequest, match="start one with"):
            serve_gym.evaluation_of({**good, "reference_backend": name}, Rules())
    for backend in ("cuda", 7, ["triton"]):
        with pytest.raises(BadRequest, match="judges Triton kernels"):
            serve_gym.evaluation_of({**good, "backend": backend}, Rules())
    for bad in ({"workflow": "other"}, {"workflow": ["kernelbench"]}, {"workflow": "kernelbench", "payload": []}):
        with pytest.raises(BadRequest, match=r"workflow|'payload'"):
            serve_gym.workflow_of(bad, Rules())


KERNEL_SIMPLE = """
import torch
import triton
import triton.language as tl

@triton.jit
def add_kernel(x_ptr, y_ptr, output_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    pid = tl.program_id(axis=0)
    offsets = pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    tl.store(output_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask), mask=mask)

class ModelNew(torch.nn.Module):
    def forward(self, x, y):
        output = torch.empty_like(x)
        n_elements = x.numel()
        add_kernel[(triton.cdiv(n_elements, 1024),)](x, y, output, n_elements, BLOCK_SIZE=1024)
        return output

def get_init_inputs():
    return []

def get_inputs():
    return [torch.randn(1024, device='cuda'), torch.randn(1024, device='cuda')]

def get_cases():
    x = torch.randn(1024, device='cuda')
    y = torch.randn(1024, device='cuda')
    expected = x + y
    return [{"inputs": [x, y], "outputs": expected}]
"""


def test_a_reference_comes_out_of_the_cases():
    """That it computes what it should is shown with the real pool, below."""
    source = reference_of(KERNEL_SIMPLE, "Net")
    assert "class Net(torch.nn.Module):\n\n    def forward(self, x, y):\n        expected = x + y\n" in source
    assert "return expected" in source and "def get_inputs" in source and "def get_init_inputs" in source
    assert not any(name in source for name in ("ModelNew", "add_kernel", "get_cases"))
    assert "return []" in reference_of(KERNEL_SIMPLE.replace("def get_init_inputs", "def other"), "Net")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("expected = x + y", "expected = ModelNew()(x, y)", "computed by ModelNew, the code under test"),
        ("expected = x + y", "expected = torch.zeros(1024)", "doesn't depend on the inputs"),
        ('"outputs": expected', '"output": expected', "get_cases\\(\\) has to"),
        ('"inputs": [x, y]', '"inputs": [x, y + 1]', "get_cases\\(\\) has to"),
        ("def get_inputs", "def other", "defines no get_inputs"),
        ("def get_cases", "def get cases", "no Python"),
        ("import torch\n", "import torch\n" + "# \n" * 40_000, "the limit is"),
    ],
)
def test_cases_that_give_no_reference_are_refused(old, new, why):
    with pytest.raises(NoReference, match=why):
        reference_of(KERNEL_SIMPLE.replace(old, new, 1))


# Over HTTP ------------------------------------------------------------------------------------------------------------


class Client:
    """One request a connection, as the standard library makes it."""

    def __init__(self, port: int, token: str = ""):
        self.port, self.headers = port, {"Authorization": f"Bearer {token}"} if token else {}

    def ask(self, method: str, path: str, body=None, headers: dict | None = None):
        """(status, JSON or text, headers)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            kind = {"Content-Type": "application/json"} if body is not None else {}
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, {**self.headers, **kind, **(headers or {})})
            answer = connection.getresponse()
            text = answer.read().decode()
            found = dict(answer.getheaders())
            is_json = found.get("content-type") == "application/json"
            return answer.status, json.loads(text) if is_json else text, found

    def post(self, path: str, body, **headers):
        return self.ask("POST", path, body, headers)

    def get(self, path: str, **headers):
        return self.ask("GET", path, None, headers)


class Running:
    """The whole server but for its signals, in this process."""

    def __init__(self, folder: Path, pool: FakePool, token: str = "", rates: Rates | None = None, **limits):
        from env.serve_app import make_app

        self.pool, self.front = pool, Front(Store(folder / "store.sqlite", **limits), pool)
        listener = serve.open_port("127.0.0.1", 0)
        app = make_app(self.front, Rules(), token, rates or Rates(0, 1), max_body=100_000)
        self.client = Client(listener.getsockname()[1], token)
        self.signals = serve._Signals()
        self.thread = threading.Thread(target=serve.serve, args=(self.front, app, listener, self.signals), daemon=True)
        self.thread.start()
        wait_for(lambda: self.signals.then)

        def up() -> bool:
            with contextlib.suppress(OSError):
                return bool(self.client.get("/health"))
            return False

        wait_for(up)

    def stop(self) -> None:
        self.signals.then()
        self.thread.join(10)
        assert not self.thread.is_alive() and self.front.stop(5)


@pytest.fixture
def start(tmp_path):
    started: list[Running] = []

    def run(pool: FakePool | None = None, **options) -> Running:
        started.append(Running(tmp_path, pool or FakePool(), **options))
        return started[-1]

    yield run
    for server in started:
        if server.thread.is_alive():
            server.stop()


def ours(text: str = "candidate", **more) -> dict:
    return {"reference": "reference", "candidate": text, **more}


@needs_fastapi
def test_submit_status_result(start):
    server = start(FakePool(hold=True))
    client = server.client
    assert client.post("/v1/jobs", ours(id="a b/c"))[:2] == (202, {"id": "a b/c", "known": False})
    assert client.post("/v1/jobs", ours(id="a b/c"))[:2] == (202, {"id": "a b/c", "known": True})
    assert client.post("/v1/jobs", ours("other", id="a b/c"))[0] == 409
    status, answer, _ = client.post("/v1/batch", {"jobs": [ours(str(i)) for i in range(6)]})
    assert status == 202 and len({job["id"] for job in answer["jobs"]}) == 6
    wait_for(lambda: len(server.pool.asked) == 4)
    last = answer["jobs"][-1]["id"]
    assert client.get("/v1/status/a%20b/c")[:2] == (200, {"id": "a b/c", "status": "running"})
    assert client.get(f"/v1/status/{last}")[1] == {"id": last, "status": "queued", "position": 6}
    assert client.get(f"/v1/result/{last}?wait_s=0.05")[0] == 202
    server.pool.release()
    status, answer, _ = client.get(f"/v1/result/{last}?wait_s=20")
    assert status == 200 and answer["status"] == "done" and answer["verdict"]["status"] == "correct"
    assert Verdict.from_json(answer["verdict"]).speedup == 2.0
    assert server.pool.asked == ["candidate", *map(str, range(6))]
    assert client.get("/v1/result/unknown")[0] == client.get("/v1/status/unknown")[0] == 404


@needs_fastapi
def test_bad_input_is_answered_in_words(start):
    client = start().client
    assert client.post("/v1/jobs", b'{"reference": ')[0] == 400
    assert "not JSON" in client.post("/v1/jobs", b'{"reference": ')[1]["detail"]
    assert client.post("/v1/jobs", {"reference": "r"})[0] == 422
    assert client.post("/v1/jobs", ours("x" * 200_000))[0] == 413
    assert client.post("/v1/jobs", ours(), **{"Content-Type": "text/plain"})[0] == 415
    assert client.get("/v1/result/x?wait_s=soon")[0] == 422
    assert client.get("/nothing/here")[0] == 404 and client.get("/v1/jobs")[0] == 405
    for path in ("/status/unknown", "/results/unknown"):
        assert client.get(path)[0] == 404 and "'unknown'" in client.get(path)[1]["detail"]
    # Without a length that could be looked at beforehand, what arrives is counted.
    with socket.create_connection(("127.0.0.1", client.port), timeout=20) as raw:
        raw.sendall(
            b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        with contextlib.suppress(OSError):
            for _ in range(30):
                raw.sendall(b"2000\r\n" + b" " * 0x2000 + b"\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 413")


@needs_fastapi
def test_strangers_are_kept_out(start):
    client = start(token=TOKEN).client
    assert client.post("/v1/jobs", ours())[0] == 202
    stranger = Client(client.port)
    for path in ("/v1/result/x", "/metrics", "/workers/status", "/openapi.json", "/results/x", "/docs"):
        assert stranger.get(path)[0] == 401, path
    assert stranger.post("/evaluate", {})[0] == stranger.post("/v1/jobs", b"x" * 300_000)[0] == 401
    for wrong in ("Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN[:-1]}"):
        status, answer, _ = stranger.get("/metrics", Authorization=wrong)
        assert (status, answer["detail"]) == (401, "wrong token")
    assert stranger.get("/health")[:2] == (200, {"status": "healthy"})
    assert client.get("/health")[1]["queue_status"]["limit"] == 10_000


@needs_fastapi
def test_without_a_token_web_pages_are_kept_out(start):
    client = start().client
    assert client.get("/metrics", Host="evil.example.org")[0] == 403
    assert client.get("/metrics", Host="[::1]:80")[0] == client.get("/metrics", Host="localhost:1")[0] == 200


@needs_fastapi
def test_a_full_queue_says_when_to_come_back(start):
    server = start(FakePool(hold=True), queue_limit=3)
    jobs = [ours(str(number)) for number in range(4)]
    status, answer, headers = server.client.post("/v1/batch", jobs)
    assert status == 429 and int(headers["retry-after"]) >= 1 and "the limit is 3" in answer["detail"]
    assert server.client.post("/v1/batch", jobs[:3])[0] == 202
    assert server.client.post("/evaluate", gym_request("t"))[0] == 429
    server.pool.release()
    wait_for(lambda: server.front.store.queued == 0)
    assert server.client.post("/v1/jobs", jobs[3])[0] == 202
    assert 'env_serve_jobs_refused_total{reason="queue_full"} 2' in server.client.get("/metrics")[1]


@needs_fastapi
def test_too_many_requests_from_an_address(start):
    server = start(rates=Rates(0.5, 12))
    answers = [server.client.post("/v1/batch", [ours(str(number)) for number in range(8)]) for _ in range(2)]
    assert answers[0][0] == 202 and answers[1][0] == 429 and int(answers[1][2]["retry-after"]) >= 1


@needs_fastapi
def test_health_workers_and_metrics(start):
    server = start()
    for number, text in enumerate(("one", "two hack", "one")):
        assert server.client.post("/v1/jobs", ours(text, id=str(number)))[0] == 202
    wait_for(lambda: server.front.store.queued == 0)
    health = server.client.get("/health")[1]
    assert health["status"] == "healthy" and health["queue_status"]["completed"] == health["total_processed"] == 2
    assert server.client.get("/workers/status")[1]["lanes"] == 2
    status, text, headers = server.client.get("/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values['env_serve_requests_total{path="/v1/jobs",status="202"}'] == "3"
    assert values["env_serve_jobs_accepted_total"] == "3" and values["env_serve_jobs_known_total"] == "1"
    assert values['env_serve_verdicts_total{status="hack"}'] == "1" and values["env_serve_healthy"] == "1"
    assert values["env_serve_queue_depth"] == "0"


def gym_request(task: str, kernel: str = "kernel", **more) -> dict:
    """As the README of KernelGYM shows it under "KernelBench Evaluation"."""
    return {
        "task_id": task, "reference_code": "reference", "kernel_code": kernel, "entry_point": "Model",
        "backend": "triton", "num_correct_trials": 5, "num_perf_trials": 100, **more,
    }  # fmt: skip


@needs_fastapi
def test_requests_as_kernelgym_documents_them(start):
    client = start().client
    status, result, _ = client.post("/evaluate", gym_request("softmax-kernel-001"))
    assert status == 200 and result["status"] == "completed"
    # What its example prints.
    assert result["compiled"] and result["correctness"] and f"{result['speedup']:.2f}x" == "2.00x"
    assert f"{result['reference_runtime']:.4f} {result['kernel_runtime']:.4f} ms" == "0.0400 0.0200 ms"
    simple = {
        "workflow": "kernel_simple",
        "task_id": "my-kernel-task-001",
        "payload": {
            "task_id": "my-kernel-task-001", "kernel_code": KERNEL_SIMPLE, "entry_point": "ModelNew",
            "backend": "triton", "device": "cuda:0", "run_correctness": True, "run_performance": True,
            "num_perf_trials": 100,
        },
    }  # fmt: skip
    status, answer, _ = client.post("/workflow/submit", simple)
    assert status == 200 and answer["task_id"] == "my-kernel-task-001" and answer["status"] == "completed"
    assert answer["result"]["compiled"] and answer["result"]["correctness"]
    assert f"{answer['result']['kernel_runtime']:.4f} ms" == "0.0200 ms"
    # The shortest request of its API reference.
    short = {"task_id": "test-001", "reference_code": "...", "kernel_code": "...", "entry_point": "Model"}
    assert client.post("/evaluate", {**short, "backend": "triton"})[0] == 200
    bench = {"workflow": "kernelbench", "task_id": "b", "payload": gym_request("b")}
    assert client.post("/workflow/submit", bench)[1]["result"]["speedup"] == 2.0
    tasks = [gym_request("one"), gym_request("two", "hack"), gym_request("three", "compile_error x")]
    status, answer, _ = client.post("/evaluate/batch", {"batch_id": "batch-1", "tasks": tasks})
    assert status == 200 and answer["batch_id"] == "batch-1"
    assert (answer["total"], answer["completed"], answer["failed"], answer["pending"]) == (3, 1, 2, 0)
    assert [row["task_id"] for row in answer["results"]] == ["one", "two", "three"]
    assert [row["decoy_kernel"] for row in answer["results"]] == [False, True, False]
    assert client.post("/evaluate", gym_request("one", "oom again"))[1]["error_code"] == "RESOURCE_ERROR"
    status, row, _ = client.get("/status/two")
    assert status == 200 and (row["task_id"], row["status"]) == ("two", "failed")
    assert client.get("/results/softmax-kernel-001")[1] == result
    assert client.get("/health")[1]["status"] == "healthy" and client.get("/workers/status")[0] == 200


@needs_fastapi
def test_what_took_too_long_or_the_machine_failed_is_no_result(start):
    server = start(FakePool(hold=True))
    status, answer, headers = server.client.post("/evaluate", gym_request("late", timeout=0.2))
    assert status == 504 and headers["x-error-code"] == "TIMEOUT_ERROR" and "stays in the queue" in answer["detail"]
    assert server.client.get("/status/late")[1]["status"] == "processing"
    assert server.client.get("/results/late")[0] == 404
    server.pool.release()
    assert server.client.post("/evaluate", gym_request("late"))[1]["status"] == "completed"
    status, _, headers = server.client.post("/evaluate", gym_request("unlucky", "infra_error"))
    assert status == 503 and headers["x-error-code"] == "SYSTEM_ERROR" and "retry-after" in headers
    assert server.client.post("/evaluate", gym_request("unlucky", "infra_error"))[0] == 503
    assert server.pool.asked.count("infra_error") == 2 and server.pool.asked.count("kernel") == 1


@needs_fastapi
def test_who_waits_while_the_server_stops_is_told_so(start):
    server = start(FakePool(hold=True))
    answers: list = []
    waiting = threading.Thread(target=lambda: answers.append(server.client.post("/evaluate", gym_request("waits"))))
    waiting.start()
    wait_for(lambda: server.pool.asked)
    began = time.monotonic()
    server.stop()
    waiting.join(10)
    assert time.monotonic() - began < 5
    assert answers[0][0] == 503 and "accepted is kept" in answers[0][1]["detail"]


# As a process ---------------------------------------------------------------------------------------------------------

FAKE_SERVER = """
import os, sys, threading, time
from concurrent.futures import Future
import env.serve
from env.records import Verdict

class Pool:
    info = {"device": "a fake"}
    def __init__(self, *args, **options): pass
    def __len__(self): return 8
    def close(self): time.sleep(float(os.environ.get("CLOSING_S", "0")))
    def submit(self, problem, response, raw):
        future = Future()
        threading.Timer(0.05, lambda: future.set_result(Verdict("correct", message=response))).start()
        return future

env.serve.Pool = Pool
raise SystemExit(env.serve.main(sys.argv[1:]))
"""


@contextlib.contextmanager
def process(folder: Path, *more: str, fake: bool = True, token: str = TOKEN):
    """(the server's process, its port), once it says that it answers."""
    command = [sys.executable, *(["-c", FAKE_SERVER] if fake else ["-m", "env.serve"])]
    command += ["--port", "0", "--store", str(folder / "store.sqlite"), *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ENV_SERVE_TOKEN": token}
    server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        line = server.stdout.readline()
        assert line.startswith("env.serve: http://127.0.0.1:"), line
        yield server, int(line.split(":")[3].partition(",")[0])
    finally:
        if server.poll() is None:
            server.kill()
        server.wait()
        server.stdout.close()


@needs_fastapi
def test_no_accepted_job_is_lost_over_kill_9(tmp_path):
    accepted: list[str] = []
    for round_ in range(2):
        with process(tmp_path) as (server, port):
            killer = threading.Timer(0.4 + 0.1 * round_, server.kill)
            killer.start()
            client, number = Client(port, TOKEN), 0
            with contextlib.suppress(OSError, http.client.HTTPException):
                while True:
                    name = f"{round_}-{number}"
                    assert client.post("/v1/jobs", ours(f"text of {name}", id=name))[0] == 202
                    accepted.append(name)
                    number += 1
            killer.join()
            assert server.wait(10) == -signal.SIGKILL
    assert len({name[0] for name in accepted}) == 2  # every round accepted some
    with process(tmp_path) as (_, port):
        client = Client(port, TOKEN)
        for name in accepted:
            status, answer, _ = client.get(f"/v1/result/{name}?wait_s=30")
            assert (status, answer["verdict"]["message"]) == (200, f"text of {name}")


@needs_fastapi
@pytest.mark.parametrize(("number", "code", "closing_s"), [(signal.SIGTERM, 143, "0"), (signal.SIGINT, 130, "60")])
def test_signals_end_it_in_good_order_even_if_the_pool_will_not(tmp_path, number, code, closing_s, monkeypatch):
    monkeypatch.setenv("CLOSING_S", closing_s)
    with process(tmp_path) as (server, port):
        assert Client(port, TOKEN).get("/metrics")[0] == 200
        began = time.monotonic()
        server.send_signal(number)
        server.send_signal(number)
        assert server.wait(10) == code and time.monotonic() - began < 5


def refused(capsys, *arguments: str) -> str:
    assert serve.main(list(arguments)) == 2
    return capsys.readouterr().err


@needs_fastapi
def test_a_start_that_can_not_be_is_refused_with_words(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("ENV_SERVE_TOKEN", raising=False)
    store = ["--store", str(tmp_path / "store.sqlite")]
    assert "other machines could run code here" in refused(capsys, *store, "--host", "0.0.0.0")
    assert "No such file" in refused(capsys, *store, "--token-file", str(tmp_path / "none"))
    with contextlib.closing(serve.open_port("127.0.0.1", 0)) as taken:
        taken.listen()
        assert "give another --host or --port" in refused(capsys, *store, "--port", str(taken.getsockname()[1]))
    with contextlib.closing(Store(tmp_path / "store.sqlite")):
        assert "another server uses it" in refused(capsys, *store, "--port", "0")
    with pytest.raises(SystemExit):
        serve.main(["--queue", "0"])


def test_without_fastapi_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(serve, "NEEDED", ("no_such_package_as_this",))
    assert "no_such_package_as_this can't be found: pip install -r requirements-serve.txt" in refused(capsys)


@needs_fastapi
def test_the_real_pool_judges_and_stops_within_five_seconds(tmp_path, answers):
    with process(tmp_path, "--slots", "1", fake=False) as (server, port):
        client = Client(port, TOKEN)
        request = gym_request("real", answers.correct, reference_code=answers.reference, timeout=60)
        status, row, _ = client.post("/evaluate", request)
        assert status == 200 and row["correctness"] and row["metadata"]["time_kind"] == "modelled", row
        assert row["speedup"] == pytest.approx(3.0)
        on_cpu = KERNEL_SIMPLE.replace("device='cuda'", "device='cpu'")
        simple = {"workflow": "kernel_simple", "task_id": "simple", "payload": {"kernel_code": on_cpu}}
        status, answer, _ = client.post("/workflow/submit", simple)
        assert status == 200 and answer["result"]["correctness"], answer
        job = {"reference": answers.reference, "candidate": answers.slow, "id": "in work"}
        assert client.post("/v1/jobs", job)[0] == 202
        wait_for(lambda: client.get("/v1/status/in%20work")[1]["status"] == "running")
        time.sleep(0.5)
        began = time.monotonic()
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 143 and time.monotonic() - began < 5
    with contextlib.closing(sqlite3.connect(tmp_path / "store.sqlite")) as left:
        assert left.execute("SELECT count(*) FROM work WHERE finished IS NULL").fetchone() == (1,)
