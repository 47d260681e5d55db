"""Small problems and any number of distinct honest Triton answers to each, as text.

Runs in the driver. No two answers share kernel text, so that neither the pool's memory of duplicates nor a compiler
cache can answer for the judge. On a GPU a forward stays well under a millisecond; on the CPU sizes are tiny, since
Triton's interpreter takes milliseconds a program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from env.records import Problem

ELEMENTWISE, ROWWISE, MATMUL = "elementwise", "rowwise", "matmul"
# Answers to one problem follow each other, as the samples of one prompt do in training.
GROUP = 8


@dataclass(frozen=True)
class Spec:
    """A problem: `torch` is the reference's expression in x (and y), `triton` the same of the loaded values.

    rows, cols: shape of the inputs. A matmul is x [rows, cols] by a Linear(cols, cols); its expressions are what
    follows the product. `reduces`: a row becomes one number.
    """

    name: str
    kind: str
    torch: str
    triton: str
    rows: int
    cols: int
    two: bool = False
    reduces: bool = False


_GELU = "0.5 * {v} * (1.0 + tl.erf({v} * 0.7071067811865476))"
_TINY = {ELEMENTWISE: (16, 128), ROWWISE: (16, 128), MATMUL: (32, 32)}

_SPECS = (
    Spec("affine_relu", ELEMENTWISE, "torch.relu(x * 2.0 + 1.0)", "tl.maximum(a * 2.0 + 1.0, 0.0)", 1024, 1024),
    Spec("silu_square", ELEMENTWISE, "F.silu(x) * 0.5 + x * x", "a * tl.sigmoid(a) * 0.5 + a * a", 2048, 1024),
    Spec("gelu_shift", ELEMENTWISE, "F.gelu(x) * 1.5 - 0.25", f"({_GELU.format(v='a')}) * 1.5 - 0.25", 4096, 1024),
    Spec("gate", ELEMENTWISE, "torch.sigmoid(x) * y + x", "tl.sigmoid(a) * b + a", 1024, 1024, two=True),
    Spec(
        "clamp_scale", ELEMENTWISE, "torch.clamp(torch.abs(x) - 0.5, 0.0, 2.0) * y",
        "tl.minimum(tl.maximum(tl.abs(a) - 0.5, 0.0), 2.0) * b", 2048, 1024, two=True,
    ),
    Spec(
        "softmax", ROWWISE, "torch.softmax(x, dim=-1)",
        "tl.exp(a - tl.max(a, axis=1)[:, None]) / tl.sum(tl.exp(a - tl.max(a, axis=1)[:, None]), axis=1)[:, None]",
        2048, 1024,
    ),
    Spec(
        "rmsnorm", ROWWISE, "x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-6)",
        "a / tl.sqrt(tl.sum(a * a, axis=1) / COLS + 1e-6)[:, None]", 2048, 1024,
    ),
    Spec(
        "layernorm", ROWWISE, "F.layer_norm(x, (x.shape[-1],))",
        "(a - (tl.sum(a, axis=1) / COLS)[:, None]) / tl.sqrt(tl.sum((a - (tl.sum(a, axis=1) / COLS)[:, None])"
        " * (a - (tl.sum(a, axis=1) / COLS)[:, None]), axis=1) / COLS + 1e-5)[:, None]",
        2048, 1024,
    ),
    Spec("square_sum", ROWWISE, "torch.sum(x * x, dim=-1)", "tl.sum(a * a, axis=1)", 4096, 1024, reduces=True),
    Spec("abs_max", ROWWISE, "torch.amax(torch.abs(x), dim=-1)", "tl.max(tl.abs(a), axis=1)", 2048, 2048, reduces=True),
    Spec("linear_relu", MATMUL, "torch.relu(x)", "tl.maximum(a, 0.0)", 512, 512),
    Spec("linear_gelu", MATMUL, "F.gelu(x)", _GELU.format(v="a"), 256, 256),
)  # fmt: skip


def specs(device: str) -> list[Spec]:
    """The twelve problems at the sizes of a device."""
    if device == "cuda":
        return list(_SPECS)
    return [sized(spec, *_TINY[spec.kind]) for spec in _SPECS]


def sized(spec: Spec, rows: int, cols: int) -> Spec:
    """The same problem at another size; cols is a power of two."""
    return replace(spec, rows=rows, cols=cols)


def spec_named(name: str) -> Spec:
    """One of the twelve, at its GPU size."""
    return next(spec for spec in _SPECS if spec.name == name)


# References -----------------------------------------------------------------------------------------------------------

_HEAD = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"


def _inputs(spec: Spec) -> str:
    shape = f"torch.randn({spec.rows}, {spec.cols})"
    drawn = ", ".join([shape] * (2 if spec.two else 1))
    return f"\n\ndef get_inputs():\n    return [{drawn}]\n\n\ndef get_init_inputs():\n    return []\n"


def _model(spec: Spec, name: str, forward: str) -> str:
    build = ""
    if spec.kind == MATMUL:
        build = (
            "    def __init__(self):\n        super().__init__()\n"
            f"        self.linear = nn.Linear({spec.cols}, {spec.cols})\n\n"
        )
    arguments = "x, y" if spec.two else "x"
    return f"\n\nclass {name}(nn.Module):\n{build}    def forward(self, {arguments}):\n{forward}"


def problem(spec: Spec) -> Problem:
    """The problem with a reference in torch operators."""
    product = "        x = self.linear(x)\n" if spec.kind == MATMUL else ""
    source = _HEAD + _model(spec, "Model", f"{product}        return {spec.torch}\n") + _inputs(spec)
    return Problem(id=f"{spec.name}-{spec.rows}x{spec.cols}", source=source, level=1, origin="benchmark")


def self_problem(spec: Spec) -> Problem:
    """The problem with one of our own Triton programs as its reference: what it is measured against is itself."""
    source = answer(spec, 0, entry="Model") + _inputs(spec)
    return Problem(id=f"self-{spec.name}-{spec.rows}x{spec.cols}", source=source, level=1, origin="benchmark")


# Answers --------------------------------------------------------------------------------------------------------------

_ELEMENTWISE = """

