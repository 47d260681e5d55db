"""The HTTP front without HTTP: what is kept on the disk, how it comes to the pool, limits, requests and results."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import threading
import time
from concurrent.futures import Future

import pytest

from env import serve_gym
from env.records import STATUSES, Verdict
from env.rules import Rules, rules_for
from env.serve_cases import NoReference, reference_of
from env.serve_front import Front, Stopping, finite
from env.serve_limits import LimitError, Rates, check_address, is_loopback, read_token
from env.serve_requests import BadRequest, batch_of, job_of, parse, wait_of
from env.store import IdTaken, Question, QueueFull, State, Store, StoreError
from tests.env.serve_fakes import KERNEL_SIMPLE, TOKEN, FakePool, question, wait_for

pytestmark = pytest.mark.budget(40)


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
        ({"reference": "r", "canditate": "c"}, r"unknown key 'canditate' \(did you mean 'candidate'\?\); known"),
    ],
)
def test_what_is_wrong_with_a_request_is_said(data, why):
    with pytest.raises(BadRequest, match=why):
        job_of(data)


def test_requests_of_several_say_which_one_is_wrong():
    good = {"reference": "r", "raw_response": "c", "entry_point": "Net", "meta": {"mine": 1}}
    assert batch_of({"jobs": [good]})[0][1] == Question("r", "c", True, "Net")
    assert len({job for job, _ in batch_of([good, good])}) == 2  # ids of their own
    with pytest.raises(BadRequest, match="job 1: 'reference' is missing"):
        batch_of([good, {"candidate": "c"}])
    for bad in ({}, {"jobs": []}, {"jobs": "x"}):
        with pytest.raises(BadRequest, match="at least one job"):
            batch_of(bad)
    with pytest.raises(BadRequest, match="job 1: unknown key 'x'"):
        batch_of([good, {**good, "x": 1}])
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
