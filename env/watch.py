"""Has the candidate reached for what isn't its own? Fingerprints of this process, and baits laid out for it.

Runs in the worker. The judge needs none of what is watched here: it compares in another process and checks times with
its own clock, so a patched clock or comparison changes no verdict. But a candidate that patches one has shown what it
was after, and an honest one has no reason to: what is found convicts. A clean report proves nothing, since foreign
code may forge it.

Three kinds: functions of torch, triton and time that were replaced; settings that only slow torch down; baits (a class
named like the reference's, its get_inputs, tensors shaped like the expected output), which hold nothing worth stealing.
"""

from __future__ import annotations

import _thread
import builtins
import gc
import inspect
import json
import mmap
import os
import select
import socket
import sys
import sysconfig
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional
import torch.testing
import triton
import triton.testing

# A bait shorter than this could be overwritten by an honest program's stray store; a longer one only on purpose.
MIN_BAIT_ELEMENTS, MAX_BAIT_BYTES = 16, 1 << 20
# Overwritten from end to end: a store out of bounds spoils some of a neighbour, never all of it with one value.
_OVERWRITTEN_SHARE = 0.99

_BAIT_SOURCE = """
import torch
import torch.nn as nn


class {name}(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()
        self.scale = 1.0

    def forward(self, *inputs):
        return inputs[0] * self.scale if inputs else torch.zeros(())


def get_inputs():
    return [torch.rand(16, 16)]


def get_init_inputs():
    return []
"""


def _namespaces() -> list[tuple[str, Any]]:
    from triton.runtime import autotuner, jit

    found: list[tuple[str, Any]] = [
        ("torch", torch),
        ("torch.Tensor", torch.Tensor),
        ("torch.nn.Module", torch.nn.Module),
        ("torch.nn.functional", torch.nn.functional),
        ("torch.random", torch.random),
        ("torch.testing", torch.testing),
        ("torch.cuda", torch.cuda),
        ("torch.cuda.Event", torch.cuda.Event),
        ("torch.cuda.Stream", torch.cuda.Stream),
        ("triton.testing", triton.testing),
        ("triton.runtime.JITFunction", jit.JITFunction),
        ("triton.runtime.Autotuner", autotuner.Autotuner),
        ("time", time),
        # What answers and buffers travel by.
        ("builtins", builtins),
        ("json", json),
        ("json.JSONEncoder", json.JSONEncoder),
        ("json.JSONDecoder", json.JSONDecoder),
        ("mmap", mmap),
        ("select", select),
        ("socket", socket),
        ("socket.socket", socket.socket),
    ]
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None:
        found.append(("triton.runtime.interpreter", interpreter))
        found.append(("triton.runtime.InterpretedFunction", interpreter.InterpretedFunction))
    return found


# What the interpreter itself puts in place while a kernel runs, and what torch.set_default_dtype changes.
_RESTLESS = {"triton.runtime.interpreter._interpreter", "torch.Storage"}


def _functions(space: Any) -> dict[str, Any]:
    # Lazily loaded submodules come and go; only what can be called is worth patching.
    return {name: value for name, value in vars(space).items() if callable(value) and not name.startswith("__")}


def _settings() -> dict[str, Any]:
    return {
        "torch.backends.cudnn.enabled": torch.backends.cudnn.enabled,
        "torch.backends.mkldnn.enabled": getattr(torch.backends.mkldnn, "enabled", True),
    }


def _hooks() -> dict[str, Any]:
    """What sees or changes all that this process executes."""
    return {
        "a tracer": sys.gettrace(),
        "a profiler": sys.getprofile(),
        "another __import__": builtins.__import__,
        "a callback of the garbage collector": [id(callback) for callback in gc.callbacks],
    }