@triton.jit
def {kernel}({pointers}out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = i < n
    a = tl.load(x_ptr + i, mask=keep, other=0.0)
{second}    tl.store(out_ptr + i, {value}, mask=keep)
"""
_ELEMENTWISE_CALL = """\
{hook}        out = torch.empty_like(x)
        n = x.numel()
        {kernel}[(triton.cdiv(n, {block}),)]({tensors}out, n, BLOCK={block}, num_warps={warps})
        return out
"""
_ROWWISE = """

@triton.jit
def {kernel}(x_ptr, out_ptr, rows, COLS: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    col = tl.arange(0, COLS)
    keep = (row < rows)[:, None]
    at = row[:, None] * COLS + col[None, :]
    a = tl.load(x_ptr + at, mask=keep, other=0.0)
    value = {value}
    tl.store({store}, value, mask={mask})
"""
_ROWWISE_CALL = """\
{hook}        rows = x.shape[0]
        out = {out}
        {kernel}[(triton.cdiv(rows, {tile}),)](x, out, rows, COLS={cols}, TILE={tile}, num_warps={warps})
        return out
"""
_MATMUL = """

@triton.jit
def {kernel}(x_ptr, w_ptr, b_ptr, out_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        right = tl.load(w_ptr + n[None, :] * K + k[:, None], mask=(n < N)[None, :] & (k < K)[:, None], other=0.0)
        total += tl.dot(left, right, input_precision="ieee")
    a = total + tl.load(b_ptr + n, mask=n < N, other=0.0)[None, :]
    tl.store(out_ptr + m[:, None] * N + n[None, :], {value}, mask=(m < M)[:, None] & (n < N)[None, :])
"""
_MATMUL_CALL = """\
{hook}        M, K = x.shape
        N = self.linear.weight.shape[0]
        out = torch.empty((M, N), device=x.device, dtype=x.dtype)
        grid = (triton.cdiv(M, {bm}), triton.cdiv(N, {bn}))
        weight, bias = self.linear.weight, self.linear.bias
        {kernel}[grid](x, weight, bias, out, M, N, K, BM={bm}, BN={bn}, BK={bk}, num_warps={warps})
        return out
"""


def answer(spec: Spec, number: int, entry: str = "ModelNew", hook: str = "", top: str = "") -> str:
    """Honest answer `number` to a problem; different numbers give different kernels.

    hook: a statement to run first in forward. top: text above the kernel. Both are for those who aren't honest.
    """
    small = spec.rows * spec.cols <= 1 << 12
    choose = _Choices(number)
    facts = {
        "kernel": f"{spec.name}_{number}",
        "hook": "".join(f"        {line}\n" for line in hook.splitlines()),
        "value": spec.triton,
        "warps": choose(4, 8, 2),
    }
    if spec.kind == ELEMENTWISE:
        facts["block"] = choose(512, 1024) if small else choose(1024, 512, 2048, 256)
        facts["pointers"] = "x_ptr, y_ptr, " if spec.two else "x_ptr, "
        facts["tensors"] = "x, y, " if spec.two else "x, "
        facts["second"] = "    b = tl.load(y_ptr + i, mask=keep, other=0.0)\n" if spec.two else ""
        kernel, call = _ELEMENTWISE, _ELEMENTWISE_CALL
    elif spec.kind == ROWWISE:
        facts["tile"] = choose(4, 8, 2) if small else choose(1, 2, 4)
        facts["cols"] = spec.cols
        facts["store"] = "out_ptr + row" if spec.reduces else "out_ptr + at"
        facts["mask"] = "row < rows" if spec.reduces else "keep"
        facts["out"] = "torch.empty(rows, device=x.device, dtype=x.dtype)" if spec.reduces else "torch.empty_like(x)"
        kernel, call = _ROWWISE, _ROWWISE_CALL
    else:
        facts["bm"], facts["bn"] = (16, 32) if small else (choose(64, 32), choose(64, 32))
        facts["bk"] = choose(16, 32)
        kernel, call = _MATMUL, _MATMUL_CALL
    head = _HEAD + "import triton\nimport triton.language as tl\n" + top
    return head + kernel.format(**facts) + _model(spec, entry, call.format(**facts))


class _Choices:
    """Draws the digits of a number, so that neighbours differ in what they choose."""

    def __init__(self, number: int):
        self.left = number

    def __call__(self, *options: int) -> int:
        self.left, place = divmod(self.left, len(options))
        return options[place]


def honest(device: str, start: int = 0) -> Iterator[tuple[Spec, int, str]]:
    """Endless (problem, number, answer), GROUP answers to a problem in a row."""
    problems = specs(device)
    number = start
    while True:
        for spec in problems:
            for _ in range(GROUP):
                number += 1
                yield spec, number, answer(spec, number)
