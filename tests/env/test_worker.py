"""The judge's handle on a worker: questions, deadlines, exit codes, pauses, and an end that comes once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from env import hostmemory
from env import worker as module
from env.files import remove_tree
from env.wire import WireError, WireTimeout
from env.worker import ForkServer, WorkerDied, WorkerTimeout

pytestmark = pytest.mark.budget(40)


@pytest.fixture
def worker(fork_server):
    worker = fork_server.fork()
    yield worker
    worker.end()


def load(worker, source: str, seconds: float = 10.0) -> dict:
    return worker.call("load", seconds, **request(worker, source))


def request(worker, source: str) -> dict:
    return {"source": source, "path": f"{worker.scratch}/m.py", "module": "m", "class": "M", "watch": None}


GOOD = "class M:\n    pass\n"


def test_load_and_answer(worker):
    assert load(worker, GOOD)["ok"]
    assert worker.alive() and not worker.ended


def test_answers_come_in_the_order_of_the_questions(worker):
    worker.post("warm", precision="ieee", gpu="")
    worker.post("load", **request(worker, "M = 5\n"))
    assert worker.collect(20)["isolation"]
    assert "M is a int" in worker.collect(20)["message"]
    assert worker.pending == 0


def test_call_takes_the_answers_to_earlier_posts_first(worker):
    worker.post("warm", precision="ieee", gpu="")
    assert load(worker, GOOD)["ok"]


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("raise ValueError('bad value')\n", "compile_error", "ValueError: bad value"),
        ("import sys\nsys.exit(3)\n", "compile_error", "SystemExit: 3"),
        ("raise KeyboardInterrupt\n", "compile_error", "KeyboardInterrupt"),
        ("import no_such_module_anywhere\n", "compile_error", "ModuleNotFoundError"),
        ("class M(:\n", "compile_error", "SyntaxError"),
        ("x = " + "-" * 20_000 + "1\n", "compile_error", "SyntaxError: nested too deep"),
        ("x = bytearray(1 << 45)\n", "oom", "MemoryError"),
        ("def f():\n    f()\nf()\n", "compile_error", "RecursionError"),
        ("raise RuntimeError(open(__file__).name)\n", "compile_error", "RuntimeError: m.py"),
        ("raise RuntimeError('x' * 100_000)\n", "compile_error", "RuntimeError: xxx"),
        ("raise RuntimeError(hex(id(object())))\n", "compile_error", "RuntimeError: 0x..."),
    ],
)
def test_what_foreign_code_raises_is_an_answer(worker, source, kind, words):
    reply = load(worker, source)
    assert reply["ok"] is False and reply["kind"] == kind and words in reply["message"]
    assert len(reply["message"]) < 5000
    assert load(worker, GOOD)["ok"], "the worker goes on"


def test_lines_of_the_candidates_own_file_are_named(worker):
    reply = load(worker, "import json\ndef parse():\n    json.loads('{')\nparse()\n")
    assert reply["lines"] == ["line 4, in <module>: parse()", "line 3, in parse: json.loads('{')"]


@pytest.mark.parametrize(
    ("source", "codes"),
    [
        ("import os\nos._exit(7)\n", {7}),
        ("import ctypes\nctypes.string_at(0)\n", {139}),
        # PID 1 of a namespace is immune to its own SIGABRT: the C library then ends it by a bad instruction.
        ("import os\nos.abort()\n", {134, 139}),
        ("import os\nos.closerange(3, 100)\n", None),
        ("import os\nos.write(3, b'\\0' * 100)\nimport time\ntime.sleep(5)\n", None),
    ],
)
def test_exit_codes(worker, source, codes):
    with pytest.raises(WorkerDied) as died:
        load(worker, source)
    assert worker.ended and not worker.alive()
    assert codes is None or died.value.code in codes


def test_deadline(worker):
    started = time.monotonic()
    with pytest.raises(WorkerTimeout, match="no answer within"):
        load(worker, "import time\ntime.sleep(30)\n", seconds=0.3)
    assert 0.25 < time.monotonic() - started < 5


def test_end_is_once_and_takes_the_scratch_along(worker):
    scratch = Path(worker.scratch)
    assert scratch.is_dir()
    worker.end()
    assert not scratch.exists() and worker.end() is None and not worker.alive()
    with pytest.raises(WorkerDied):
        worker.post("warm")


def test_paused_time_does_not_count(worker):
    """A worker that stood still for somebody else's measurement has lost nothing of its own time."""
    load(worker, GOOD)
    worker.pause()
    worker.post("load", **request(worker, GOOD))
    threading.Timer(0.6, worker.resume).start()
    started = time.monotonic()
    assert worker.collect(0.3)["ok"]
    assert time.monotonic() - started > 0.5
    assert worker.stopped_s() == pytest.approx(0.6, abs=0.4)
    worker.resume()