class Watch:
    """Fingerprints taken when it is made, before foreign code comes in; `report` says what has changed since."""

    def __init__(self, entry_point: str, device: str, own_file: str = "", out: int = -1):
        """out: a descriptor that leads to the judge. What is seen goes there at once: whoever gets hold of this process
        afterwards can't take it back.
        """
        self.device = device
        self.out = out
        self.own_file = own_file
        self.functions = {name: (space, _functions(space)) for name, space in _namespaces()}
        self.call = torch.nn.Module.__call__
        self.settings = _settings()
        self.hooks = _hooks()
        self.events: list[str] = []
        self.looking = False
        sys.addaudithook(self._on_event)
        self._watch_threads()
        self._watch_counting()
        self.persisting = _persisting_bytes() if device == "cuda" else 0
        self.operators = set(torch.library._impls)
        self.entry_point = entry_point
        self.bait = self._lay_bait(entry_point)
        self.bait_functions = {
            name: (value, value.__code__, value.__defaults__) for name, value in self._bait_parts().items()
        }
        self.expected: list[torch.Tensor] = []
        self.copies: list[torch.Tensor] = []

    def _on_event(self, event: str, arguments: tuple) -> None:
        """An audit hook, which nobody can take out again: what the candidate's own code asks of the interpreter that a
        module with kernels has no use for. Only where its code asked itself, not a library that it called.
        """
        if self.looking:
            return  # this hook looks at frames itself
        self.looking = True
        try:
            what = _reaches(event, arguments)
            on_behalf = _ASKS_FOR_FRAMES if event.startswith(("sys._getframe", "object.")) else _STANDARD
            if what and len(self.events) < 8 and what not in self.events and self._asked_itself(on_behalf):
                self.events.append(what)
                if self.out >= 0:
                    os.write(self.out, f"{what}\n".encode())
        finally:
            self.looking = False

    def _watch_threads(self) -> None:
        """Python tells no audit hook of a new thread before its version 3.12."""
        for module, name in (
            (_thread, "start_new_thread"),
            (threading, "_start_new_thread"),
            (_thread, "start_joinable_thread"),
            (threading, "_start_joinable_thread"),
        ):
            start = getattr(module, name, None)
            if start is not None:
                setattr(module, name, self._noting(start, "_thread.start_new_thread"))

    def _watch_counting(self) -> None:
        """What torch offers to look at, or turn off, that by which operators are counted (CPU) and profiled."""
        from torch.utils import _python_dispatch

        profiling = ("_enable_record_function", "_disable_profiler", "_toggle_collection_dynamic")
        for module, names in (
            (torch._C._autograd, profiling),
            (torch.autograd, profiling),
            (torch.autograd.profiler, profiling),
            (torch._C, ("_get_dispatch_stack_at", "_pop_torch_dispatch_stack")),
            (_python_dispatch, ("_get_current_dispatch_mode", "_get_current_dispatch_mode_stack",
                                "_disable_current_modes", "_pop_mode", "_pop_mode_temporarily")),
        ):  # fmt: skip
            for name in names:
                if hasattr(module, name):
                    setattr(module, name, self._noting(getattr(module, name), _COUNTING))

    def _noting(self, function: Callable, event: str) -> Callable:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._on_event(event, ())
            return function(*args, **kwargs)

        return noted

    def _asked_itself(self, on_behalf: tuple[str, ...]) -> bool:
        """Whether the candidate's code is the caller, or that of a standard module which only asks on its behalf.

        Whatever belongs to no library is the candidate's: code that it makes from text may bear any name.
        """
        frame = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if name == self.own_file:
                return True
            if name != __file__:
                if name.startswith(_LIBRARIES):
                    return False
                if not name.startswith(on_behalf):
                    return not name.startswith(_STANDARD)
            frame = frame.f_back
        return False

    @staticmethod
    def _lay_bait(entry_point: str) -> types.ModuleType:
        module = types.ModuleType("reference")
        exec(compile(_BAIT_SOURCE.format(name=entry_point), "reference.py", "exec"), vars(module))
        sys.modules["reference"] = module
        return module

    def _bait_parts(self) -> dict[str, Any]:
        """The bait's functions as they are now, None for what is gone."""
        module = vars(self.bait)
        cls = module.get(self.entry_point)
        members = vars(cls) if isinstance(cls, type) else {}
        parts = {f"{self.entry_point}.{name}": members.get(name) for name in ("forward", "__init__")}
        return {**parts, **{name: module.get(name) for name in ("get_inputs", "get_init_inputs")}}

    def lay_expected(self, shapes: list[tuple[list[int], torch.dtype]]) -> None:
        """Tensors that look like the outputs that a checker would hold: random, and of no use to anybody."""
        if self.expected:
            return
        for shape, dtype in shapes:
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            if not dtype.is_floating_point or tensor.numel() < MIN_BAIT_ELEMENTS or tensor.nbytes > MAX_BAIT_BYTES:
                continue
            generator = torch.Generator(self.device).manual_seed(12345)
            self.expected.append(torch.rand(shape, generator=generator, device=self.device).to(dtype))
        self.copies = [tensor.cpu().flatten() for tensor in self.expected]

    def report(self) -> list[str]:
        """What was tampered with, in words; empty where nothing was."""
        found = []
        for name, (space, functions) in self.functions.items():
            now = _functions(space)
            if isinstance(space, type):
                # A new name on a class replaces what it had inherited.
                inherited = {key for base in space.__mro__[1:] for key in vars(base)}
                found += [f"{name}.{key} was replaced" for key in now if key not in functions and key in inherited]
            found += [
                f"{name}.{key} was replaced"
                for key, value in functions.items()
                if now.get(key) is not value and f"{name}.{key}" not in _RESTLESS
            ]
        if torch.nn.Module.__call__ is not self.call:
            found.append("torch.nn.Module.__call__ was replaced")
        found += [f"{name} was turned off" for name, value in _settings().items() if self.settings[name] and not value]
        found += [f"{name} was installed" for name, value in _hooks().items() if value != self.hooks[name]]
        found += self.events
        if self.device == "cuda" and _persisting_bytes() > self.persisting:
            found.append("part of the L2 cache was set aside for persisting data")
        registered = sorted(set(torch.library._impls) - self.operators)
        found += [f"torch's own operator {name} was overridden" for name in registered if _is_torchs(name)]
        found += [f"a mode of the candidate's own ({name}) is left on the stack" for name in _foreign_modes()]
        found += self._bait_report()
        return found[:16]

    def _bait_report(self) -> list[str]:
        found, now = [], self._bait_parts()
        for name, (function, code, defaults) in self.bait_functions.items():
            if now[name] is not function or function.__code__ is not code or function.__defaults__ != defaults:
                found.append(f"the reference's {name} was replaced")
        # A mode of the candidate's would see these operators, and could answer in their place.
        with torch._C.DisableTorchFunction():
            for tensor, copy in zip(self.expected, self.copies):
                changed = tensor.detach().cpu().flatten() != copy
                if changed.numel() and float(changed.float().mean()) >= _OVERWRITTEN_SHARE:
                    found.append(
                        "a tensor shaped like the expected output, which isn't the candidate's, was overwritten"
                    )
        return found


