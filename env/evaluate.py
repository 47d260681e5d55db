"""Judge one candidate: `python -m env.evaluate REFERENCE CANDIDATE [--json] [--device cpu|cuda]`.

Runs in the driver. Exits 0 whenever a verdict was reached, 2 where the question can't be asked (no such file, no text,
no device), 130 or 143 where Ctrl-C or SIGTERM came first.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from env.commands import Stopped, StopSignals, add_rule_options, check_input, chosen_rules
from env.feedback import is_tie, kernel_name, reasons
from env.plaintext import harmless
from env.pool import Pool, PoolError
from env.problems import ProblemError, load_file
from env.questions import misread
from env.records import Verdict

MAX_ROWS = 20


def render_text(verdict: Verdict) -> str:
    """A verdict for a person at a terminal. Foreign words are made harmless: they could move the cursor."""
    lines = [f"status: {verdict.status}"]
    if verdict.blameless:
        lines.append(harmless(verdict.message, 2000, 20))
    elif verdict.status != "correct":
        lines += reasons(verdict)
    lines += _times(verdict)
    lines += _kernels(verdict)
    if verdict.evidence.get("isolation_missing"):
        lines.append(f"isolation missing: {', '.join(map(str, verdict.evidence['isolation_missing']))}")
    if verdict.evidence.get("rules"):
        lines.append(f"rules: {verdict.evidence['rules']}")
    versions = ", ".join(f"{name} {version}" for name, version in verdict.versions.items())
    lines.append(f"device: {verdict.device or 'none'}{f' ({versions})' if versions else ''}")
    stages = {name: seconds for name, seconds in verdict.cost.items() if name != "total_s"}
    parts = ", ".join(f"{name.removesuffix('_s')} {seconds:.2f}" for name, seconds in stages.items())
    lines.append(f"took: {verdict.cost.get('total_s', 0):.2f} s{f' ({parts})' if parts else ''}")
    return "\n".join(line for line in lines if line)


def _times(verdict: Verdict) -> list[str]:
    if verdict.speedup is None:
        return []
    lines = [f"speedup: {verdict.speedup:.3f}x"]
    if verdict.speedup_low is not None and verdict.speedup_high is not None:
        lines[0] += f" [{verdict.speedup_low:.3f}, {verdict.speedup_high:.3f}]"
    if is_tie(verdict):
        lines[0] += ": a tie, the interval spans 1"
    if verdict.reference_us is not None and verdict.candidate_us is not None:
        lines.append(
            f"{verdict.time_kind} times: reference {verdict.reference_us:.2f} us, "
            f"candidate {verdict.candidate_us:.2f} us"
        )
    return lines


def _kernels(verdict: Verdict) -> list[str]:
    if not verdict.profile:
        return []
    total = sum(row["time_us"] for row in verdict.profile) or 1.0
    shown = verdict.profile[:MAX_ROWS]
    names = [("triton " if row["own"] else "torch  ") + kernel_name(row) for row in shown]
    width = max(len("kernel"), *map(len, names))
    lines = [f"{'kernel'.ljust(width)}  calls     time us   share"]
    lines += [
        f"{name.ljust(width)}  {row['count']:5d}  {row['time_us']:10.2f}  {100 * row['time_us'] / total:5.1f}%"
        for name, row in zip(names, shown)
    ]
    if len(verdict.profile) > MAX_ROWS:
        lines.append(f"and {len(verdict.profile) - MAX_ROWS} more")
    if verdict.profiling_ratio is not None:
        lines.append(f"profiling ratio: {verdict.profiling_ratio:.3f} (time in the candidate's own kernels)")
    return lines


def read_candidate(path: Path) -> str:
    """A candidate's file. Raises ValueError where it isn't text: what the judge gets has to be what the file holds."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"CANDIDATE {path}: not text in UTF-8 ({error.reason} at byte {error.start}); give a Python file, saved as "
            "UTF-8"
        ) from error


_HINTS = {
    "answer": "this looks like a model's whole answer: with --raw the code in it is judged",
    "source": "this looks like plain source: without --raw it is judged as it is",
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m env.evaluate", description="Judge one candidate against a reference."
    )
    parser.add_argument(
        "problem",
        type=Path,
        metavar="REFERENCE",
        help="KernelBench-format file: class Model, get_inputs, get_init_inputs",
    )
    parser.add_argument("candidate", type=Path, metavar="CANDIDATE", help="Python file that defines class ModelNew")
    parser.add_argument("--json", action="store_true", help="print the verdict as one JSON object")
    parser.add_argument("--raw", action="store_true", help="the candidate file holds a model's whole answer")
    parser.add_argument("--entry-point", default="Model", help="name of the reference class (the candidate's: + New)")
    add_rule_options(parser)
    args = parser.parse_args(argv)
    if not args.entry_point.isidentifier():
        parser.error(f"--entry-point {args.entry_point!r} can't be the name of a class")
    try:
        rules = chosen_rules(args)
        check_input("REFERENCE", args.problem, f"a file with class {args.entry_point}, get_inputs and get_init_inputs")
        check_input(
            "CANDIDATE",
            args.candidate,
            f"a Python file with class {args.entry_point}New, or with --raw a model's whole answer",
        )
        problem = load_file(args.problem, entry_point=args.entry_point)
        response = read_candidate(args.candidate)
        with StopSignals() as signals, Pool(args.device, slots=1, seed=args.seed, rules=rules, lanes=1) as pool:
            verdict = pool.submit(problem, response, raw=args.raw).result()
            signals.ignore()
    except ProblemError as error:
        print(f"env.evaluate: REFERENCE {error}", file=sys.stderr)
        return 2
    except (OSError, ValueError, PoolError) as error:
        print(f"env.evaluate: {error}", file=sys.stderr)
        return 2
    except Stopped as stop:
        print(f"env.evaluate: {stop}; there is no verdict", file=sys.stderr)
        return stop.code
    if seems := misread(verdict, response, args.raw, args.entry_point):
        print(f"env.evaluate: {args.candidate}: {_HINTS[seems]}", file=sys.stderr)
    try:
        print(json.dumps(verdict.to_json()) if args.json else render_text(verdict), flush=True)
    except BrokenPipeError:  # the reader (head, less) has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
