"""A filter of system calls that no kernel of a candidate needs: to other processes, the kernel itself, the network.

Runs in the freshly forked worker, last of the layers, while there is a single thread; all that it starts inherits it.
It is a list of what is refused (EPERM), not of what is allowed: the CUDA driver and Python need hundreds of calls that
change with their versions, and what a candidate could do with them is bounded by the other layers.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from env.libc import LIBC, last_error

# Numbers from asm/unistd_64.h and asm-generic/unistd.h. From 424 on all architectures agree.
_COMMON = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "clone3": 435,
    "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447,
    "process_mrelease": 448, "open_tree_attr": 467,
}  # fmt: skip
NUMBERS = {
    "x86_64": _COMMON | {
        "shmget": 29, "socket": 41, "socketpair": 53, "clone": 56, "kill": 62, "semget": 64, "msgget": 68,
        "ptrace": 101, "syslog": 103, "uselib": 134, "personality": 135, "vhangup": 153, "modify_ldt": 154,
        "pivot_root": 155, "adjtimex": 159, "chroot": 161, "acct": 163, "settimeofday": 164, "mount": 165,
        "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170, "setdomainname": 171,
        "iopl": 172, "ioperm": 173, "create_module": 174, "init_module": 175, "delete_module": 176, "quotactl": 179,
        "clock_settime": 227, "mq_open": 240, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250,
        "unshare": 272, "perf_event_open": 298, "fanotify_init": 300, "open_by_handle_at": 304, "clock_adjtime": 305,
        "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313,
        "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "setrlimit": 160, "prlimit64": 302,
    },
    "aarch64": _COMMON | {
        "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "vhangup": 58, "quotactl": 60, "acct": 89,
        "personality": 92, "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106,
        "clock_settime": 112, "syslog": 116, "ptrace": 117, "kill": 129, "reboot": 142, "sethostname": 161,
        "setdomainname": 162, "settimeofday": 170, "adjtimex": 171, "mq_open": 180, "msgget": 186, "semget": 190,
        "shmget": 194, "socket": 198, "socketpair": 199, "add_key": 217, "request_key": 218, "keyctl": 219,
        "clone": 220, "swapon": 224, "swapoff": 225, "perf_event_open": 241, "fanotify_init": 262,
        "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268, "process_vm_readv": 270,
        "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "bpf": 280, "userfaultfd": 282,
        "kexec_file_load": 294, "setrlimit": 164, "prlimit64": 261,
    },
}  # fmt: skip
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000

# What each group would give a candidate, and the calls that are refused whatever their arguments.
GROUPS = {
    "other processes": (
        "ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp", "process_madvise",
        "process_mrelease",
    ),
    "mounts": (
        "mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "open_tree_attr", "fsopen", "fsconfig",
        "fsmount", "fspick", "mount_setattr",
    ),
    "namespaces": ("setns",),
    # A large surface that candidates don't use, and io_uring opens files and sockets past this very filter.
    "kernel interfaces": (
        "bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register",
        "fanotify_init", "modify_ldt", "uselib",
    ),
    "keys": ("keyctl", "add_key", "request_key"),
    "the machine": (
        "kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "create_module", "reboot",
        "swapon", "swapoff", "acct", "syslog", "quotactl", "quotactl_fd", "sethostname", "setdomainname", "vhangup",
        "iopl", "ioperm", "personality",
    ),
    "clocks": ("clock_settime", "settimeofday", "adjtimex", "clock_adjtime"),
    # A process that starves itself must not look like a machine that is short of memory.
    "own limits": ("setrlimit",),
    # Names a file without a path, which is what Landlock and mounts look at.
    "files by handle": ("open_by_handle_at",),
    # Memory that belongs to no process: the watch over host memory couldn't say whose it is.
    "memory of nobody": ("shmget", "semget", "msgget", "mq_open", "memfd_secret"),
}  # fmt: skip

_NEW_NAMESPACES = 0x00000080 | 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_AF_UNIX = 1
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF: load word, jumps, return
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
# Offsets in struct seccomp_data: arguments are 8 bytes each, both architectures little-endian.
_NUMBER, _ARCH, _FIRST_ARGUMENT, _THIRD_ARGUMENT = 0, 4, 16, 32
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def program(machine: str) -> bytes:
    """The filter for an architecture as BPF instructions of 8 bytes. Raises KeyError for an unknown one."""
    numbers = NUMBERS[machine]
    refuse, unknown, allow = (
        _instruction(_RETURN, _ERRNO | errno.EPERM),
        _instruction(_RETURN, _ERRNO | errno.ENOSYS),
        _instruction(_RETURN, _ALLOW),
    )
    # Calls of another architecture (32 bit) have other numbers: all refused.
    code = [_instruction(_LOAD, _ARCH), _instruction(_EQUAL, _AUDIT_ARCH[machine], 1, 0), refuse]
    code.append(_instruction(_LOAD, _NUMBER))
    if machine == "x86_64":
        code += [_instruction(_AT_LEAST, _X32_BIT, 0, 1), refuse]
    for name in (name for group in GROUPS.values() for name in group if name in numbers):
        code += [_instruction(_EQUAL, numbers[name], 0, 1), refuse]
    # Its flags are behind a pointer that a filter can't follow: the C library falls back to clone.
    code += [_instruction(_EQUAL, numbers["clone3"], 0, 1), unknown]

    def by_argument(name: str, *test: bytes) -> None:
        body = [_instruction(_LOAD, _FIRST_ARGUMENT), *test]
        code.extend([_instruction(_EQUAL, numbers[name], 0, len(body)), *body])

    for name in ("clone", "unshare"):
        by_argument(name, _instruction(_ANY_BIT, _NEW_NAMESPACES, 0, 1), refuse, allow)
    for name in ("socket", "socketpair"):
        by_argument(name, _instruction(_EQUAL, _AF_UNIX, 1, 0), refuse, allow)
    # kill(-1): every process that this user may signal, where no PID namespace keeps the judge out of reach.
    by_argument("kill", _instruction(_EQUAL, 0xFFFFFFFF, 0, 1), refuse, allow)
    # prlimit64 with new limits: reading the old ones is what getrlimit does.
    body = [
        _instruction(_LOAD, _THIRD_ARGUMENT), _instruction(_EQUAL, 0, 0, 2),
        _instruction(_LOAD, _THIRD_ARGUMENT + 4), _instruction(_EQUAL, 0, 1, 0), refuse, allow,
    ]  # fmt: skip
    code += [_instruction(_EQUAL, numbers["prlimit64"], 0, len(body)), *body]
    return b"".join([*code, allow])


def install() -> None:
    """Set the filter for this process and all that it starts, for good. Needs "no new privileges".

    Raises OSError with the reason where this kernel or this architecture can't.
    """
    machine = platform.machine()
    if machine not in NUMBERS:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    code = program(machine)
    text = ctypes.create_string_buffer(code, len(code))
    filter_ = struct.pack("@HxxxxxxP", len(code) // 8, ctypes.addressof(text))
    if LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, filter_, 0, 0) != 0:
        raise last_error()
