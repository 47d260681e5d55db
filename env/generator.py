"""Seeded problems in the KernelBench format: chains of operators, from element-wise ones to a small matrix product.

Runs in the driver and makes text only: neither torch nor a GPU is needed. Training and held-out problems never share a
chain of operators, whatever the seeds and sizes, and some pairs of neighbours occur in held-out chains alone.
"""

from __future__ import annotations

import hashlib
import math
import random
from functools import cache
from itertools import pairwise

from env.operators import BINARY, BROADCAST, ELEMENTWISE, INPUTS, MATMUL, OPERATORS, REDUCTION, ROWWISE, names, others
from env.records import Problem

Chain = tuple[str, ...]

# A prefix of any length has all families in about these shares.
FAMILIES = (
    "elementwise", "rowwise", "reduction", "broadcast", "elementwise",
    "matmul", "rowwise", "two_input", "reduction", "elementwise",
)  # fmt: skip
_KIND = {"rowwise": ROWWISE, "two_input": BINARY, "broadcast": BROADCAST}

# Neighbours (first, then second) that training never shows: has the policy learned operators or chains by heart?
HELDOUT_PAIRS = frozenset(
    {
        ("gelu", "half"), ("tanh", "square"), ("silu", "sub_half"), ("abs", "sigmoid"), ("double", "tanh"),
        ("add_one", "relu"), ("leaky_relu", "softmax"), ("square", "rmsnorm"), ("clamp", "sum"), ("silu", "mean"),
        ("matmul", "silu"), ("matmul", "clamp"), ("add_b", "gelu"), ("tanh", "mul_s"), ("abs", "add_y"),
    }
)  # fmt: skip
HELDOUT_SHARE = 0.25
NEW_PAIR_EVERY = 3

# (ROWS, COLS). cpu: the interpreter takes about 2 ms a program instance, and a row is one, so rows are few; a length
# costs nothing. gpu: so large that memory traffic, not the launch, is what costs. Lengths that are no power of two make
# masks matter.
SHAPES = {
    "cpu": ((16, 128), (16, 160), (16, 200), (16, 256)),
    "gpu": ((4096, 4096), (8192, 4096), (4096, 8192), (8192, 3000), (6000, 5000), (8192, 5000)),
}

# The inner length of a matrix product. Small: the product costs about as much as the memory that its result takes, so
# that an epilogue in the same kernel pays; one block of tl.dot holds all of it.
INNER = (32, 64)

# Neighbours that may change places without changing what is computed: scaling by a positive number, and what keeps the
# sign of each element or adds a constant to it.
_SCALES = frozenset({"half", "double"})
_COMMUTING = (
    (_SCALES, frozenset({"relu", "leaky_relu", "abs", "half", "double", "mul_y", "mul_b", "mul_s"})),
    (frozenset({"add_one", "sub_half"}), frozenset({"add_one", "sub_half", "add_y", "add_b"})),
    (frozenset({"relu"}), frozenset({"leaky_relu"})),
)

# A probability of a long row is nearly zero: adding to it or bending it would leave a constant or change nothing.
_AFTER_SOFTMAX = frozenset({"half", "double", "silu", "gelu"})
# The largest of thousands of saturated values is the bound itself, whatever the input.
_BOUNDED = frozenset({"sigmoid", "tanh", "clamp"})
_MIN_EFFECT = 0.03
_TRIES = 400
_CHOICES = 4

_TEMPLATE = """\
import torch
import torch.nn as nn
import torch.nn.functional as F

ROWS = {rows}
COLS = {cols}
{inner}

class Model(nn.Module):
    def forward(self, {arguments}):
{body}
        return x


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
"""


def commute(a: str, b: str) -> bool:
    """Whether two neighbouring operators may change places without changing what is computed."""
    return any((a in left and b in right) or (b in left and a in right) for left, right in _COMMUTING)


