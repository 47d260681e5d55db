"""What makes a problem degenerate, from its reference's outputs alone. Pure functions on tensors; runs in the driver.

A problem is degenerate where a program that doesn't do the work can't be told from one that does.

| kind | what was seen |
| --- | --- |
| zero, constant | every output holds zero, or one value, throughout, in every trial |
| inputs_fixed | get_inputs gives the same inputs with every seed |
| independent_of_inputs | other inputs give the same outputs, within a tolerance |
| independent_of_weights | other weights give the same outputs, within a tolerance |
| random | the same inputs give other outputs in another run, or with another seed of torch |
| shortcut | an output that nobody computed is within a tolerance of the right one |
| nan, fails | NaN throughout; the reference raises or returns nothing to compare |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from env.compare import Tolerance, compare, tolerance_for
from env.rules import PROFILES
from env.tensors import tensor_nodes, view

KINDS = (
    "zero", "constant", "inputs_fixed", "independent_of_inputs", "independent_of_weights", "random", "shortcut", "nan",
    "fails",
)  # fmt: skip


@dataclass
class Observed:
    """What was seen of a reference; buffers are flat bytes as env.tensors lays them out.

    outputs, inputs: one a trial (at least three). moved: outputs for the first trial's inputs with other weights, None
    where it has none. reseeded: the first trial's again, with another seed of torch.
    """

    layout: dict[str, Any]
    outputs: list[torch.Tensor]
    inputs_layout: dict[str, Any]
    inputs: list[torch.Tensor]
    moved: torch.Tensor | None
    reseeded: torch.Tensor


def tolerances() -> dict[str, Tolerance]:
    """By profile of env.rules, strictest first: what passes ours passes as a rule the others."""
    return {name: tolerance_for(rules) for name, rules in PROFILES.items()}


def reasons(seen: Observed, allowed: Mapping[str, Tolerance]) -> list[dict[str, Any]]:
    """[{kind, detail, passes}], [] for a sound problem. passes: under which profiles, where that is the question."""
    found: list[dict[str, Any]] = []

    def add(kind: str, detail: str, passes: list[str] | None = None) -> None:
        found.append({"kind": kind, "detail": detail} | ({"passes": passes} if passes is not None else {}))

    def passing(other: torch.Tensor, expected: torch.Tensor | None = None) -> list[str]:
        expected = seen.outputs[0] if expected is None else expected
        return [
            name for name, limit in allowed.items() if compare(seen.layout, expected, seen.layout, other, limit).match
        ]

    strict = next(iter(allowed))
    if strict not in passing(seen.reseeded):
        add("random", "another seed of torch gives another output for the same inputs and weights")
    values = one_value(seen)
    if values is not None and not any(map(any, values)):
        add("zero", "all outputs are zero in every trial")
    elif values is not None:
        shown = sorted({f"{value:.6g}" for trial in values for value in trial})[:4]
        add("constant", f"every output holds one value throughout: {', '.join(shown)}")
    if all(torch.equal(given, seen.inputs[0]) for given in seen.inputs[1:]):
        add("inputs_fixed", "get_inputs gives the same inputs whatever the seed")
    elif all_pass := [
        name for name in passing(seen.outputs[1]) if all(name in passing(other) for other in seen.outputs[2:])
    ]:
        add("independent_of_inputs", f"{len(seen.outputs)} trials of other inputs give the same output", all_pass)
    if seen.moved is not None and (same := passing(seen.moved)):
        add("independent_of_weights", "with every weight changed the output is the same", same)
    for name, guesses in shortcuts(seen):
        # In every trial but the one that it may be made of: a guess that passes once may be luck.
        if passes := [
            limit
            for limit in allowed
            if all(limit in passing(guess, seen.outputs[trial]) for trial, guess in guesses.items())
        ]:
            add("shortcut", name, passes)
    return found


def one_value(seen: Observed) -> list[list[float]] | None:
    """The value of each output in each trial, if every one of them holds a single value; None otherwise, and for
    outputs of one element, which always do."""
    nodes = tensor_nodes(seen.layout)
    if not any(view(node, seen.outputs[0]).numel() > 1 for node in nodes):
        return None
    values = []
    for data in seen.outputs:
        parts = [view(node, data).reshape(-1) for node in nodes]
        if not all(part.numel() and bool((part == part[0]).all()) for part in parts):
            return None
        values.append([float(part[0].abs() if part.is_complex() else part[0]) for part in parts])
    return values


def shortcuts(seen: Observed) -> Iterator[tuple[str, dict[int, torch.Tensor]]]:
    """(name, trial -> outputs) of programs that compute nothing: they know another trial's outputs, or hand back an
    input. What is the other trial's output itself is no shortcut of its own: independent_of_inputs tells of it."""
    nodes, known = tensor_nodes(seen.layout), seen.outputs[1]
    others = [trial for trial in range(len(seen.outputs)) if trial != 1]
    told = [known]
    for name, make in (
        ("zeros in place of the output", torch.zeros_like),
        ("one value, the mean of another trial's output", lambda part: _like(part, _mean(part))),
        (
            "one row for the whole batch, from another trial's output",
            lambda part: _like(part, _mean(part, 0)) if part.dim() > 1 else part,
        ),
    ):
        guess = _made(nodes, known, make)
        if not any(torch.equal(guess, other) for other in told):
            told.append(guess)
            yield name, dict.fromkeys(others, guess)
    for number, node in enumerate(tensor_nodes(seen.inputs_layout)):
        if all(n["shape"] == node["shape"] and n["dtype"] == node["dtype"] for n in nodes):
            yield (
                f"input {number} returned as it is",
                {t: _filled(nodes, known, view(node, seen.inputs[t])) for t in others},
            )


def _made(nodes: list[dict[str, Any]], data: torch.Tensor, make: Any) -> torch.Tensor:
    changed = data.clone()
    for node in nodes:
        part = view(node, changed)
        if part.numel():
            part.copy_(make(part))
    return changed


def _filled(nodes: list[dict[str, Any]], data: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return _made(nodes, data, lambda _: value)


def _mean(part: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    wide = part.to(torch.complex128 if part.is_complex() else torch.float64)
    return wide.mean() if dim is None else wide.mean(dim, keepdim=True)


def _like(part: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return value.to(part.dtype).expand(part.shape)
