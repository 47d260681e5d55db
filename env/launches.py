"""Which Triton kernels really run, and what happens when their effect is taken away.

Runs in the worker, bound before foreign code comes in. A kernel is the candidate's own where its function was compiled
from the candidate's file: identity, never a name. Two ways show what its kernels are worth. `withheld` leaves out
launches of a process that has run already, which costs nothing and tells kernels apart. Knock-out, in a fresh process,
removes the stores and atomics of own kernels (on a GPU when Triton builds the kernel, on the CPU in the interpreter),
which reaches graphs and other ways round a launch too. Where the output then stays the same, they do nothing that
matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_LAUNCHES = 10_000
ALL = "*"
COMPILING = ".compiling"


@dataclass
class LaunchLog:
    """Launches since `clear`, in order. `own_file` is the candidate's path, set when it is loaded.

    withheld: own kernels whose launches are left out, by name; ALL for every one of them.
    """

    own_file: str = ""
    launches: list[tuple[str, bool]] = field(default_factory=list)
    own_running: bool = False
    around: Callable[[str, bool], Any] | None = None
    # Writes launches down (`env.trace.Recorder`).
    recorder: Any = None
    # Runs own kernels in the launcher's place (`env.copies`).
    inspect: Callable[[str, Callable, tuple, dict], Any] | None = None
    withheld: frozenset[str] = frozenset()

    names: dict[Any, str] = field(default_factory=dict)

    def clear(self) -> None:
        self.launches.clear()

    def name_of(self, fn: Any) -> str:
        """A kernel's name; with its line where another kernel has the same one: they must not stand for each other."""
        code = fn.__code__
        if code.co_filename != self.own_file:
            return fn.__name__
        if code not in self.names:
            taken = fn.__name__ in self.names.values()
            self.names[code] = f"{fn.__name__}:{code.co_firstlineno}" if taken else fn.__name__
        return self.names[code]

    def withholds(self, name: str, own: bool) -> bool:
        return own and (name in self.withheld or ALL in self.withheld)

    def summary(self) -> list[dict[str, Any]]:
        """[{name, own, count}] in order of first launch."""
        counts: dict[tuple[str, bool], int] = {}
        for launch in self.launches:
            counts[launch] = counts.get(launch, 0) + 1
        return [{"name": name, "own": own, "count": count} for (name, own), count in counts.items()]


def _refuse_bf16(args: tuple, kwargs: dict) -> None:
    import torch

    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
            raise NotImplementedError(
                "bfloat16 tensors can't be judged on the CPU: Triton's interpreter computes them wrongly"
            )


def install(log: LaunchLog, device: str) -> None:
    """Record every launch of this process in `log`, through `kernel[grid]`, `.run` and the autotuner alike."""
    if device == "cuda":
        from triton.runtime.jit import JITFunction as Kernel
    else:
        from triton.runtime.interpreter import InterpretedFunction as Kernel

        from env.interpreter import refuse_python
    run = Kernel.run
    compilable: set[Any] = set()

    def recorded_run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if not isinstance(self, Kernel):
            raise TypeError("only Triton's own kernel objects can be launched")
        if device != "cuda":
            _refuse_bf16(args, kwargs)
            if self.fn.__code__ not in compilable:
                refuse_python(self.fn)
                compilable.add(self.fn.__code__)
        name, own = log.name_of(self.fn), self.fn.__code__.co_filename == log.own_file
        if not warmup and len(log.launches) < MAX_LAUNCHES:
            log.launches.append((name, own))
        if log.withholds(name, own):
            return None
        # While warming up as well: that compiles the kernel, which a knock-out must not miss.
        log.own_running = own
        try:
            if log.inspect is not None and own and not warmup:
                return log.inspect(name, lambda a, k: run(self, *a, grid=grid, warmup=False, **k), args, kwargs)
            if log.recorder is not None and not warmup:
                with log.recorder.launch(self, name, args, kwargs):
                    return run(self, *args, grid=grid, warmup=warmup, **kwargs)
            if warmup or log.around is None:
                return run(self, *args, grid=grid, warmup=warmup, **kwargs)
            with log.around(name, own):
                return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        finally:
            log.own_running = False

    Kernel.run = recorded_run


