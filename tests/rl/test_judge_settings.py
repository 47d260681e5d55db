"""The judge of a run: every setting of `env` reaches the pool and its rules; seeds and GPUs by device and placement."""

from __future__ import annotations

import pytest

from env.rules import rules_for
from rl import rollout
from rl.config import load_recipe

pytestmark = pytest.mark.budget(10)

# No default among them, no two numbers equal.
SETTINGS = [
    "env.slots=3", "env.lanes=5", "env.trials=7", "env.compile_timeout_s=11", "env.run_timeout_s=13",
    "env.profile=paper",
]  # fmt: skip
GPU = ["env.precision=tf32", "env.reference=compile", "env.time=device"]


@pytest.fixture
def made(monkeypatch):
    """What make_pool gives the pool."""
    calls = []
    monkeypatch.setattr(rollout, "Pool", lambda **given: calls.append(given) or given)
    monkeypatch.setattr(rollout, "visible_gpus", lambda: ["0", "1", "2", "3"])
    return lambda recipe, *settings: rollout.make_pool(load_recipe(recipe, [*SETTINGS, *settings]))


def test_on_the_cpu(made):
    given = made("mini-cpu")
    rules = given["rules"]
    assert (given["device"], given["slots"], given["lanes"], given["gpus"]) == ("cpu", 3, 5, None)
    assert (rules.trials, rules.compile_timeout_s, rules.run_timeout_s) == (7, 11, 13)
    assert rules == rules_for("paper", "cpu", trials=7, compile_timeout_s=11.0, run_timeout_s=13.0)
    assert rules != rules_for("default", "cpu", trials=7, compile_timeout_s=11.0, run_timeout_s=13.0)


def test_on_a_gpu(made):
    given = made("mini-gpu", *GPU)
    rules = given["rules"]
    assert (given["device"], given["slots"], given["lanes"], given["gpus"]) == ("cuda", 3, 5, None)
    assert (rules.precision, rules.reference, rules.rewarded_time) == ("tf32", "compile", "device")
    usual = made("mini-gpu", "env.precision=ieee", "env.reference=eager", "env.time=eager")["rules"]
    assert (usual.precision, usual.reference, usual.rewarded_time) == ("ieee", "eager", "eager")


def test_on_the_cpu_secret_inputs_are_the_seeds_and_on_a_gpu_nobodys(made):
    seeds = [made("mini-cpu", f"seed={seed}")["seed"] for seed in (1, 1, 2)]
    assert seeds[0] == seeds[1] != seeds[2] and 1 not in seeds
    assert made("mini-gpu")["seed"] is None


@pytest.mark.parametrize(("ranks", "left"), [(None, ["1", "2", "3"]), ("3", ["3"])])
def test_apart_the_judge_has_the_gpus_that_the_learner_does_not_take(made, monkeypatch, ranks, left):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if ranks:
        monkeypatch.setenv("WORLD_SIZE", ranks)
    assert made("mini-gpu", "env.placement=apart")["gpus"] == left
