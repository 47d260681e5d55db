"""Judge the candidates of tests/kernelbench on real KernelBench problems, next to a plain loop that trusts them.

    KERNELBENCH_DIR=… python scripts/bench_kernelbench.py --out FILE [--device cuda|cpu] [--only SUBSTR] [--limit N]

Answers three questions: is the verdict the one that the manifest expects, how fast are the honest candidates, and does
the judge's speedup agree with CUDA events around the same calls in a process of its own? The plain loops run first, so
that the pool's workers can't disturb them. FILE is rewritten after every row: a run cut short keeps what it has.
With --device cpu the problems are shrunk to what Triton's interpreter can do: that checks the plumbing, no speed.

Runs on the GPU machine; this process itself never touches CUDA. Problems come from KERNELBENCH_DIR and are not ours.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from env.files import write_atomic  # noqa: E402
from env.pool import Pool  # noqa: E402
from env.problems import load_file  # noqa: E402
from env.records import BLAMELESS_STATUSES, Problem, Verdict  # noqa: E402
from env.rules import Rules  # noqa: E402

FOLDER = ROOT / "tests" / "kernelbench"
WARM_UPS, TIMED_CALLS = 10, 50
PLAIN_TIMEOUT_S = 90
# Most telling first: the device may be taken away at any time.
ORDER = {"honest": 0, "decoy": 1, "wrong": 1, "lazy": 1, "self": 2}


def kernelbench_folder() -> Path:
    """The folder with level1/ and level2/. Ends the program with what to do where it isn't set or isn't that."""
    named = os.environ.get("KERNELBENCH_DIR", "")
    if not named:
        sys.exit(
            "KERNELBENCH_DIR is not set. Get https://github.com/ScalingIntelligence/KernelBench and set the variable"
            " to its KernelBench/ folder (the one with level1/ and level2/)."
        )
    folder = Path(named).resolve()
    if not (folder / "level1").is_dir() or not (folder / "level2").is_dir():
        sys.exit(
            f"KERNELBENCH_DIR={folder}: it has no level1/ and level2/; point it at the KernelBench/ folder inside the"
            " KernelBench repository"
        )
    return folder


def load_rows(only: str, limit: int) -> list[dict[str, Any]]:
    """The manifest's rows whose problem, candidate or kind contains `only`, most telling first, at most `limit`."""
    rows = json.loads((FOLDER / "manifest.json").read_text())
    rows = [row for row in rows if only in f"{row['problem']} {row['candidate']} {row['kind']}"]
    rows.sort(key=lambda row: ORDER[row["kind"]])
    return rows[:limit] if limit else rows


def shrunk(source: str, sizes: dict[str, str]) -> str:
    """The same problem with small module-level size constants."""
    for name, value in sizes.items():
        source = re.sub(rf"^{re.escape(name)}\s*=\s*[^#\n]*", f"{name} = {value}  ", source, flags=re.MULTILINE)
    return source


def load_problem(folder: Path, row: dict[str, Any], device: str) -> Problem:
    """The row's problem; on the CPU at its small sizes."""
    problem = load_file(folder / row["problem"], folder)
    if device == "cuda":
        return problem
    sizes = json.loads((FOLDER / "small_sizes.json").read_text())[row["problem"]]
    return Problem.from_json({**problem.to_json(), "source": shrunk(problem.source, sizes)})


def candidate_source(row: dict[str, Any], problem: Problem) -> str:
    """The candidate's file, or the reference itself under the candidate's name."""
    if row["candidate"]:
        return (FOLDER / "candidates" / row["candidate"]).read_text()
    return re.sub(r"\bModel\b", "ModelNew", problem.source)


# The plain loop -----------------------------------------------------------------------------------------------------


