"""What foreign code can reach from inside a worker, tried from inside, and what is left when a worker has ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from env import isolation, own_uid
from env.worker import ForkServer, WeakIsolation, WorkerTimeout, sweep

# Three fork servers (torch is imported for each) and one more that is refused.
pytestmark = pytest.mark.budget(90)

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
    report = worker.call("warm", 30, precision="ieee", gpu="")["isolation"]
    # A uid of one's own is for judges that run as root.
    missing = {name: state for name, state in report.items() if state != "on" and name != "own uid"}
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
    again = worker.call("warm", 10, precision="ieee", gpu="")["isolation"]
    assert set(again) >= {
        "mount namespace", "network namespace", "ipc namespace", "pid namespace", "own /proc", "own /dev/shm",
        "read-only mounts", "no new privileges", "no capabilities", "writes only to scratch", "own uid",
        "reads only what Python needs", "signals stay inside", "seccomp", "process limit", "limits",
        "own process group", "nothing outlives it",
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


def test_only_what_python_needs_is_read(worker, fork_server, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("mine")
    other = fork_server.fork()
    Path(other.scratch, "answer.py").write_text("theirs")
    home = next((str(path) for path in Path.home().iterdir() if path.is_file()), str(secret))
    files = [ROOT / "README.md", next((ROOT / "tests" / "cases").rglob("*.py")), secret, f"{other.scratch}/answer.py",
             home, "/etc/shadow", "/proc/1/../../etc/shadow", "/proc/self/root/etc/shadow"]  # fmt: skip
    folders = [ROOT, ROOT / "tests", tmp_path, other.scratch, fork_server.home, Path.home(), "/", "/tmp", "/etc"]
    facts = ask(
        worker,
        f"""
import shutil, subprocess, sys
for path in {list(map(str, files))}:
    f[path] = attempt(lambda: open(path, "rb").read())
    f["copied " + path] = attempt(lambda: subprocess.check_output(["cat", path]))
    f["linked " + path] = attempt(lambda: (os.symlink(path, "link"), open("link").read()))
for path in {list(map(str, folders))}:
    f["listed " + path] = attempt(lambda: os.listdir(path))
disks = [name for name in os.listdir("/dev") if name[:2] in ("vd", "sd")]
f["disks"] = attempt(lambda: open("/dev/" + disks[0], "rb").read(1))
import env.runner, torch, triton
f["ours"] = [len(open(module.__file__).read()) > 0 for module in (env.runner, torch, triton, os)]
f["scratch"] = [write("mine"), len(os.listdir("."))  > 0]
""",
    )
    other.end()
    assert facts.pop("ours") == [True] * 4 and facts.pop("scratch") == ["written", True]
    assert {path: answer for path, answer in facts.items() if not answer.startswith("refused")} == {}


def test_each_worker_is_a_user_of_its_own(worker, fork_server):
    if worker.call("warm", 10, precision="ieee", gpu="")["isolation"]["own uid"] != "on":
        pytest.skip("needs root, and Python where another user can read it or be shown it")
    body = """
f["ids"] = [*os.getresuid(), *os.getresgid()]
f["groups"] = os.getgroups()
f["nobody"] = attempt(lambda: os.setuid(0))
"""
    second = fork_server.fork()
    mine, theirs = ask(worker, body), ask(second, body)
    freed = theirs["ids"][0]
    second.end()
    for facts in (mine, theirs):
        assert len(set(facts["ids"])) == 1 and facts["groups"] == [] and facts["nobody"].startswith("refused")
        assert own_uid.FIRST_UID <= facts["ids"][0] < own_uid.FIRST_UID + own_uid.SLOTS
    assert mine["ids"] != theirs["ids"]
    assert Path(worker.scratch).stat().st_uid == mine["ids"][0]
    third = fork_server.fork()
    assert ask(third, body)["ids"][0] == freed, "given back once nothing of it was left"
    third.end()


def test_uids_are_not_handed_out_twice():
    first, second = own_uid.Slots(), own_uid.Slots()
    taken = [first.take(), second.take(), first.take()]
    assert len(set(taken)) == 3
    first.give_back(taken[0])
    assert second.take() == taken[0]


def test_python_that_others_cannot_read_is_named(tmp_path):
    inner = tmp_path / "closed" / "python"
    inner.mkdir(parents=True)
    for folder in (inner, tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    (tmp_path / "closed").chmod(0o700)
    assert own_uid.closed_folders([inner], str(tmp_path)) == {tmp_path / "closed": [inner]}
    (tmp_path / "closed").chmod(0o711)
    assert own_uid.closed_folders([inner], str(tmp_path)) == {}
    inner.chmod(0o700)
    with pytest.raises(OSError, match="can't be read by another user"):
        own_uid.closed_folders([inner], str(tmp_path))


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


# Without privileges --------------------------------------------------------------------------------------------------

NAMESPACES = "user namespace,mount namespace,network namespace,ipc namespace,pid namespace,own uid"


@pytest.fixture(scope="module")
def bare_server():
    """What an unprivileged container leaves: Landlock, seccomp, a subreaper, no new privileges."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(isolation.LAYERS_OFF, NAMESPACES)
        server = ForkServer("cpu")
    yield server
    server.close()


