"""Candidates into a pool, rows out of it, with a time box: what all sections of the benchmark share.

Runs in the driver. The queue is kept short, so that a section that runs out of time leaves little behind.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from env.pool import Pool
from env.records import Problem, Verdict
from env.rules import Rules, rules_for
from scripts.bench import machine

GRACE_S = 120.0


@dataclass(frozen=True)
class Item:
    """A candidate with what it is called, and the statuses that are right (none: any is)."""

    name: str
    problem: Problem
    source: str
    expected: tuple[str, ...] = ()
    raw: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Context:
    """What a section is told. `data` is its part of the report, saved by `checkpoint` at most every few seconds."""

    device: str
    minutes: float
    seed: int
    lanes: int
    data: dict[str, Any]
    save: Callable[[], None]
    options: Any
    sections: dict[str, Any]
    last_saved: float = 0.0
    started: float = field(default_factory=time.monotonic)

    def deadline(self, share: float = 1.0) -> float:
        """When `share` of this section's time is over, on the monotonic clock."""
        return self.started + 60.0 * self.minutes * share

    def checkpoint(self) -> None:
        if time.monotonic() - self.last_saved > 10.0:
            self.save()
            self.last_saved = time.monotonic()

    def rules(self, **changes: Any) -> Rules:
        return rules_for("default", self.device, **changes)

    def pool(self, slots: int = 0, lanes: int | None = None, **changes: Any) -> Pool:
        """A pool with the default rules but for `changes`; `lanes` None: as the command line says."""
        lanes = self.lanes if lanes is None else lanes
        return Pool(self.device, slots=slots, seed=self.seed, rules=self.rules(**changes), lanes=lanes)


def row_of(item: Item, verdict: Verdict, asked_s: float, done_s: float) -> dict[str, Any]:
    """One judged candidate as numbers: small, since there are thousands."""
    row = {
        "name": item.name,
        "problem": item.problem.id,
        "status": verdict.status,
        "asked_s": round(asked_s, 4),
        "done_s": round(done_s, 4),
        "cost": verdict.cost,
        "speedup": verdict.speedup,
        "reference_us": verdict.reference_us,
        "profiling_ratio": verdict.profiling_ratio,
        **item.facts,
    }
    if item.expected:
        row["right"] = verdict.status in item.expected
        if not row["right"]:
            names = ("without_kernels", "knockout", "clock")
            row["evidence"] = {name: verdict.evidence[name] for name in names if name in verdict.evidence}
    if verdict.status != "correct":
        row["rule"] = verdict.evidence.get("rule")
        row["message"] = verdict.message[:300]
    return row


def run_items(
    context: Context,
    pool: Pool,
    items: Iterable[Item],
    deadline: float,
    title: str,
    total: int | None = None,
    ahead: int = 2,
    rows: list[dict[str, Any]] | None = None,
    look: Callable[[dict[str, Any], Verdict], None] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, float | int]]:
    """Judge items in their order until they or the time run out.

    ahead: how many wait beside those that are being judged. rows: a list to append to (a part of the report).
    look: is shown every row with its verdict. Returns (rows in order of completion, {start_s, last_asked_s, unfinished}
    with seconds on the rows' clock).
    """
    rows = [] if rows is None else rows
    done: queue.Queue[tuple[Item, Future, float, float]] = queue.Queue()
    waiting, source, exhausted = 0, iter(items), False
    start = time.monotonic()
    last_asked = 0.0
    # A line a second is fine on a screen and drowns a log.
    every_s = 1.0 if sys.stderr.isatty() else 20.0
    with tqdm(total=total, desc=title, unit="verdict", mininterval=every_s, maxinterval=every_s) as bar:
        while True:
            while not exhausted and waiting < len(pool) + ahead and time.monotonic() < deadline:
                item = next(source, None)
                if item is None:
                    exhausted = True
                    break
                last_asked = time.monotonic() - start
                future = pool.submit(item.problem, item.source, raw=item.raw)
                future.add_done_callback(
                    lambda future, item=item, asked=last_asked: done.put(
                        (item, future, asked, time.monotonic() - start)
                    )
                )
                waiting += 1
            over = exhausted or time.monotonic() >= deadline
            if waiting == 0 and over:
                break
            try:
                item, future, asked, finished = done.get(timeout=1.0)
            except queue.Empty:
                if time.monotonic() > deadline + GRACE_S:
                    break
                continue
            waiting -= 1
            with contextlib.suppress(CancelledError):
                verdict = future.result()
                row = row_of(item, verdict, asked, finished)
                if look is not None:
                    look(row, verdict)
                rows.append(row)
                bar.update()
                context.checkpoint()
    return rows, {"last_asked_s": round(last_asked, 3), "unfinished": waiting}


def settle(device: str, seconds: float = 1.0, limit_s: float = 30.0) -> None:
    """Wait until the number of processes has stood still for a while: spares are warm, the dead are gone."""
    end = time.monotonic() + limit_s
    seen, since = -1, time.monotonic()
    while time.monotonic() < end:
        count = len(machine.descendants())
        if count != seen:
            seen, since = count, time.monotonic()
        if time.monotonic() - since >= (6.0 if device == "cuda" else seconds):
            return
        time.sleep(0.1)
