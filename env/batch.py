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
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="surrogatepass").splitlines(), 1):
        if not line.strip():
            continue
        try:
            question = json.loads(line)
        except json.JSONDecodeError as error:
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


def read_done(path: Path) -> set[str]:
    """Ids (as JSON) that have a verdict already. A last line cut short by a kill is taken off the file."""
    if not path.exists():
        return set()
    done, good = set(), 0
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break  # even where it could be read: the next verdict would stand on the same line
            try:
                done.add(json.dumps(json.loads(line)["id"]))
            except (ValueError, KeyError, TypeError):
                break
            good += len(line)
    if good != path.stat().st_size:
        os.truncate(path, good)
    return done


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m env.batch", description="Judge many candidates.")
    parser.add_argument("questions", type=Path, metavar="IN.jsonl")
    parser.add_argument("verdicts", type=Path, metavar="OUT.jsonl")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--slots", type=int, default=0, help="evaluators; default: one a GPU, or one a core")
    parser.add_argument("--seed", type=int, default=None, help="seed of the secret inputs; default: a fresh secret")
    args = parser.parse_args(argv)
    try:
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
