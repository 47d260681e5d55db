"""Triton's interpreter made fit for a judge: autotuning without a GPU, no work done twice in a launch, no way out of a
launch's memory (env/bounds.py).

Runs in the fork server, before any worker exists (CPU only).
"""

from __future__ import annotations

import dis
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver, interpreter

from env import bounds


def prepare() -> None:
    """Install all of it for this process and all that are forked from it."""
    driver.set_active(InterpreterDriver())
    _patch_language_once_a_launch()
    bounds.install()


class InterpreterDriver(DriverBase):
    """Stands in for a GPU driver, so that `@triton.autotune` works under the interpreter.

    Every configuration is run once (a kernel that can't bear that is wrong on a GPU too) and all take the same time, so
    the first one wins, on every machine.
    """

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("the interpreter compiles nothing")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        def benchmark(call: Any, quantiles: Any = None, **_: Any) -> Any:
            call()
            return [1.0] * len(quantiles) if quantiles else 1.0

        return benchmark


def _patch_language_once_a_launch() -> None:
    """The interpreter replaces triton.language's functions anew at every call of a device function (tl.sum is one): 6
    ms, more than the program itself. Within a launch the replacements stay, so that once is enough."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_once(fn: Any) -> Any:
        if id(fn.__globals__) in patched:
            return interpreter._LangPatchScope()
        patched.add(id(fn.__globals__))
        return patch(fn)

    def launch_afresh(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            # The launch has put the originals back.
            patched.clear()

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_afresh


def refuse_python(fn: Any) -> None:
    """Raise TypeError where a kernel calls what no GPU compiles: the interpreter runs any Python function.

    fn: the kernel as its author wrote it. Only names that are looked up among the module's: attributes bear the names
    of Triton's own functions.
    """
    for instruction in dis.get_instructions(fn.__code__):
        if instruction.opname == "LOAD_GLOBAL":
            value = fn.__globals__.get(instruction.argval)
            module = value.__name__ if isinstance(value, ModuleType) else str(getattr(value, "__module__", ""))
            python = isinstance(value, (FunctionType, BuiltinFunctionType)) and not module.startswith("triton")
            if python or (isinstance(value, ModuleType) and module.startswith(("numpy", "torch", "triton._C"))):
                raise TypeError(
                    f"the kernel {fn.__name__} uses {instruction.argval}, which Triton can't compile: a kernel may "
                    "call Triton's functions and @triton.jit functions only"
                )
