"""From the JSON of a request to questions for the judge, in this project's own words. Runs in the driver.

The fields are those of env.batch (`env.questions`): `id`, `reference`, one of `candidate` and `raw_response`,
`entry_point`, `meta`; others are refused.
"""

from __future__ import annotations

import json
import keyword
import uuid
from typing import Any

from env.extract import MAX_CHARS
from env.questions import unknown_keys
from env.store import Question

MAX_BATCH = 256
MAX_ID_CHARS = 200
MAX_WAIT_S = 3600.0


class BadRequest(ValueError):
    """What is wrong with a request, in words for its sender. `status`: the HTTP status to answer with."""

    def __init__(self, why: str, status: int = 422):
        self.status = status
        super().__init__(why)


def parse(body: bytes) -> Any:
    """Raises BadRequest for what isn't JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        # A UnicodeDecodeError's own words would repeat the whole body.
        why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)[:200]
        raise BadRequest(f"the body is not JSON: {why}", 400) from error


def an_object(data: Any, what: str = "the body") -> dict[str, Any]:
    if not isinstance(data, dict):
        raise BadRequest(f"{what} is {_kind(data)}, not an object")
    return data


def text_of(data: dict[str, Any], field: str, where: str = "") -> str:
    """A text of the question. Raises BadRequest where it is missing, empty, no text or too long."""
    value = data.get(field)
    if not isinstance(value, str) or not value.strip():
        raise BadRequest(f"{where}{field!r} is {'missing' if value is None else _kind(value)}: it has to be text")
    if len(value) > MAX_CHARS:
        raise BadRequest(f"{where}{field!r} has {len(value)} characters, the limit is {MAX_CHARS}", 413)
    return value


def id_of(data: dict[str, Any], field: str, where: str = "") -> str:
    """The asker's name for a job, or a fresh one."""
    value = data.get(field)
    if value is None:
        return str(uuid.uuid4())
    # Surrogates aren't printable either.
    if not isinstance(value, str) or not value.strip() or not value.isprintable() or len(value) > MAX_ID_CHARS:
        raise BadRequest(f"{where}{field!r} has to be text of 1 to {MAX_ID_CHARS} printable characters")
    return value


def entry_point_of(data: dict[str, Any], where: str = "") -> str:
    value = data.get("entry_point", "Model")
    if not isinstance(value, str) or not value.isidentifier() or keyword.iskeyword(value) or len(value) > MAX_ID_CHARS:
        raise BadRequest(f"{where}'entry_point' is not the name of a class")
    return value


def job_of(data: Any, where: str = "") -> tuple[str, Question]:
    """(id, question) of one of our own requests. Raises BadRequest; `where` says which of several it was."""
    an_object(data, f"{where or 'the body'}".strip(": "))
    if wrong := unknown_keys(data):
        raise BadRequest(f"{where}{wrong}")
    kinds = [key for key in ("candidate", "raw_response") if data.get(key) is not None]
    if len(kinds) != 1:
        raise BadRequest(f"{where}give one of 'candidate' (source) and 'raw_response' (a model's whole answer)")
    question = Question(
        reference=text_of(data, "reference", where),
        response=text_of(data, kinds[0], where),
        raw=kinds[0] == "raw_response",
        entry_point=entry_point_of(data, where),
    )
    return id_of(data, "id", where), question


def list_of(data: Any, field: str) -> list[Any]:
    """The list of a batch: under `field`, or the body itself."""
    jobs = data if isinstance(data, list) else an_object(data).get(field)
    if not isinstance(jobs, list) or not jobs:
        raise BadRequest(f"{field!r} has to be a list of at least one job")
    if len(jobs) > MAX_BATCH:
        raise BadRequest(f"{len(jobs)} jobs in one request, the limit is {MAX_BATCH}", 413)
    return jobs


def batch_of(data: Any) -> list[tuple[str, Question]]:
    return [job_of(job, f"job {number}: ") for number, job in enumerate(list_of(data, "jobs"))]


def wait_of(value: Any, default: float, field: str = "wait_s") -> float:
    """Seconds that the asker is ready to wait."""
    if value is None:
        return default
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = -1.0
    if isinstance(value, bool) or not 0 <= seconds <= MAX_WAIT_S:
        raise BadRequest(f"{field!r} has to be a number of seconds from 0 to {MAX_WAIT_S:.0f}")
    return seconds


def _kind(value: Any) -> str:
    names = {str: "empty text", list: "a list", dict: "an object", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
