"""The loop inside a worker: load a module, make inputs, run it, time it, profile it, and report facts.

Runs in the sandboxed process, together with foreign code; every function it needs is bound before that code comes in.
It decides nothing: outputs go into a buffer that the judge owns, times and launches are claims that the judge checks.
Loaded by the fork server before forking (`preload`), so that a worker starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from env import bounds, distributions, tensors
from env.bench import Bench, shorten_autotuning
from env.buffers import Buffer, SharedMemoryError
from env.copies import Copies
from env.launches import LaunchLog, install, knock_out, note_compiling, poisoned_fresh_memory
from env.modelled import counted_call
from env.needed import needed_bytes
from env.profile import profiled_call, warm_profiler
from env.state import copy_of, counterparts, modules_of, put, restore, set_training, tensors_of
from env.watch import Watch
from env.wire import Wire, WireError

MAX_TEXT = 4000
MAX_CACHED_BYTES = 2 << 30


# Imported by name, since nothing here uses them: _dynamo replaces torch.manual_seed when it is imported, which must not
# look like a candidate's doing; torch.profiler imports _inductor at its first use, 5 s of each process otherwise.
_NEEDED = ("torch._dynamo", "torch._inductor", "torch.utils.deterministic", "triton", "triton.language")


def preload(device: str) -> None:
    """Import what workers need, once, in the fork server. No torch operator may run here."""
    for name in _NEEDED:
        importlib.import_module(name)
    _preload_lazy_imports()
    if device == "cuda":
        importlib.import_module("triton.compiler")
    else:
        from env import interpreter

        importlib.import_module("env.program")  # for the workers, see Runner
        interpreter.prepare()


def _preload_lazy_imports() -> None:
    """What Triton imports at the first launch: 0.3 s of every candidate otherwise. Names move between its versions."""
    for name in (
        "triton.compiler.code_generator",
        "triton.experimental.gluon",
        "triton.experimental.gluon.nvidia.hopper",
        "triton.experimental.gluon.nvidia.blackwell",
        "triton.experimental.gluon.language",
        "triton.experimental.gluon.language.extra",
        "triton.language.extra.libdevice",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # The first vmap registers decompositions as operators, which must not look like a candidate's doing.
    from torch._functorch import vmap

    vmap.lazy_load_decompositions()


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT // 2] + "\n...\n" + text[-MAX_TEXT // 2 :]


# How allocators outside torch's own say it: the CPU's, a driver call, cuBLAS.
_NO_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def _words(error: BaseException) -> str:
    """What an exception says; its own __str__ may fail, or not give text."""
    try:
        return str(error)
    except BaseException:
        return "(an exception that can't be shown)"


def _blame(error: BaseException, loading: bool, path: str) -> dict[str, Any]:
    """An exception as facts: the kind of failure, the message, the traceback's lines in the candidate's own file."""
    chain, seen = [], error
    while seen is not None and len(chain) < 8:
        chain.append(seen)
        seen = seen.__cause__ or seen.__context__
    kind = "compile_error" if loading else "runtime_error"
    if isinstance(error, tensors.LayoutError):
        return {"ok": False, "kind": "incorrect", "message": f"forward() returns {error}", "lines": []}
    for link in chain:
        if isinstance(link, SyntaxError):
            break  # whatever the parser ran into
        short = isinstance(link, SharedMemoryError) and link.short_of_memory
        if (
            short
            or isinstance(link, (MemoryError, torch.OutOfMemoryError))
            or any(words in _words(link)[:300] for words in _NO_MEMORY)
        ):
            kind = "oom"
        elif type(link).__module__.startswith("triton.compiler"):
            kind = "compile_error"
    # Addresses and scratch folders differ between equal runs and tell the author nothing.
    message = re.sub(r"0x[0-9a-f]{6,}", "0x...", f"{type(error).__name__}: {_words(error)}")
    message = _cut(message.replace(path.rsplit("/", 1)[0] + "/", ""))
    own = []
    for link in reversed(chain):
        for frame in traceback.extract_tb(link.__traceback__):
            if frame.filename == path:
                own.append(f"line {frame.lineno}, in {frame.name}: {(frame.line or '').strip()}")
    lines = list(dict.fromkeys(own))[-6:]
    return {"ok": False, "kind": kind, "message": message, "lines": lines}


class Runner:
    """State of one worker: at most one module, its model, and the trees that wait to be copied out."""

    def __init__(self, device: str):
        self.device = device
        self.buffers: dict[str, Buffer] = {}
        self.held: dict[str, tuple[dict, list[torch.Tensor]]] = {}
        self.log = LaunchLog()
        self.module: Any = None
        self.model: Any = None
        self.initial: dict[str, torch.Tensor] = {}
        self.constants: list[torch.Tensor] = []
        self.path = ""
        self.tf32 = False
        self.watch: Watch | None = None
        self.bench: Any = None
        if device == "cpu":
            from env import program, trace

            self.program, self.trace = program, trace
        install(self.log, device)

    def op_warm(self, request: dict) -> dict:
        """Pay for what is slow and doesn't depend on the candidate: context, profiler, what timed calls need."""
        torch.set_num_threads(1)
        if request["gpu"]:
            os.environ["CUDA_VISIBLE_DEVICES"] = request["gpu"]  # read when CUDA starts, below
        self.tf32 = request["precision"] == "tf32"
        # Triton reads it when it compiles; a GPU's matrix units round float32 to 10 bits unless told otherwise.
        os.environ["TRITON_F32_DEFAULT"] = request["precision"]
        self._keep_policy()
        if self.device == "cuda":
            shorten_autotuning()
            self.bench = Bench()
            warm_profiler()
            torch.cuda.synchronize()
        return {"ok": True}

    def _keep_policy(self) -> None:
        """One precision for both sides: what a candidate set for the whole process doesn't count."""
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        torch.backends.cudnn.allow_tf32 = self.tf32

    def op_attach(self, request: dict, fds: list[int]) -> dict:
        if len(fds) != 1:
            return {"ok": False, "kind": "no_descriptor", "message": "the process has no file descriptor left"}
        old = self.buffers.pop(request["name"], None)
        if old is not None:
            old.close()
        self.buffers[request["name"]] = Buffer.attach(fds[0], request["nbytes"], self.device)
        return {"ok": True}

    def op_load(self, request: dict, fds: list[int]) -> dict:
        """Write the source to scratch, execute it as a module, find the class."""
        self.path = request["path"]
        with open(self.path, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(request["source"])
        self.log.own_file = self.path
        if self.device == "cuda":
            note_compiling(Path(self.path).parent)
        if request["watch"]:
            self.watch = Watch(request["watch"], self.device, self.path, fds[0] if fds else -1)
            _hide_own_modules()
        if request.get("knockout"):
            knock_out(self.log, self.device)
        spec = importlib.util.spec_from_file_location(request["module"], self.path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[request["module"]] = module
        try:
            code = compile(request["source"], self.path, "exec", dont_inherit=True)
        except (MemoryError, RecursionError) as error:
            raise SyntaxError("nested too deep for Python's parser") from error
        exec(code, module.__dict__)
        self.module = module
        if not isinstance(getattr(module, request["class"], None), type):
            if not hasattr(module, request["class"]):
                raise TypeError(f"No class {request['class']} is defined once the source has been executed")
            found = type(getattr(module, request["class"])).__name__
            raise TypeError(f"{request['class']} is a {found} once the source has been executed; it must be a class")
        return {"ok": True, **self._tampered()}

    def _tampered(self) -> dict[str, list[str]]:
        return {"tampered": self.watch.report() if self.watch is not None else []}

    def op_init_inputs(self, request: dict) -> dict:
        arguments = self.module.get_init_inputs()
        layout, held, _ = tensors.plan(arguments, keep_strides=True)
        if held:
            raise tensors.LayoutError("get_init_inputs() returns tensors: only plain values can be passed on")
        return {"ok": True, "layout": layout}

    def op_build(self, request: dict) -> dict:
        """Construct the model on the device from a seed, and keep its first state to return to before each trial."""
        arguments = tensors.unpack(request["layout"], torch.empty(0, dtype=torch.uint8))
        positional, named = (), {}
        if isinstance(arguments, dict):
            named = arguments
        else:
            positional = arguments
        torch.manual_seed(request["seed"])
        with torch.device(self.device):
            self.model = getattr(self.module, request["class"])(*positional, **named)
        if not isinstance(self.model, torch.nn.Module):
            raise TypeError(f"{request['class']} doesn't build a torch.nn.Module")
        self.model.to(self.device)
        if request.get("compile"):
            # Both are asked by torch; everybody else's torch.compile stays a pass-through.
            os.environ["TORCHDYNAMO_DISABLE"], torch._dynamo.config.disable = "0", False
            os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
            self.model = torch.compile(self.model)
        self._keep_state()
        return {"ok": True, **self._tampered()}

    def _keep_state(self) -> None:
        self.initial = {name: copy_of(value) for name, value in tensors_of(self.model).items()}

    def op_state(self, request: dict) -> dict:
        layout, held, nbytes = tensors.plan(dict(self.initial), keep_strides=False)
        self.held["state"] = (layout, held)
        return {"ok": True, "layout": layout, "nbytes": nbytes}

    def op_load_state(self, request: dict) -> dict:
        """Take over the reference's weights as a checkpoint, else by `state.counterparts`; otherwise the common seed
        must do. `floats`: how many numbers each tensor of this model's own state holds.
        """
        theirs = tensors.unpack(request["layout"], self.buffers[request["buffer"]].tensor)
        how = "by name" if self._loads_itself(theirs) else ""
        own = tensors_of(self.model)
        if not how:
            how, names = counterparts(own, theirs)
            for name, other in names.items():
                put(own[name], theirs[other])
        if how:
            self._keep_state()
        floats = [value.numel() if value.is_floating_point() else 0 for value in own.values()]
        return {"ok": True, "loaded": how, "floats": floats}

    def _loads_itself(self, theirs: dict[str, torch.Tensor]) -> bool:
        """Whether the model takes the reference's state as it is, as it would a checkpoint; its hooks may derive from
        it what it keeps beside.
        """
        try:
            torch.nn.Module.load_state_dict(self.model, {name: copy_of(value) for name, value in theirs.items()})
        except Exception:
            self._restore()
            return False
        return True

    def _restore(self) -> None:
        restore(tensors_of(self.model), self.initial)

    def op_make_inputs(self, request: dict) -> dict:
        torch.manual_seed(request["seed"])
        # On a GPU the draws happen there: gigabytes from the host's generator would take many seconds.
        with torch.device(self.device), distributions.drawing(request["distribution"]):
            inputs = self.module.get_inputs()
        inputs = tensors.map_tensors(inputs, lambda tensor: tensor.to(self.device))
        layout, held, nbytes = tensors.plan(inputs, keep_strides=True)
        self.held["inputs"] = (layout, held)
        return {"ok": True, "layout": layout, "nbytes": nbytes}

    def op_pack(self, request: dict) -> dict:
        layout, held = self.held.pop(request["name"])
        tensors.pack(layout, held, self.buffers[request["buffer"]].tensor)
        del held
        self._give_back_memory()
        return {"ok": True}

    def _give_back_memory(self) -> None:
        """Wait for the device; return large caches to it, since up to four processes hold copies of a problem's
        tensors.
        """
        self._synchronise()
        if self.device == "cuda" and torch.cuda.memory_reserved() > MAX_CACHED_BYTES:
            torch.cuda.empty_cache()

    def _synchronise(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _arguments(self, request: dict) -> list:
        return tensors.call_arguments(request["layout"], self.buffers["inputs"].tensor)

    def _reset(self, request: dict) -> None:
        self._restore()
        for _, module in modules_of(self.model):
            set_training(module, request["train"])
        if "shake" in request:
            name, value = list(tensors_of(self.model).items())[request["shake"]]
            if value.is_floating_point():
                put(value, self.initial[name] + torch.randn_like(self.initial[name]))
        self._keep_policy()
        # A random reference (dropout) is at least the same function on both sides.
        torch.manual_seed(request["seed"])

    def _hold_outputs(self, outputs: Any) -> dict:
        """Copy the outputs to the judge's buffer where they fit. What doesn't is wrong: the judge knows the size."""
        subclass = _foreign_subclass(outputs)
        # A tensor that computes itself when it is looked at is looked at as the memory that it is.
        with torch._C.DisableTorchFunctionSubclass():
            layout, held, nbytes = tensors.plan(outputs, keep_strides=False)
            self.held["outputs"] = (layout, held)
            buffer = self.buffers.get("outputs")
            packed = buffer is not None and nbytes <= buffer.nbytes
            if packed:
                tensors.pack(layout, held, buffer.tensor)
                self.held.pop("outputs")
        return {"layout": layout, "nbytes": nbytes, "packed": packed, "subclass": subclass}

    def op_run(self, request: dict) -> dict:
        """One forward pass on the judge's inputs, from the first state."""
        if self.watch is not None and request.get("bait"):
            self.watch.lay_expected([(shape, tensors.DTYPES[dtype]) for shape, dtype in request["bait"]])
        self._reset(request)
        arguments = self._arguments(request)
        self.log.clear()
        # The same in every trial and in the runs without kernels: none of them shows by it.
        with poisoned_fresh_memory(), torch.set_grad_enabled(request["grad"]):
            outputs = self.model(*arguments)
        launches = self.log.summary()
        # Whether work was joined to the stream is asked when it is timed; here only its values count.
        self._synchronise()
        facts = self._hold_outputs(outputs)
        del outputs
        self._give_back_memory()
        return {"ok": True, **facts, "launches": launches, **self._tampered()}

    def op_run_double(self, request: dict) -> dict:
        """The same forward pass in float64, for what the reference's own rounding amounts to."""
        self._reset(request)
        arguments = tensors.map_tensors(self._arguments(request), _double)
        model = copy.deepcopy(self.model).double()
        with torch.no_grad():
            outputs = model(*arguments)
        self._synchronise()
        layout, held, nbytes = tensors.plan(outputs, keep_strides=False)
        self.held["double"] = (layout, held)
        return {"ok": True, "layout": layout, "nbytes": nbytes}

    def op_effect(self, request: dict) -> dict:
        """A forward pass without the launches of some own kernels. Fresh memory is NaN: nothing is inherited."""
        self._reset(request)
        arguments = self._arguments(request)
        self.log.withheld = frozenset(request["kernels"])
        try:
            with poisoned_fresh_memory(), torch.no_grad():
                outputs = self.model(*arguments)
            self._synchronise()
            facts = self._hold_outputs(outputs)
        finally:
            self.log.withheld = frozenset()
        return {"ok": True, **facts}

    def op_inspect(self, request: dict) -> dict:
        """A forward pass that looks at what each own kernel makes of its arguments."""
        self._reset(request)
        arguments = self._arguments(request)
        copies = Copies()
        self.log.inspect = copies.launch
        try:
            with poisoned_fresh_memory(), torch.no_grad():
                self.model(*arguments)
            self._synchronise()
        finally:
            self.log.inspect = None
        return {"ok": True, "useful": copies.useful}

    def op_trace(self, request: dict) -> dict:
        """One forward pass written down as a program (CPU); what it found in memory waits for `constants`."""
        self._reset(request)
        arguments = self._arguments(request)
        self.log.clear()
        with torch.no_grad():
            inputs = self.buffers["inputs"].tensor
            outputs, program, self.constants = self.trace.recorded_call(self.model, arguments, self.log, inputs)
        launches = self.log.summary()
        return {"ok": True, "program": program, **self._hold_outputs(outputs), "launches": launches, **self._tampered()}

    def op_constants(self, request: dict) -> dict:
        """The layout of what `trace` found in memory."""
        layout, held, nbytes = tensors.plan(self.constants, keep_strides=False)
        self.held["constants"], self.constants = (layout, held), []
        return {"ok": True, "layout": layout, "nbytes": nbytes}

    def op_program(self, request: dict) -> dict:
        """Another process's program in a model's place (CPU). No foreign Python ever runs here."""
        bounds.keep_in()
        constants = tensors.unpack(request["layout"], self.buffers[request["buffer"]].tensor)
        self.model = self.program.Program(request["program"], constants, Path(request["folder"]), self.log)
        self._keep_state()
        return {"ok": True}

    def op_model_time(self, request: dict) -> dict:
        """Modelled times of one forward pass (CPU)."""
        self._reset(request)
        arguments = self._arguments(request)
        self.log.clear()
        with torch.no_grad():
            outputs, rows = counted_call(self.model, arguments, self.log)
        launches = self.log.summary()
        return {"ok": True, "rows": rows, **self._hold_outputs(outputs), "launches": launches, **self._tampered()}

    def op_needed(self, request: dict) -> dict:
        """Bytes that any program must move for these inputs (`env.needed`); asked of the reference alone."""
        self._reset(request)
        read, written = needed_bytes(self.model, self._arguments(request))
        return {"ok": True, "read": read, "written": written}

    def op_time(self, request: dict) -> dict:
        """A block of timed calls on a GPU (`env.bench`), each call's outputs copied out as soon as it returns."""
        self._reset(request)
        self.log.clear()
        with torch.no_grad():
            facts = self.bench.block(self.model, self.buffers, request)
        return {"ok": True, **facts, "launches": self.log.summary()}

    def op_report(self, request: dict) -> dict:
        """What the watch has seen: asked after the timed blocks, since it takes as long as many a block."""
        return {"ok": True, **self._tampered()}

    def op_profile(self, request: dict) -> dict:
        """Kernel table of one forward pass on a GPU."""
        self._reset(request)
        arguments = self._arguments(request)
        # The inputs have just been copied here: a first kernel that has to write back their lines takes 5 % longer.
        self.bench.cool()
        with torch.no_grad():
            rows = profiled_call(self.model, arguments, self.log)
        return {"ok": True, "rows": rows}


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _hide_own_modules() -> None:
    """Foreign code that asks for this program's modules gets none of those that run here."""
    for name in [name for name in sys.modules if name == "env" or name.startswith("env.")]:
        del sys.modules[name]


def _foreign_subclass(tree: Any) -> str:
    """Name of a tensor class that isn't torch's own, among the outputs; empty where there is none."""
    for leaf in tensors.leaves(tree):
        # By identity: a metaclass may say that its class equals torch's.
        if isinstance(leaf, torch.Tensor) and not (type(leaf) is torch.Tensor or type(leaf) is torch.nn.Parameter):
            return type(leaf).__name__[:80]
    return ""


def serve(wire: Wire, device: str, isolation: dict[str, str]) -> None:
    """Answer the judge's requests until it closes the channel. Foreign exceptions become facts, never a dead worker."""
    runner = Runner(device)
    blame = _blame
    send, receive = wire.send, wire.recv
    while True:
        try:
            request = receive(timeout_s=3600 * 24)
        except WireError:
            return
        name = request["op"]
        fds = wire.take_fds()
        try:
            method = getattr(runner, f"op_{name}")
            reply = method(request, fds) if name in ("attach", "load") else method(request)
            if name == "warm":
                reply["isolation"] = isolation
        except BaseException as error:  # foreign code may raise any class of its own
            reply = blame(error, name == "load", runner.path)
        try:
            send(reply)
        except (ValueError, TypeError) as error:  # a number with too many digits for JSON, say
            send(blame(error, name == "load", runner.path))
