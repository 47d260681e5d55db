"""The judge over HTTP: what was accepted gets its verdict whatever is killed, and strangers get nothing.

All but one test run with a pool that stands in for the real one. Needs requirements-serve.txt.
"""

from __future__ import annotations

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
from pathlib import Path

import pytest

from env import serve
from env.records import Verdict
from env.rules import Rules
from env.serve_front import Front
from env.serve_limits import Rates
from env.store import Store
from tests.env.serve_fakes import KERNEL_SIMPLE, TOKEN, FakePool, wait_for

pytestmark = pytest.mark.budget(150)

ROOT = Path(__file__).resolve().parents[2]
missing = [name for name in serve.NEEDED if importlib.util.find_spec(name) is None]
needs_fastapi = pytest.mark.skipif(
    bool(missing), reason=f"{' and '.join(missing)} not installed: pip install -r requirements-serve.txt"
)


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
            killer = threading.Timer(0.2, server.kill)
            client, number = Client(port, TOKEN), 0
            with contextlib.suppress(OSError, http.client.HTTPException):
                while True:
                    name = f"{round_}-{number}"
                    assert client.post("/v1/jobs", ours(f"text of {name}", id=name))[0] == 202
                    accepted.append(name)
                    number += 1
                    if number == 10:
                        killer.start()
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
