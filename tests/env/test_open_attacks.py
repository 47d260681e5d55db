"""Cheats that still pass on the CPU: each is expected to, strictly, so that one which is stopped leaves this list.

They all do their work where the count of bytes doesn't look (torch's unwrapped methods, the process's own memory,
replaced counters, the runner itself) and let a small kernel finish it. Modelled times are claims of the process that
runs the candidate; on a GPU the judge's own clock bounds them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from env.pool import Pool
from env.records import Problem
from env.rules import Rules

pytestmark = pytest.mark.budget(150)

FOLDER = Path(__file__).resolve().parents[1] / "attacks" / "open"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if "reference" not in path.stem)


@pytest.fixture(scope="module")
def verdicts():
    """{attack: future of its verdict}."""
    rules = Rules(trials=3, compile_timeout_s=15, run_timeout_s=10)
    with Pool("cpu", slots=2, seed=7, rules=rules) as pool:
        futures = {}
        for name in NAMES:
            own = FOLDER / f"{name}.reference.py"
            reference = own if own.exists() else FOLDER / "reference.py"
            problem = Problem(id=reference.stem, source=reference.read_text())
            futures[name] = pool.submit(problem, (FOLDER / f"{name}.py").read_text(), raw=False)
        yield futures


@pytest.mark.xfail(strict=True, reason="passes still")
@pytest.mark.parametrize("name", NAMES)
def test_earns_nothing(verdicts, name):
    verdict = verdicts[name].result()
    assert verdict.status != "correct" or verdict.speedup < 1.2
