"""Judge many candidates: `python -m env.batch IN.jsonl OUT.jsonl [--gpus all|0,1 | --ray ADDRESS]`.

Runs in the driver. A line in is a question (`env.questions`); a line out has `id` and `verdict`, in the order in which
they are reached. Each verdict is on disk before the next is waited for; run again, it goes on where it stopped. Exits
with 0 when all have a verdict, 2 where the questions can't be asked (there are none, one is no question, OUT can't be
written), 130 or 143 where Ctrl-C or SIGTERM came first.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future, as_completed
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from env.commands import (
    CPU,
    CUDA,
    Stopped,
    StopSignals,
    add_rule_options,
    check_input,
    check_output,
    chosen_rules,
    gpu_list,
    slot_count,
)
from env.files import explained
from env.pool import Pool, PoolError
from env.questions import candidate_sha256, misread, problem_of, read_questions, response_of
from env.ray_pool import RayPool
from env.rules import Rules

NEEDED = "a file of JSON lines, each with id, reference, and candidate or raw_response"


class BatchError(ValueError):
    """An OUT.jsonl that can't be used: says why and what to do."""


# What is there already -----------------------------------------------------------------------------------------------


def _done_row(line: bytes) -> dict[str, Any] | None:
    """A whole line that this program wrote, None for any other."""
    try:
        row = json.loads(line)
        # A line without its end doesn't count even where it can be read: the next verdict would stand on the same line.
        return row if "id" in row and isinstance(row["verdict"], dict) and line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def read_done(path: Path) -> dict[str, dict[str, Any]]:
    """{id as JSON: verdict} of those that have one. A last line that a kill or a power cut damaged is taken off.

    Raises BatchError for a file that isn't ours (damage elsewhere than in the last line, or no verdict at all in a file
    whose only line doesn't begin like one): it is left as it is.
    """
    if not path.exists():
        return {}
    lines = path.read_bytes().splitlines(keepends=True) if path.stat().st_size else []
    rows = [_done_row(line) for line in lines]
    start = b'{"id": '
    for number, (line, row) in enumerate(zip(lines, rows), 1):
        cut_short = number == len(lines) and (
            number > 1 or (not line.endswith(b"\n") and line.startswith(start[: len(line)]))
        )
        if row is None and not cut_short:
            raise BatchError(f"{path}:{number}: not a verdict of env.batch; give another OUT.jsonl")
    if rows and rows[-1] is None:
        os.truncate(path, path.stat().st_size - len(lines[-1]))
    return {json.dumps(row["id"]): row["verdict"] for row in rows if row is not None}


def check_done(questions: list[dict[str, Any]], done: dict[str, dict[str, Any]], rules: Rules, device: str) -> None:
    """Raises BatchError where a verdict that is there belongs to another question of the same id, or to other rules."""
    for question in questions:
        verdict = done.get(json.dumps(question["id"]))
        if verdict is not None and (other := _difference(question, verdict, rules, device)):
            raise BatchError(
                f"the verdict of id {json.dumps(question['id'])} that is there was reached for {other}; "
                "give changed questions new ids, or another OUT.jsonl"
            )


def _difference(question: dict[str, Any], verdict: dict[str, Any], rules: Rules, device: str) -> str:
    """In what a verdict isn't one on this question. What it doesn't say (it came to nothing early) is no difference."""

    def differs(told: object, now: str) -> bool:
        return bool(told) and told != now

    if differs(verdict.get("problem_sha256"), problem_of(question).sha256):
        return "another reference"
    if differs(verdict.get("candidate_sha256"), candidate_sha256(question)):
        return "another candidate"
    kind = verdict.get("time_kind")
    if differs(kind and (CPU if kind == "modelled" else CUDA), device):
        return f"another device than {device}"
    evidence = verdict.get("evidence")
    ruled = evidence.get("rules") if isinstance(evidence, dict) else None
    if differs(ruled, rules.describe()):
        return f"other rules ({ruled}; now: {rules.describe()})"
    return ""


# Judging -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _alone_on(path: Path) -> Iterator[IO[str]]:
    """OUT.jsonl opened to add lines, by one batch at a time. A folder that is made for it is said."""
    if not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        print(f"env.batch: made the folder {path.parent} for OUT.jsonl", file=sys.stderr)
    with open(path, "a", encoding="utf-8") as out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BatchError(f"{path}: another batch is writing to it") from error
        yield out


def _write(out: IO[str], ids: list, verdict: dict[str, Any]) -> None:
    """On disk when this returns."""
    with explained(Path(out.name)):
        out.writelines(json.dumps({"id": question_id, "verdict": verdict}) + "\n" for question_id in ids)
        out.flush()
        os.fsync(out.fileno())