def plain_loop(reference_file: str, candidate_files: list[str], connection: Any) -> None:
    """In a fresh process: time the reference and each candidate with events. Sends (file name, numbers) for each."""
    import importlib.util

    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False

    def load(file: str, name: str):
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def times_us(model: Any, inputs: list) -> list[float]:
        for _ in range(WARM_UPS):
            model(*inputs)
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(TIMED_CALLS)
        ]
        for start, end in events:
            start.record()
            model(*inputs)
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1000.0 for start, end in events]

    with torch.no_grad():
        module = load(reference_file, "reference")
        torch.manual_seed(11)
        with torch.device("cuda"):
            arguments = module.get_init_inputs()
            reference = module.Model(*arguments)
            inputs = module.get_inputs()
        baseline = times_us(reference, inputs)
        for file in candidate_files:
            try:
                with torch.device("cuda"):
                    candidate = load(file, "candidate").ModelNew(*arguments)
                candidate.load_state_dict(reference.state_dict())
                own = times_us(candidate, inputs)
                expected, got = reference(*inputs), candidate(*inputs)
                largest = float((got - expected).abs_().max() / expected.abs().max())
                del expected, got
                found = {
                    "plain_reference_us": statistics.median(baseline),
                    "plain_candidate_us": statistics.median(own),
                    "plain_reference_mean_us": statistics.fmean(baseline),
                    "plain_candidate_mean_us": statistics.fmean(own),
                    "plain_speedup": statistics.median(baseline) / statistics.median(own),
                    "plain_error": largest,
                }
            except Exception as error:
                # One candidate that fails must not cost the others their numbers; the table shows it.
                found = {"plain_message": f"{type(error).__name__}: {str(error)[:300]}"}
            connection.send((Path(file).name, found))
    connection.close()


