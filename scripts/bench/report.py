"""From the raw numbers of the sections to figures beside what is needed: the table, and the summary for README.

Runs in the driver; pure arithmetic on what the report file holds, so that figures can be made anew from it.
"""

from __future__ import annotations

from typing import Any

# What a figure needs to be. One place, so that the table and its tests agree.
VERDICTS_A_SECOND = 3.0
EXCLUSIVE_MS = 80.0
SELF_ERROR = {"device": 0.01, "eager": 0.03, "modelled": 0.0}
RATIO_OF_ALL_TRITON = 0.97
RATIO_POINTS = 2.0
RECOVERY_S = 3.0
HOG_GB_ABOVE_LIMIT = 2.0

Figure = dict[str, Any]


def _figure(name: str, measured: str, needed: str, ok: bool | None, **values: Any) -> Figure:
    """ok None: nothing to hold it against on this device, or nothing measured."""
    return {"figure": name, "measured": measured, "needed": needed, "ok": ok, "values": values}


def _cases(data: dict, cuda: bool) -> list[Figure]:
    rows = data.get("rows", [])
    right = sum(row["right"] for row in rows)
    flagged = [row["name"] for row in rows if row["category"] == "honest" and row["status"] == "hack"]
    wrong = [row["name"] for row in rows if not row["right"]]
    measured = f"{right} of {data.get('asked', len(rows))}, {len(flagged)} honest flagged"
    ok = right == data.get("asked") and not flagged
    return [_figure("cases right", measured, "all, none", ok, right=right, judged=len(rows), wrong=wrong)]


def _throughput(data: dict, cuda: bool) -> list[Figure]:
    rate, bad = data.get("rate"), data.get("not_correct", [])
    if rate is None:
        return [_figure("verdicts a second", "too few verdicts", f"{VERDICTS_A_SECOND:.0f}", None)]
    measured = f"{rate:.2f} over {data['verdicts']}" + (f", {len(bad)} not correct" if bad else "")
    ok = rate >= VERDICTS_A_SECOND and not bad if cuda else None
    values = {name: data.get(name) for name in ("rate", "lanes", "cores", "busy_share", "mean_cost_s", "bound")}
    return [_figure("verdicts a second", measured, f"{VERDICTS_A_SECOND:.0f}, all correct", ok, **values)]


def _exclusive(data: dict, cuda: bool) -> list[Figure]:
    held = data.get("exclusive_ms", {})
    if not held.get("count"):
        return [_figure("exclusive GPU time", "not measured", f"< {EXCLUSIVE_MS:.0f} ms", False if cuda else None)]
    # The mean: the GPU's time a verdict, which bounds the rate. A single long one costs no more than its share.
    measured = f"mean {held['mean']:.0f} ms, p50 {held['p50']:.0f} ms, p95 {held['p95']:.0f} ms"
    ok = held["mean"] < EXCLUSIVE_MS if cuda else None
    return [_figure("exclusive GPU time", measured, f"mean < {EXCLUSIVE_MS:.0f} ms", ok, **held)]


def _self(data: dict, cuda: bool) -> list[Figure]:
    figures = []
    for kind in ("device", "eager") if cuda else ("modelled",):
        found = data.get("errors", {}).get(kind, {}).get("all", {})
        limit, p95 = SELF_ERROR[kind], found.get("p95")
        name, needed = f"self, {kind}: p95 of |speedup - 1|", f"<= {limit:.0%}"
        if p95 is None:
            figures.append(_figure(name, "not measured", needed, False))
            continue
        bad = len(data.get("not_correct", []))
        measured = f"{p95:.2%} of {found['count']} runs" + (f", {bad} not correct" if bad else "")
        figures.append(
            _figure(
                name,
                measured,
                needed,
                p95 <= limit and not bad and found["count"] >= data["asked"],
                **data["errors"][kind],
            )
        )
    return figures


def _ratio(data: dict, cuda: bool) -> list[Figure]:
    rows = data.get("rows", [])
    whole = [row["profiling_ratio"] for row in rows if row.get("all")]
    lazy = {row["name"]: row.get("points_off") for row in rows if "truth" in row}
    complete = len(rows) >= data.get("asked", 0)
    figures = []
    known = [value for value in whole if value is not None]
    if whole:
        lowest = min(known, default=0.0)
        measured = f"lowest {lowest:.3f} of {len(whole)}" + (", some missing" if len(known) < len(whole) else "")
        ok = complete and len(known) == len(whole) and lowest > RATIO_OF_ALL_TRITON
        figures.append(_figure("profiling ratio, all Triton", measured, f"> {RATIO_OF_ALL_TRITON}", ok, lowest=lowest))
    if lazy:
        known = [abs(points) for points in lazy.values() if points is not None]
        worst = max(known, default=None)
        measured = "not measured" if worst is None else f"at most {worst:.2f} points off, {len(known)} of {len(lazy)}"
        ok = complete and len(known) == len(lazy) and worst is not None and worst <= RATIO_POINTS
        figures.append(_figure("profiling ratio, lazy", measured, f"within {RATIO_POINTS:.0f} points", ok, **lazy))
    return figures