@cache
def orders(chain: Chain) -> frozenset[Chain]:
    """All chains that compute the same because neighbours may change places, the chain itself among them."""
    found, left = {chain}, [chain]
    while left:
        known = left.pop()
        for at in range(len(known) - 1):
            if commute(known[at], known[at + 1]):
                other = (*known[:at], known[at + 1], known[at], *known[at + 2 :])
                if other not in found:
                    found.add(other)
                    left.append(other)
    return frozenset(found)


@cache
def canonical(chain: Chain) -> str:
    """The text that identifies what a chain computes, apart from its size: the first of its orders."""
    return " > ".join(min(orders(chain)))


def has_new_pair(chain: Chain) -> bool:
    """True where two neighbours are a pair that training never shows."""
    return any(pair in HELDOUT_PAIRS for pair in pairwise(chain))


@cache
def split_of(chain: Chain) -> str:
    """ "train" or "heldout": a property of what is computed, so that no choice of seeds can leak one into the other."""
    digest = hashlib.sha256(canonical(chain).encode()).digest()
    held = int.from_bytes(digest[:4], "big") < HELDOUT_SHARE * 2**32
    return "heldout" if held or any(map(has_new_pair, orders(chain))) else "train"


def chain_of(source: str) -> Chain:
    """The chain that a generated reference's forward holds. Raises ValueError naming what isn't a known line."""
    lines = [line.strip() for line in source.splitlines()]
    starts = [number for number, line in enumerate(lines) if line.startswith("def forward(self, x")]
    if not starts or "return x" not in lines[starts[0] :]:
        raise ValueError(
            "the reference has no 'def forward(self, x...)' that ends in 'return x': it was not generated here"
        )
    body = lines[starts[0] + 1 : lines.index("return x", starts[0])]
    known = {operator.line: name for name, operator in OPERATORS.items()}
    unknown = [line for line in body if line not in known]
    if unknown or not body:
        raise ValueError(f"the reference holds a line that is no known operator: {(unknown or ['(empty)'])[0]!r}")
    return tuple(known[line] for line in body)


# Is a chain worth judging? -------------------------------------------------------------------------------------------


def _samples() -> list[tuple[list[float], list[float]]]:
    rng = random.Random(2024)
    return [([rng.gauss(0, 1) for _ in range(64)], [rng.gauss(0, 1) for _ in range(64)]) for _ in range(4)]


_SAMPLES = _samples()


def _outputs(chain: Chain) -> list[float]:
    """What a chain makes of four fixed rows of normal numbers, all outputs in one list."""
    results: list[float] = []
    for x, y in _SAMPLES:
        for name in chain:
            x = OPERATORS[name].apply(x, y)
        results += x
    return results


