"""Section recovery: how long until the next verdict is served after a hang, a crash, or a kill from outside.

Runs in the driver, with one evaluator and one lane: no other lane can serve meanwhile. What is reported is the time
beyond what two verdicts in a row take anyway and, for a hang, beyond the limits that the rules grant.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from env.pool import Pool
from env.records import Verdict
from scripts.bench.candidates import Spec, answer, problem, specs
from scripts.bench.hostile import Fault, faults, faulty
from scripts.bench.machine import Judge, Process, judge_processes
from scripts.bench.stream import Context, settle

COMPILE_S, RUN_S = {"cuda": 8.0, "cpu": 4.0}, {"cuda": 4.0, "cpu": 2.0}
PATIENCE_S = 90.0
STANDBY_S = 40.0
NORMAL_PAIRS = 3


def _kill_targets(judge: Judge) -> dict[str, list[Process]]:
    """Whom to kill from outside, by what the report calls them."""
    return {
        "kill -9 of the oldest worker": judge.workers[:1],
        "kill -9 of the newest worker": judge.workers[-1:],
        "kill -9 of every worker": judge.workers,
        "kill -9 of the fork server": [process for process in judge.fork_servers if process.pid in judge.serving],
        "kill -9 of the evaluator": [process for process in judge.evaluators if process.pid in judge.serving],
    }


class Episodes:
    """One pool and an endless supply of distinct answers to one problem."""

    def __init__(self, context: Context, pool: Pool, spec: Spec):
        self.context = context
        self.pool = pool
        self.spec = spec
        self.numbers: Iterator[int] = itertools.count(300_000)
        self.limits = {"compile": COMPILE_S[context.device], "run": RUN_S[context.device]}

    def ask(self, fault: Fault | None = None) -> Future:
        number = next(self.numbers)
        source = faulty(self.spec, number, fault) if fault else answer(self.spec, number)
        future = self.pool.submit(problem(self.spec), source, raw=False)
        future.add_done_callback(lambda future: setattr(future, "done_at", time.monotonic()))
        return future

    def wait(self, future: Future, seconds: float) -> Verdict | None:
        with contextlib.suppress(FutureTimeout, CancelledError):
            verdict = future.result(timeout=seconds)
            while not hasattr(future, "done_at"):  # waiters wake before callbacks run
                time.sleep(0.001)
            return verdict
        return None

    def normal_s(self) -> float:
        """What the second of two honest ones takes, as every episode below has it."""
        seconds = []
        for _ in range(NORMAL_PAIRS):
            settle(self.context.device)
            first, second = self.ask(), self.ask()
            if self.wait(first, PATIENCE_S) is None or self.wait(second, PATIENCE_S) is None:
                raise RuntimeError("an honest candidate got no verdict: there is no normal time to compare with")
            seconds.append(second.done_at - first.done_at)
        return statistics.median(seconds)

    def hostile(self, fault: Fault, normal_s: float) -> dict[str, Any]:
        """A candidate with a fault and an honest one right behind it."""
        settle(self.context.device)
        budget = sum(self.limits[name] for name in fault.budgets)
        start = time.monotonic()
        bad, good = self.ask(fault), self.ask()
        verdict = self.wait(good, PATIENCE_S + budget)
        seconds = good.done_at - start if verdict else None
        first = self.wait(bad, 1.0)
        return {
            "name": fault.name,
            "status": first.status if first else None,
            "right": bool(first) and first.status in fault.expected,
            "message": first.message[:200] if first else "",
            "next_status": verdict.status if verdict else None,
            "next_message": verdict.message[:200] if verdict else "",
            "budget_s": budget,
            "until_next_s": seconds,
            "its_own_s": bad.done_at - start if first else None,
            # All of it, the work before the fault included: an upper bound.
            "recovery_s": seconds - budget - normal_s if verdict and verdict.status == "correct" else None,
        }

    def killed(self, name: str, normal_s: float) -> dict[str, Any]:
        """Kill processes of the judge while it judges; the next correct verdict counts, whosever it is.

        On a GPU an evaluator stands by; the last kill may have used it up, and kills are minutes apart where nobody
        makes them on purpose.
        """
        settle(self.context.device)
        end = time.monotonic() + STANDBY_S
        while self.context.device == "cuda" and not self.pool.standby_ready() and time.monotonic() < end:
            time.sleep(0.1)
        flying = self.ask()
        time.sleep(0.3 * normal_s)
        targets = _kill_targets(judge_processes())[name]
        start = time.monotonic()
        for process in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        good = self.ask()
        verdict = self.wait(good, PATIENCE_S)
        caught = self.wait(flying, PATIENCE_S)
        served = [f.done_at for f, v in ((flying, caught), (good, verdict)) if v and v.status == "correct"]
        served = [moment - start for moment in served if moment > start]
        return {
            "name": name,
            "killed": len(targets),
            "status": caught.status if caught else None,
            "message": (caught.message[:200] if caught else "") if targets else "no such process was found",
            "next_status": verdict.status if verdict else None,
            "next_message": verdict.message[:200] if verdict else "",
            "until_next_s": min(served, default=None),
            "recovery_s": min(served) - normal_s if served and targets else None,
        }


def recovery(context: Context) -> None:
    """All episodes, one after another, on one pool."""
    context.data.update(compile_timeout_s=COMPILE_S[context.device], run_timeout_s=RUN_S[context.device])
    rows = context.data.setdefault("rows", [])
    changes = {"compile_timeout_s": COMPILE_S[context.device], "run_timeout_s": RUN_S[context.device]}
    with context.pool(slots=1, lanes=1, **changes) as pool:
        episodes = Episodes(context, pool, specs(context.device)[0])
        normal = episodes.normal_s()
        context.data["normal_s"] = normal
        plan: list[tuple[Any, Any]] = [(episodes.hostile, fault) for fault in faults(context.device)]
        plan += [(episodes.killed, name) for name in _kill_targets(Judge([], [], []))]
        plan = [(act, what) for act, what in plan if context.options.only in getattr(what, "name", what)]
        context.data["asked"] = len(plan)
        for act, what in plan:
            if time.monotonic() > context.deadline():
                break
            row = act(what, normal)
            rows.append(row)
            served = "never" if row["recovery_s"] is None else f"{row['recovery_s']:.2f} s past the budget"
            print(f"recovery  {row['name']:32s} {row['status'] or '-':14s} next verdict {served}", flush=True)
            context.checkpoint()
