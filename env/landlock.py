"""Landlock: which files foreign code may read and change, that it opens no TCP connection, and whom it may signal.

Runs in the freshly forked worker; needs no privilege, which makes it the layer that unprivileged containers have. The
rules are an allow-list: what Python, torch, Triton, CUDA and a C compiler need to run, and the worker's own scratch.
"""

from __future__ import annotations

import errno
import os
import pwd
import shutil
import stat
import struct
import sys
from pathlib import Path

from env.libc import LIBC, last_error

_SYS_CREATE, _SYS_ADD, _SYS_RESTRICT = 444, 445, 446

# Access bits of the kernel's ABI, by the version that brought them.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 1 << 1, 1 << 2, 1 << 3
_READS = _EXECUTE | _READ_FILE | _READ_DIR
_WRITES_V1 = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))  # and remove_*, make_*
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_FILE_BITS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_NET_BIND_TCP, _NET_CONNECT_TCP = 1, 2
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2

ROOT = Path(__file__).resolve().parent.parent

# The CUDA driver names its threads through /proc/self and fails where it can't.
WRITABLE = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/proc/self")
_SYSTEM = (
    "/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/sys/devices", "/sys/bus", "/sys/class",
    "/sys/dev", "/sys/module", "/sys/fs/cgroup", "/sys/kernel/mm",
)  # fmt: skip
# Not all of /etc: keys and password hashes are readable to a worker that runs as root without capabilities.
_ETC = (
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "timezone", "passwd", "group", "nsswitch.conf", "hosts",
    "host.conf", "os-release", "alternatives", "OpenCL", "nvidia", "mime.types",
)  # fmt: skip
# Where /proc isn't the worker's own: nothing about other processes.
_SHARED_PROC = (
    "self", "cpuinfo", "meminfo", "stat", "loadavg", "uptime", "version", "filesystems", "devices", "modules", "sys",
    "driver", "bus", "interrupts",
)  # fmt: skip


def version() -> int:
    """Landlock's ABI version here, 0 where the kernel has none."""
    return max(0, LIBC.syscall(_SYS_CREATE, None, 0, 1))


def _forbidden(scratch: str) -> set[Path]:
    """Folders that no rule may open as a whole: the project, the home folder, where scratch folders are, and all that
    these lie in.
    """
    closed = [ROOT, ROOT / "tests", ROOT / "runs", Path(scratch).resolve()]
    try:
        closed.append(Path(pwd.getpwuid(os.getuid()).pw_dir).resolve())
    except KeyError:  # a container's user without a name has no home folder either
        closed.append(Path("/root"))
    return {folder for path in closed for folder in (path, *path.parents)}


def needed_folders(scratch: str) -> list[Path]:
    """Folders and files that Python, torch, Triton and CUDA read while they run, those of the system left out."""
    wanted = [Path(sys.prefix), Path(sys.base_prefix), Path(sys.exec_prefix)]
    wanted += [Path(entry) for entry in sys.path if entry]
    wanted += [Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":") if entry.startswith("/")]
    for file in Path("/etc/ld.so.conf.d").glob("*.conf"):  # where the driver's libraries may lie
        wanted += [Path(line.strip()) for line in file.read_text().splitlines() if line.startswith("/")]
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name, "").startswith("/"):
            wanted.append(Path(os.environ[name]))
    for tool in ("cc", "gcc", "clang", "ld", "as", "ptxas"):
        found = shutil.which(tool)
        if found:
            wanted.append(Path(found).resolve().parent.parent)
    mapped = {line.split(None, 5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if " /" in line}
    closed = _forbidden(scratch)
    for name in mapped:
        path = Path(name)
        if not name.startswith(("/dev/", "/proc/", "/memfd:", "/SYSV")) and path.is_file():
            wanted.append(path if path.parent in closed else path.parent)
    system = tuple(map(Path, _SYSTEM))
    kept: list[Path] = []
    for path in sorted({*wanted, *(path.resolve() for path in wanted)}, key=lambda path: len(path.parts)):
        inside = any(path.is_relative_to(other) for other in (*system, *kept))
        if path.exists() and path not in closed and path.resolve() not in closed and not inside:
            kept.append(path)
    return [*kept, ROOT / "env"]


def readable(scratch: str, own_proc: bool) -> list[str]:
    """Everything that a worker may read, folders with all below them."""
    proc = ["/proc"] if own_proc else [f"/proc/{name}" for name in _SHARED_PROC]
    devices = [*map(str, Path("/dev").glob("nvidia*")), *WRITABLE]
    etc = [f"/etc/{name}" for name in _ETC]
    return [scratch, *_SYSTEM, *etc, *proc, *devices, *map(str, needed_folders(scratch))]


def _add(ruleset: int, path: str, allowed: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return  # what isn't there, or is closed to this user anyway, needs no rule
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            allowed &= _FILE_BITS
        rule = struct.pack("<Qi", allowed, fd)
        if LIBC.syscall(_SYS_ADD, ruleset, 1, rule, 0) != 0:
            raise last_error(path)
    finally:
        os.close(fd)


def restrict(writable: list[str], readable: list[str] | None, tcp: bool = True, signals: bool = True) -> int:
    """Allow changes below `writable` and reads below `readable` (None: reads stay free), for good.

    tcp: refuse TCP where this kernel can. signals: signals and abstract sockets reach this worker's own processes only,
    where this kernel can. Returns the ABI version: 4 and up have TCP, 6 and up signals. Raises OSError.
    """
    abi = version()
    if abi < 1:
        raise OSError(errno.ENOSYS, "this kernel has no Landlock")
    writes = _WRITES_V1 | (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0)
    handled = writes | (_READS if readable is not None else 0)
    attributes = struct.pack("<Q", handled)
    if abi >= 4:
        attributes += struct.pack("<Q", _NET_BIND_TCP | _NET_CONNECT_TCP if tcp else 0)
    if abi >= 6:
        attributes += struct.pack("<Q", _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if signals else 0)
    ruleset = LIBC.syscall(_SYS_CREATE, attributes, len(attributes), 0)
    if ruleset < 0:
        raise last_error()
    try:
        for path in writable:
            _add(ruleset, path, handled)
        for path in readable or []:
            _add(ruleset, path, _READS)
        if readable is not None:
            _add(ruleset, "/dev", _READ_DIR)  # libraries look there for GPUs by name
        if LIBC.syscall(_SYS_RESTRICT, ruleset, 0) != 0:
            raise last_error()
    finally:
        os.close(ruleset)
    return abi