def _rms(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


@cache
def is_sound(chain: Chain) -> bool:
    """True where the output varies with the input, is of ordinary size, and would differ without any one operator.

    The last rule refuses what an optimiser may drop (a scale before a layernorm, a relu after a square): there, a
    kernel that forgets an operator would be right.
    """
    if len(set(chain)) < len(chain):
        return False
    if "softmax" in chain and not _AFTER_SOFTMAX.issuperset(chain[chain.index("softmax") + 1 :]):
        return False
    if chain[-1] == "max" and not _BOUNDED.isdisjoint(chain):
        return False
    if chain[-1] in ("sum", "mean"):
        # Terms of both signs cancel: what is left is small beside the rounding of the terms, and right answers differ.
        terms = _outputs(chain[:-1]) if len(chain) > 1 else [value for x, _ in _SAMPLES for value in x]
        if abs(sum(terms) / len(terms)) < 0.1 * _rms(terms):
            return False
    full = _outputs(chain)
    size, mean = _rms(full), sum(full) / len(full)
    if not 0.005 < size < 100.0 or _rms([value - mean for value in full]) < 0.02 * size:
        return False
    for position, name in enumerate(chain):
        if OPERATORS[name].kind in (REDUCTION, MATMUL):
            continue  # without it the output has another shape
        without = _outputs(chain[:position] + chain[position + 1 :])
        if _rms([a - b for a, b in zip(full, without)]) < _MIN_EFFECT * size:
            return False
    return True


# Drawing chains ------------------------------------------------------------------------------------------------------


def _draw(family: str, elementwise: int, rng: random.Random) -> Chain:
    """A random chain of a family with so many element-wise operators beside its own one, sound or not."""
    chain = rng.sample(names(ELEMENTWISE), elementwise)
    if family == "reduction":
        chain.append(rng.choice(names(REDUCTION)))
    elif family == "matmul":
        chain.insert(0, "matmul")
    elif family != "elementwise":
        chain.insert(rng.randrange(len(chain) + 1), rng.choice(names(_KIND[family])))
    return tuple(chain)


def _next_chain(family: str, split: str, used: dict[str, int], taken: set[str], rng: random.Random) -> Chain:
    """The one of a few fitting chains that holds the operators used least so far, so that all of them soon occur."""
    # Short chains, of which a model of two million parameters soon learns how chains are put together. Measured once
    # each, held-out answers right to the letter (teacher-forced): up to five operators, 240 problems, 29 % after 844
    # SFT steps; two or three, 320 problems, 42 % after 895 steps and 79 % after 1076.
    lengths = (2, 3, 3) if family == "elementwise" else (1, 2, 2)
    shortest = rng.choice(lengths)
    new_pair = split == "heldout" and len(taken) % NEW_PAIR_EVERY == 0
    fitting: list[Chain] = []
    # Short chains run out: longer ones follow.
    for length in range(shortest, max(lengths) + 3):
        for _ in range(_TRIES):
            chain = _draw(family, length, rng)
            known = canonical(chain) in taken or any(canonical(chain) == canonical(other) for other in fitting)
            if known or split_of(chain) != split or (new_pair and not has_new_pair(chain)) or not is_sound(chain):
                continue
            fitting.append(chain)
            if len(fitting) == _CHOICES:
                break
        if fitting:
            break
    if not fitting:
        raise ValueError(f"no further {family} chain for the {split} split after {len(taken)} problems: ask for fewer")
    return max(fitting, key=lambda chain: sum(1.0 / (1 + used.get(name, 0)) for name in chain))


def render(chain: Chain, rows: int, cols: int, inner: int = 0) -> str:
    """A chain as reference source; inputs are normal numbers, the first [rows, cols], or [rows, inner] where a chain
    begins with a matrix product."""
    product, more = "matmul" in chain, others(chain)
    return _TEMPLATE.format(
        rows=rows,
        cols=cols,
        inner=f"INNER = {inner}\n" if product else "",
        arguments=", ".join(["x", *more]),
        body="\n".join(f"        {OPERATORS[name].line}" for name in chain),
        inputs=", ".join([f"torch.randn(ROWS, {'INNER' if product else 'COLS'})", *(INPUTS[name] for name in more)]),
    )


def generate(split: str, count: int, seed: int, size: str) -> list[Problem]:
    """`count` problems with different chains; equal arguments give equal bytes.

    split: "train" or "heldout". size: "cpu" (for Triton's interpreter) or "gpu". Raises ValueError for other words, and
    where the split has no more chains (several hundred are there).
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"unknown split {split!r}: use 'train' or 'heldout'")
    if size not in SHAPES:
        raise ValueError(f"unknown size {size!r}: use {' or '.join(map(repr, SHAPES))}")
    rng = random.Random(f"problems:{split}:{size}:{seed}")
    used: dict[str, int] = {}
    taken: set[str] = set()
    problems = []
    for index in range(count):
        family = FAMILIES[index % len(FAMILIES)]
        chain = _next_chain(family, split, used, taken, rng)
        rows, cols = rng.choice(SHAPES[size])
        inner = rng.choice(INNER) if family == "matmul" else 0
        taken.add(canonical(chain))
        for name in chain:
            used[name] = used.get(name, 0) + 1
        problems.append(
            Problem(
                id=f"{'-'.join(chain)}-{rows}x{f'{inner}x' if inner else ''}{cols}",
                source=render(chain, rows, cols, inner),
                level=2,
                name=f"{family}: {' > '.join(chain)}",
                origin="generator",
            )
        )
    return problems
