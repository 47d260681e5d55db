"""System calls that no candidate needs are refused, on both architectures; what Triton and torch need still works."""

from __future__ import annotations

import errno
import json
import platform
import shutil
import struct

import pytest

from env import seccomp

pytestmark = pytest.mark.budget(40)

ALLOW = 0x7FFF0000
EPERM, ENOSYS = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS


def run(code: bytes, number: int, arch: int, *arguments: int) -> int:
    """What the kernel would make of a filter: BPF, as far as it is used here."""
    given = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<iIQ6Q", number if number < 1 << 31 else number - (1 << 32), arch, 0, *given)
    accumulator, at = 0, 0
    while True:
        operation, if_true, if_false, value = struct.unpack_from("<HBBI", code, 8 * at)
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif operation == 0x06:
            return value
        else:
            true = {
                0x15: accumulator == value,
                0x35: accumulator >= value,
                0x45: bool(accumulator & value),
            }[operation]
            at += if_true if true else if_false


ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


@pytest.mark.parametrize("machine", ARCHES)
def test_filter(machine):
    code, arch, numbers = seccomp.program(machine), ARCHES[machine], seccomp.NUMBERS[machine]
    listed = [name for group in seccomp.GROUPS.values() for name in group]
    assert all(run(code, numbers[name], arch) == EPERM for name in listed if name in numbers)
    by_argument = {"clone", "clone3", "unshare", "socket", "socketpair", "kill", "prlimit64"}
    assert set(numbers) == ({*listed, *by_argument} & set(numbers))
    assert len(set(numbers.values())) == len(numbers), "two names of one number"
    assert run(code, numbers["clone3"], arch) == ENOSYS
    read, openat, execve, mmap = {"x86_64": (0, 257, 59, 9), "aarch64": (63, 56, 221, 222)}[machine]
    assert all(run(code, number, arch) == ALLOW for number in (read, openat, execve, mmap))
    threads, new_user, new_pid = 0x3D0F00, 0x10000011, 0x20000011
    assert run(code, numbers["clone"], arch, threads) == run(code, numbers["clone"], arch, 17) == ALLOW
    assert run(code, numbers["clone"], arch, new_user) == run(code, numbers["unshare"], arch, new_pid) == EPERM
    families = [run(code, numbers["socket"], arch, family) for family in (1, 2, 10, 16, 17, 38, 40)]
    assert families == [ALLOW] + [EPERM] * 6
    assert (
        run(code, numbers["kill"], arch, 0xFFFFFFFFFFFFFFFF) == EPERM and run(code, numbers["kill"], arch, 77) == ALLOW
    )
    # (pid, which, new limits, old limits): only without new ones
    assert run(code, numbers["prlimit64"], arch, 0, 9, 0, 1 << 40) == ALLOW
    for new in (1, 1 << 32, 0x7FFF12345678):
        assert run(code, numbers["prlimit64"], arch, 0, 9, new, 0) == EPERM
    other = ARCHES["aarch64" if machine == "x86_64" else "x86_64"]
    assert run(code, read, other) == run(code, read, 0x40000003) == EPERM, "calls of another architecture"
    if machine == "x86_64":
        assert run(code, 0x40000000 | read, arch) == EPERM, "x32"


def ask(worker, body: str) -> dict:
    """Run `body` (it fills a dict `f`) inside a worker. Returns f."""
    source = (
        "import ctypes, errno, json, os, socket\nlibc = ctypes.CDLL(None, use_errno=True)\nclass P:\n    pass\n"
        + "f = {}\n" + body + "\ndef get_init_inputs():\n    return [json.dumps(f)]\n"
    )  # fmt: skip
    path = f"{worker.scratch}/probe.py"
    loaded = worker.call("load", 60, source=source, path=path, module="probe", watch=None, **{"class": "P"})
    assert loaded["ok"], loaded
    return json.loads(worker.call("init_inputs", 20)["layout"]["items"][0]["value"])


@pytest.fixture
def worker(fork_server):
    if fork_server.isolation["seccomp"] != "on":
        pytest.skip(f"seccomp is {fork_server.isolation['seccomp']}")
    worker = fork_server.fork()
    yield worker
    worker.end()


@pytest.mark.parametrize("group", seccomp.GROUPS)
def test_group_is_refused_inside(worker, group):
    numbers = seccomp.NUMBERS[platform.machine()]
    calls = {name: numbers[name] for name in seccomp.GROUPS[group] if name in numbers}
    facts = ask(
        worker,
        f"""
for name, number in {calls!r}.items():
    ctypes.set_errno(0)
    f[name] = [libc.syscall(number, 0, 0, 0, 0, 0), errno.errorcode.get(ctypes.get_errno())]
""",
    )
    assert facts == {name: [-1, "EPERM"] for name in calls}


def test_namespaces_and_sockets_inside(worker):
    facts = ask(
        worker,
        """
def attempt(action):
    try:
        return str(type(action()))
    except OSError as error:
        return errno.errorcode[error.errno]
for family in ("AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG"):
    f[family] = attempt(lambda: socket.socket(getattr(socket, family), socket.SOCK_DGRAM))
f["pair"] = attempt(socket.socketpair)
f["unshare"] = [libc.unshare(0x10000000), ctypes.get_errno()]
f["everybody"] = attempt(lambda: os.kill(-1, 9))
""",
    )
    assert facts.pop("pair") == "<class 'tuple'>" and facts.pop("unshare") == [-1, errno.EPERM]
    assert set(facts.values()) == {"EPERM"}, facts


def test_honest_work_goes_on_inside(worker):
    compiler = shutil.which("cc")
    facts = ask(
        worker,
        f"""
import subprocess, sys, threading, multiprocessing, tempfile
import torch, triton, triton.language as tl
@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)
x = torch.randn(100); y = torch.empty_like(x)
double[(1,)](x, y, 100, BLOCK=128)
f["triton"] = torch.equal(y, x * 2)
done = []
threads = [threading.Thread(target=done.append, args=(n,)) for n in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
f["threads"] = sorted(done)
f["python"] = subprocess.check_output([sys.executable, "-c", "import json; print(json.dumps(4))"], text=True)
f["os.system"] = os.system("true")
f["temporary"] = tempfile.NamedTemporaryFile(delete=False).name.startswith(os.environ["TMPDIR"])
with multiprocessing.get_context("fork").Pool(2) as pool:
    f["pool"] = pool.map(abs, [-1, -2])
if {bool(compiler)}:
    open("stub.c", "w").write("int answer(void) {{ return 42; }}")
    made = subprocess.run(["cc", "-shared", "-fPIC", "-O2", "stub.c", "-o", "stub.so"], capture_output=True, text=True)
    f["cc"] = made.stderr or ctypes.CDLL(os.path.abspath("stub.so")).answer()
""",
    )
    assert facts.pop("cc", 42) == 42
    assert facts == {
        "triton": True, "threads": list(range(8)), "python": "4\n", "os.system": 0, "temporary": True, "pool": [1, 2],
    }  # fmt: skip
