"""Randomness by name: every draw comes from the run's seed and the name of what is drawn. Runs in every rl process.

A generator that is derived anew from (seed, "rollout", step) needs no saved state and doesn't care what was drawn
before it, so a resumed run and a run with another batch order draw the same numbers.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import torch

Name = str | int


def derive(seed: int, *names: Name) -> int:
    """A 63-bit seed for the purpose `names`, e.g. derive(seed, "prs", step): the same on every host."""
    # repr keeps ("a", 1) and ("a1",) apart, and 1 apart from "1".
    digest = hashlib.sha256(repr((seed, *names)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(seed: int, *names: Name, device: str = "cpu") -> torch.Generator:
    """A fresh torch generator for the purpose `names`."""
    return torch.Generator(device=device).manual_seed(derive(seed, *names))


def rng(seed: int, *names: Name) -> random.Random:
    """A fresh standard-library generator for the purpose `names`."""
    return random.Random(derive(seed, *names))


def uniform(seed: int, *names: Name) -> float:
    """One draw from [0, 1) that belongs to `names` alone: the same number whatever else is drawn, in any order."""
    return (derive(seed, *names) >> 10) / 2**53


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python and torch (all devices), for library code that uses them."""
    random.seed(seed)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """The global generators' states, of plain types only, so that `torch.load(weights_only=True)` reads them back."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(internal), gauss], "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put back what `rng_state` returned. CUDA states are skipped where this host has another number of devices."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    cuda = state.get("cuda", [])
    if cuda and torch.cuda.is_available() and torch.cuda.device_count() == len(cuda):
        torch.cuda.set_rng_state_all(cuda)
