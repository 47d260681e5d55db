"""The layers between foreign code and this machine: namespaces, no capabilities, write access to one folder, limits.

Runs in the freshly forked process, before CUDA and before foreign code, while it has a single thread (`unshare` and
Landlock act per thread). Each layer is tried and reported by name: none is silently absent.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
from collections.abc import Callable
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = (
    0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_MS_PRIVATE_REC = (1 << 18) | (1 << 14)
_MS_NOSUID_NOEXEC_NODEV = 2 | 8 | 4
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_CHILD_SUBREAPER = 1, 38, 36
_MS_NOSUID_NODEV, _MS_BIND = 2 | 4, 4096
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = -100, 0x8000, 1
_SYS_CAPSET, _SYS_MOUNT_SETATTR = 126, 442
_SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_ADD, _SYS_LANDLOCK_RESTRICT = 444, 445, 446

# Beside scratch and the GPU's devices. The CUDA driver names its threads through /proc/self and fails where it can't.
_WRITABLE = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/shm", "/proc/self")

# Landlock's access bits that change the file system (reading and executing stay free in this level).
_LANDLOCK_WRITES_V1 = (1 << 1) | sum(1 << bit for bit in range(4, 13))  # write_file, remove_*, make_*
_LANDLOCK_REFER, _LANDLOCK_TRUNCATE = 1 << 13, 1 << 14
_LANDLOCK_FILE_BITS = (1 << 1) | _LANDLOCK_TRUNCATE


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _try(layer: Callable[[], None]) -> str:
    """Set a layer up. Returns "on" or why not."""
    try:
        layer()
        return "on"
    except OSError as error:
        return f"off: {error.strerror}"


def set_parent_death_signal() -> None:
    """Die with the parent: no worker outlives a killed judge."""
    _check(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def become_subreaper() -> None:
    """Adopt orphaned descendants, so that a double fork can't escape from whoever cleans up."""
    _check(_LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def unshare_namespaces() -> dict[str, str]:
    """Leave the host's namespaces. The PID namespace acts from the next fork on. Returns {layer: "on" or why not}."""
    report: dict[str, str] = {}
    if os.geteuid() != 0:
        report["user namespace"] = _try(_unshare_user)
    for name, flag in (
        ("mount namespace", _CLONE_NEWNS),
        ("network namespace", _CLONE_NEWNET),
        ("ipc namespace", _CLONE_NEWIPC),
        ("pid namespace", _CLONE_NEWPID),
    ):
        report[name] = _try(lambda flag=flag: _check(_LIBC.unshare(flag)))
    if report["mount namespace"] == "on":
        # Otherwise our mounts below would propagate back to the host.
        _LIBC.mount(None, b"/", None, ctypes.c_ulong(_MS_PRIVATE_REC), None)
    return report


def _unshare_user() -> None:
    uid, gid = os.getuid(), os.getgid()
    _check(_LIBC.unshare(_CLONE_NEWUSER))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _mount_own_proc() -> None:
    """Show foreign code only its own processes. Needs the new PID and mount namespaces."""
    _check(_LIBC.mount(b"proc", b"/proc", b"proc", ctypes.c_ulong(_MS_NOSUID_NOEXEC_NODEV), None))


def seal_mounts(scratch: str) -> dict[str, str]:
    """A /dev/shm of its own, and every other mount read-only but scratch. Returns {layer: "on" or why not}.

    What Landlock leaves open: shared memory is a mailbox between one worker and the next (a candidate could learn that
    it is being judged a second time), and modes, times and attributes of files can be changed by their owner anywhere.
    """
    return {"own /dev/shm": _try(_mount_own_shm), "read-only mounts": _try(lambda: _make_read_only(scratch))}


def _mount_own_shm() -> None:
    _check(_LIBC.mount(b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(_MS_NOSUID_NODEV), b"size=1g,mode=1777"))


def _make_read_only(scratch: str) -> None:
    def set_attributes(path: bytes, flags: int, turn_on: int, turn_off: int) -> None:
        attributes = struct.pack("<4Q", turn_on, turn_off, 0, 0)
        _check(_LIBC.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, path, flags, attributes, len(attributes)))

    _check(_LIBC.mount(scratch.encode(), scratch.encode(), None, ctypes.c_ulong(_MS_BIND), None))
    set_attributes(b"/", _AT_RECURSIVE, _MOUNT_ATTR_RDONLY, 0)
    # CUDA names its threads through /proc, Landlock guards the rest of it.
    for path in (scratch.encode(), b"/proc", b"/dev/shm"):
        set_attributes(path, 0, 0, _MOUNT_ATTR_RDONLY)
    os.chdir(scratch)  # the folder that was entered before lies below a mount that is read-only now


def restrict_writes(writable: list[str]) -> str:
    """Landlock: files can be changed below `writable` only. Returns "on" or why not."""
    version = _LIBC.syscall(_SYS_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return "off: this kernel has no Landlock"
    handled = (
        _LANDLOCK_WRITES_V1 | (_LANDLOCK_REFER if version >= 2 else 0) | (_LANDLOCK_TRUNCATE if version >= 3 else 0)
    )
    rules = struct.pack("<Q", handled)
    ruleset = _LIBC.syscall(_SYS_LANDLOCK_CREATE, rules, len(rules), 0)
    if ruleset < 0:
        return f"off: {os.strerror(ctypes.get_errno())}"
    try:
        for path in writable:
            if not Path(path).exists():
                continue
            allowed = handled if Path(path).is_dir() else handled & _LANDLOCK_FILE_BITS
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                _check(_LIBC.syscall(_SYS_LANDLOCK_ADD, ruleset, 1, struct.pack("<Qi", allowed, fd), 0))
            finally:
                os.close(fd)
        _check(_LIBC.syscall(_SYS_LANDLOCK_RESTRICT, ruleset, 0))
        return "on"
    except OSError as error:
        return f"off: {error.strerror}"
    finally:
        os.close(ruleset)


def drop_privileges() -> dict[str, str]:
    """No new privileges and no capabilities, for good. Returns {layer: "on" or why not}."""
    return {
        "no new privileges": _try(lambda: _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))),
        "no capabilities": _try(_drop_capabilities),
    }


def _drop_capabilities() -> None:
    header = struct.pack("<Ii", 0x20080522, 0)  # version 3, this thread
    _check(_LIBC.syscall(_SYS_CAPSET, header, bytes(24)))


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


def apply(scratch: str, namespaces: dict[str, str], host_memory_bytes: int) -> dict[str, str]:
    """All layers that act inside the worker, in the order that lets each still be set. Returns the whole report."""
    report = dict(namespaces)
    if namespaces.get("pid namespace") == "on" and namespaces.get("mount namespace") == "on":
        report["own /proc"] = _try(_mount_own_proc)
        if report["own /proc"] == "on":
            report.update(seal_mounts(scratch))
    limit_resources(host_memory_bytes)
    report.update(drop_privileges())
    report["writes only to scratch"] = restrict_writes([scratch, *_WRITABLE, *map(str, Path("/dev").glob("nvidia*"))])
    # Last: the kernel clears it when credentials change.
    set_parent_death_signal()
    return report
