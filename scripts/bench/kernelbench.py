"""Section kernelbench: every reference of levels 1 and 2 as its own candidate must be a hack, never a problem_error.

Runs in the driver; the problems come from KERNELBENCH_DIR and are not ours. A run that was cut goes on where
it stopped.
"""

from __future__ import annotations

import ast
import random
import time
from pathlib import Path
from typing import Any

from env.problems import load_folder
from env.records import Problem, Verdict
from scripts.bench.stream import Context, Item, run_items
from scripts.bench_kernelbench import kernelbench_folder

LEVELS = ("level1", "level2")
# Gigabytes of inputs, several copies of each: few at once.
LANES = 4
TOO_BIG = "too big here"


def own_candidate(source: str, entry: str = "Model") -> str:
    """The reference as its own candidate: its class under the candidate's name, the old name still leading to it.

    By the syntax tree, not by a regular expression: the name may stand in strings, comments and other names. Raises
    ValueError where there is no such class.
    """
    tree = ast.parse(source)
    found = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == entry), None)
    if found is None:
        raise ValueError(f"no class {entry} at the top level of the reference")
    lines = source.splitlines()
    head = found.lineno - 1  # a decorated class starts at its own line here
    lines[head] = lines[head].replace(f"class {entry}", f"class {entry}New", 1)
    lines.insert(found.end_lineno, f"\n\n{entry} = {entry}New  # super({entry}, self) still finds it")
    return "\n".join(lines) + "\n"


def load(folder: Path) -> list[Problem]:
    """Levels 1 and 2."""
    problems = []
    for level in LEVELS:
        for problem in load_folder(folder / level):
            number = int(level.removeprefix("level"))
            problems.append(Problem(id=f"{level}/{problem.id}", source=problem.source, level=number, origin="folder"))
    return problems


def sort_of(row: dict[str, Any]) -> str:
    """as_it_must_be, too_big, or exception."""
    if row["status"] == "hack" and row.get("rule") == "no_own_launch" and row.get("values_match") is not False:
        return "as_it_must_be"
    if row["status"] == "infra_error" and TOO_BIG in row.get("message", ""):
        return "too_big"
    return "exception"


def kernelbench(context: Context) -> None:
    """Judge what isn't judged yet, in a seeded random order, and sort the rows."""
    problems = [p for p in load(kernelbench_folder()) if context.options.only in p.id]
    random.Random(context.seed).shuffle(problems)
    if context.options.limit:
        problems = problems[: context.options.limit]
    rows = context.data.setdefault("rows", [])
    context.data["asked"] = len(problems)
    # What failed by the machine's fault may go right this time.
    rows[:] = [row for row in rows if row["status"] != "infra_error" or row["sort"] == "too_big"]
    known = {row["sha256"] for row in rows}
    items = [
        Item(p.id, p, own_candidate(p.source), ("hack",), facts={"sha256": p.sha256})
        for p in problems
        if p.sha256 not in known
    ]

    def look(row: dict[str, Any], verdict: Verdict) -> None:
        row["values_match"] = verdict.values_match
        row["interval"] = [verdict.speedup_low, verdict.speedup_high]
        row["sort"] = sort_of(row)
        if row["sort"] != "as_it_must_be":
            print(f"\n{row['sort']}  {row['name']}: {row['status']} {row.get('message', '')[:160]}", flush=True)
        context.data["counts"] = counts([*rows, row])

    started = time.monotonic()
    with context.pool(lanes=context.lanes or (LANES if context.device == "cuda" else 0)) as pool:
        _, facts = run_items(
            context, pool, items, context.deadline(), "kernelbench", len(items), ahead=0, rows=rows, look=look
        )
    context.data.update(facts, counts=counts(rows), judging_s=time.monotonic() - started)
    for sort in ("exception", "too_big"):
        context.data[sort] = [
            {"problem": row["name"], "status": row["status"], "rule": row.get("rule"), "message": row.get("message"),
             "values_match": row["values_match"], "seconds": row["cost"].get("total_s")}
            for row in rows
            if row["sort"] == sort
        ]  # fmt: skip


def counts(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Rows of each sort, and those whose own speedup isn't near 1 though it was measured."""
    found = {sort: sum(row["sort"] == sort for row in rows) for sort in ("as_it_must_be", "too_big", "exception")}
    timed = [row["speedup"] for row in rows if row["speedup"] is not None]
    return {**found, "timed": len(timed), "timed_beyond_10_percent": sum(abs(value - 1.0) > 0.1 for value in timed)}
