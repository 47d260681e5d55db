"""The answers that the scripted teacher knows, as text: kernels and modules for a chain of operators.

Runs where trajectories are collected. The same operator is the same line everywhere and every kernel is put together
from the same few lines: a model of a few million parameters has to learn this language from some hundred answers.
"""

from __future__ import annotations

from env.generator import Chain
from env.operators import BROADCAST, MATMUL, OPERATORS, REDUCTION, ROWWISE, others

# From an operator to its lines in a kernel. `mask` keeps what lies behind the end of a row out of sums and maxima.
# tanh and gelu are written out: libdevice doesn't exist in Triton's interpreter.
KERNEL_LINES: dict[str, tuple[str, ...]] = {
    "relu": ("v = tl.maximum(v, 0.0)",),
    "leaky_relu": ("v = tl.where(v > 0.0, v, 0.1 * v)",),
    "sigmoid": ("v = tl.sigmoid(v)",),
    "tanh": ("v = 2.0 * tl.sigmoid(2.0 * v) - 1.0",),
    "silu": ("v = v * tl.sigmoid(v)",),
    "gelu": ("v = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))",),
    "abs": ("v = tl.abs(v)",),
    "square": ("v = v * v",),
    "clamp": ("v = tl.minimum(tl.maximum(v, -1.0), 1.0)",),
    "half": ("v = v * 0.5",),
    "double": ("v = v * 2.0",),
    "add_one": ("v = v + 1.0",),
    "sub_half": ("v = v - 0.5",),
    "add_y": ("v = v + y",),
    "mul_y": ("v = v * y",),
    "add_b": ("v = v + b",),
    "mul_b": ("v = v * b",),
    "mul_s": ("v = v * s",),
    "matmul": ('v = tl.dot(a, w, input_precision="ieee")',),
    "softmax": (
        'v = tl.exp(v - tl.max(tl.where(mask, v, float("-inf")), axis=0))',
        "v = v / tl.sum(tl.where(mask, v, 0.0), axis=0)",
    ),
    "layernorm": (
        "v = v - tl.sum(tl.where(mask, v, 0.0), axis=0) / cols",
        "v = v / tl.sqrt(tl.sum(tl.where(mask, v * v, 0.0), axis=0) / cols + 1e-5)",
    ),
    "rmsnorm": ("v = v / tl.sqrt(tl.sum(tl.where(mask, v * v, 0.0), axis=0) / cols + 1e-6)",),
    "sum": ("v = tl.sum(tl.where(mask, v, 0.0), axis=0)",),
    "mean": ("v = tl.sum(tl.where(mask, v, 0.0), axis=0) / cols",),
    "max": ('v = tl.max(tl.where(mask, v, float("-inf")), axis=0)',),
}

# How a kernel that sees one row, or a flat piece, loads the further inputs.
OTHER_LOADS = {
    "y": "y = tl.load(y_ptr + i, mask=mask, other=0.0)",
    "b": "b = tl.load(b_ptr + c, mask=mask, other=0.0)",
    "s": "s = tl.load(s_ptr + tl.program_id(0))",
}

IMPORTS = ["import torch", "import torch.nn.functional as F", "import triton", "import triton.language as tl"]
FLAT_TUNED = ("1024", "4")
FLAT_SLOW = ("256", "1")
ROW_WARPS = "8"
ROW_WARPS_SLOW = "2"
TILE_TUNED = ("64", "4")
TILE_SLOW = ("32", "1")

# What a decoy's kernel computes: nothing, it copies x, which keeps these answers short. It doesn't make them easier to
# get right: of the decoys that the small policy tried on held-out problems after SFT, 6 of 24 passed when the kernel
# held the chain, and 16 of 65 when it copies. It is torch's lines that are wrong in the others.
_COPY: Chain = ()


def _has(chain: Chain, *kinds: str) -> bool:
    return any(OPERATORS[name].kind in kinds for name in chain)


