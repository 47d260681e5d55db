"""Sections soak and hog: does anything stay behind, and does one candidate get the machine's memory?

Runs in the driver. Left behind: processes, descriptors, scratch, memory of the host and of the device. Looked at three
times: idle before and after the run (with the same few candidates judged last, so that the same references are kept),
and once the pool is closed.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterator
from typing import Any

from env.records import Verdict
from scripts.bench import machine
from scripts.bench.arithmetic import slope
from scripts.bench.candidates import GROUP, answer, honest, problem, specs
from scripts.bench.hostile import cheat, faults, faulty, hog, wrong
from scripts.bench.stream import Context, Item, run_items, settle
from scripts.bench.verdicts import case_items

COMPILE_S, RUN_S = {"cuda": 20.0, "cpu": 6.0}, {"cuda": 6.0, "cpu": 3.0}
COUNT = {"cuda": 600, "cpu": 2000}
LOOK_EVERY_S = 5.0
HANGS_EVERY = 20  # of the bad ones: each costs a lane its whole budget


def mixed(device: str, seed: int, first: int = 0) -> Iterator[Item]:
    """Endless mix, a third of it crashing or cheating: tests/cases and our own, every text distinct.

    first: where the numbers in the texts begin; other numbers, other texts, so that none is a duplicate to the pool.
    """
    rng = random.Random(seed)
    good = ((f"{spec.name}_{number}", spec, text) for spec, number, text in honest(device, start=500_000 + first))
    cases = [item for item in case_items(device) if not item.raw and len(item.source) < 100_000]
    hanging = ("d05", "d11", "d19")
    bad_cases = [item for item in cases if item.name[0] in "acd" and not item.name.startswith(hanging)]
    hangs = [item for item in cases if item.name.startswith(hanging)]
    others = [item for item in cases if item.name[0] in "beh" and "autotune" not in item.name]
    for number in itertools.count(first):
        if number % 3 == 2:
            kind = "hang" if number // 3 % HANGS_EVERY == HANGS_EVERY - 1 else rng.choice(("case", "case", "own"))
            if kind == "own":
                yield _own_bad(device, number, rng)
            else:
                yield _distinct(rng.choice(hangs if kind == "hang" else bad_cases), number, kind)
        elif number % 8 == 0:
            yield _distinct(rng.choice(others), number, "case")
        else:
            name, spec, text = next(good)
            yield Item(f"{number}:{name}", problem(spec), text, ("correct",), facts={"kind": "honest"})


def _distinct(item: Item, number: int, kind: str) -> Item:
    source = f"{item.source}\n# {number}\n"
    return Item(f"{number}:{item.name}", item.problem, source, item.expected, facts={"kind": kind})


def _own_bad(device: str, number: int, rng: random.Random) -> Item:
    spec = rng.choice(specs(device))
    name = rng.choice(("cheat", "wrong", "fault"))
    if name == "cheat":
        text, expected = cheat(spec, 900_000 + number), ("hack",)
    elif name == "wrong":
        text, expected = wrong(spec, 900_000 + number), ("incorrect",)
    else:
        fault = rng.choice([fault for fault in faults(device) if not fault.budgets])
        text, expected, name = faulty(spec, 900_000 + number, fault), fault.expected, fault.name
    return Item(f"{number}:{name}", problem(spec), text, expected, facts={"kind": "own"})


def _last_ones(device: str, start: int) -> list[Item]:
    """All twelve problems, often enough for every evaluator to meet them, before both idle looks.

    An evaluator keeps the references of a few problems: it is full of these, and what it holds is alike both times.
    """
    rounds = 2 * len(machine.judge_processes().evaluators)
    chosen = [spec for _ in range(rounds) for spec in specs(device)]
    return [
        Item(f"last_{number}", problem(spec), answer(spec, number), ("correct",))
        for number, spec in enumerate(chosen, start)
    ]


def leaks(before: dict, after: dict, closed: dict, start: dict, growth: dict, lanes: int) -> list[str]:
    """What stayed behind, in words; empty where nothing did.

    before, after: idle looks at the running pool. closed: after its end. start: before it. growth: per 100 verdicts.
    Allowance for one kept reference a lane more or less, each with two to four processes, a folder and descriptors.
    """
    found = []
    allowed = {
        "processes": 4 * lanes, "workers": 2 * lanes, "worker_folders": 2 * lanes, "judge_folders": 0,
        "driver_fds": 4, "evaluator_fds": 16 * lanes, "fork_server_fds": 4 * lanes,
    }  # fmt: skip
    for name, room in allowed.items():
        if after[name] - before[name] > room:
            found.append(f"{name} grew from {before[name]} to {after[name]}")
    for name in ("processes", "judge_folders", "files"):
        if closed[name] > start[name]:
            found.append(f"{closed[name] - start[name]} {name} are left when the pool is closed")
    for name, limit in (("evaluator_mb", 8.0), ("fork_server_mb", 8.0), ("driver_mb", 8.0)):
        if (growth.get(name) or 0.0) > limit:
            found.append(f"{name} grows by {growth[name]:.1f} for 100 verdicts")
    if start["gpu_mb"] is not None:
        if closed["gpu_mb"] - start["gpu_mb"] > 64:
            found.append(f"{closed['gpu_mb'] - start['gpu_mb']} MB of the GPU are still in use after closing")
        # One kept reference is a context of some 600 MB.
        if after["gpu_mb"] - before["gpu_mb"] > 1400 * lanes:
            found.append(f"gpu_mb grew from {before['gpu_mb']} to {after['gpu_mb']}")
    return found


def soak(context: Context) -> None:
    """Many mixed candidates in a row, then some of them again alone; only these where all the others are judged."""
    count = context.options.soak_count or COUNT[context.device]
    again = min(context.options.soak_again, count)
    limits = {"compile_timeout_s": COMPILE_S[context.device], "run_timeout_s": RUN_S[context.device]}
    data = context.data
    if "leaks" in data and data.get("asked") == count == len(data["rows"]):
        _again(context, data["rows"], again, limits)
        return
    for old in data.keys() - {"minutes", "command", "date"}:
        del data[old]
    rows, series = data.setdefault("rows", []), data.setdefault("series", [])
    data.update(asked=count, start=machine.snapshot(context.device))
    looked = time.monotonic()

    def look(row: dict[str, Any], verdict: Verdict) -> None:
        nonlocal looked
        if time.monotonic() - looked > LOOK_EVERY_S:
            looked = time.monotonic()
            series.append({"verdicts": len(rows) + 1, **machine.snapshot(context.device)})

    with context.pool(**limits) as pool:
        lanes = data["lanes"] = len(pool)
        run_items(
            context, pool, itertools.chain(
                itertools.islice(mixed(context.device, context.seed, first=60_000), 3 * lanes),
                _last_ones(context.device, 800_000),
            ), context.deadline(0.2), "soak: warm-up",
        )  # fmt: skip
        settle(context.device)
        data["before"] = machine.snapshot(context.device)
        items = itertools.islice(mixed(context.device, context.seed), count)
        _, facts = run_items(context, pool, items, context.deadline(0.7), "soak", count, rows=rows, look=look)
        last = _last_ones(context.device, 801_000)
        run_items(context, pool, last, context.deadline(0.75), "soak: last ones")
        settle(context.device)
        data["after"] = machine.snapshot(context.device)
    time.sleep(1.0)
    data["closed"] = machine.snapshot(context.device)
    late = [point for point in series if point["verdicts"] > len(rows) / 3]
    names = ("evaluator_mb", "fork_server_mb", "driver_mb", "processes", "evaluator_fds", "gpu_mb")
    growth = {
        name: slope([(point["verdicts"] / 100.0, point[name]) for point in late if point[name] is not None])
        for name in names
    }
    data.update(facts, growth_per_100=growth)
    data["leaks"] = leaks(data["before"], data["after"], data["closed"], data["start"], growth, lanes)
    data["not_as_expected"] = [row for row in rows if row.get("right") is False]
    context.save()
    _again(context, rows, again, limits)


def _again(context: Context, rows: list[dict[str, Any]], count: int, limits: dict[str, float]) -> None:
    """Judge the first ones once more, one at a time in a pool of their own: neighbours may not matter."""
    seen = {row["name"]: row["status"] for row in rows}
    before = context.data.get("alone", {"judged": 0, "differ": []})  # of a run that was cut short
    items = [item for item in itertools.islice(mixed(context.device, context.seed), count) if item.name in seen]
    items = items[before["judged"] :]
    with context.pool(slots=1, lanes=1, **limits) as pool:
        alone, facts = run_items(context, pool, items, context.deadline(), "soak: alone", len(items), ahead=0)
    context.data["alone"] = {
        **facts,
        "judged": before["judged"] + len(alone),
        "asked": count,
        "differ": before["differ"] + [
            {"name": row["name"], "beside_others": seen[row["name"]], "alone": row["status"], "cost": row["cost"],
             "message": row.get("message", "")}
            for row in alone
            if row["status"] != seen[row["name"]]
        ],
    }  # fmt: skip


# A memory hog -------------------------------------------------------------------------------------------------------

HOST_GB, CAP_GB = {"cuda": 16.0, "cpu": 2.0}, {"cuda": 64.0, "cpu": 5.0}


def hog_check(context: Context) -> None:
    """How far the machine's memory goes up before a candidate that eats it is stopped, and who is served then."""
    device = context.device
    limit, threads = HOST_GB[device], min(12, max(2, len(os.sched_getaffinity(0))))
    free = machine.describe("cpu")["memory_gb"] - machine.used_gb()
    cap = min(CAP_GB[device], 0.6 * free)
    context.data.update(max_host_gb=limit, cap_gb=cap, threads=threads, group=GROUP)
    if cap <= limit + 1.0:
        raise RuntimeError(f"only {free:.1f} GB are free: too few to let a hog pass its limit of {limit:.0f} GB safely")
    spec = specs(device)[0]
    with context.pool(slots=1, lanes=1, max_host_gb=limit, compile_timeout_s=20.0, run_timeout_s=10.0) as pool:
        ask = lambda text: pool.submit(problem(spec), text, raw=False)  # noqa: E731
        ask(answer(spec, 400_000)).result()
        settle(device)
        start = time.monotonic()
        ask(answer(spec, 400_001)).result()
        normal = time.monotonic() - start
        settle(device)
        with machine.MemoryWatch() as watch:
            verdict = ask(hog(spec, 400_002, cap, threads)).result()
            stopped = time.monotonic()
            after = ask(answer(spec, 400_003)).result()
            served = time.monotonic()
    context.data.update(
        status=verdict.status, message=verdict.message[:300], next_status=after.status,
        peak_gb=watch.peak_gb(), fastest_gb_s=watch.fastest_gb_s(), samples=len(watch.samples),
        normal_s=normal, next_after_s=served - stopped - normal, verdict_s=verdict.cost.get("total_s"),
    )  # fmt: skip
