"""Sections that judge and look at the verdicts: cases, throughput, exclusive, self. Runs in the driver."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from env.records import Problem, Verdict
from scripts.bench import machine
from scripts.bench.arithmetic import bound, errors_of_self, mean_by_key, spread, steady_rate
from scripts.bench.candidates import GROUP, Spec, answer, honest, problem, self_problem, sized, spec_named, specs
from scripts.bench.stream import Context, Item, run_items

CASES = Path(__file__).resolve().parents[2] / "tests" / "cases"
# These run into a timeout or try many configurations: first, so that the rest is judged beside them.
SLOW = ("d05_kernel_infinite_loop", "d11_signal_ignored_hang", "d19_deep_recursion", "h37_autotune_many_configs")
# Sized for a GPU's clock: under the interpreter, which takes milliseconds a program, 64 rows show the same.
LARGE, SMALL = "torch.randn(512, 1024)", "torch.randn(64, 1024)"
SHORT_FORWARD_US = 1000.0


def case_items(device: str, kinds: str = "abcdeh", only: str = "") -> list[Item]:
    """tests/cases that a device can judge, slow ones first."""
    items = []
    for folder in sorted(CASES.iterdir(), key=lambda folder: (folder.name not in SLOW, folder.name)):
        if not (folder / "expected.json").exists() or folder.name[0] not in kinds or only not in folder.name:
            continue
        expected = json.loads((folder / "expected.json").read_text())
        if expected["needs_gpu"] and device == "cpu":
            continue
        acceptable = expected["acceptable"]
        if device == "cuda":
            acceptable = expected.get("acceptable_on_gpu", acceptable)
        reference = (folder / "reference.py").read_text()
        if device == "cpu":
            reference = reference.replace(LARGE, SMALL)
        candidate = next(folder.glob("candidate*")).read_text(encoding="utf-8", errors="surrogateescape")
        items.append(
            Item(
                folder.name,
                Problem(id=folder.name, source=reference),
                candidate,
                tuple(acceptable),
                raw=expected["input_kind"] == "raw_response",
                facts={"category": expected["category"], "acceptable": acceptable},
            )
        )
    return items


def cases(context: Context) -> None:
    """Every case of tests/cases against the statuses that its expected.json allows."""
    items = case_items(context.device, context.options.kinds, context.options.only)

    def show(row: dict[str, Any], verdict: Verdict) -> None:
        row["message"] = verdict.message[:300]
        if not row["right"]:
            why = verdict.evidence.get("rule") or verdict.message[:110].replace("\n", " ")
            print(f"\nWRONG {row['name']}: {row['status']}, not {'/'.join(row['acceptable'])}; {why}", flush=True)

    rows = context.data.setdefault("rows", [])
    context.data["asked"] = len(items)
    with context.pool() as pool:
        _, facts = run_items(
            context, pool, items, context.deadline(), "cases", len(items), ahead=len(items), rows=rows, look=show
        )
    context.data.update(facts)


def honest_items(device: str, start: int = 0) -> Iterator[Item]:
    """Endless distinct honest answers, each to be found correct."""
    for spec, number, source in honest(device, start):
        yield Item(f"{spec.name}_{number}", problem(spec), source, ("correct",))


def throughput(context: Context) -> None:
    """Verdicts a second in steady state, default rules, a fresh process and distinct kernels for each."""
    rows = context.data.setdefault("rows", [])
    meter = machine.CpuMeter()
    with context.pool() as pool:
        lanes = len(pool)
        # The first ones find cold references and spares that still warm up.
        skip = 2 * lanes
        context.data.update(lanes=lanes, skipped=skip, group=GROUP, cores=machine.describe("cpu")["cores"])

        def look(row: dict[str, Any], verdict: Verdict) -> None:
            row["held_ms"] = (verdict.evidence.get("timing") or {}).get("held_ms")
            row["rounds"] = (verdict.evidence.get("timing") or {}).get("rounds")
            if len(rows) == skip:
                meter.busy_share()
            if len(rows) == skip + 2 * lanes:
                context.data["gpu_mb"] = machine.gpu_used_mb(context.device)

        limit = context.options.throughput_limit or None
        items = itertools.islice(honest_items(context.device), limit)
        try:
            _, facts = run_items(context, pool, items, context.deadline(), "throughput", limit, rows=rows, look=look)
            context.data.update(facts)
        finally:  # what a stopped run has seen is a rate as well
            _rate(context.data, meter.busy_share())


def _rate(data: dict[str, Any], busy: float) -> None:
    """From the rows of a throughput run to its rate and to what bounds it."""
    rows, skip = data["rows"], data["skipped"]
    inside = sorted(rows, key=lambda row: row["done_s"])[skip:]
    last_asked = data.get("last_asked_s", max((row["asked_s"] for row in rows), default=0.0))
    rate = steady_rate([row["done_s"] for row in rows], skip, last_asked)
    stages = mean_by_key(row["cost"] for row in inside)
    data.update(
        busy_share=busy,
        mean_cost_s=stages,
        in_lane_s=spread([row["cost"].get("total_s", 0.0) for row in inside]),
        from_submit_s=spread([row["done_s"] - row["asked_s"] for row in inside]),
        not_correct=[row for row in rows if not row["right"]],
        **rate,
    )
    if rate["rate"]:
        data["bound"] = bound(rate["rate"], data["lanes"], busy, stages.get("exclusive_s"), stages)


def exclusive(context: Context) -> None:
    """Seconds for which a verdict holds the GPU alone, for problems whose forward takes under a millisecond.

    Taken from the throughput section where that ran, since there the GPU is contended as in training.
    """
    rows = context.sections.get("throughput", {}).get("rows")
    context.data["from"] = "throughput" if rows else "its own candidates"
    if not rows:
        items = itertools.islice(honest_items(context.device, start=100_000), 4 * GROUP)
        with context.pool() as pool:
            rows, facts = run_items(context, pool, items, context.deadline(), "exclusive", 4 * GROUP)
        context.data.update(facts, rows=rows)
    short = [row for row in rows if row["status"] == "correct" and (row["reference_us"] or 1e9) < SHORT_FORWARD_US]
    held = [row for row in short if "exclusive_s" in row["cost"]]
    context.data["exclusive_ms"] = spread([1000.0 * row["cost"]["exclusive_s"] for row in held])
    by_problem = {row["problem"]: [] for row in held}
    for row in held:
        by_problem[row["problem"]].append(1000.0 * row["cost"]["exclusive_s"])
    context.data["by_problem_ms"] = {name: spread(values) for name, values in by_problem.items()}


# A program against itself -------------------------------------------------------------------------------------------


def self_specs(device: str) -> list[Spec]:
    """Four problems from about 13 us to about 1.3 ms of an H200."""
    if device == "cpu":
        return specs("cpu")[:1] + specs("cpu")[5:6]
    return [
        sized(spec_named("affine_relu"), 2048, 2048),
        sized(spec_named("gelu_shift"), 8192, 2048),
        sized(spec_named("softmax"), 16384, 4096),
        sized(spec_named("linear_relu"), 2048, 2048),
    ]


def self_items(device: str, runs: int) -> Iterator[Item]:
    """Our own Triton programs as reference and as candidate, `runs` in all; a comment alone tells the runs apart."""
    for run, spec in zip(range(runs), itertools.cycle(self_specs(device))):
        yield Item(f"self_{spec.name}_{run}", self_problem(spec), f"{answer(spec, 0)}\n# run {run}\n", ("correct",))


def measured_speedups(verdict: Verdict) -> dict[str, float | None]:
    """{kind of time: speedup}: both kinds where the verdict has them, else the one that it calls its own."""
    times = verdict.evidence.get("times")
    if isinstance(times, dict):
        return {kind: found.get("speedup") for kind, found in times.items() if isinstance(found, dict)}
    return {verdict.time_kind: verdict.speedup} if verdict.time_kind else {}


def self_check(context: Context) -> None:
    """The error of the speedup where the truth is known: 1."""
    runs = context.options.self_runs or (50 if context.device == "cuda" else 8)

    def look(row: dict[str, Any], verdict: Verdict) -> None:
        row["speedups"] = measured_speedups(verdict)
        row["times"] = verdict.evidence.get("times")
        row["blocks_us"] = (verdict.evidence.get("timing") or {}).get("blocks_us")
        row["interval"] = [verdict.speedup_low, verdict.speedup_high]

    rows = context.data.setdefault("rows", [])
    context.data["asked"] = runs
    with context.pool() as pool:
        try:
            _, facts = run_items(
                context, pool, self_items(context.device, runs), context.deadline(), "self", runs, rows=rows, look=look
            )
            context.data.update(facts)
        finally:
            judged = [row for row in rows if row["status"] == "correct"]
            context.data["errors"] = errors_of_self(judged)
            context.data["not_correct"] = [row for row in rows if not row["right"]]
    covered = [row["interval"][0] <= 1.0 <= row["interval"][1] for row in judged if row["interval"][0] is not None]
    context.data["interval_holds_1"] = sum(covered) / len(covered) if covered else None