def _recovery(data: dict, cuda: bool) -> list[Figure]:
    rows = data.get("rows", [])
    seconds = {row["name"]: row["recovery_s"] for row in rows}
    served = {name: value for name, value in seconds.items() if value is not None}
    slowest = max(served, key=served.get, default="")
    wrong = [row["name"] for row in rows if row.get("right") is False]
    if not served:
        return [_figure("recovery", "never", f"< {RECOVERY_S:.0f} s", False if rows else None, **seconds)]
    measured = f"at most {served[slowest]:.2f} s ({slowest})"
    if len(rows) < data["asked"]:
        measured += f", {data['asked'] - len(rows)} not tried"
    if len(served) < len(rows):
        never = [name for name in seconds if name not in served]
        measured = f"never after {', '.join(never)}; else {measured}"
    ok = len(served) == len(rows) and served[slowest] < RECOVERY_S and not wrong and len(rows) >= data["asked"]
    return [_figure("recovery past the budget", measured, f"< {RECOVERY_S:.0f} s", ok, wrong_status=wrong, **seconds)]


def _soak(data: dict, cuda: bool) -> list[Figure]:
    if "leaks" not in data:
        return [_figure("soak", "cut before its end", "no leak", None)]
    judged, left = len(data["rows"]), data["leaks"]
    enough = judged >= data["asked"]
    measured = f"{judged} of {data['asked']} judged, " + ("; ".join(left) or "no leak")
    figures = [
        _figure(
            "soak: left behind", measured, "no leak", not left and enough, growth_per_100=data["growth_per_100"],
            before=data["before"], after=data["after"], closed=data["closed"],
        )
    ]  # fmt: skip
    alone = data.get("alone")
    if alone:
        differ = [row["name"] for row in alone["differ"]]
        measured = f"{alone['judged'] - len(differ)} of {alone['judged']} the same"
        ok = not differ and alone["judged"] >= alone["asked"]
        figures.append(_figure("soak: the same alone", measured, f"{alone['asked']} the same", ok, differ=differ))
    return figures


def _hog(data: dict, cuda: bool) -> list[Figure]:
    if "peak_gb" not in data:
        return [_figure("memory hog", "not measured", "stopped in time", False)]
    limit = data["max_host_gb"] + HOG_GB_ABOVE_LIMIT
    measured = (
        f"{data['status']} at {data['peak_gb']:.1f} GB ({data['fastest_gb_s']:.1f} GB/s),"
        f" next after {data['next_after_s']:.1f} s"
    )
    ok = data["status"] == "oom" and data["peak_gb"] <= limit and data["next_status"] == "correct"
    ok = ok and data["next_after_s"] < RECOVERY_S
    names = ("peak_gb", "fastest_gb_s", "max_host_gb", "next_after_s")
    needed = f"oom, <= {limit:.0f} GB, < {RECOVERY_S:.0f} s"
    return [_figure("memory hog", measured, needed, ok, **{name: data[name] for name in names})]


def _kernelbench(data: dict, cuda: bool) -> list[Figure]:
    found = data.get("counts")
    if not found:
        return [_figure("KernelBench as its own candidate", "nothing judged", "all hack", None)]
    judged = len(data["rows"])
    measured = (
        f"{found['as_it_must_be']} of {judged} hack, {found['exception']} exceptions, {found['too_big']} too big"
        + (f", {data['asked'] - judged} not judged" if data.get("asked", judged) > judged else "")
    )
    ok = found["exception"] == 0 and judged >= data.get("asked", judged)
    names = [row["problem"] for row in data.get("exception", [])]
    return [_figure("KernelBench as its own candidate", measured, "all hack", ok, exceptions=names, **found)]


def _contexts(data: dict, cuda: bool) -> list[Figure]:
    rows = data.get("bursts", [])
    if not rows:
        return []
    found = []
    for row in rows:
        moved = [
            abs(row["beside"][name]["us"] / row["quiet"][name]["us"] - 1)
            for name in row["beside"]
            if name in row["quiet"]
        ]
        measured = f"{row['each_s']:.3f} s each, gone in {row['exit_each_s']:.3f} s"
        measured += f", timings moved {100 * max(moved):.1f} %" if moved else ""
        found.append(_figure(f"contexts, {row['setting']}, {row['width']} at once", measured, "-", None))
    return found


_MAKERS = {
    "cases": _cases, "throughput": _throughput, "exclusive": _exclusive, "self": _self, "contexts": _contexts,
    "ratio": _ratio, "recovery": _recovery, "soak": _soak, "hog": _hog, "kernelbench": _kernelbench,
}  # fmt: skip


def figures(sections: dict[str, dict], device: str) -> list[Figure]:
    """The figures of all sections that were measured, in the table's order."""
    found = []
    for name, maker in _MAKERS.items():
        data = sections.get(name)
        if data is None:
            continue
        made = maker(data, device == "cuda")
        if data.get("error"):
            for figure in made:
                figure["ok"], figure["measured"] = False, f"failed: {data['error'].splitlines()[-1][:80]}"
        if data.get("stopped"):
            for figure in made:
                figure["measured"] += " (stopped)"
        found += made
    return found


def table(found: list[Figure]) -> str:
    """One line a figure."""
    marks = {True: "ok", False: "NO", None: "-"}
    rows = [("figure", "measured", "needed", "ok")]
    rows += [(f["figure"], f["measured"], f["needed"], marks[f["ok"]]) for f in found]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[3]]) for row in rows)


def summary(found: list[Figure], machine: dict[str, Any]) -> dict[str, Any]:
    """What README says: every figure as measured, with the machine it was measured on."""
    where = {name: machine[name] for name in ("device", "cores", "versions", "date") if name in machine}
    lines = {f["figure"]: {name: f[name] for name in ("measured", "needed", "ok")} for f in found}
    return {**where, "figures": lines}
