"""Cheats that do their work where a count of bytes in their own process doesn't look: none earns anything on the CPU.

torch's unwrapped methods, the process's own memory, replaced counters, the runner itself; then a small kernel finishes
it. The judge counts what it runs itself (`env.replay`), so that such work is missing from the outputs there.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from env.pool import Pool
from env.records import Problem
from env.rules import Rules

pytestmark = pytest.mark.budget(150)

FOLDER = Path(__file__).resolve().parents[1] / "attacks" / "uncounted"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if "reference" not in path.stem)


def source_of(name: str) -> str:
    """An attack with what it shares with others put in its place."""
    text = (FOLDER / f"{name}.py").read_text()
    return re.sub(r"^# here stands (shared/\w+\.py)\n", lambda found: (FOLDER / found[1]).read_text(), text, flags=re.M)


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
            futures[name] = pool.submit(problem, source_of(name), raw=False)
        yield futures


@pytest.mark.parametrize("name", NAMES)
def test_earns_nothing(verdicts, name):
    verdict = verdicts[name].result()
    assert verdict.status != "correct" or verdict.speedup < 1.2