def needs_row(chain: Chain) -> bool:
    """True where one program must see a whole row; otherwise the tensor is cut flat."""
    return _has(chain, ROWWISE, REDUCTION, BROADCAST)


def kernel(name: str, part: Chain, row: bool) -> list[str]:
    """Definition of one kernel that computes `part` of a chain in a single pass."""
    if _has(part, MATMUL):
        return _product_kernel(name, part)
    more = others(part)
    length = "cols" if row else "n"
    pointers = ", ".join(f"{argument}_ptr" for argument in ("x", *more, "out"))
    lines = ["@triton.jit", f"def {name}({pointers}, {length}, BLOCK: tl.constexpr):"]
    if row:
        lines += ["    c = tl.arange(0, BLOCK)", "    i = tl.program_id(0) * cols + c", "    mask = c < cols"]
    else:
        lines += ["    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "    mask = i < n"]
    lines.append("    v = tl.load(x_ptr + i, mask=mask, other=0.0)")
    lines += [f"    {OTHER_LOADS[argument]}" for argument in more]
    lines += _translated(part)
    if _has(part, REDUCTION):
        lines.append("    tl.store(out_ptr + tl.program_id(0), v)")
    else:
        lines.append("    tl.store(out_ptr + i, v, mask=mask)")
    return lines


def _product_kernel(name: str, part: Chain) -> list[str]:
    """A program makes one square tile of x @ w; the inner length is one block."""
    return [
        "@triton.jit",
        f"def {name}(x_ptr, w_ptr, out_ptr, rows, cols, K: tl.constexpr, BLOCK: tl.constexpr):",
        "    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]",
        "    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]",
        "    i = r * K + tl.arange(0, K)[None, :]",
        "    a = tl.load(x_ptr + i, mask=r < rows, other=0.0)",
        "    i = tl.arange(0, K)[:, None] * cols + c",
        "    w = tl.load(w_ptr + i, mask=c < cols, other=0.0)",
        *_translated(part),
        "    tl.store(out_ptr + r * cols + c, v, mask=(r < rows) & (c < cols))",
    ]


def _translated(part: Chain) -> list[str]:
    # The reference's line as a comment: a reader sees what stands for what, and a small model learns to copy the
    # reference's next line and then to translate it, which carries over to chains that it never saw.
    return [f"    {line}" for operator in part for line in (f"# {OPERATORS[operator].line}", *KERNEL_LINES[operator])]


def launch(name: str, part: Chain, row: bool, source: str, target: str, slow: bool = False, block: str = "") -> str:
    """The one line of forward that launches a kernel made by `kernel` with the same name, part and cut."""
    arguments = ", ".join([source, *others(part), target])
    if _has(part, MATMUL):
        fixed, warps = TILE_SLOW if slow else TILE_TUNED
        block = block or fixed
        grid = f"(triton.cdiv(x.shape[0], {block}), triton.cdiv(w.shape[1], {block}))"
        return f"{name}[{grid}]({arguments}, x.shape[0], w.shape[1], w.shape[0], BLOCK={block}, num_warps={warps})"
    if row:
        warps = ROW_WARPS_SLOW if slow else ROW_WARPS
        block = block or "triton.next_power_of_2(x.shape[1])"
        return f"{name}[(x.shape[0],)]({arguments}, x.shape[1], BLOCK={block}, num_warps={warps})"
    fixed, warps = FLAT_SLOW if slow else FLAT_TUNED
    block = block or fixed
    size = f"{source}.numel()"  # behind a product it isn't x's
    return f"{name}[(triton.cdiv({size}, {block}),)]({arguments}, {size}, BLOCK={block}, num_warps={warps})"


def allocate(target: str, part: Chain) -> str:
    """The line that makes room for what `part` stores."""
    if _has(part, MATMUL):
        return f"{target} = x.new_empty(x.shape[0], w.shape[1])"
    return f"{target} = x.new_empty(x.shape[0])" if _has(part, REDUCTION) else f"{target} = torch.empty_like(x)"


def torch_lines(part: Chain) -> list[str]:
    """Part of a chain in torch: the reference's own lines."""
    return [OPERATORS[name].line for name in part]


def module(chain: Chain, body: list[str]) -> list[str]:
    """class ModelNew with the given lines of forward. The reference has no parameters, so neither has this one."""
    head = ["class ModelNew(torch.nn.Module):", f"    def forward(self, {', '.join(['x', *others(chain)])}):"]
    return head + [f"        {line}" for line in body]


def program(*parts: list[str]) -> str:
    """A whole answer's code. F is imported only where it is used."""
    body = [line for part in parts for line in part]
    uses_functional = any("F." in line and not line.lstrip().startswith("#") for line in body)
    imports = [line for line in IMPORTS if uses_functional or "functional" not in line]
    return "\n".join(imports + body)


# One function a quality -----------------------------------------------------------------------------------------------


def tuned(chain: Chain) -> str:
    """One kernel, one pass, blocks and warps that keep a GPU's memory busy."""
    return _single(chain, chain)


def wrong(chain: Chain, dropped: int) -> str:
    """The tuned kernel without the operator at index `dropped` (not one that changes the shape)."""
    return _single(chain, chain[:dropped] + chain[dropped + 1 :])


def _single(chain: Chain, computed: Chain) -> str:
    # The signature and the cut are the whole chain's, so that a dropped operator changes nothing else.
    row = needs_row(chain)
    body = [allocate("out", chain), launch("fused", computed, row, "x", "out"), "return out"]
    return program(kernel("fused", computed, row), module(chain, body))


def fused(chain: Chain) -> str:
    """All of it in Triton, but through a buffer in memory between two kernels, with too few warps."""
    first, second = chain[:1], chain[1:]
    row, then_row = needs_row(first), needs_row(second)
    body = [
        allocate("mid", first),
        allocate("out", chain),
        launch("first", first, row, "x", "mid", slow=True),
        launch("second", second, then_row, "mid", "out", slow=True),
        "return out",
    ]
    return program(kernel("first", first, row), kernel("second", second, then_row), module(chain, body))


def lazy(chain: Chain) -> str:
    """The first operator in Triton, the others left to torch."""
    first, rest = chain[:1], chain[1:]
    row = needs_row(first)
    body = [allocate("out", first), launch("fused", first, row, "x", "out"), "x = out", *torch_lines(rest), "return x"]
    return program(kernel("fused", first, row), module(chain, body))


def never_launched(chain: Chain) -> str:
    """A decoy: a kernel is defined, and torch does the work."""
    return program(kernel("fused", _COPY, row=False), module(chain, [*torch_lines(chain), "return x"]))


def ignored(chain: Chain) -> str:
    """A decoy: a kernel runs, and torch's result is returned."""
    body = [allocate("out", _COPY), launch("fused", _COPY, False, "x", "out"), *torch_lines(chain), "return x"]
    return program(kernel("fused", _COPY, row=False), module(chain, body))


def undefined_name(chain: Chain) -> str:
    """Broken: the offsets are called by a name that doesn't exist."""
    return tuned(chain).replace("tl.load(x_ptr + i,", "tl.load(x_ptr + offsets,")


def odd_block(chain: Chain) -> str:
    """Broken: a block of 100 elements, where tl.arange takes powers of two only."""
    row = needs_row(chain)
    body = [allocate("out", chain), launch("fused", chain, row, "x", "out", block="100"), "return out"]
    return program(kernel("fused", chain, row), module(chain, body))


def missing_colon(chain: Chain) -> str:
    """Broken: not even Python."""
    return tuned(chain).replace("class ModelNew(torch.nn.Module):", "class ModelNew(torch.nn.Module)")
