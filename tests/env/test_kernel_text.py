"""Kernels as text (env/kernel_text.py): what is told comes back, what Triton wouldn't compile is refused."""

from __future__ import annotations

import linecache
import textwrap

import pytest

pytestmark = pytest.mark.budget(60)

triton = pytest.importorskip("triton")

import torch  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

from env import kernel_text  # noqa: E402
from env.kernel_text import Refused, build, decode, describe, encode  # noqa: E402


def written(tmp_path, text: str, name: str = "k") -> list[dict]:
    """The units of a kernel that a module's text defines."""
    path = tmp_path / "candidate.py"
    head = "import math\nimport numpy as np\nimport torch\nimport triton\nimport triton.language as tl\n"
    path.write_text(head + textwrap.dedent(text))
    linecache.checkcache(str(path))
    space = {"__name__": "candidate"}
    exec(compile(path.read_text(), str(path), "exec"), space)
    kernel = space[name]
    units: list[dict] = []
    describe(kernel if hasattr(kernel, "arg_names") else InterpretedFunction(kernel), units, {}, str(path))
    return units


HONEST = {
    "constants": """
        WIDTH = tl.constexpr(32)
        SCALE = 2.5
        def k(x, o, n, B: tl.constexpr = 32):
            '''Doubles and a half.'''
            offs = tl.program_id(0) * B + tl.arange(0, WIDTH)
            m = offs < n
            tl.store(o + offs, tl.load(x + offs, mask=m, other=0.0) * SCALE, mask=m)
        """,
    "device functions": """
        @triton.jit
        def half(v):
            return v * 0.5
        @triton.jit
        def five(v):
            return half(v) * 5
        def k(x, o, n, B: tl.constexpr):
            offs = tl.arange(0, B)
            v = five(tl.load(x + offs, offs < n)).to(tl.float32)
            tl.store(o + offs, v, offs < n)
        """,
    "control flow": """
        def k(x, o, n, B: tl.constexpr):
            offs = tl.arange(0, B)
            acc = tl.zeros((B,), dtype=tl.float32)
            for i in range(0, 5):
                if i % 2 == 0 and n > 0:
                    acc += tl.load(x + offs, mask=offs < n)
                else:
                    acc -= 0.25 * tl.load(x + offs, mask=offs < n)
            left = 1
            while left > 0:
                left -= 1
            tl.store(o + offs, acc, mask=offs < n)
        """,
    "names of its own": """
        from triton.language import float32, sum as total
        from math import pi
        def k(x, o, n, B: tl.constexpr):
            offs = tl.arange(0, B)
            one = total(tl.where(offs == 0, 1.0, 0.0).to(float32), 0)
            tl.store(o + offs, tl.load(x + offs, mask=offs < n) * 2.5 * one * (pi / math.pi), mask=offs < n)
        """,
    "a block pointer": """
        def k(x, o, n, B: tl.constexpr):
            i = tl.make_block_ptr(x, (n,), (1,), (0,), (B,), (0,))
            j = tl.make_block_ptr(o, (n,), (1,), (0,), (B,), (0,))
            tl.store(j, tl.load(i, boundary_check=(0,)) * 2.5, boundary_check=(0,))
        """,
}


@pytest.mark.parametrize("name", HONEST)
def test_what_is_told_comes_back(tmp_path, name):
    units = written(tmp_path, HONEST[name])
    kernels = build(units, tmp_path)
    x, o = torch.randn(32), torch.empty(32)
    kernels[0][(1,)](x, o, 32, B=32)
    torch.testing.assert_close(o, 2.5 * x)
    own = [kernel.fn.__code__.co_filename.endswith("own.py") for kernel in kernels]
    assert own == [True] * len(units)


