"""The names and fields of KernelGYM's published HTTP API, in terms of our questions and verdicts. Runs in the driver.

After the README of github.com/hkust-nlp/KernelGYM: `POST /evaluate`, `/evaluate/batch` and `/workflow/submit` answer
with what was found, `GET /status/{task_id}` and `/results/{task_id}` tell of it later. What the README leaves open is
decided here and said so. Trials, tolerances and ways of timing are this server's rules (`metadata.rules`), not the
request's.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from env.rules import Rules
from env.serve_cases import NoReference, reference_of
from env.serve_requests import BadRequest, an_object, entry_point_of, id_of, list_of, text_of
from env.store import Question, State

BACKENDS = ("triton", "auto")
REFERENCES = {"pytorch": "eager", "eager": "eager", "compile": "compile", "torch_compile": "compile"}
WORKFLOWS = ("kernelbench", "kernel_simple")
DEFAULT_WAIT_S = 600.0

# error_code by status. A problem's and the machine's fault say so: they are no judgement on the kernel.
_CODES = {
    "incorrect": "CORRECTNESS_ERROR",
    "hack": "CORRECTNESS_ERROR",
    "compile_error": "COMPILATION_ERROR",
    "runtime_error": "RUNTIME_ERROR",
    "timeout": "TIMEOUT_ERROR",
    "oom": "RESOURCE_ERROR",
    "problem_error": "VALIDATION_ERROR",
    "infra_error": "SYSTEM_ERROR",
}
_RAN = ("correct", "incorrect", "hack", "runtime_error")


def _choices(data: dict[str, Any], rules: Rules, where: str) -> None:
    """Refuse what this server would judge otherwise than asked."""
    backend = data.get("backend")
    if backend is not None and backend not in BACKENDS:
        raise BadRequest(f"{where}backend {str(backend)[:40]!r}: this server judges Triton kernels; use 'triton'")
    asked = data.get("reference_backend")
    if asked is not None and (not isinstance(asked, str) or REFERENCES.get(asked) != rules.reference):
        raise BadRequest(
            f"{where}reference_backend {str(asked)[:40]!r}: this server's reference is {rules.reference!r}; "
            "start one with --reference eager or --reference compile"
        )


def evaluation_of(data: Any, rules: Rules, where: str = "") -> tuple[str, Question]:
    """(task id, question) of an /evaluate request. Raises BadRequest."""
    an_object(data, where.strip(": ") or "the body")
    _choices(data, rules, where)
    return id_of(data, "task_id", where), Question(
        reference=text_of(data, "reference_code", where),
        response=text_of(data, "kernel_code", where),
        entry_point=entry_point_of(data, where),
    )


def evaluations_of(data: Any, rules: Rules) -> list[tuple[str, Question]]:
    """Those of /evaluate/batch: a list, or an object with one under `tasks` (the README leaves that open)."""
    tasks = list_of(data, "tasks")
    return [evaluation_of(task, rules, f"task {number}: ") for number, task in enumerate(tasks)]


def workflow_of(data: Any, rules: Rules) -> tuple[str, str, Question]:
    """(workflow, task id, question) of a /workflow/submit request.

    `kernelbench` has the payload of /evaluate; `kernel_simple` brings test cases in its kernel_code, out of which a
    reference is made.
    """
    workflow = an_object(data).get("workflow")
    if workflow not in WORKFLOWS:
        raise BadRequest(f"workflow {str(workflow)[:40]!r} is unknown; known: {', '.join(WORKFLOWS)}")
    payload = an_object(data.get("payload"), "'payload'")
    payload = {**payload, "task_id": data.get("task_id", payload.get("task_id"))}
    if workflow == "kernel_simple" and payload.get("reference_code") is None:
        # Here the entry point names the kernel's class.
        rival = entry_point_of({"entry_point": payload.get("entry_point", "ModelNew")})
        if not rival.endswith("New") or rival == "New":
            raise BadRequest(f"entry_point {rival!r}: the kernel's class has to be called ...New, as in ModelNew")
        payload["entry_point"] = rival.removesuffix("New")
        try:
            payload["reference_code"] = reference_of(text_of(payload, "kernel_code"), payload["entry_point"])
        except NoReference as error:
            raise BadRequest(str(error)) from error
    return workflow, *evaluation_of(payload, rules)


def result_of(state: State) -> dict[str, Any]:
    """An evaluation's result. Runtimes in milliseconds; null where nothing was measured, or nothing is known.

    status: `completed` for a right kernel, `timeout` or `failed` for a wrong one (error_code says how), `pending`
    without a verdict. speedup is null unless the kernel is right: a cheat's time is no speedup.
    """
    row: dict[str, Any] = {
        "task_id": state.id, "status": "pending", "compiled": None, "correctness": None, "decoy_kernel": None,
        "reference_runtime": None, "kernel_runtime": None, "speedup": None, "metadata": {},
        "error_message": None, "error_code": None, "submitted_at": _time(state.accepted), "completed_at": None,
        "processing_time": None,
    }  # fmt: skip
    if state.finished is None or state.verdict is None:
        return row
    verdict = json.loads(state.verdict)
    status = verdict["status"]
    right = status == "correct"
    blameless = status in ("problem_error", "infra_error")
    row["status"] = "completed" if right else "timeout" if status == "timeout" else "failed"
    # A kernel that ran out of time or memory may have done so while it was compiled.
    row["compiled"] = True if status in _RAN else False if status == "compile_error" else None
    row["correctness"] = None if blameless else right
    row["decoy_kernel"] = None if blameless else status == "hack"
    row["reference_runtime"] = _ms(verdict["reference_us"])
    row["kernel_runtime"] = _ms(verdict["candidate_us"])
    row["speedup"] = verdict["speedup"] if right else None
    evidence = verdict["evidence"]
    row["metadata"] = {
        "verdict": status, "time_kind": verdict["time_kind"], "device": verdict["device"],
        "rules": evidence.get("rules"), "rule": evidence.get("rule"), "profiling_ratio": verdict["profiling_ratio"],
        "profile": verdict["profile"], "speedup_low": verdict["speedup_low"], "speedup_high": verdict["speedup_high"],
        "feedback": verdict["feedback"], "versions": verdict["versions"],
    }  # fmt: skip
    if not right:
        row["error_message"] = verdict["message"] or verdict["feedback"] or status
        row["error_code"] = _CODES[status]
    row["completed_at"] = _time(state.finished)
    # A question that was judged before the job came took no time.
    row["processing_time"] = max(0.0, state.finished - state.accepted)
    return row


def status_of(state: State, running: bool, position: int) -> dict[str, Any]:
    """What /status tells: `pending`, `processing`, or the result's status."""
    status = result_of(state)["status"]
    waiting = state.finished is None
    return {
        "task_id": state.id, "status": "processing" if waiting and running else status,
        "progress": 0.0 if waiting else 1.0, "queue_position": position if waiting and not running else None,
        "submitted_at": _time(state.accepted), "completed_at": None if waiting else _time(state.finished),
    }  # fmt: skip


def _ms(time_us: float | None) -> float | None:
    return None if time_us is None else time_us / 1000


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