# Where code lies that isn't the candidate's: installed packages and this program, which ask for themselves, and
# Python's own modules, which ask on behalf of their caller.
_LIBRARIES = (
    *{f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib")},
    *{f"{Path(module.__file__).parents[1]}/" for module in (torch, triton)},
    f"{Path(__file__).parent}/",
)
_STANDARD = (sysconfig.get_path("stdlib") + "/", sysconfig.get_path("platstdlib") + "/", "<frozen ")
# Others look at frames for themselves: dataclasses at the module that they are made in, traceback at what it prints.
_ASKS_FOR_FRAMES = (inspect.__file__,)
_COUNTING = "kernel-judge.counting"
_EVENTS = {
    _COUNTING: "the counting of operators was looked at or turned off",
    "gc.get_objects": "all objects of the process were listed (gc)",
    "gc.get_referrers": "objects were looked up by what refers to them (gc)",
    "gc.get_referents": "objects were looked up by what they refer to (gc)",
    "sys._getframe": "frames of the caller were looked at",
    "sys._getframemodulename": "frames of the caller were looked at",
    "sys._current_frames": "frames of all threads were looked at",
    "sys.settrace": "a tracer was installed",
    "sys.setprofile": "a profiler was installed",
    "sys.monitoring.register_callback": "a monitor was installed",
    "_thread.start_new_thread": "a thread was started, whose work isn't measured",
    "_thread.start_joinable_thread": "a thread was started, whose work isn't measured",
    "os.fork": "a process was started",
    "os.forkpty": "a process was started",
    "os.posix_spawn": "a process was started",
    "os.exec": "a process was started",
    "os.system": "a process was started",
    "subprocess.Popen": "a process was started",
}
_FRAME_ATTRIBUTES = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")


def _reaches(event: str, arguments: tuple) -> str:
    """What an audit event means for whoever caused it, empty where it means nothing."""
    if event == "object.__getattr__":
        return "frames were looked at through a traceback" if arguments[1] in _FRAME_ATTRIBUTES else ""
    if event.startswith("ctypes."):
        return f"memory or libraries were reached around torch ({event})"
    if event == "compile":
        # (An import compiles under its own name: the importer asks.)
        named = isinstance(arguments[1], str) and arguments[1].startswith((*_LIBRARIES, *_STANDARD))
        imports = sys._getframe(2).f_code.co_filename.startswith("<frozen importlib")
        return "code was made under the name of a library's file" if named and not imports else ""
    if event == "import":
        return f"{arguments[0]} was imported" if str(arguments[0]).split(".")[0] == "env" else ""
    return _EVENTS.get(event, "")


def _persisting_bytes() -> int:
    from cuda.bindings import driver

    code, value = driver.cuCtxGetLimit(driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE)
    return int(value) if code == driver.CUresult.CUDA_SUCCESS else 0


def _is_torchs(registration: str) -> bool:
    return registration.split("/")[0] in ("aten", "prims", "prim")


def _foreign_modes() -> list[str]:
    """Modes on torch's stacks whose class isn't torch's (`torch.set_default_device` leaves one of torch's own)."""
    stack = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    stack += [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]
    return [type(mode).__name__[:40] for mode in stack if not type(mode).__module__.startswith(("torch.", "env."))]
