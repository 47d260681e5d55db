"""Which launches are recorded, whose they are, and that a knock-out takes exactly the own kernels' effect away.

The compiler's side is checked without a GPU: kernels are compiled for sm_90 in a process without the interpreter (this
file as a script, since TRITON_INTERPRET is read when a kernel is decorated), and stores are looked for in the result.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from env import launches
from env.launches import COMPILING, LaunchLog, install, knock_out, note_compiling, poisoned_fresh_memory

pytestmark = pytest.mark.budget(60)
ROOT = Path(__file__).resolve().parents[2]
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")


@triton.jit
def add_one(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) + 1.0, mask=i < n)


@triton.jit
def store_one(y):
    tl.store(y, 1.0)


@triton.jit
def count_up(y, old, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(old + i, tl.atomic_add(y + i, 1.0))


@triton.jit
def maximum(y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_max(y + i, 9.0, mask=i < n)


@triton.jit
def lock(y):
    tl.atomic_cas(y, 0, 1)


@triton.jit
def spin(y):
    while tl.atomic_cas(y, 0, 1) == 1:
        pass


@triton.jit
def block_copy(x, y, n, BLOCK: tl.constexpr):
    source = tl.make_block_ptr(x, (n,), (1,), (0,), (BLOCK,), (0,))
    target = tl.make_block_ptr(y, (n,), (1,), (0,), (BLOCK,), (0,))
    tl.store(target, tl.load(source, boundary_check=(0,)), boundary_check=(0,))


@triton.jit
def broken(y):
    tl.store(y, 1.0)
    undefined_name()  # noqa: F821


@triton.jit
def all_atomics(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i)
    old = tl.atomic_add(y + i, v, mask=i < n)
    old += tl.atomic_max(y + i, v)
    old += tl.atomic_min(y + i, v, mask=i < n)
    old += tl.atomic_xchg(y + i, v)
    old += tl.atomic_and(y + i, v)
    old += tl.atomic_or(y + i, v)
    old += tl.atomic_xor(y + i, v)
    old += tl.atomic_cas(y + i, v, v)
    tl.atomic_add(y, 1)
    tl.atomic_cas(y, 0, 1)
    tl.store(x + i, old)


@triton.jit
def all_float_atomics(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i)
    tl.atomic_add(y + i, v)
    tl.atomic_max(y + i, v, mask=i < n)
    tl.atomic_min(y + i, v)
    tl.store(x + i, tl.atomic_xchg(y + i, v), mask=i < n)


@triton.jit
def descriptors(x, y, n, BLOCK: tl.constexpr):
    source = tl.make_tensor_descriptor(x, (n, n), (n, 1), (BLOCK, BLOCK))
    target = tl.make_tensor_descriptor(y, (n, n), (n, 1), (BLOCK, BLOCK))
    value = source.load([0, 0])
    target.store([0, 0], value)
    target.atomic_add([0, 0], value)


@triton.jit
def writer(y, v):
    tl.store(y, v)


@triton.jit
def through_a_device_function(y):
    writer(y, 2.0)


# Recording -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def log(monkeypatch):
    """A launch log in force for one test, own file this one; everything it patches is put back."""
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setattr(InterpretedFunction, "run", InterpretedFunction.run)
    monkeypatch.setattr(interpreter, "_interpreter", interpreter._interpreter)
    monkeypatch.setattr(
        torch.utils.deterministic, "fill_uninitialized_memory", torch.utils.deterministic.fill_uninitialized_memory
    )
    log = LaunchLog(own_file=__file__)
    install(log, "cpu")
    yield log
    torch.use_deterministic_algorithms(False)


def foreign(tmp_path):
    """The same kernel from another file: a library's."""
    path = tmp_path / "library.py"
    path.write_text(
        "import triton\nimport triton.language as tl\n"
        "@triton.jit\ndef add_one(x, y, n, BLOCK: tl.constexpr):\n"
        "    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
        "    tl.store(y + i, tl.load(x + i, mask=i < n) + 1.0, mask=i < n)\n"
    )
    spec = importlib.util.spec_from_file_location("library", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.add_one


@interpreted
def test_every_way_to_launch_is_recorded(log):
    x, y = torch.zeros(8), torch.zeros(8)
    add_one[(1,)](x, y, 8, BLOCK=8)
    add_one[lambda meta: (1,)](x, y, 8, BLOCK=8)
    add_one.run(x, y, 8, BLOCK=8, grid=(1,), warmup=False)
    bound = add_one[(2,)]
    bound(x, y, 8, BLOCK=4)
    assert log.summary() == [{"name": "add_one", "own": True, "count": 4}]
    assert sum(own for _, own in log.launches) == 4
    log.clear()
    assert log.summary() == [] and sum(own for _, own in log.launches) == 0


@interpreted
def test_a_warm_up_is_no_launch(log):
    add_one.run(torch.zeros(8), torch.zeros(8), 8, BLOCK=8, grid=(1,), warmup=True)
    assert log.launches == []


def test_own_is_known_while_a_kernel_is_only_compiled(monkeypatch):
    """On a GPU `warmup` compiles: a knock-out must take the stores out there, since the launch reuses that kernel."""
    from triton.runtime.jit import JITFunction

    log, seen = LaunchLog(own_file=__file__), []
    monkeypatch.setattr(JITFunction, "run", lambda self, *_, grid, warmup: seen.append((warmup, log.own_running)))
    install(log, "cuda")
    kernel = JITFunction(store_one.fn)
    kernel.run(grid=(1,), warmup=True)
    kernel.run(grid=(1,), warmup=False)
    assert seen == [(True, True), (False, True)]
    assert log.launches == [("store_one", True)] and not log.own_running


@interpreted
def test_own_is_where_the_function_comes_from_and_not_its_name(log, tmp_path):
    x, y = torch.zeros(8), torch.zeros(8)
    foreign(tmp_path)[(1,)](x, y, 8, BLOCK=8)
    add_one[(1,)](x, y, 8, BLOCK=8)
    assert log.summary() == [
        {"name": "add_one", "own": False, "count": 1},
        {"name": "add_one", "own": True, "count": 1},
    ]


@interpreted
def test_a_launch_that_fails_is_over_afterwards(log):
    with pytest.raises(Exception, match="undefined_name"):
        broken[(1,)](torch.zeros(1))
    assert log.own_running is False and sum(own for _, own in log.launches) == 1


@interpreted
def test_endless_launches_do_not_fill_the_memory(log, monkeypatch):
    monkeypatch.setattr(launches, "MAX_LAUNCHES", 5)
    for _ in range(8):
        store_one[(1,)](torch.zeros(1))
    assert sum(own for _, own in log.launches) == 5


@interpreted
def test_around_is_entered_for_each_launch(log):
    from contextlib import contextmanager

    seen = []

    @contextmanager
    def around(name, own):
        seen.append((name, own))
        yield

    log.around = around
    store_one[(1,)](torch.zeros(1))
    log.around = None
    store_one[(1,)](torch.zeros(1))
    assert seen == [("store_one", True)]


@interpreted
def test_bfloat16_is_refused_by_name(log):
    with pytest.raises(NotImplementedError, match="bfloat16"):
        store_one[(1,)](torch.zeros(1, dtype=torch.bfloat16))


# Knock-out in the interpreter ----------------------------------------------------------------------------------------


@interpreted
def test_stores_of_own_kernels_have_no_effect(log):
    knock_out(log, "cpu")
    x, y = torch.ones(100), torch.full((100,), 7.0)
    add_one[(4,)](x, y, 100, BLOCK=32)
    store_one[(1,)](y)
    block_copy[(1,)](x, y, 100, BLOCK=64)
    assert y.eq(7.0).all() and x.eq(1.0).all()
    assert sum(own for _, own in log.launches) == 3


@interpreted
def test_without_knock_out_the_same_kernels_have_theirs(log):
    x, y = torch.ones(100), torch.full((100,), 7.0)
    add_one[(4,)](x, y, 100, BLOCK=32)
    assert y.eq(2.0).all()
    block_copy[(1,)](x, y, 100, BLOCK=64)
    assert y[:64].eq(1.0).all() and y[64:].eq(2.0).all()


@interpreted
def test_stores_of_other_kernels_stay(log, tmp_path):
    kernel = foreign(tmp_path)
    knock_out(log, "cpu")
    x, y = torch.ones(8), torch.zeros(8)
    add_one[(1,)](x, y, 8, BLOCK=8)
    assert y.eq(0.0).all()
    kernel[(1,)](x, y, 8, BLOCK=8)
    assert y.eq(2.0).all()


@interpreted
def test_atomics_return_the_old_value_and_change_nothing(log):
    knock_out(log, "cpu")
    y, old = torch.full((8,), 3.0), torch.zeros(8)
    count_up[(1,)](y, old, BLOCK=8)
    maximum[(1,)](y, 4, BLOCK=8)
    assert y.eq(3.0).all() and old.eq(0.0).all()
    held = torch.zeros(1, dtype=torch.int32)
    lock[(1,)](held)
    spin[(1,)](held)
    assert held.item() == 0


@interpreted
def test_atomics_without_knock_out(log):
    y, old = torch.full((8,), 3.0), torch.zeros(8)
    count_up[(1,)](y, old, BLOCK=8)
    maximum[(1,)](y, 4, BLOCK=8)
    assert old.eq(3.0).all() and y[:4].eq(9.0).all() and y[4:].eq(4.0).all()
    held = torch.zeros(1, dtype=torch.int32)
    lock[(1,)](held)
    assert held.item() == 1


@interpreted
def test_fresh_memory_is_not_a_number(log):
    knock_out(log, "cpu")
    assert torch.empty(1000).isnan().all() and torch.empty_like(torch.zeros(3)).isnan().all()


# Knock-out in the compiler -------------------------------------------------------------------------------------------

# kernel -> (signature, marks that its code has without a knock-out: one of each tuple)
COMPILED = {
    "add_one": ({"x": "*fp32", "y": "*fp32", "n": "i32"}, ["tt.store", "st.global"]),
    "store_one": ({"y": "*fp32"}, ["tt.store", "st.global"]),
    "block_copy": ({"x": "*fp32", "y": "*fp32", "n": "i32"}, ["tt.store", "st.global"]),
    "through_a_device_function": ({"y": "*fp32"}, ["tt.store", "st.global"]),
    "all_atomics": (
        {"x": "*i32", "y": "*i32", "n": "i32"},
        ["tt.atomic_rmw", "tt.atomic_cas", "tt.store", "atom.global", ".cas", ".exch", "st.global"],
    ),
    "all_float_atomics": ({"x": "*fp32", "y": "*fp32", "n": "i32"}, ["tt.atomic_rmw", "atom.global", "tt.store"]),
    "spin": ({"y": "*i32"}, ["tt.atomic_cas", ".cas"]),
    "descriptors": (
        {"x": "*fp32", "y": "*fp32", "n": "i32"},
        ["tt.descriptor_store", "tt.descriptor_reduce", "bulk.tensor.2d.global.shared", "cp.reduce.async.bulk"],
    ),
}  # fmt: skip
EFFECTS = (
    "tt.store", "tt.atomic", "descriptor_store", "descriptor_reduce", "descriptor_scatter",
    "st.global", "atom.", "red.", ".global.shared", "cp.reduce",
)  # fmt: skip


def compile_all(knocked_out: bool) -> dict[str, str]:
    """{kernel: TTIR and PTX} for sm_90, as if each were launched by its own candidate."""
    from triton.backends.compiler import GPUTarget

    log = LaunchLog(own_file=str(Path(__file__)), own_running=True)
    if knocked_out:
        knock_out(log, "cuda")
    texts = {}
    for name, (signature, _) in COMPILED.items():
        kernel = globals()[name]
        constants = {"BLOCK": 32} if "BLOCK" in kernel.arg_names else {}
        signature = {**signature, **dict.fromkeys(constants, "constexpr")}
        source = triton.compiler.ASTSource(kernel, signature, constants)
        asm = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm
        texts[name] = asm["ttir"] + asm["ptx"]
    if knocked_out:
        # Whoever launches when no own kernel runs keeps its stores.
        log.own_running = False
        kernel = triton.compiler.ASTSource(store_one, {"y": "*fp64"}, {})
        texts["foreign"] = triton.compile(kernel, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    return texts


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[bool, dict[str, str]]:
    """Compiled texts, {knocked out: {kernel: text}}, each from a process of its own."""
    texts = {}
    for knocked_out in (False, True):
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        # A cache of its own: the key is the source, which is the same with and without knock-out.
        environment.update(TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("cache")), TRITON_ALWAYS_COMPILE="1")
        environment["PYTHONPATH"] = str(ROOT)
        done = subprocess.run(
            [sys.executable, __file__, str(int(knocked_out))],
            env=environment, capture_output=True, text=True, timeout=110, cwd=ROOT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        texts[knocked_out] = json.loads(done.stdout.splitlines()[-1])
    return texts


NO_CODE = ("//", "#loc", ".file", ".loc", ".section", ".b8")


def code_lines(text: str) -> str:
    """Without comments and source locations, whose file and function names could hold any word."""
    return "\n".join(line for line in text.split("\n") if not line.strip().startswith(NO_CODE))


@pytest.mark.parametrize("kernel", COMPILED)
def test_compiled_kernel_writes(compiled, kernel):
    text = code_lines(compiled[False][kernel])
    assert [mark for mark in COMPILED[kernel][1] if mark not in text] == []


@pytest.mark.parametrize("kernel", COMPILED)
def test_compiled_kernel_without_effect_writes_nothing(compiled, kernel):
    text = code_lines(compiled[True][kernel])
    assert "tt.func" in text and ".entry" in text
    assert [mark for mark in EFFECTS if mark in text] == []


def test_kernel_of_others_still_writes_after_the_knock_out(compiled):
    assert "st.global" in compiled[True]["foreign"]


if __name__ == "__main__":
    print(json.dumps(compile_all(sys.argv[1] == "1")))


class _Stream:
    device = "cuda:0"

    def __init__(self):
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)


@pytest.fixture
def streams(monkeypatch):
    """The default stream and a list that ends with the current one, in place of CUDA's."""
    default = _Stream()
    entered = [default]
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: default)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: entered[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", entered.append)
    return default, entered


def test_another_stream_waits_until_fresh_memory_is_filled(streams):
    """Else a kernel that writes from another stream to memory of the default one races against our NaN."""
    default, entered = streams
    side, ours = _Stream(), torch.cuda.set_stream
    with poisoned_fresh_memory():
        torch.cuda.set_stream(side)
        torch.cuda.set_stream(default)
    assert side.waited_for == [default] and not default.waited_for  # what comes back is not joined for the candidate
    assert entered == [default, side, default] and torch.cuda.set_stream == ours
    torch.cuda.set_stream(side)
    assert len(side.waited_for) == 1


def test_a_patched_set_stream_is_left_for_the_watch(streams):
    fake = print
    with poisoned_fresh_memory():
        torch.cuda.set_stream = fake
    assert torch.cuda.set_stream is fake


def test_the_kernel_that_is_being_compiled_is_named_whatever_its_constants_are(tmp_path, monkeypatch):
    """Not through Triton's hooks, which write constants as JSON: a function is none."""
    from triton.runtime.jit import JITFunction

    seen = []

    def compiled(self, *args, **kwargs):
        seen.append((tmp_path / COMPILING).read_text())
        if args:
            raise RuntimeError("no such instruction")
        return "a kernel"

    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    note_compiling(tmp_path)

    def scaled(x):
        return x

    kernel = JITFunction.__new__(JITFunction)
    kernel.fn = scaled
    assert kernel._do_compile() == "a kernel"
    with pytest.raises(RuntimeError, match="no such instruction"):
        kernel._do_compile({"FN": scaled})
    assert seen == ["scaled", "scaled"] and not (tmp_path / COMPILING).exists()
