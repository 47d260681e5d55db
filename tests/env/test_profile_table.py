"""A worker's claimed kernel table: what isn't one counts for nothing, and the ratio stays between 0 and 1."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env.profile_table import MAX_ROWS, profiling_ratio, valid_rows

pytestmark = pytest.mark.budget(10)


def row(time_us, own=True, name="kernel", count=1):
    return {"name": name, "own": own, "count": count, "time_us": time_us}


def test_ratio_is_own_time_over_all_time():
    assert profiling_ratio([row(3.0), row(1.0, own=False), row(2.0), row(2.0, own=False)]) == pytest.approx(5 / 8)
    assert profiling_ratio([row(3.0)]) == 1.0
    assert profiling_ratio([row(3.0, own=False)]) == 0.0


def test_nothing_seen_is_none_and_not_zero():
    assert profiling_ratio([]) is None
    assert profiling_ratio([row(0.0)]) is None


@pytest.mark.parametrize("claim", [None, 5, "rows", {"rows": []}, [[1, 2]], [None], ["x"], [{}], [{"time_us": "5"}]])
def test_what_is_no_table_is_an_empty_one(claim):
    assert valid_rows(claim) == []


@pytest.mark.parametrize("time_us", [math.nan, math.inf, -math.inf, -1.0, None, "1", [1.0]])
def test_rows_with_an_impossible_time_are_dropped(time_us):
    assert valid_rows([row(time_us), row(2.0)]) == [row(2.0)]


def test_own_must_be_true_itself():
    for claim in (1, "yes", [True], None):
        assert valid_rows([row(1.0, own=claim)])[0]["own"] is False


def test_long_tables_and_names_are_cut():
    table = valid_rows([row(1.0, name="k" * 5000)] * (MAX_ROWS + 50))
    assert len(table) == MAX_ROWS and all(len(entry["name"]) <= 120 for entry in table)


def test_further_keys_do_not_come_through():
    assert valid_rows([{**row(1.0), "bytes": 7, "note": "x" * 10_000}]) == [row(1.0)]


def test_count_that_is_no_number_is_zero():
    assert valid_rows([row(1.0, count="many")])[0]["count"] == 0


KEYS = st.sampled_from(["name", "own", "count", "time_us", "x"])
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=8,
)
ROWS = st.lists(st.fixed_dictionaries({"name": JSON, "own": JSON, "count": JSON, "time_us": JSON}), max_size=4)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.one_of(JSON, ROWS))
def test_any_claim_gives_a_ratio_in_its_range(claim):
    rows = valid_rows(claim)
    ratio = profiling_ratio(rows)
    assert ratio is None or 0.0 <= ratio <= 1.0
    assert all(entry["time_us"] >= 0 and isinstance(entry["count"], int) for entry in rows)
