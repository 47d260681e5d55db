"""Judge many candidates: `python -m env.batch IN.jsonl OUT.jsonl [--device cpu|cuda]`.

Runs in the driver. A line in has `id`, `reference`, and `candidate` (source) or `raw_response` (a model's whole
answer); a line out has `id` and `verdict`. Each verdict is on disk before the next is waited for; run again, it goes on
where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

from tqdm import tqdm

from env.pool import Pool, PoolError
from env.records import Problem


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
        key = json.dumps(question["id"])
        if key in seen:
            raise BatchError(f"{path}:{number}: the id {key} stands on an earlier line")
        seen.add(key)
        questions.append(question)
    return questions


def _verdict_id(line: bytes) -> str | None:
    """Id (as JSON) of a whole line that this program wrote, None for any other."""
    try:
        row = json.loads(line)
        # A line without its end doesn't count even where it can be read: the next verdict would stand on the same line.
        return json.dumps(row["id"]) if isinstance(row["verdict"], dict) and line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def read_done(path: Path) -> set[str]:
    """Ids (as JSON) that have a verdict already. A last line that a kill or a power cut damaged is taken off the file.

    Raises BatchError for a file that isn't ours (damage elsewhere than in the last line, or no verdict at all in a file
    whose only line doesn't begin like one): it is left as it is.
    """
    if not path.exists():
        return set()
    lines = path.read_bytes().splitlines(keepends=True) if path.stat().st_size else []
    ids = [_verdict_id(line) for line in lines]
    start = b'{"id": '
    for number, (line, found) in enumerate(zip(lines, ids), 1):
        cut_short = number == len(lines) and (
            number > 1 or (not line.endswith(b"\n") and line.startswith(start[: len(line)]))
        )
        if found is None and not cut_short:
            raise BatchError(f"{path}:{number}: not a verdict of env.batch; give another OUT.jsonl")
    if ids and ids[-1] is None:
        os.truncate(path, path.stat().st_size - len(lines[-1]))
    return {found for found in ids if found is not None}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m env.batch", description="Judge many candidates.")
    parser.add_argument("questions", type=Path, metavar="IN.jsonl")
    parser.add_argument("verdicts", type=Path, metavar="OUT.jsonl")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--slots", type=int, default=0, help="evaluators; default: one a GPU, or one a core")
    parser.add_argument("--seed", type=int, default=None, help="seed of the secret inputs; default: a fresh secret")
    args = parser.parse_args(argv)
    try:
        if args.verdicts.exists() and args.verdicts.samefile(args.questions):
            raise BatchError(f"{args.verdicts}: questions and verdicts are the same file; give another OUT.jsonl")
        questions = read_questions(args.questions)
        done = read_done(args.verdicts)
        left = [question for question in questions if json.dumps(question["id"]) not in done]
        if not left:
            return 0
        args.verdicts.parent.mkdir(parents=True, exist_ok=True)
        with (
            Pool(args.device, slots=args.slots, seed=args.seed) as pool,
            open(args.verdicts, "a", encoding="utf-8") as out,
        ):
            futures: dict[Any, list] = {}
            for question in left:
                raw = "raw_response" in question
                problem = Problem(
                    id=str(question["id"]),
                    source=question["reference"],
                    entry_point=question.get("entry_point", "Model"),
                )
                future = pool.submit(problem, question["raw_response" if raw else "candidate"], raw=raw)
                futures.setdefault(future, []).append(question["id"])
            bar = tqdm(total=len(questions), initial=len(done), unit="verdict", desc="judging")
            for future in as_completed(futures):
                verdict = future.result().to_json()
                for question_id in futures[future]:
                    out.write(json.dumps({"id": question_id, "verdict": verdict}) + "\n")
                    bar.update()
                out.flush()
                os.fsync(out.fileno())
            bar.close()
    except (OSError, BatchError, PoolError) as error:
        print(f"env.batch: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
