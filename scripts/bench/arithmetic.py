"""What the benchmark makes of its raw numbers: percentiles, rates, slopes. Runs in the driver; plain floats only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def percentile(values: Iterable[float], share: float) -> float | None:
    """The value below which `share` (0 to 1) of the values lie, linear between neighbours; None where there is none."""
    ordered = sorted(values)
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
    """count, mean, p50, p95 and max of a list of numbers."""
    return {
        "count": len(values),
        "mean": sum(values) / len(values) if values else None,
        "p50": percentile(values, 0.5),
        "p95": percentile(values, 0.95),
        "max": max(values, default=None),
    }


def steady_rate(done_s: Sequence[float], skip: int, until_s: float) -> dict[str, float | int | None]:
    """Verdicts a second between the `skip`-th and the last one that came in before `until_s`.

    `until_s` is when the last candidate was handed in: after it the queue runs dry, and what comes in tells how fast a
    few are, not how many a full machine judges. Counted from one completion to another, so that no part of a verdict
    is lost or paid for twice.
    """
    inside = [moment for moment in sorted(done_s) if moment <= until_s][skip:]
    if len(inside) < 2 or inside[-1] <= inside[0]:
        return {"rate": None, "verdicts": len(inside), "from_s": None, "to_s": None}
    rate = (len(inside) - 1) / (inside[-1] - inside[0])
    return {"rate": rate, "verdicts": len(inside), "from_s": inside[0], "to_s": inside[-1]}


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Least-squares growth of the second number for each unit of the first; None for fewer than three points."""
    if len(points) < 3:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    width = sum((x - mean_x) ** 2 for x, _ in points)
    if width == 0:
        return None
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / width


def mean_by_key(rows: Iterable[dict[str, float]]) -> dict[str, float]:
    """The mean of every key over the rows that have it: {stage: seconds}."""
    sums: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            sums.setdefault(key, []).append(value)
    return {key: sum(values) / len(values) for key, values in sums.items()}


def bound(rate: float, lanes: int, busy_share: float, exclusive_s: float | None, stages: dict[str, float]) -> str:
    """Name what keeps the rate where it is: the cores, the GPU that one verdict holds alone, or waiting in a stage.

    rate: verdicts a second. busy_share: of all cores. exclusive_s: mean seconds that a verdict holds the GPU alone.
    stages: mean seconds a stage, `total_s` among them.
    """
    held = None if exclusive_s is None else rate * exclusive_s
    parts = [f"cores {busy_share:.0%} busy"]
    if held is not None:
        parts.append(f"GPU held alone {held:.0%} of the time")
    inner = {name: seconds for name, seconds in stages.items() if name not in ("total_s", "exclusive_s")}
    longest = max(inner, key=inner.get, default="")
    if longest:
        total = stages.get("total_s") or sum(inner.values())
        parts.append(f"{lanes} lanes, longest stage {longest} {inner[longest]:.2f} of {total:.2f} s")
    named = "waiting inside the longest stage"
    if busy_share > 0.85:
        named = "the CPU cores"
    elif held is not None and held > 0.7:
        named = "the time that a verdict has the GPU alone"
    return f"{named} ({'; '.join(parts)})"


def errors_of_self(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, dict[str, float | int | None]]]:
    """|speedup - 1| of runs of a program against itself: {kind of time: {problem or "all": spread}}."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for kind, speedup in row.get("speedups", {}).items():
            if speedup is not None:
                for name in (row["problem"], "all"):
                    found.setdefault(kind, {}).setdefault(name, []).append(abs(speedup - 1.0))
    return {kind: {name: spread(errors) for name, errors in problems.items()} for kind, problems in found.items()}
