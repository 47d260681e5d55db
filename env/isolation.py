"""The layers between foreign code and this machine, put together: what is tried, in which order, what must be there.

Runs in the freshly forked process, before CUDA and before foreign code, while it has a single thread (`unshare`,
Landlock and seccomp act per thread). Each layer is tried and reported by name, "on" or "off: why": none is silently
absent. `minimum` says whether what is left is enough to run foreign code at all.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import resource
import signal
import struct
from collections.abc import Callable
from pathlib import Path

from env import landlock, own_uid, seccomp
from env.libc import LIBC, last_error

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = (
    0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_MS_PRIVATE_REC = (1 << 18) | (1 << 14)
_MS_NOSUID_NOEXEC_NODEV = 2 | 8 | 4
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_CHILD_SUBREAPER = 1, 38, 36
_MS_NOSUID_NODEV, _MS_BIND = 2 | 4, 4096
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = -100, 0x8000, 1
_SYS_CAPSET = 91 if platform.machine() == "aarch64" else 126
_SYS_MOUNT_SETATTR = 442

# Processes and threads of one worker. CUDA starts about ten threads, a compiler a few processes.
MAX_PROCESSES = 512
LAYERS_OFF = "KERNEL_JUDGE_LAYERS_OFF"
_turned_off: set[str] = set()


def read_layers_off() -> None:
    """Take the names of layers to leave out from the environment: to find out which one breaks a driver, no more.

    Read once, in the fork server.
    """
    _turned_off.update(name.strip() for name in os.environ.pop(LAYERS_OFF, "").split(",") if name.strip())


def _check(result: int) -> None:
    if result != 0:
        raise last_error()


def _set_up(report: dict[str, str], name: str, layer: Callable[[], object]) -> bool:
    """Set a layer up and report it: "on", or why not. Returns whether it is on."""
    if name in _turned_off:
        report[name] = f"off: turned off by {LAYERS_OFF}"
        return False
    try:
        layer()
        report[name] = "on"
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        report[name] = f"off: {reason}"
    return report[name] == "on"


def set_parent_death_signal(number: int = signal.SIGKILL) -> None:
    """Die with the parent: no worker outlives a killed judge."""
    _check(LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0))


def become_subreaper() -> None:
    """Adopt orphaned descendants, so that a double fork can't escape from whoever cleans up."""
    _check(LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def unshare_namespaces() -> dict[str, str]:
    """Leave the host's namespaces. The PID namespace acts from the next fork on. Returns {layer: "on" or why not}."""
    report: dict[str, str] = {}
    if os.geteuid() != 0:
        _set_up(report, "user namespace", _unshare_user)
    for name, flag in (
        ("mount namespace", _CLONE_NEWNS),
        ("network namespace", _CLONE_NEWNET),
        ("ipc namespace", _CLONE_NEWIPC),
        ("pid namespace", _CLONE_NEWPID),
    ):
        _set_up(report, name, lambda flag=flag: _check(LIBC.unshare(flag)))
    if report["mount namespace"] == "on":
        # Otherwise our mounts below would propagate back to the host.
        LIBC.mount(None, b"/", None, ctypes.c_ulong(_MS_PRIVATE_REC), None)
    return report


def _unshare_user() -> None:
    uid, gid = os.getuid(), os.getgid()
    _check(LIBC.unshare(_CLONE_NEWUSER))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _mount_own_proc() -> None:
    """Show foreign code only its own processes. Needs the new PID and mount namespaces."""
    _check(LIBC.mount(b"proc", b"/proc", b"proc", ctypes.c_ulong(_MS_NOSUID_NOEXEC_NODEV), None))


def _mount_own_shm() -> None:
    _check(LIBC.mount(b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(_MS_NOSUID_NODEV), b"size=1g,mode=1777"))


def _make_read_only(scratch: str, others: list[str]) -> None:
    def set_attributes(path: bytes, flags: int, turn_on: int, turn_off: int) -> None:
        attributes = struct.pack("<4Q", turn_on, turn_off, 0, 0)
        _check(LIBC.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, path, flags, attributes, len(attributes)))

    _check(LIBC.mount(scratch.encode(), scratch.encode(), None, ctypes.c_ulong(_MS_BIND), None))
    set_attributes(b"/", _AT_RECURSIVE, _MOUNT_ATTR_RDONLY, 0)
    # CUDA names its threads through /proc, Landlock guards the rest of it.
    for path in (scratch, *others):
        set_attributes(path.encode(), 0, 0, _MOUNT_ATTR_RDONLY)
    os.chdir(scratch)  # the folder that was entered before lies below a mount that is read-only now


def _drop_capabilities() -> None:
    header = struct.pack("<Ii", 0x20080522, 0)  # version 3, this thread
    _check(LIBC.syscall(_SYS_CAPSET, header, bytes(24)))


def limit_resources(host_memory_bytes: int) -> None:
    """Per-process limits. `host_memory_bytes` bounds the address space and must be 0 for CUDA, which reserves
    terabytes.
    """
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 1024,
        resource.RLIMIT_FSIZE: 2 << 30,
        resource.RLIMIT_MEMLOCK: 8 << 20,
    }
    if host_memory_bytes:
        limits[resource.RLIMIT_AS] = host_memory_bytes
    for what, value in limits.items():
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))
    os.nice(5)  # the judge answers first


def close_descriptors(keep: set[int]) -> None:
    """Close everything that was inherited except `keep`, and point the standard streams at /dev/null.

    By ranges, not by listing /proc/self/fd: a supervisor shares its worker's mounts, where its own /proc is gone.
    """
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    first = 3
    for fd in [*sorted(keep), 1 << 20]:
        os.closerange(first, fd)
        first = fd + 1