def test_a_stopped_worker_can_be_ended(worker):
    worker.pause()
    started = time.monotonic()
    worker.end()
    assert time.monotonic() - started < 3 and not worker.alive()
    worker.pause()
    worker.resume()


def test_workers_share_nothing(fork_server):
    first, second = fork_server.fork(), fork_server.fork()
    load(first, "import math\nmath.pi = 3\nclass M:\n    pass\n")
    reply = load(second, "import math\nraise ValueError(math.pi)\n")
    assert "3.14159" in reply["message"] and first.scratch != second.scratch
    first.end()
    second.end()


def test_a_late_answer_is_not_taken_for_the_next_one(fork_server, monkeypatch):
    monkeypatch.setattr(module, "_REQUEST_S", 0.3)
    before = set(fork_server.home.iterdir())
    os.kill(fork_server.process.pid, signal.SIGSTOP)
    with pytest.raises(WireTimeout, match="gave no answer"):
        fork_server.fork()
    assert set(fork_server.home.iterdir()) == before
    os.kill(fork_server.process.pid, signal.SIGCONT)
    monkeypatch.setattr(module, "_REQUEST_S", 30.0)
    first, second = fork_server.fork(), fork_server.fork()
    assert load(first, GOOD)["ok"] and load(second, GOOD)["ok"] and first.pid != second.pid
    first.end()
    second.end()
    # The one that was asked for in vain has found nobody at its channel.
    end = time.monotonic() + 5
    while hostmemory.descendants(fork_server.process.pid)[0] and time.monotonic() < end:
        time.sleep(0.02)
    assert hostmemory.descendants(fork_server.process.pid)[0] == []


def test_a_slow_end_keeps_nobody_waiting(fork_server):
    slow = fork_server.fork()
    os.kill(slow.supervisor, signal.SIGSTOP)
    ending = threading.Thread(target=slow.end)
    ending.start()
    started = time.monotonic()
    worker = fork_server.fork()
    assert load(worker, GOOD)["ok"]
    worker.end()
    assert time.monotonic() - started < 5 and ending.is_alive()
    os.kill(slow.supervisor, signal.SIGCONT)
    ending.join(5)
    assert not ending.is_alive()


def test_pause_stops_what_the_worker_has_started(worker):
    source = (
        "import subprocess, sys\nclass M:\n    pass\n"
        "subprocess.Popen(['sh', '-c', 'while true; do :; done'], start_new_session=True)\n"
    )
    assert load(worker, source)["ok"]
    below = hostmemory.descendants(worker.supervisor)[0]
    assert len(below) == 2

    def states() -> set[str]:
        return {Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] for pid in below}

    worker.pause()
    end = time.monotonic() + 2
    while states() != {"T"} and time.monotonic() < end:
        time.sleep(0.01)
    assert states() == {"T"}
    worker.resume()
    assert "T" not in states() and load(worker, GOOD)["ok"]


def test_lost_fork_server_is_an_error_and_not_a_hang():
    server = ForkServer("cpu")
    worker = server.fork()
    server.process.kill()
    server.process.wait()
    started = time.monotonic()
    with pytest.raises((WireError, WireTimeout)):
        server.fork()
    worker.end()
    server.close()
    assert time.monotonic() - started < 10
    assert not server.home.exists() and not worker.alive()


def test_a_folder_nested_deeper_than_python_recurses_is_removed(tmp_path):
    """A candidate can leave one behind: nobody may stumble over it, now or when a later judge sweeps."""
    top = tmp_path / "scratch"
    top.mkdir()
    script = (
        "import os\nfor _ in range(1500):\n    os.mkdir('d' * 100)\n    os.chdir('d' * 100)\nopen('file', 'w').close()"
    )
    subprocess.run([sys.executable, "-c", script], cwd=top, check=True)
    (top / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    remove_tree(top)
    assert not top.exists() and (tmp_path / "kept" / "file").exists()
    remove_tree(top)  # not there any more: that is what was wanted
