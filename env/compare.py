"""Are two outputs the same? Structure, shape, dtype, values within a tolerance, NaN and Inf in the same places.

Runs in the judge, on its private copies. The tolerance follows the precision and the magnitude of the reference's
output, so that neither a subsampled mean nor a flush to zero hides inside an absolute tolerance of 1e-2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from env.rules import Rules
from env.tensors import tensor_nodes, view

# Relative tolerance by dtype. fp32 leaves room for another order of summation over long axes and none for tf32 or fp16
# products (relative error about 3e-4 and more).
RELATIVE = {"float64": 1e-7, "float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2, "complex64": 1e-4, "complex128": 1e-7}
# tf32 keeps 10 bits of each factor: 5e-4 a product.
TF32_RELATIVE = {**RELATIVE, "float32": 3e-3, "complex64": 3e-3}
CHUNK = 1 << 26


@dataclass(frozen=True)
class Tolerance:
    """Error that is allowed: relative * (|expected| + share * typical size), or atol + rtol * |expected|.

    relative: by dtype; a dtype that isn't named must be equal. slack: a factor for references that are imprecise
    themselves. allclose: `torch.allclose` with atol = rtol = relative, as other evaluators have it.
    """

    relative: dict[str, float]
    slack: float = 1.0
    allclose: bool = False

    def of(self, expected: torch.Tensor, magnitude: torch.Tensor | float, dtype: str) -> torch.Tensor:
        """Elementwise, in the precision of `expected` (wide)."""
        relative = self.relative[dtype] * self.slack
        if self.allclose:
            return relative * (1.0 + expected.abs())
        # An element may be off by the relative tolerance of itself, or of a tenth of the output's typical size.
        return relative * (expected.abs() + 0.1 * magnitude) + 1e-30


OURS = Tolerance(RELATIVE)


def tolerance_for(rules: Rules, slack: float = 1.0) -> Tolerance:
    """The tolerance that a set of rules asks for. Other evaluators' rules are theirs exactly: without slack."""
    if rules.tolerance is not None:
        return Tolerance(rules.tolerance, allclose=True)
    return Tolerance(TF32_RELATIVE if rules.precision == "tf32" else RELATIVE, slack)


@dataclass
class Comparison:
    """`match`, and for its author the first thing that differs. `error`: largest error in units of the tolerance."""

    match: bool
    message: str = ""
    error: float = 0.0


def _structure(expected: dict, got: dict, path: str) -> str:
    if expected["kind"] != got["kind"] and got.get("type") == "NoneType":
        return f"{path} is None where the reference returns a {expected['kind']}: does forward() return it?"
    if expected["kind"] != got["kind"]:
        return f"{path} is a {got['kind']} where the reference returns a {expected['kind']}"
    if expected["kind"] == "tensor":
        if expected["shape"] != got["shape"]:
            return f"{path} has shape {got['shape']}, the reference has {expected['shape']}"
        if expected["dtype"] != got["dtype"]:
            return f"{path} has dtype {got['dtype']}, the reference has {expected['dtype']}"
        if expected["device"] != got.get("device"):
            return f"{path} is on {got.get('device')}, the reference is on {expected['device']}"
        return ""
    if expected["kind"] == "value":
        if expected["type"] != got["type"] or expected["value"] != got["value"]:
            shown = repr(got["value"])[:80]
            return f"{path} is the {got['type']} {shown}, the reference gives {expected['value']!r}"
        return ""
    if len(expected["items"]) != len(got["items"]) or expected.get("keys") != got.get("keys"):
        return f"{path} has {len(got['items'])} items, the reference has {len(expected['items'])}"
    for index, (mine, theirs) in enumerate(zip(expected["items"], got["items"])):
        found = _structure(mine, theirs, f"{path}[{index}]")
        if found:
            return found
    return ""


def _first_bad(bad: torch.Tensor, shape: list[int], start: int) -> list[int]:
    flat = int(torch.nonzero(bad)[0]) + start
    index = []
    for size in reversed(shape):
        index.append(flat % size)
        flat //= size
    return index[::-1]