def run_plain(folder: Path, rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Plain times by candidate, for honest and lazy rows: one process a problem handles all its candidates."""
    by_problem: dict[str, list[str]] = {}
    for row in rows:
        if row["kind"] in ("honest", "lazy"):
            by_problem.setdefault(row["problem"], []).append(str(FOLDER / "candidates" / row["candidate"]))
    # A fork server has torch imported and no CUDA context: each child is fresh without paying seconds for the import.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton"])
    times: dict[str, dict[str, Any]] = {}
    for problem, files in by_problem.items():
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=plain_loop, args=(str(folder / problem), files, theirs))
        process.start()
        theirs.close()
        deadline = time.monotonic() + PLAIN_TIMEOUT_S
        why = "the plain loop ended without a result"
        try:
            while any(Path(file).name not in times for file in files):
                if not ours.poll(max(0.0, deadline - time.monotonic())):
                    why = f"the plain loop took over {PLAIN_TIMEOUT_S} s"
                    break
                name, found = ours.recv()
                times[name] = found
                print(
                    f"plain  {name:20s} {_number(found.get('plain_speedup'), 'x')} {found.get('plain_message', '')}",
                    flush=True,
                )
        except EOFError:
            print(f"plain  {problem}: {why}", flush=True)
        for file in files:
            times.setdefault(Path(file).name, {"plain_message": why})
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
    return times


# The judge ----------------------------------------------------------------------------------------------------------


def result_row(row: dict[str, Any], verdict: Verdict, plain: dict[str, Any]) -> dict[str, Any]:
    """One line of the report; times in microseconds, seconds as the judge counts them."""
    return {
        "problem": row["problem"],
        "candidate": row["candidate"],
        "kind": row["kind"],
        "expected": row["expected"],
        "status": verdict.status,
        "right": verdict.status in row["expected"],
        "expect_faster": row["expect_faster"],
        "speedup": verdict.speedup,
        "interval": [verdict.speedup_low, verdict.speedup_high],
        "reference_us": verdict.reference_us,
        "candidate_us": verdict.candidate_us,
        "time_kind": verdict.time_kind,
        "profiling_ratio": verdict.profiling_ratio,
        "plain_reference_us": None,
        "plain_candidate_us": None,
        "plain_speedup": None,
        **plain,
        "seconds": verdict.cost.get("total_s"),
        "cost": verdict.cost,
        "message": verdict.message[:500],
        "note": row["note"],
    }


def totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts by kind, honest candidates that are faster for sure, and how far judge and plain loop are apart."""
    kinds = {}
    for kind in ORDER:
        mine = [row for row in rows if row["kind"] == kind]
        kinds[kind] = {"rows": len(mine), "right": sum(row["right"] for row in mine)}
    honest = [row for row in rows if row["kind"] == "honest" and row["speedup"]]
    apart = [row["speedup"] / row["plain_speedup"] - 1.0 for row in rows if row["speedup"] and row["plain_speedup"]]
    return {
        "rows": len(rows),
        "right": sum(row["right"] for row in rows),
        "not_judged": sum(row["status"] in BLAMELESS_STATUSES for row in rows),
        "kinds": kinds,
        "honest_faster": sum(row["interval"][0] > 1.0 for row in honest),
        "honest_measured": len(honest),
        "expected_faster_and_are": sum(row["interval"][0] > 1.0 for row in honest if row["expect_faster"]),
        "judge_over_plain_median": statistics.median(apart) if apart else None,
        "judge_over_plain_widest": max(apart, key=abs) if apart else None,
    }


def describe_machine(device: str) -> dict[str, Any]:
    """Device name and versions, asked without opening a CUDA context here."""
    versions = {"python": sys.version.split()[0]}
    for package in ("torch", "triton"):
        versions[package] = importlib.metadata.version(package)
    name = "cpu (Triton's interpreter, problems shrunk, modelled times)"
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        first = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()[0]
        name, versions["driver"] = (part.strip() for part in first.split(",", 1))
    return {"device": name, "versions": versions, "date": datetime.now(UTC).isoformat(timespec="seconds")}


def _number(value: float | None, unit: str = "") -> str:
    return f"{value:7.2f}{unit}" if value is not None else f"{'-':>7s}{' ' * len(unit)}"


def table(rows: list[dict[str, Any]]) -> str:
    """What a person wants to see at the end, one line a row."""
    heads = f"{'speedup':>8s} {'95% interval':>17s} {'plain':>8s} {'ratio':>7s} {'s':>6s}"
    lines = [f"{'candidate':28s} {'status':13s} ok {heads}"]
    for row in rows:
        name = row["candidate"] or f"self {Path(row['problem']).stem[:20]}"
        low, high = row["interval"]
        lines.append(
            f"{name:28s} {row['status']:13s} {'ok' if row['right'] else 'NO'} {_number(row['speedup'], 'x')} "
            f"{_number(low)} … {_number(high)} {_number(row['plain_speedup'], 'x')} {_number(row['profiling_ratio'])} "
            f"{row['seconds'] or 0:6.1f}"
        )
    return "\n".join(lines)


def judge_rows(
    report: dict[str, Any], args: argparse.Namespace, folder: Path, rows: list[dict[str, Any]], plain: dict
) -> None:
    """Submit the rows in order, `args.lanes` at a time, and write the report after every verdict."""
    rules = Rules(trials=args.trials)
    waiting: deque = deque()
    pending = deque(rows)
    with Pool(device=args.device, slots=1, rules=rules, lanes=args.lanes) as pool:
        while pending or waiting:
            while pending and len(waiting) < args.lanes:
                row = pending.popleft()
                problem = load_problem(folder, row, args.device)
                waiting.append((row, pool.submit(problem, candidate_source(row, problem), raw=False)))
            row, future = waiting.popleft()
            done = result_row(row, future.result(), plain.get(row["candidate"] or "", {}))
            report["rows"].append(done)
            report["totals"] = totals(report["rows"])
            write_atomic(Path(args.out), json.dumps(report, indent=1) + "\n")
            mark = "ok" if done["right"] else f"NOT {'/'.join(row['expected'])}: {done['message'][:160]}"
            print(f"judge  {row['candidate'] or 'self ' + row['problem']:40s} {done['status']:13s} {mark}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", required=True, help="JSON file to write")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="only rows whose problem, candidate or kind contains this")
    parser.add_argument("--limit", type=int, default=0, help="at most so many rows")
    parser.add_argument(
        "--trials", type=int, default=Rules.trials, help="correctness trials; fewer need less GPU memory"
    )
    parser.add_argument("--lanes", type=int, default=1, help="candidates judged at once; more need more GPU memory")
    args = parser.parse_args()
    folder = kernelbench_folder()
    rows = load_rows(args.only, args.limit)
    if not rows:
        sys.exit(f"no row of {FOLDER / 'manifest.json'} contains {args.only!r}")
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    started = time.monotonic()
    report = {
        **describe_machine(args.device),
        "command": " ".join(sys.argv),
        "trials": args.trials,
        "rows": [],
        "totals": {},
    }
    plain = run_plain(folder, rows) if args.device == "cuda" else {}
    print(f"plain loops: {time.monotonic() - started:.0f} s", flush=True)
    report["plain"] = plain
    write_atomic(Path(args.out), json.dumps(report, indent=1) + "\n")
    judge_rows(report, args, folder, rows, plain)
    print(table(report["rows"]))
    print(json.dumps(report["totals"]))
    print(f"{time.monotonic() - started:.0f} s in all; written to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
