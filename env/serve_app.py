"""The HTTP routes (FastAPI), each a few lines between a request's JSON and `Front`. Runs in the driver.

Imported by env.serve only once FastAPI is known to be there. Bodies are read here, not by FastAPI: their size is
counted while they arrive, and what is wrong with them is said in words.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response

from env import serve_gym as gym
from env.rules import Rules
from env.serve_front import Front, Stopping
from env.serve_limits import Asgi, Gate, Rates
from env.serve_metrics import CONTENT_TYPE, Metrics
from env.serve_requests import BadRequest, an_object, batch_of, job_of, parse, wait_of
from env.store import IdTaken, Question, QueueFull, Receipt, State, StoreError

BODY_TIMEOUT_S = 60.0


def make_app(front: Front, rules: Rules, token: str, rates: Rates, max_body: int) -> Asgi:
    """The ASGI application. token: "" asks for none. max_body: bytes of a request."""
    metrics = Metrics()
    # The pages under /docs would load scripts from elsewhere.
    app = FastAPI(title="Kernel judge", docs_url=None, redoc_url=None)

    # What can go wrong ------------------------------------------------------------------------------------------------

    def answers(status: int, headers: Callable[[Exception], dict[str, str]] = lambda _: {}) -> Callable[..., Awaitable]:
        async def handler(_: Request, error: Exception) -> Response:
            code = error.status if isinstance(error, BadRequest) else status
            return JSONResponse({"detail": str(error)}, code, headers=headers(error))

        return handler

    app.add_exception_handler(BadRequest, answers(422))
    app.add_exception_handler(IdTaken, answers(409))
    app.add_exception_handler(StoreError, answers(503, lambda _: {"retry-after": "5"}))

    @app.exception_handler(QueueFull)
    async def queue_full(_: Request, error: QueueFull) -> Response:
        metrics.refused["queue_full"] += 1
        return JSONResponse({"detail": str(error)}, 429, headers={"retry-after": str(front.retry_after_s())})

    @app.exception_handler(Stopping)
    async def stopping(_: Request, __: Stopping) -> Response:
        why = "the server is stopping; what it accepted is kept and judged after the next start: ask for it by its id"
        return JSONResponse({"detail": why}, 503, headers={"retry-after": "10"})

    # Shared by the routes ---------------------------------------------------------------------------------------------

    async def body_of(request: Request) -> Any:
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > max_body:
                        raise BadRequest(f"the body has more than {max_body} bytes, which is the limit", 413)
        except TimeoutError as error:
            raise BadRequest(f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s", 408) from error
        return parse(bytes(body))

    async def accept(request: Request, jobs: list[tuple[str, Question]], rename: bool = False) -> list[Receipt]:
        """A batch costs as much of the rate as its jobs do one by one; the first was paid for at the gate."""
        if len(jobs) > 1 and (wait := rates.take(request.client.host if request.client else "", len(jobs) - 1)):
            metrics.refused["rate"] += len(jobs)
            raise HTTPException(429, "too many jobs from this address", headers={"retry-after": str(math.ceil(wait))})
        receipts = await front.submit(jobs, rename)
        metrics.accepted += len(receipts)
        metrics.known += sum(receipt.known for receipt in receipts)
        return receipts

    async def judged(job: str, wait_s: float) -> State:
        state = await front.wait(job, wait_s)
        if state is None:
            raise HTTPException(404, f"no job {job!r} here; it was never accepted, or its verdict was removed by age")
        return state

    def known(job: str) -> State:
        state = front.store.state(job)
        if state is None:
            raise HTTPException(404, f"no job {job!r} here; it was never accepted, or its verdict was removed by age")
        return state

    def describe(state: State) -> dict[str, Any]:
        """A job in our own words: queued, running or done."""
        if state.finished is not None:
            return {"id": state.id, "status": "done", "verdict": json.loads(state.verdict or "null")}
        if front.running(state.work):
            return {"id": state.id, "status": "running"}
        return {"id": state.id, "status": "queued", "position": front.store.position(state.work)}

    # Our own routes ---------------------------------------------------------------------------------------------------

    @app.post("/v1/jobs", status_code=202)
    async def submit(request: Request) -> Any:
        """Queue a candidate: id?, reference, candidate or raw_response, entry_point?. On disk when answered."""
        receipts = await accept(request, [job_of(await body_of(request))])
        return {"id": receipts[0].id, "known": receipts[0].known}

    @app.post("/v1/batch", status_code=202)
    async def batch(request: Request) -> Any:
        """Queue several, all or none: {"jobs": [...]}."""
        receipts = await accept(request, batch_of(await body_of(request)))
        return {"jobs": [{"id": receipt.id, "known": receipt.known} for receipt in receipts]}

    @app.get("/v1/status/{job:path}")
    async def job_status(job: str) -> Any:
        """Where a job stands: queued (with its position), running, done."""
        row = describe(known(job))
        row.pop("verdict", None)
        return row

    @app.get("/v1/result/{job:path}")
    async def job_result(job: str, request: Request) -> Any:
        """The verdict; 202 while there is none. ?wait_s=30 waits for it that long."""
        state = await judged(job, wait_of(request.query_params.get("wait_s"), 0.0))
        return JSONResponse(describe(state), 202 if state.finished is None else 200)

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.render(front), media_type=CONTENT_TYPE)

    # As KernelGYM documents them: its clients call tasks of their next run by the same names again --------------------

    async def result_when_judged(job: str, wait_s: float) -> dict[str, Any]:
        """An evaluation that isn't there in time, or that the machine failed, is no result: clients try again."""
        state = await judged(job, wait_s)
        if state.finished is None:
            why = f"no verdict within {wait_s:.0f} s; {job!r} stays in the queue: GET /results/ and its id"
            raise HTTPException(504, why, headers={"x-error-code": "TIMEOUT_ERROR"})
        if state.status == "infra_error":
            why = "this machine could not judge it, which says nothing about the kernel; the same request tries again"
            raise HTTPException(503, why, headers={"x-error-code": "SYSTEM_ERROR", "retry-after": "5"})
        return gym.result_of(state)

    @app.post("/evaluate")
    async def evaluate(request: Request) -> Any:
        """Judge a kernel against a reference, and answer with the result."""
        data = await body_of(request)
        job = gym.evaluation_of(data, rules)
        wait_s = wait_of(data.get("timeout"), gym.DEFAULT_WAIT_S, "timeout")
        await accept(request, [job], rename=True)
        return await result_when_judged(job[0], wait_s)

    @app.post("/evaluate/batch")
    async def evaluate_batch(request: Request) -> Any:
        """Judge several, and answer with all results; one without a verdict in time stays `pending`."""
        data = await body_of(request)
        jobs = gym.evaluations_of(data, rules)
        options = data if isinstance(data, dict) else {}
        end = time.monotonic() + wait_of(options.get("timeout"), gym.DEFAULT_WAIT_S, "timeout")
        await accept(request, jobs, rename=True)
        rows = [gym.result_of(await judged(job, end - time.monotonic())) for job, _ in jobs]
        completed = sum(row["status"] == "completed" for row in rows)
        pending = sum(row["status"] == "pending" for row in rows)
        return {
            "batch_id": options.get("batch_id"), "total": len(rows), "completed": completed, "pending": pending,
            "failed": len(rows) - completed - pending, "results": rows,
        }  # fmt: skip

    @app.post("/workflow/submit")
    async def workflow_submit(request: Request) -> Any:
        """Judge by workflow: kernelbench, or kernel_simple with its test cases in the kernel's file."""
        data = an_object(await body_of(request))
        # In a thread: a file of 100 000 characters is parsed for a second.
        workflow, *job = await asyncio.to_thread(gym.workflow_of, data, rules)
        wait_s = wait_of(data.get("timeout"), gym.DEFAULT_WAIT_S, "timeout")
        await accept(request, [tuple(job)], rename=True)
        row = await result_when_judged(job[0], wait_s)
        return {"task_id": job[0], "workflow": workflow, "status": row["status"], "result": row}

    @app.get("/status/{task_id:path}")
    async def task_status(task_id: str) -> Any:
        state = known(task_id)
        running = front.running(state.work)
        waits = state.finished is None and not running
        return gym.status_of(state, running, front.store.position(state.work) if waits else 0)

    @app.get("/results/{task_id:path}")
    async def task_results(task_id: str) -> Any:
        state = known(task_id)
        if state.finished is None:
            raise HTTPException(404, f"{task_id!r} has no result yet: GET /status/ and its id")
        return gym.result_of(state)

    @app.get("/health")
    async def health(request: Request) -> Any:
        """Whether accepted jobs are being judged. Without the token, no more than that."""
        trouble = front.trouble()
        row: dict[str, Any] = {"status": "unhealthy" if trouble else "healthy"}
        if request.state.trusted:
            finished = front.store.finished()
            row |= {
                "trouble": trouble, "uptime": time.time() - front.started,
                "queue_status": {
                    "pending": max(0, front.store.queued - front.in_flight), "processing": front.in_flight,
                    "completed": sum(finished.values()), "limit": front.store.queue_limit,
                },
                "active_tasks": front.in_flight, "total_processed": sum(front.verdicts.values()),
                "rules": rules.describe(), "device": front.pool.info.get("device", ""),
            }  # fmt: skip
        return JSONResponse(row, 503 if trouble else 200)

    @app.get("/workers/status")
    async def workers_status() -> Any:
        """How much is judged at once, on what. The pool replaces an evaluator that is lost on its own."""
        info = front.pool.info
        return {
            "lanes": len(front.pool), "in_flight": front.in_flight, "device": info.get("device", ""),
            "versions": info.get("versions", {}), "verdicts_per_second": front.rate(),
        }  # fmt: skip

    return Gate(app, token, rates, max_body, metrics.note)
