"""A candidate that crashes without its kernels is asked again in a fresh process, twice at most."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from env.judge import Judge
from env.records import Verdict
from env.reference import Rejected

pytestmark = pytest.mark.budget(10)


def effect_of(monkeypatch, without: str, fresh: list[str]) -> tuple[Verdict, int]:
    """The verdict so far behind `_check_effect`, and how many fresh processes it took, for made-up outcomes."""
    judge, asked = object.__new__(Judge), []
    verdict = Verdict("infra_error")
    verdict.evidence["launches"] = {"train": [{"name": "kernel", "own": True, "count": 1}]}
    session = SimpleNamespace(end=lambda: None)
    reference = SimpleNamespace(trial=lambda kind: None)
    monkeypatch.setattr(Judge, "_copying", lambda *_: [])
    monkeypatch.setattr(Judge, "_without", lambda *_: without)
    monkeypatch.setattr(Judge, "_knock_out", lambda *_: asked.append(1) or fresh[len(asked) - 1])
    judge._check_effect(None, "", reference, session, verdict, None)
    return verdict, len(asked)


def test_a_changed_output_needs_no_fresh_process(monkeypatch):
    verdict, processes = effect_of(monkeypatch, "changed", [])
    assert processes == 0 and verdict.evidence["without_kernels"] == "changed"


@pytest.mark.parametrize("without", ["unchanged", "crashed"])
@pytest.mark.parametrize("fresh", [["changed"], ["crashed", "changed"], ["crashed", "crashed"]])
def test_a_crash_counts_as_an_effect_only_where_it_comes_again(monkeypatch, without, fresh):
    verdict, processes = effect_of(monkeypatch, without, fresh)
    assert processes == len(fresh) and verdict.evidence["knockout"] == fresh[-1]


@pytest.mark.parametrize("fresh", [["unchanged"], ["crashed", "unchanged"]])
def test_a_crash_by_chance_doesnt_save_kernels_that_do_nothing(monkeypatch, fresh):
    with pytest.raises(Rejected, match="stays the same") as caught:
        effect_of(monkeypatch, "crashed", fresh)
    assert caught.value.status == "hack" and caught.value.evidence["rule"] == "no_effect"
