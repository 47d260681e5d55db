"""Judge many candidates: `python -m env.batch IN.jsonl OUT.jsonl [--gpus all|0,1 | --ray ADDRESS]`.

Runs in the driver. A line in has `id`, `reference`, `candidate` (source) or `raw_response` (a model's whole answer),
and `entry_point` where the reference class isn't called Model; a line out has `id` and `verdict`, in the order in which
they are reached. Each verdict is on disk before the next is waited for; run again, it goes on where it stopped. Exits
with 0 when all have a verdict, 2 where the question can't be asked, 130 or 143 where Ctrl-C or SIGTERM came first.
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

from env.commands import CPU, CUDA, Stopped, StopSignals, add_rule_options, chosen_rules, gpu_list
from env.extract import candidate_source
from env.pool import Pool, PoolError
from env.ray_pool import RayPool
from env.records import Problem, sha256
from env.rules import Rules


class BatchError(ValueError):
    """A line that isn't a question: says which line and what it needs."""


def read_questions(path: Path) -> list[dict[str, Any]]:
    """Check every line before anything is judged. Raises BatchError naming the line."""
    questions, seen = [], set()
    try:
        text = path.read_text(encoding="utf-8", errors="surrogatepass")
    except UnicodeDecodeError as error:
        raise BatchError(f"{path}: not text in UTF-8 ({error.reason} at byte {error.start})") from error
    # Not splitlines(): JSON may hold U+2028 and U+0085 as they are, which Python takes for line ends.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            question = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BatchError(f"{path}:{number}: not JSON ({error})") from error
        kinds = [
            key
            for key in ("candidate", "raw_response")
            if isinstance(question, dict) and isinstance(question.get(key), str)
        ]
        if len(kinds) != 1 or not isinstance(question.get("reference"), str) or "id" not in question:
            raise BatchError(
                f"{path}:{number}: needs 'id', 'reference' and one of 'candidate' or 'raw_response', "
                "the last two as text"
            )
        entry_point = question.get("entry_point", "Model")
        if not isinstance(entry_point, str) or not entry_point.isidentifier():
            raise BatchError(f"{path}:{number}: entry_point is {entry_point!r}, not the name of a class")
        key = json.dumps(question["id"])
        if key in seen:
            raise BatchError(f"{path}:{number}: the id {key} stands on an earlier line")
        seen.add(key)
        questions.append(question)
    return questions


def problem_of(question: dict[str, Any]) -> Problem:
    return Problem(
        id=str(question["id"]), source=question["reference"], entry_point=question.get("entry_point", "Model")
    )


def _response(question: dict[str, Any]) -> tuple[str, bool]:
    """(what is to be judged, whether it is a model's whole answer)."""
    raw = "raw_response" in question
    return question["raw_response" if raw else "candidate"], raw


def _candidate_sha256(question: dict[str, Any]) -> str:
    """What the evaluator writes into the verdict: the digest of the source that it judges."""
    response, raw = _response(question)
    source = candidate_source(response, raw, question.get("entry_point", "Model"))
    return sha256(response if source is None else source)


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
    if differs(verdict.get("candidate_sha256"), _candidate_sha256(question)):
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
    """OUT.jsonl opened to add lines, by one batch at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BatchError(f"{path}: another batch is writing to it") from error
        yield out


def _write(out: IO[str], ids: list, verdict: dict[str, Any]) -> None:
    """On disk when this returns."""
    out.writelines(json.dumps({"id": question_id, "verdict": verdict}) + "\n" for question_id in ids)
    out.flush()
    os.fsync(out.fileno())


def judge_all(
    pool: Pool | RayPool, questions: list[dict[str, Any]], out: IO[str], bar: tqdm, signals: StopSignals
) -> None:
    """Judge what is left and write each verdict as it comes. Stopped, it still writes what is there by then."""
    ids: dict[Future, list] = {}
    for question in questions:
        response, raw = _response(question)
        future = pool.submit(problem_of(question), response, raw=raw)
        ids.setdefault(future, []).append(question["id"])

    def note(future: Future) -> None:
        mine = ids.pop(future)
        _write(out, mine, future.result().to_json())
        bar.update(len(mine))

    try:
        for future in as_completed(list(ids)):
            with signals.held():
                note(future)
    except Stopped:
        for future in [future for future in ids if future.done() and not future.cancelled()]:
            note(future)
        raise


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m env.batch", description="Judge many candidates.")
    parser.add_argument("questions", type=Path, metavar="IN.jsonl")
    parser.add_argument("verdicts", type=Path, metavar="OUT.jsonl")
    parser.add_argument("--gpus", type=gpu_list, default=[], help="all, or 0,1: GPUs to judge on, one evaluator each")
    parser.add_argument("--slots", type=int, default=0, help="evaluators; default: one a GPU, or one a core")
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
        print(
            f"env.batch: {stop}; the verdicts so far are in {args.verdicts}, the same command goes on from there",
            file=sys.stderr,
        )
        return stop.code
    return 0


def _opened(args: argparse.Namespace, rules: Rules) -> Pool | RayPool:
    if args.ray is not None:
        return RayPool(args.ray, args.device, args.slots, args.seed, rules)
    return Pool(args.device, args.slots, args.seed, rules, gpus=args.gpus or None)


def _run(args: argparse.Namespace, signals: StopSignals) -> None:
    if args.verdicts.exists() and args.verdicts.samefile(args.questions):
        raise BatchError(f"{args.verdicts}: questions and verdicts are the same file; give another OUT.jsonl")
    rules = chosen_rules(args)
    questions = read_questions(args.questions)
    with _alone_on(args.verdicts) as out:
        done = read_done(args.verdicts)
        check_done(questions, done, rules, args.device)
        left = [question for question in questions if json.dumps(question["id"]) not in done]
        if not left:
            return
        with (
            _opened(args, rules) as pool,
            tqdm(total=len(questions), initial=len(questions) - len(left), unit="verdict", desc="judging") as bar,
        ):
            judge_all(pool, left, out, bar, signals)
            signals.ignore()


if __name__ == "__main__":
    raise SystemExit(main())