def _values(
    expected: torch.Tensor, got: torch.Tensor, path: str, dtype: str, shape: list[int], allowed: Tolerance
) -> Comparison:
    if dtype not in allowed.relative:
        bad = (expected != got).reshape(-1)
        count = int(bad.sum())
        if not count:
            return Comparison(True)
        where = _first_bad(bad, shape, 0)
        return Comparison(False, f"{path} differs in {count} of {bad.numel()} elements, first at {where}", float("inf"))
    wide = torch.complex128 if expected.is_complex() else torch.float64
    expected, got = expected.reshape(-1), got.reshape(-1)
    magnitude = _root_mean_square(expected, wide)
    chunks = list(zip(expected.split(CHUNK), got.split(CHUNK)))

    def errors(number: int) -> torch.Tensor:
        mine, theirs = chunks[number]
        return _errors(mine.to(wide), theirs.to(wide), magnitude, dtype, allowed)

    if not expected.numel():
        return Comparison(True)
    found = [torch.stack([(part > 1.0).sum().double(), part.max()]) for part in map(errors, range(len(chunks)))]
    # Asked once: each question to the device waits for whoever else works on it.
    counts, worsts = torch.stack(found).cpu().unbind(1)
    count, worst = int(counts.sum()), float(worsts.max())
    if not count:
        return Comparison(True, error=worst)
    number = int(torch.nonzero(counts)[0])
    bad = errors(number) > 1.0
    local = int(torch.nonzero(bad)[0])
    where = _first_bad(bad, shape, number * CHUNK)
    mine, theirs = expected[number * CHUNK + local], got[number * CHUNK + local]
    first = f"first at {where}: {_show(theirs)} where the reference has {_show(mine)}"
    return Comparison(
        False, f"{path}: {count} of {expected.numel()} elements off by up to {worst:.3g} tolerances, {first}", worst
    )


def _errors(
    expected: torch.Tensor, got: torch.Tensor, magnitude: torch.Tensor, dtype: str, allowed: Tolerance
) -> torch.Tensor:
    """Error of each element in tolerances [elements]; infinite where NaN and Inf don't stand in the same places."""
    error = (expected - got).abs() / allowed.of(expected, magnitude, dtype)
    same_special = (expected == got) | (torch.isnan(expected) & torch.isnan(got))
    error = torch.where(torch.isfinite(expected), error, torch.where(same_special, 0.0, float("inf")))
    return torch.nan_to_num(error, nan=float("inf"), posinf=float("inf"))


def _root_mean_square(expected: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """Of the finite elements, 0 where there is none; stays on the device."""
    total = torch.zeros((), dtype=torch.float64, device=expected.device)
    count = torch.zeros((), dtype=torch.float64, device=expected.device)
    for part in expected.split(CHUNK):
        finite = torch.isfinite(part)
        total += torch.where(finite, part.to(wide).abs() ** 2, 0.0).sum()
        count += finite.sum()
    return (total / count.clamp(min=1.0)) ** 0.5


def _show(value: torch.Tensor) -> str:
    return f"{value.item():.6g}"


def compare(
    expected: dict[str, Any],
    expected_bytes: torch.Tensor,
    got: dict[str, Any],
    got_bytes: torch.Tensor,
    allowed: Tolerance = OURS,
) -> Comparison:
    """Compare two laid-out trees (`env.tensors`): layouts, and flat uint8 buffers [bytes] that hold their tensors."""
    difference = _structure(expected, got, "the output")
    if difference:
        return Comparison(False, difference, float("inf"))
    worst = 0.0
    for number, (mine, theirs) in enumerate(zip(tensor_nodes(expected), tensor_nodes(got))):
        path = "the output" if len(tensor_nodes(expected)) == 1 else f"output tensor {number}"
        result = _values(
            view(mine, expected_bytes), view(theirs, got_bytes), path, mine["dtype"], mine["shape"], allowed
        )
        if not result.match:
            return result
        worst = max(worst, result.error)
    return Comparison(True, error=worst)


def agreement(
    layout: dict[str, Any], data: torch.Tensor, wide_layout: dict[str, Any], wide_data: torch.Tensor, rules: Rules
) -> float | None:
    """Largest error of outputs against the same outputs in float64, in tolerances; None where they can't be compared
    (other shapes) or aren't finite.
    """
    allowed = tolerance_for(rules)
    nodes, wide_nodes = tensor_nodes(layout), tensor_nodes(wide_layout)
    if [node["shape"] for node in nodes] != [node["shape"] for node in wide_nodes]:
        return None
    worst = 0.0
    for node, wide_node in zip(nodes, wide_nodes):
        mine, exact = view(node, data), view(wide_node, wide_data)
        if not mine.is_floating_point() or not exact.is_floating_point():
            if not bool((mine == exact).all()):
                return None
            continue
        mine, exact = mine.reshape(-1).double(), exact.reshape(-1).double()
        if not mine.numel():
            continue
        if not bool(torch.isfinite(mine).all()) or not bool(torch.isfinite(exact).all()):
            return None
        magnitude = _root_mean_square(exact, exact.dtype)
        worst = max(worst, float(_errors(exact, mine, magnitude, node["dtype"], allowed).max()))
    return worst
