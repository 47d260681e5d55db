"""Answers that hang, crash, cheat or eat the machine's memory, as text.

Runs in the driver, which never executes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from scripts.bench.candidates import Spec, answer

# Volatile loads: LLVM takes a loop out that neither reads nor writes memory, however endless.
_SPIN = """

@triton.jit
def spin(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x_ptr + i)
    turns = 0
    while turns >= 0:
        v = tl.load(x_ptr + i, volatile=True)
        turns = tl.sum((v == v).to(tl.int32), axis=0)
    tl.store(out_ptr + i, v)
"""
_FAR = """

@triton.jit
def far(x_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK).to(tl.int64)
    tl.store(x_ptr + (i + 1) * (1 << 40), 1.0)
"""


@dataclass(frozen=True)
class Fault:
    """`hook` runs first in forward, `top` stands above the kernel. `budgets`: which limits may pass before the judge
    can know ("compile", "run": the first forward compiles, so both). `expected`: statuses that are right."""

    name: str
    expected: tuple[str, ...]
    hook: str = ""
    top: str = ""
    budgets: tuple[str, ...] = ()
    gpu_only: bool = False


FAULTS = (
    Fault("host loop in forward", ("timeout",), hook="while True: pass", budgets=("compile", "run")),
    Fault("host loop on import", ("timeout",), top="\n\nwhile True: pass\n", budgets=("compile",)),
    Fault(
        "loop in a kernel", ("timeout",), top=_SPIN, hook="spin[(1,)](x, torch.empty_like(x), BLOCK=64)",
        budgets=("compile", "run"),
    ),
    Fault("segmentation fault", ("runtime_error",), hook="import ctypes; ctypes.string_at(0)"),
    Fault("os._exit", ("runtime_error", "hack"), hook="import os; os._exit(0)"),
    Fault("abort", ("runtime_error",), hook="import os; os.abort()"),
    # PID 1 of its own namespace can't kill itself: it then goes on and is as honest as it looks.
    Fault("SIGKILL to itself", ("correct", "oom", "runtime_error"), hook="import os; os.kill(os.getpid(), 9)"),
    Fault("write far out of bounds", ("runtime_error",), top=_FAR, hook="far[(1,)](x, BLOCK=64)", gpu_only=True),
)  # fmt: skip


def faults(device: str) -> list[Fault]:
    """The faults that a device can have."""
    return [fault for fault in FAULTS if device == "cuda" or not fault.gpu_only]


def faulty(spec: Spec, number: int, fault: Fault) -> str:
    """An answer that is honest but for its fault."""
    return answer(spec, number, hook=fault.hook, top=fault.top)


def cheat(spec: Spec, number: int) -> str:
    """An answer whose kernel runs and whose output is torch's."""
    text = answer(spec, number)
    product = "self.linear(x)" if "self.linear" in text else "x"
    body, _, _ = text.rpartition("        return out\n")
    return body + f"        x = {product}\n        return {spec.torch}\n"


def wrong(spec: Spec, number: int) -> str:
    """An answer that is off by 3 % and a bit."""
    return answer(spec, number).replace("        return out\n", "        return out * 1.03 + 0.01\n")


_HOG = '''
import ctypes
import mmap
import threading
import time


def eat(share_bytes):
    """Touch fresh pages as fast as the machine gives them; memset runs without the interpreter's lock."""
    held, piece = [], 64 << 20
    for _ in range(share_bytes // piece):
        pages = mmap.mmap(-1, piece)
        pages.madvise(mmap.MADV_HUGEPAGE)
        view = (ctypes.c_char * piece).from_buffer(pages)
        ctypes.memset(ctypes.addressof(view), 1, piece)
        held.append((pages, view))
    time.sleep(20)


def feast():
    threads = [threading.Thread(target=eat, args=(({cap_bytes}) // {threads},)) for _ in range({threads})]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

'''


def hog(spec: Spec, number: int, cap_gb: float, threads: int) -> str:
    """An answer that fills the host's memory from several threads. It stops at `cap_gb` of its own accord: a judge that
    lets it pass must not cost the machine."""
    return answer(spec, number, hook="feast()", top=_HOG.format(cap_bytes=int(cap_gb * (1 << 30)), threads=threads))
