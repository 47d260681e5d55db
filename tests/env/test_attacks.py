"""What was tried against this judge by somebody who knew README and env/, and what became of each.

Every folder of tests/attacks got through once, or is an honest program that resembles one that did. A cheat may come
out as `correct` where its numbers are honest: then they are worth nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from env.pool import Pool
from env.records import Problem
from env.rules import Rules

pytestmark = pytest.mark.budget(150)

FOLDER = Path(__file__).resolve().parents[1] / "attacks"
ATTACKS = {
    folder.name: json.loads((folder / "expected.json").read_text())
    for folder in sorted(FOLDER.iterdir())
    if (folder / "expected.json").exists()
}


@pytest.fixture(scope="module")
def verdicts():
    """{attack: future of its verdict}."""
    rules = Rules(trials=3, compile_timeout_s=15, run_timeout_s=10)
    with Pool("cpu", slots=2, seed=7, rules=rules) as pool:
        yield {
            name: pool.submit(
                Problem(id=name, source=(FOLDER / name / "reference.py").read_text()),
                (FOLDER / name / "candidate.py").read_text(),
                raw=False,
            )
            for name in ATTACKS
        }


@pytest.mark.parametrize("name", ATTACKS)
def test_gets_what_it_deserves(verdicts, name):
    expected, verdict = ATTACKS[name], verdicts[name].result()
    assert verdict.status in expected["acceptable"], (expected["what"], verdict.message)
    if verdict.status == "correct":
        assert verdict.speedup <= expected.get("most_speedup", float("inf")), expected["what"]
        assert verdict.speedup >= expected.get("least_speedup", 0.0), expected["what"]
        assert verdict.profiling_ratio <= expected.get("most_profiling_ratio", 1.0), expected["what"]
        assert verdict.profiling_ratio >= expected.get("least_profiling_ratio", 0.0), expected["what"]


def test_there_are_cheats_and_honest_programs():
    honest = [name for name, expected in ATTACKS.items() if expected["what"].startswith("honest")]
    assert len(honest) >= 8 and len(ATTACKS) - len(honest) >= 30
