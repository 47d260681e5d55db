"""Questions for the judge as lines of JSON: what a line of `env.batch` or a job of `env.serve` may say.

Runs in the driver. A line has `id`, `reference`, `candidate` (source) or `raw_response` (a model's whole answer), and
`entry_point` where the reference class isn't called Model. `meta` is the asker's own and isn't looked at; any other key
is refused, since it would be a misspelt one more often than not.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from env.extract import candidate_source, code_blocks, extract_code
from env.problem_format import several
from env.records import Problem, Verdict, sha256

KEYS = ("id", "reference", "candidate", "raw_response", "entry_point", "meta")


class QuestionError(ValueError):
    """A line or file that isn't a question: says which and what it needs."""


def unknown_keys(keys: Iterable[str]) -> str:
    """What is wrong with the keys of a question, "" where nothing is."""
    unknown = [key for key in keys if key not in KEYS]
    if not unknown:
        return ""
    told = []
    for key in unknown[:5]:
        meant = difflib.get_close_matches(key, KEYS, n=1)
        told.append(f"{key[:60]!r}" + (f" (did you mean {meant[0]!r}?)" if meant else ""))
    more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
    return (
        f"unknown key{'s' if len(unknown) > 1 else ''} {', '.join(told)}{more}; known are {', '.join(KEYS)} "
        "(what is yours belongs under 'meta')"
    )


def read_questions(path: str | Path) -> list[dict[str, Any]]:
    """Check every line before anything is judged. Raises QuestionError naming the bad lines, or a file without any."""
    path = Path(path)
    questions, seen, faults = [], set(), []
    try:
        text = path.read_text(encoding="utf-8-sig", errors="surrogatepass")
    except UnicodeDecodeError as error:
        raise QuestionError(f"{path}: not text in UTF-8 ({error.reason} at byte {error.start})") from error
    # Not splitlines(): JSON may hold U+2028 and U+0085 as they are, which Python takes for line ends.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            question = _question(line, f"{path}:{number}")
        except QuestionError as error:
            faults.append(str(error))
            continue
        key = json.dumps(question["id"])
        if key in seen:
            faults.append(f"{path}:{number}: the id {key} stands on an earlier line")
        seen.add(key)
        questions.append(question)
    if faults:
        raise QuestionError(several(faults))
    if not questions:
        raise QuestionError(f"{path}: no lines, so nothing to judge; a line has {', '.join(KEYS[:3])}, as JSON")
    return questions


def _question(line: str, where: str) -> dict[str, Any]:
    try:
        question = json.loads(line, object_pairs_hook=_without_repeats)
    except QuestionError as error:
        raise QuestionError(f"{where}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise QuestionError(f"{where}: not JSON ({error})") from error
    if isinstance(question, dict) and (wrong := unknown_keys(question)):
        raise QuestionError(f"{where}: {wrong}")
    kinds = [
        key
        for key in ("candidate", "raw_response")
        if isinstance(question, dict) and isinstance(question.get(key), str)
    ]
    if len(kinds) != 1 or not isinstance(question.get("reference"), str) or "id" not in question:
        raise QuestionError(
            f"{where}: needs 'id', 'reference' and one of 'candidate' or 'raw_response', the last two as text"
        )
    entry_point = question.get("entry_point", "Model")
    if not isinstance(entry_point, str) or not entry_point.isidentifier():
        raise QuestionError(f"{where}: entry_point is {entry_point!r}, not the name of a class")
    return question


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON's readers keep the last of two equal keys without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise QuestionError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands there twice")
    return found


def problem_of(question: dict[str, Any]) -> Problem:
    """The reference of a question."""
    return Problem(
        id=str(question["id"]), source=question["reference"], entry_point=question.get("entry_point", "Model")
    )


def response_of(question: dict[str, Any]) -> tuple[str, bool]:
    """(what is to be judged, whether it is a model's whole answer)."""
    raw = "raw_response" in question
    return question["raw_response" if raw else "candidate"], raw


def candidate_sha256(question: dict[str, Any]) -> str:
    """What the evaluator writes into the verdict: the digest of the source that it judges."""
    response, raw = response_of(question)
    source = candidate_source(response, raw, question.get("entry_point", "Model"))
    return sha256(response if source is None else source)


def misread(verdict: Verdict, response: str, raw: bool, entry_point: str = "Model") -> str:
    """What a candidate that doesn't compile seems to be instead of what it was handed over as: "answer" (words around
    a code block, given as source), "source" (given as a whole answer), or "" where it is neither."""
    if verdict.status != "compile_error":
        return ""
    if raw:
        return "source" if "```" not in response and f"class {entry_point}New" in response else ""
    return "answer" if code_blocks(response) and extract_code(response, entry_point) is not None else ""