REFUSED = {
    "handles": "def k(x):\n    tl.load(x).handle.data",
    "underscores": "def k(x):\n    x.__class__",
    "a list that stays": "KEPT = []\ndef k(x):\n    KEPT.append(tl.load(x))",
    "a dict": "KEPT = {}\ndef k(x):\n    KEPT[0] = tl.load(x)",
    "numpy": "def k(x):\n    np.zeros(3)",
    "torch": "def k(x):\n    torch.zeros(3)",
    "python's functions": "def f(v):\n    return v\ndef k(x):\n    f(x)",
    "getattr": "def k(x):\n    getattr(x, 'handle')",
    "an import": "def k(x):\n    import os",
    "a lambda": "def k(x):\n    (lambda: 1)()",
    "a function within": "def k(x):\n    def g():\n        return 1\n    g()",
    "a try": "def k(x):\n    try:\n        tl.load(x)\n    except Exception:\n        pass",
    "global": "N = 1\ndef k(x):\n    global N\n    N = 2",
    "stars": "def k(*x):\n    tl.load(x[0])",
    "an attribute that is set": "def k(x):\n    tl.load = 3",
    "an item that is set": "def k(x):\n    v = [1]\n    v[0] = 2",
    "a generator": "def k(x):\n    yield x",
    "an attribute in an f-string": "def k(x):\n    tl.static_print(f'{x.handle}')",
    "Triton's insides": "def k(x):\n    tl.core.builtin(x)",
    "the module of a module": "def k(x):\n    tl.semantic.TritonSemantic",
    "triton's runtime": "def k(x):\n    triton.runtime.driver",
    "the interpreter's names": "def k(x):\n    interpreter_semantic.to_tensor(x)",
    "a list as a default": "def k(x, memo=[]):\n    memo += [tl.load(x)]",
    "a default of another kind": "def k(x, memo=[].append):\n    memo(x)",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_triton_would_not_compile_is_refused(tmp_path, name):
    with pytest.raises(Refused):
        build(written(tmp_path, REFUSED[name]), tmp_path)


@pytest.mark.parametrize(
    "unit",
    [
        {"text": "x = 1"}, {"text": "def k(): pass\nprint(1)"}, {"text": "@print\ndef k(): pass"}, {"text": "def k(:"},
        {"text": 3}, {"text": "def k(): pass", "names": 3}, {"text": "def k(): pass", "name": "a b"},
        {"text": "def k():\n    os", "names": {"os": {"module": "os"}}},
        {"text": "def k():\n    f", "names": {"f": {"of": "triton", "name": "runtime"}}},
        {"text": "def k():\n    f", "names": {"f": {"of": "triton.language", "name": "__loader__"}}},
        {"text": "def k():\n    f", "names": {"f": {"unit": 7}}},
        {"text": "def k():\n    f", "names": {"f": {"type": "core"}}},
        {"text": "def k():\n    f", "names": {"f": {"torch": "save"}}},
        {"text": "def k():\n    pass", "names": {"__builtins__": {"value": 1}}},
        {"text": "def k():\n    pass", "names": {"interpreter_semantic": {"value": 1}}},
    ],
)  # fmt: skip
def test_forged_units_are_refused(tmp_path, unit):
    with pytest.raises((Refused, IndexError)):
        build([{"name": "k", "own": True, "names": {}, **unit}], tmp_path)


def test_values_survive(tmp_path):
    values = [None, True, 3, "text", 0.1, float("inf"), (1, (2.0, "a")), tl.float32, torch.int64]
    for value in values:
        assert decode(encode(value, [], {}, "", "it"), []) == value
    assert decode(encode(tl.constexpr(5), [], {}, "", "it"), []).value == 5
    assert decode(encode([1, 2], [], {}, "", "it"), []) == (1, 2)  # nothing that could be kept
    for value in (object(), {}, torch.ones(1), print):
        with pytest.raises(Refused, match="it is a"):
            encode(value, [], {}, "", "it")


def test_a_kernel_has_no_builtins_but_its_own(tmp_path):
    kernel = build(written(tmp_path, HONEST["constants"]), tmp_path)[0]
    assert set(kernel.fn.__globals__["__builtins__"]) == set(kernel_text._BUILTINS)
