"""The operators that generated problems are chains of: one reference line each, and what they do to plain floats.

Runs in the driver; standard library only. The float versions decide, without torch, whether a chain is worth judging.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

ELEMENTWISE, ROWWISE, REDUCTION, BINARY = "elementwise", "rowwise", "reduction", "binary"
BROADCAST, MATMUL = "broadcast", "matmul"

# Further arguments of forward that operators read, in the order of the signature, and what get_inputs draws for them.
INPUTS = {
    "y": "torch.randn(ROWS, COLS)",
    "b": "torch.randn(COLS)",
    "s": "torch.randn(ROWS, 1)",
    "w": "torch.randn(INNER, COLS) / INNER**0.5",
}


@dataclass(frozen=True)
class Operator:
    """`line`: its one line in a reference's forward, the same text wherever it stands.

    `apply(x, y)`: [cols], [cols] -> [cols], or [1] for a reduction; y stands for the further input, which only
    operators with `other` read, the name of that argument (a key of INPUTS).
    """

    name: str
    kind: str
    line: str
    apply: Callable[[list[float], list[float]], list[float]]
    other: str = ""


def _sigmoid(a: float) -> float:
    return 1.0 / (1.0 + math.exp(-a))


def _softmax(x: list[float], _: list[float]) -> list[float]:
    powers = [math.exp(a - max(x)) for a in x]
    total = sum(powers)
    return [power / total for power in powers]


def _layernorm(x: list[float], _: list[float]) -> list[float]:
    mean = sum(x) / len(x)
    deviation = math.sqrt(sum((a - mean) ** 2 for a in x) / len(x) + 1e-5)
    return [(a - mean) / deviation for a in x]


def _rmsnorm(x: list[float], _: list[float]) -> list[float]:
    size = math.sqrt(sum(a * a for a in x) / len(x) + 1e-6)
    return [a / size for a in x]


def _each(name: str, line: str, function: Callable[[float], float]) -> Operator:
    return Operator(name, ELEMENTWISE, line, lambda x, _: [function(a) for a in x])


def _pair(name: str, kind: str, other: str, line: str, function: Callable[[float, float], float]) -> Operator:
    return Operator(name, kind, line, lambda x, y: [function(a, b) for a, b in zip(x, y)], other)


@cache
def _matrix(size: int) -> list[list[float]]:
    """[size, size] normal numbers / sqrt(size), always the same."""
    rng = random.Random(size)
    return [[rng.gauss(0, 1) / math.sqrt(size) for _ in range(size)] for _ in range(size)]


def _product(x: list[float], _: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(x, column)) for column in _matrix(len(x))]


_ALL = (
    _each("relu", "x = torch.relu(x)", lambda a: max(a, 0.0)),
    _each("leaky_relu", "x = F.leaky_relu(x, 0.1)", lambda a: a if a > 0.0 else 0.1 * a),
    _each("sigmoid", "x = torch.sigmoid(x)", _sigmoid),
    _each("tanh", "x = torch.tanh(x)", math.tanh),
    _each("silu", "x = F.silu(x)", lambda a: a * _sigmoid(a)),
    _each("gelu", "x = F.gelu(x)", lambda a: 0.5 * a * (1.0 + math.erf(a / math.sqrt(2.0)))),
    _each("abs", "x = torch.abs(x)", abs),
    _each("square", "x = x * x", lambda a: a * a),
    _each("clamp", "x = torch.clamp(x, -1.0, 1.0)", lambda a: min(max(a, -1.0), 1.0)),
    _each("half", "x = x * 0.5", lambda a: a * 0.5),
    _each("double", "x = x * 2.0", lambda a: a * 2.0),
    _each("add_one", "x = x + 1.0", lambda a: a + 1.0),
    _each("sub_half", "x = x - 0.5", lambda a: a - 0.5),
    _pair("add_y", BINARY, "y", "x = x + y", lambda a, b: a + b),
    _pair("mul_y", BINARY, "y", "x = x * y", lambda a, b: a * b),
    _pair("add_b", BROADCAST, "b", "x = x + b", lambda a, b: a + b),
    _pair("mul_b", BROADCAST, "b", "x = x * b", lambda a, b: a * b),
    Operator("mul_s", BROADCAST, "x = x * s", lambda x, y: [a * y[0] for a in x], "s"),
    Operator("matmul", MATMUL, "x = x @ w", _product, "w"),
    Operator("softmax", ROWWISE, "x = torch.softmax(x, dim=-1)", _softmax),
    Operator("layernorm", ROWWISE, "x = F.layer_norm(x, (x.shape[-1],))", _layernorm),
    Operator("rmsnorm", ROWWISE, "x = x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-6)", _rmsnorm),
    Operator("sum", REDUCTION, "x = torch.sum(x, dim=-1)", lambda x, _: [sum(x)]),
    Operator("mean", REDUCTION, "x = torch.mean(x, dim=-1)", lambda x, _: [sum(x) / len(x)]),
    Operator("max", REDUCTION, "x = torch.amax(x, dim=-1)", lambda x, _: [max(x)]),
)

OPERATORS: dict[str, Operator] = {operator.name: operator for operator in _ALL}


def others(chain: Sequence[str]) -> list[str]:
    """The further arguments of a forward that holds these operators, in the order of its signature."""
    read = {OPERATORS[name].other for name in chain}
    return [name for name in INPUTS if name in read]


def names(kind: str) -> list[str]:
    """Names of the operators of one kind, in a fixed order."""
    return [operator.name for operator in _ALL if operator.kind == kind]