def test_minimum_is_met_without_namespaces(bare_server):
    report = bare_server.isolation
    assert all(report[name] == f"off: turned off by {isolation.LAYERS_OFF}" for name in NAMESPACES.split(",")[1:-1])
    assert isolation.minimum(report) == []
    assert report["process limit"].startswith("off: needs a uid or a user namespace")


def test_nothing_outlives_a_worker_without_namespaces(bare_server):
    name = f"kjb{os.getpid() % 1000000}"
    worker = bare_server.fork()
    ask(worker, f"daemon({name!r})\ndaemon({name!r})")
    assert wait_until(lambda: len(named(name)) == 2, 5), "the daemons run"
    worker.end()
    assert not named(name) and not alive(worker.pid) and not alive(worker.supervisor)


def test_judge_is_out_of_reach_without_namespaces(bare_server):
    worker = bare_server.fork()
    facts = ask(
        worker,
        f"""
for name, pid in dict(judge={os.getpid()}, server={bare_server.process.pid}, supervisor={worker.supervisor}).items():
    f["memory of " + name] = attempt(lambda: open("/proc/%d/mem" % pid, "rb").read(1))
    f["environment of " + name] = attempt(lambda: open("/proc/%d/environ" % pid).read())
    if {bare_server.isolation["signals stay inside"] == "on"}:
        f["signal to " + name] = attempt(lambda: os.kill(pid, 0))
f["everybody"] = attempt(lambda: os.kill(-1, 9))
f["mailbox"] = attempt(lambda: write("/dev/shm/kernel-judge-test-mailbox"))
f["network"] = attempt(lambda: socket.create_connection(("127.0.0.1", 9), timeout=2))
f["file"] = attempt(lambda: open({str(ROOT / "README.md")!r}).read())
""",
    )
    worker.end()
    assert {what: answer for what, answer in facts.items() if not answer.startswith("refused")} == {}
    assert "refused: ConnectionRefusedError" not in facts.values()


def test_supervisor_that_is_killed_takes_its_worker_along(bare_server):
    name = f"kjs{os.getpid() % 1000000}"
    worker = bare_server.fork()
    ask(worker, f"daemon({name!r})")
    assert wait_until(lambda: len(named(name)) == 1, 5)
    os.kill(worker.supervisor, signal.SIGKILL)
    assert wait_until(lambda: not named(name) and not alive(worker.pid), 3)
    assert worker.end() == 137


def test_too_little_is_refused_and_said(monkeypatch):
    off = [*NAMESPACES.split(","), "seccomp", "writes only to scratch"]
    monkeypatch.setenv(isolation.LAYERS_OFF, ", ".join(off))
    with pytest.raises(WeakIsolation) as refused:
        ForkServer("cpu")
    assert len(refused.value.missing) == 2
    for words in ("no network (network namespace: turned off", "writes only to its own folder", "env.doctor"):
        assert words in str(refused.value)
    assert "weak_isolation=True" in str(refused.value)
    assert not list(Path(tempfile.gettempdir()).glob(f"kernel-judge-*-{os.getpid()}-*/trial"))


def test_minimum_names_what_is_missing():
    assert len(isolation.minimum({})) == 6
    report = {
        "nothing outlives it": "on", "seccomp": "on", "writes only to scratch": "off: this kernel has no Landlock",
        "read-only mounts": "off: Operation not permitted", "no new privileges": "on", "own process group": "on",
        "limits": "on",
    }  # fmt: skip
    assert isolation.minimum(report) == [
        "writes only to its own folder (writes only to scratch: this kernel has no Landlock; read-only mounts: "
        "Operation not permitted)"
    ]


# Killed judges -------------------------------------------------------------------------------------------------------

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
    assert wait_until(lambda: not list(tmp_path.iterdir()), 2), "the fork server has removed its folder"


def test_folders_of_judges_that_are_gone_are_removed(tmp_path, fork_server):
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = {
        f"kernel-judge-{namespace}-{gone.pid}-1-a": True,  # nobody has that number now
        f"kernel-judge-{namespace}-{os.getpid()}-1-b": True,  # somebody else has it now
        fork_server.home.name: False,  # its owner lives
        f"kernel-judge-{namespace + 1}-{gone.pid}-1-c": False,  # another container's, whose processes aren't seen
        "kernel-judge-results": False,
    }
    for name in names:
        (tmp_path / name / "work").mkdir(parents=True)
    assert {path.name for path in sweep(str(tmp_path))} == {name for name, swept in names.items() if swept}
    assert {path.name for path in tmp_path.iterdir()} == {name for name, swept in names.items() if not swept}
