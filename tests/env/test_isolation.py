"""What foreign code can reach from inside a worker, tried from inside, and what is left when a worker has ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from env.worker import WorkerTimeout

pytestmark = pytest.mark.budget(60)

ROOT = Path(__file__).resolve().parents[2]

PROBE = '''
import ctypes, json, os, signal, socket, time

libc = ctypes.CDLL(None, use_errno=True)


class Probe:
    pass


def attempt(action):
    """The result as text, or the kind of error."""
    try:
        return str(action())
    except BaseException as error:
        return "refused: " + type(error).__name__


def daemon(name):
    """Double fork, new session, all signals ignored: what would survive an ordinary kill."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in range(1, 65):
                try:
                    signal.signal(number, signal.SIG_IGN)
                except (OSError, ValueError):
                    pass
            libc.prctl(15, name.encode(), 0, 0, 0)
            while True:
                time.sleep(0.05)
        os._exit(0)
    os.wait()


def write(path):
    with open(path, "a") as file:
        file.write("x")
    return "written"


def get_init_inputs():
    return [json.dumps(facts())]

'''


def request(worker, source: str, name: str = "Probe") -> dict:
    return {"source": source, "path": f"{worker.scratch}/probe.py", "module": "probe", "class": name, "watch": None}


def ask(worker, body: str) -> dict:
    """Run `body` (it fills a dict `f`) inside a worker. Returns f."""
    lines = "".join(f"    {line}\n" for line in body.strip().split("\n"))
    source = f"{PROBE}\ndef facts():\n    f = {{}}\n{lines}    return f\n"
    loaded = worker.call("load", 20, **request(worker, source))
    assert loaded["ok"], loaded
    reply = worker.call("init_inputs", 20)
    assert reply["ok"], reply
    return json.loads(reply["layout"]["items"][0]["value"])


@pytest.fixture
def worker(fork_server):
    """A warm worker; skipped where this machine gives no namespaces."""
    worker = fork_server.fork()
    isolation = worker.call("warm", 30, precision="ieee")["isolation"]
    missing = {name: state for name, state in isolation.items() if state != "on"}
    if missing:
        worker.end()
        pytest.skip(f"needs root or user namespaces, and Landlock: {missing}")
    yield worker
    worker.end()


def named(name: str) -> list[int]:
    """Process ids on this machine of that (short) name, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "comm").read_text().strip() == name and " Z " not in (entry / "stat").read_text():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def test_the_helpers_see_processes():
    assert alive(os.getpid()) and not alive(2**22 + 1)
    assert os.getpid() in named(Path("/proc/self/comm").read_text().strip())


def wait_until(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


# Inside --------------------------------------------------------------------------------------------------------------


def test_every_layer_is_reported(worker):
    # `worker` has checked that all are on; none may be absent without a word either.
    again = worker.call("warm", 10, precision="ieee")["isolation"]
    assert set(again) >= {
        "mount namespace", "network namespace", "ipc namespace", "pid namespace", "own /proc", "own /dev/shm",
        "read-only mounts", "no new privileges", "no capabilities", "writes only to scratch",
    }  # fmt: skip


def test_no_network(worker):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(f"\0kernel-judge-test-{os.getpid()}")
        local.listen()
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
        facts = ask(
            worker,
            f"""
f["loopback"] = attempt(lambda: socket.create_connection(("127.0.0.1", {port}), timeout=2))
f["outside"] = attempt(lambda: socket.create_connection(("192.0.2.1", 80), timeout=2))
f["name"] = attempt(lambda: socket.getaddrinfo("example.org", 80))
f["abstract"] = attempt(lambda: socket.socket(socket.AF_UNIX).connect("\\0kernel-judge-test-{os.getpid()}"))
f["interfaces"] = [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]]
""",
        )
    assert facts.pop("interfaces") == ["lo"]
    assert all(answer.startswith("refused") for answer in facts.values()), facts


def test_no_process_of_the_host_is_seen_or_signalled(worker):
    facts = ask(
        worker,
        f"""
f["own"] = os.getpid()
f["parent"] = os.getppid()
f["seen"] = [int(name) for name in os.listdir("/proc") if name.isdigit()]
f["kill"] = attempt(lambda: os.kill({os.getpid()}, 0))
f["judge"] = attempt(lambda: open("/proc/{os.getpid()}/environ").read())
f["trace"] = libc.ptrace(16, {os.getpid()}, 0, 0)
""",
    )
    assert facts["own"] == 1 and facts["parent"] == 0 and facts["seen"] == [1]
    assert facts["kill"] == "refused: ProcessLookupError" and facts["judge"] == "refused: FileNotFoundError"
    assert facts["trace"] == -1


def test_no_capabilities_and_no_way_back(worker):
    facts = ask(
        worker,
        """
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines() if ":" in line)
f["effective"], f["permitted"] = status["CapEff"].strip(), status["CapPrm"].strip()
f["no_new_privileges"] = status["NoNewPrivs"].strip()
f["mount"] = libc.mount(b"tmpfs", b"/mnt", b"tmpfs", 0, None)
f["remount"] = libc.mount(None, b"/", None, ctypes.c_ulong(32 | 4096), None)
f["unmount"] = libc.umount2(b"/dev/shm", 2)
f["chroot"] = attempt(lambda: os.chroot("/tmp"))
f["nice"] = attempt(lambda: os.nice(-5))
""",
    )
    assert facts["effective"] == facts["permitted"] == "0000000000000000" and facts["no_new_privileges"] == "1"
    assert facts["mount"] == facts["remount"] == facts["unmount"] == -1
    assert facts["chroot"].startswith("refused") and facts["nice"].startswith("refused")


def test_files_are_changed_in_scratch_only(worker, fork_server, tmp_path):
    victim = tmp_path / "victim.txt"
    victim.write_text("mine")
    victim.chmod(0o644)
    other = fork_server.fork()
    places = [
        ROOT,
        ROOT / "env",
        Path("/tmp"),
        Path.home(),
        Path("/etc"),
        tmp_path,
        fork_server.home,
        Path(other.scratch),
    ]
    facts = ask(
        worker,
        f"""
for place in {list(map(str, places))}:
    f["write " + place] = attempt(lambda: write(place + "/kernel-judge-escape"))
    f["folder " + place] = attempt(lambda: os.mkdir(place + "/kernel-judge-escape-folder"))
for what, action in dict(
    append=lambda: write({str(victim)!r}),
    truncate=lambda: os.truncate({str(victim)!r}, 0),
    remove=lambda: os.unlink({str(victim)!r}),
    rename=lambda: os.rename({str(victim)!r}, {str(victim)!r} + "2"),
    link=lambda: os.link({str(victim)!r}, "link"),
    mode=lambda: os.chmod({str(victim)!r}, 0o777),
    times=lambda: os.utime({str(victim)!r}, (0, 0)),
    attribute=lambda: os.setxattr({str(victim)!r}, "user.x", b"x"),
).items():
    f[what] = attempt(action)
f["scratch"] = attempt(lambda: write("ours")) + attempt(lambda: write(os.environ["TMPDIR"] + "/more"))
f["null"] = attempt(lambda: write("/dev/null"))
""",
    )
    other.end()
    assert facts.pop("scratch") == "writtenwritten" and facts.pop("null") == "written"
    assert {place: answer for place, answer in facts.items() if not answer.startswith("refused")} == {}
    assert victim.read_text() == "mine" and victim.stat().st_mode & 0o777 == 0o644


def test_shared_memory_is_no_mailbox_between_workers(worker, fork_server):
    name = f"/dev/shm/kernel-judge-test-{os.getpid()}"
    assert ask(worker, f'f["left"] = attempt(lambda: write({name!r}))') == {"left": "written"}
    assert not Path(name).exists()
    second = fork_server.fork()
    assert ask(second, 'f["found"] = os.listdir("/dev/shm")') == {"found": []}
    second.end()


def test_environment_holds_no_secret(worker, fake_token):
    facts = ask(
        worker,
        """
f["environment"] = dict(os.environ)
f["first"] = open("/proc/self/environ").read()
""",
    )
    assert fake_token not in json.dumps(facts)
    allowed = {
        "PATH",
        "LANG",
        "HOME",
        "TMPDIR",
        "LD_LIBRARY_PATH",
        "PYTHONPATH",
        "PYTHONHASHSEED",
        "PYTHONDONTWRITEBYTECODE",
    }
    prefixes = ("TRITON_", "TORCH", "CUDA_", "OPENBLAS_", "OMP_", "MKL_", "HF_HUB_OFFLINE", "KMP_", "LC_")
    assert [name for name in facts["environment"] if name not in allowed and not name.startswith(prefixes)] == []
    assert facts["environment"]["HOME"] == facts["environment"]["TMPDIR"] == worker.scratch


def test_only_its_own_descriptors_are_open(worker):
    inherited = ask(
        worker,
        """
f["open"] = {}
for fd in range(256):
    try:
        f["open"][fd] = os.readlink("/proc/self/fd/%d" % fd)
    except OSError:
        pass
""",
    )["open"]
    assert [inherited.pop(str(fd)) for fd in (0, 1, 2)] == ["/dev/null"] * 3
    (channel,) = inherited.values()
    assert channel.startswith("socket:"), "the channel to the judge and nothing else"


def test_core_dumps_and_huge_files_are_off(worker):
    facts = ask(
        worker,
        """
import resource
f["core"] = resource.getrlimit(resource.RLIMIT_CORE)
f["space"] = resource.getrlimit(resource.RLIMIT_AS)[1]
f["raise"] = attempt(lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 50, 1 << 50)))
f["files"] = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
""",
    )
    assert facts["core"] == [0, 0] and 0 < facts["space"] <= 24 << 30 and facts["files"] <= 1024
    assert facts["raise"].startswith("refused")


# The end -------------------------------------------------------------------------------------------------------------


def test_nothing_that_a_worker_started_outlives_it(worker):
    name = f"kjd{os.getpid() % 1000000}"
    ask(worker, f'daemon({name!r})\nf["scratch"] = write("left-over")')
    assert wait_until(lambda: len(named(name)) == 1, 5), "the daemon runs"
    scratch, pid, supervisor = worker.scratch, worker.pid, worker.supervisor
    assert Path(scratch, "left-over").exists() and alive(pid) and alive(supervisor)
    worker.end()
    assert wait_until(lambda: not named(name), 2)
    assert not alive(pid) and not alive(supervisor) and not Path(scratch).exists()


def test_worker_that_ignores_every_signal_is_killed_at_its_timeout(worker):
    source = (
        "import signal, time\n"
        "for number in range(1, 65):\n"
        "    try:\n        signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError):\n        pass\n"
        "while True:\n"
        "    try:\n        time.sleep(1)\n"
        "    except BaseException:\n        pass\n"
    )
    started = time.monotonic()
    with pytest.raises(WorkerTimeout):
        worker.call("load", 0.5, **request(worker, source, "M"))
    pid = worker.pid
    os.kill(pid, signal.SIGTERM)
    assert alive(pid)
    worker.end()
    assert not alive(pid) and time.monotonic() - started < 5


JUDGE = """
import sys, time
from env.worker import ForkServer

server = ForkServer("cpu")
workers = [server.fork() for _ in range(2)]
print(server.process.pid, *[pid for w in workers for pid in (w.pid, w.supervisor)], server.home, flush=True)
time.sleep(60)
"""


def test_killed_judge_leaves_no_process_behind(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    judge = subprocess.Popen(
        [sys.executable, "-c", JUDGE], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        words = judge.stdout.readline().split()
    finally:
        judge.kill()
    pids = [int(word) for word in words[:5]]
    assert len(pids) == 5
    judge.wait()
    judge.stdout.close()
    assert wait_until(lambda: not any(map(alive, pids)), 5), [pid for pid in pids if alive(pid)]