def judge_all(
    pool: Pool | RayPool, questions: list[dict[str, Any]], out: IO[str], bar: tqdm, signals: StopSignals
) -> list[str]:
    """Judge what is left and write each verdict as it comes. Stopped, it still writes what is there by then.

    Returns the ids (as JSON) of candidates that don't compile since they were handed over as something else.
    """
    asked: dict[Future, list[dict[str, Any]]] = {}
    for question in questions:
        response, raw = response_of(question)
        future = pool.submit(problem_of(question), response, raw=raw)
        asked.setdefault(future, []).append(question)
    misunderstood: list[str] = []

    def note(future: Future) -> None:
        mine, verdict = asked.pop(future), future.result()
        _write(out, [question["id"] for question in mine], verdict.to_json())
        bar.update(len(mine))
        if misread(verdict, *response_of(mine[0]), mine[0].get("entry_point", "Model")):
            misunderstood.extend(json.dumps(question["id"]) for question in mine)

    try:
        for future in as_completed(list(asked)):
            with signals.held():
                note(future)
    except Stopped:
        for future in [future for future in asked if future.done() and not future.cancelled()]:
            note(future)
        raise
    return misunderstood


def _so_far(path: Path) -> str:
    """What a batch that was stopped leaves behind. Only reads: OUT.jsonl may be another batch's."""
    try:
        count = sum(_done_row(line) is not None for line in path.read_bytes().splitlines(keepends=True))
    except OSError:
        count = 0
    if not count:
        return "there is no verdict yet, the same command begins anew"
    return f"the verdicts so far are in {path} ({count} of them), the same command goes on from there"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m env.batch",
        description="Judge many candidates. Stopped or killed, the same command goes on where it was.",
        epilog="A line of IN.jsonl: id; reference; candidate (source) or raw_response (a model's whole answer); "
        "entry_point where the reference class isn't called Model; meta for what is yours. Other keys, ids that come "
        "twice and a file without any line are refused before anything is judged. A line of OUT.jsonl: id, verdict. "
        "Ends with 0 when all have a verdict, 2 where that can't be, 130 or 143 when stopped.",
    )
    parser.add_argument("questions", type=Path, metavar="IN.jsonl", help="what is to be judged, one question a line")
    parser.add_argument("verdicts", type=Path, metavar="OUT.jsonl", help="gets the verdicts; its folder is made")
    parser.add_argument("--gpus", type=gpu_list, default=[], help="all, or 0,1: GPUs to judge on, one evaluator each")
    parser.add_argument("--slots", type=slot_count, default=0, help="evaluators; default: one a GPU, or one a core")
    parser.add_argument(
        "--ray", metavar="ADDRESS", help="judge on all nodes of a Ray cluster: HOST:PORT of its head, or auto"
    )
    add_rule_options(parser)
    parser.set_defaults(device=None)
    args = parser.parse_args(argv)
    if args.gpus != [] and args.device == CPU:
        parser.error("--gpus and --device cpu contradict each other")
    if args.gpus != [] and args.ray is not None:
        parser.error("--gpus chooses among this machine's; with --ray all of the nodes' are used: --device cuda")
    args.device = args.device or (CPU if args.gpus == [] else CUDA)
    try:
        with StopSignals() as signals:
            _run(args, signals)
    except (OSError, ValueError, PoolError) as error:
        print(f"env.batch: {error}", file=sys.stderr)
        return 2
    except Stopped as stop:
        print(f"env.batch: {stop}; {_so_far(args.verdicts)}", file=sys.stderr)
        return stop.code
    return 0


def _opened(args: argparse.Namespace, rules: Rules) -> Pool | RayPool:
    if args.ray is not None:
        return RayPool(args.ray, args.device, args.slots, args.seed, rules)
    return Pool(args.device, args.slots, args.seed, rules, gpus=args.gpus or None)


def _run(args: argparse.Namespace, signals: StopSignals) -> None:
    check_input("IN.jsonl", args.questions, NEEDED)
    check_output("OUT.jsonl", args.verdicts)
    if args.verdicts.exists() and args.verdicts.samefile(args.questions):
        raise BatchError(f"{args.verdicts}: questions and verdicts are the same file; give another OUT.jsonl")
    rules = chosen_rules(args)
    questions = read_questions(args.questions)
    with _alone_on(args.verdicts) as out:
        done = read_done(args.verdicts)
        check_done(questions, done, rules, args.device)
        left = [question for question in questions if json.dumps(question["id"]) not in done]
        if not left:
            print(f"env.batch: all {len(questions)} have a verdict in {args.verdicts} already", file=sys.stderr)
            return
        with (
            _opened(args, rules) as pool,
            tqdm(total=len(questions), initial=len(questions) - len(left), unit="verdict", desc="judging") as bar,
        ):
            misunderstood = judge_all(pool, left, out, bar, signals)
            signals.ignore()
    if misunderstood:
        shown = ", ".join(misunderstood[:5]) + (", …" if len(misunderstood) > 5 else "")
        print(
            f"env.batch: {len(misunderstood)} compile_error (ids {shown}): a whole answer goes under raw_response, "
            "plain source under candidate, and here it seems to be the other way round",
            file=sys.stderr,
        )


if __name__ == "__main__":
    raise SystemExit(main())
