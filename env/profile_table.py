"""Reading a kernel table: is it one, and how much of the time is the candidate's own.

Runs in the judge, on what a worker claims. Needs no GPU.
"""

from __future__ import annotations

from typing import Any

MAX_ROWS = 200
MAX_US = 1e12


def valid_rows(rows: Any) -> list[dict[str, Any]]:
    """The well-formed rows of a claimed table: {name, own, count, time_us}; what isn't a table is an empty one."""
    if not isinstance(rows, list):
        return []
    table = []
    for row in rows[:MAX_ROWS]:
        if not isinstance(row, dict) or type(row.get("time_us")) not in (int, float):
            continue
        time_us = row["time_us"]
        if 0 <= time_us < MAX_US:  # (false for NaN; an integer may be too large to become a float)
            time_us = float(time_us)
            count = row["count"] if type(row.get("count")) is int and 0 <= row["count"] < 1 << 40 else 0
            table.append(
                {"name": str(row.get("name"))[:120], "own": row.get("own") is True, "count": count, "time_us": time_us}
            )
    return table


def profiling_ratio(rows: list[dict[str, Any]]) -> float | None:
    """Own device time over all device time (PAPER: T_generated / T_total), in [0, 1]; None where nothing was seen."""
    total = sum(row["time_us"] for row in rows)
    if total <= 0:
        return None
    return sum(row["time_us"] for row in rows if row["own"]) / total
