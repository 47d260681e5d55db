"""Made-up ablations for the tests of analysis/: ROOT/<variant>/seed<N> with known numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rl.config import load_recipe
from rl.metric_names import known


def value_of(variant: str, seed: int, step: int, name: str) -> float:
    """What a made-up run has for a metric: a known function, so that tests can say what a curve must show."""
    size = sum(map(ord, variant + name)) % 17 / 100
    return 0.2 + size + 0.01 * step + 0.02 * seed * (1 if step % 2 else -1)


METRICS = [f"fast/{p}_turn{turn}" for p in ("1.0", "1.2") for turn in (1, 2)]
METRICS += ["hack/ratio", "policy/entropy", "policy/grad_norm", "policy/ppl_rollout", "policy/ppl_learner", "mask/prs"]
HELDOUT = [f"eval/{name}" for name in METRICS if name.startswith("fast/")]


@pytest.fixture
def make_ablation(tmp_path) -> Callable[..., Path]:
    """make_ablation({variant: overrides}, seeds=(1, 2, 3), steps=8, heldout=4) writes run folders; returns the root."""

    def make(variants, seeds=(1, 2, 3), steps: int = 8, heldout: int = 4, root: str = "runs") -> Path:
        assert all(known(name) for name in METRICS + HELDOUT)
        for variant, overrides in variants.items():
            for seed in seeds:
                folder = tmp_path / root / variant / f"seed{seed}"
                (folder / "rl").mkdir(parents=True)
                settings = [f"seed={seed}", f"train.steps={steps}", *overrides]
                config = load_recipe("mini-cpu", settings).to_json()
                (folder / "config.json").write_text(json.dumps(config))
                lines = []
                for step in range(steps + 1):
                    names = METRICS if step else []
                    names = names + HELDOUT if heldout and step % heldout == 0 else names
                    if names:
                        row = {"step": step} | {name: value_of(variant, seed, step, name) for name in names}
                        lines.append(json.dumps(row) + "\n")
                (folder / "rl/metrics.jsonl").write_text("".join(lines))
        return tmp_path / root

    return make