def _limit_processes(report: dict[str, str]) -> None:
    """Bound fork bombs. The kernel counts by user, and by user namespace since 5.14: without one or the other, the
    judge's own processes would count.
    """
    release = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    if report.get("own uid") != "on" and not (report.get("user namespace") == "on" and release >= (5, 14)):
        raise OSError(
            errno.EPERM, "needs a uid or a user namespace of its own; the fork server counts and kills instead"
        )
    resource.setrlimit(resource.RLIMIT_NPROC, (MAX_PROCESSES, MAX_PROCESSES))


def _mounts(report: dict[str, str], scratch: str, uid: int | None) -> None:
    """What needs mounting, while this process still may."""
    if report["pid namespace"] == "on":
        _set_up(report, "own /proc", _mount_own_proc)
    # Shared memory would be a mailbox from one worker to the next: a candidate could learn that it is judged again.
    _set_up(report, "own /dev/shm", _mount_own_shm)
    if uid is not None:
        _set_up(report, "own uid", lambda: own_uid.uncover(_closed_folders(scratch)))
    # What Landlock leaves open: modes, times and attributes of files can be changed by their owner.
    shared = ["/dev/shm"] if report["own /dev/shm"] == "on" else []
    _set_up(report, "read-only mounts", lambda: _make_read_only(scratch, ["/proc", *shared]))


def _closed_folders(scratch: str) -> dict[Path, list[Path]]:
    return own_uid.closed_folders(landlock.needed_folders(scratch), scratch)


def _become(report: dict[str, str], scratch: str, uid: int | str) -> None:
    if isinstance(uid, str):
        report["own uid"] = uid
        return
    if report.get("own uid") is None:
        # Without mounts of its own nothing can be shown that lies in a folder that others may not enter.
        def reachable() -> None:
            closed = _closed_folders(scratch)
            if closed:
                raise OSError(errno.EACCES, f"{next(iter(closed))} can't be entered by another user (chmod o+x)")

        _set_up(report, "own uid", reachable)
    if report["own uid"] == "on":
        _set_up(report, "own uid", lambda: own_uid.become(uid, scratch))


def _landlock(report: dict[str, str], scratch: str) -> None:
    own_proc = report.get("own /proc") == "on"
    writable = [scratch, *landlock.WRITABLE, *map(str, Path("/dev").glob("nvidia*"))]
    readable = landlock.readable(scratch, own_proc)
    if report.get("own /dev/shm") == "on":
        writable.append("/dev/shm")
    reads = "reads only what Python needs"
    off = f"off: turned off by {LAYERS_OFF}"
    signals = "signals stay inside" not in _turned_off

    def restrict() -> None:
        abi = landlock.restrict(writable, None if reads in _turned_off else readable, signals=signals)
        report[reads] = off if reads in _turned_off else "on"
        report["signals stay inside"] = (
            off if not signals else "on" if abi >= 6 else "off: this kernel's Landlock is too old (Linux 6.12 has it)"
        )

    if not _set_up(report, "writes only to scratch", restrict):
        report[reads] = report["signals stay inside"] = report["writes only to scratch"]


def apply(
    scratch: str, namespaces: dict[str, str], host_memory_bytes: int, uid: int | str = "off: not asked for"
) -> dict[str, str]:
    """All layers that act inside the worker, in the order that lets each still be set. Returns the whole report.

    namespaces: what `unshare_namespaces` reported. uid: the user to become, or why there is none.
    """
    report = dict(namespaces)
    own_session = os.getsid(0) == os.getpid()
    report["own process group"] = "on" if own_session else "off: no session of its own"
    if namespaces.get("mount namespace") == "on":
        _mounts(report, scratch, None if isinstance(uid, str) or "own uid" in _turned_off else uid)
    for name in ("own /proc", "own /dev/shm", "read-only mounts"):
        report.setdefault(name, "off: needs a mount and a PID namespace")
    _set_up(report, "limits", lambda: limit_resources(host_memory_bytes))
    _set_up(report, "no new privileges", lambda: _check(LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)))
    _become(report, scratch, uid)
    _set_up(report, "process limit", lambda: _limit_processes(report))
    _set_up(report, "no capabilities", _drop_capabilities)
    _landlock(report, scratch)
    # Last, since the kernel clears it when credentials change; the filter after it refuses none of its calls.
    set_parent_death_signal()
    _set_up(report, "seccomp", seccomp.install)
    return report


def minimum(report: dict[str, str]) -> list[str]:
    """What is missing for foreign code to be run at all, in words; empty where it may be.

    report: what `apply` returned, with "nothing outlives it" from the fork server's trial (see `env.forkserver`). It
    can be had without privileges: Landlock, seccomp, a subreaper and no_new_privs are enough.
    """

    def on(*names: str) -> bool:
        return any(report.get(name) == "on" for name in names)

    def why(*names: str) -> str:
        return "; ".join(f"{name}: {report.get(name, 'off: not reported').removeprefix('off: ')}" for name in names)

    required = {
        "whatever a candidate starts ends with it": ("nothing outlives it",),
        "no network": ("network namespace", "seccomp"),
        "writes only to its own folder": ("writes only to scratch", "read-only mounts"),
        "no new privileges": ("no new privileges",),
        "a process group of its own": ("own process group",),
        "limits on memory, files and core dumps": ("limits",),
    }
    return [f"{what} ({why(*names)})" for what, names in required.items() if not on(*names)]