def note_compiling(folder: Path) -> None:
    """Leave the name of the kernel that is being compiled in a file of `folder`: should it never end, the author learns
    that it was the compiler that was still at work. Not by Triton's own hooks: for these it writes a kernel's constants
    as JSON, which a function among them (`FN=act`) isn't.
    """
    from triton.runtime.jit import JITFunction

    marker, compiled = folder / COMPILING, JITFunction._do_compile  # Triton 3.6 and 3.7

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        marker.write_text(str(getattr(self.fn, "__name__", "a kernel")))
        try:
            return compiled(self, *args, **kwargs)
        finally:
            marker.unlink(missing_ok=True)

    JITFunction._do_compile = noted


def knock_out(log: LaunchLog, device: str) -> None:
    """Take the stores and atomics out of the candidate's own kernels, from now on and for the rest of this process.

    Fresh memory is filled with NaN as well, so that an output which nobody wrote can't look right by chance.
    """
    poison_fresh_memory()
    if device == "cuda":
        _knock_out_compiler(log)
    else:
        _knock_out_interpreter(log)


def poison_fresh_memory() -> None:
    """Let `torch.empty` give NaN from now on."""
    import torch

    torch.utils.deterministic.fill_uninitialized_memory = True
    torch._C._set_deterministic_algorithms(True, warn_only=True)


@contextmanager
def poisoned_fresh_memory() -> Iterator[None]:
    """While active, `torch.empty` gives NaN; afterwards what was there.

    Another stream waits for the one that it is entered from: torch.empty alone puts no work on a stream, and a kernel
    that writes to its memory from another one must not race against our filling it.
    """
    import torch

    enter = torch.cuda.set_stream

    def set_stream(stream: Any) -> None:
        if stream is not None and stream != torch.cuda.default_stream(stream.device):
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        enter(stream)

    poison_fresh_memory()
    torch.cuda.set_stream = set_stream
    try:
        yield
    finally:
        if torch.cuda.set_stream is set_stream:  # else the watch shall see what was put there
            torch.cuda.set_stream = enter
        torch._C._set_deterministic_algorithms(False, warn_only=False)


def _knock_out_interpreter(log: LaunchLog) -> None:
    import numpy as np
    from triton.runtime import interpreter

    real = interpreter._interpreter

    class WithoutEffect:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def store(self, ptr: Any, value: Any, mask: Any) -> None:
            if not log.own_running:
                real.store(ptr, value, mask)

        def atomic_rmw(self, op: Any, ptr: Any, value: Any, mask: Any, sem: Any) -> Any:
            if not log.own_running:
                return real.atomic_rmw(op, ptr, value, mask, sem)
            return real.load(ptr, mask, np.zeros_like(value), value.dtype)

        def atomic_cas(self, ptr: Any, cmp: Any, value: Any, sem: Any) -> Any:
            if not log.own_running:
                return real.atomic_cas(ptr, cmp, value, sem)
            return real.load(ptr, np.ones_like(ptr, dtype=bool), np.zeros_like(value), value.dtype)

    interpreter._interpreter = WithoutEffect()


def _knock_out_compiler(log: LaunchLog) -> None:
    import triton.language as tl
    from triton.language.semantic import TritonSemantic

    def without_store(method: Callable) -> Callable:
        def store(self: Any, *args: Any, **kwargs: Any) -> Any:
            if log.own_running:
                return tl.tensor(None, tl.void) if method.__name__ != "descriptor_store" else None
            return method(self, *args, **kwargs)

        return store

    def old_value(method: Callable) -> Callable:
        def atomic(self: Any, ptr: Any, *args: Any, **kwargs: Any) -> Any:
            if not log.own_running:
                return method(self, ptr, *args, **kwargs)
            # atomic_cas(ptr, cmp, val, sem, scope) has no mask; the others are (ptr, val, mask, sem, scope).
            mask = None if method.__name__ == "atomic_cas" else args[1]
            if mask is None:
                return self.load(ptr, None, None, (), "", "", "", False)
            return self.load(ptr, mask, None, (), "", "", "", False)

        return atomic

    for name in dir(TritonSemantic):
        method = getattr(TritonSemantic, name)
        if name == "store" or name.startswith(("descriptor_store", "descriptor_scatter", "descriptor_atomic")):
            setattr(TritonSemantic, name, without_store(method))
        elif name.startswith("atomic_") and name != "atom_red_typechecking_impl":
            setattr(TritonSemantic, name, old_value(method))
