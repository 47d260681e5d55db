"""What the tests of evaluations share: a judge that makes verdicts up, and a server that misbehaves."""

from __future__ import annotations

import json
import threading
from collections import Counter
from concurrent.futures import Future
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from env.records import Problem, Verdict, sha256
from env.rules import rules_for

STATUSES = ("correct", "correct", "correct", "hack", "incorrect", "runtime_error", "infra_error")


class MadeUpJudge:
    """The verdict follows from problem, answer and reference; counts what it was asked, can break off like a kill."""

    def __init__(self, breaks_after: int | None = None, reference: str = "eager"):
        self.asked, self.breaks_after = 0, breaks_after
        self.rules = rules_for(reference=reference)
        self.info = {"device": "made up", "versions": {"python": "3", "torch": "2", "triton": "3"}}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, problem: Problem, response: str, raw: bool = True) -> Future:
        if self.asked == self.breaks_after:
            raise KeyboardInterrupt
        self.asked += 1
        future: Future = Future()
        future.set_result(self.verdict(problem, response))
        return future

    def verdict(self, problem: Problem, response: str) -> Verdict:
        drawn = int(sha256(f"{problem.id} {response} {self.rules.reference}")[:8], 16)
        status = STATUSES[drawn % len(STATUSES)] if "class ModelNew" in response else "compile_error"
        verdict = Verdict(status=status, feedback=f"status: {status} {drawn}", cost={"total_s": 0.5})
        verdict.problem_sha256 = problem.sha256
        if status == "correct":
            verdict.speedup = 0.5 + drawn // 7 % 200 / 100
            verdict.speedup_low, verdict.speedup_high = verdict.speedup - 0.05, verdict.speedup + 0.05
            verdict.reference_us, verdict.candidate_us = 100.0, 100.0 / verdict.speedup
            verdict.profiling_ratio, verdict.time_kind = 0.9, "modelled"
        return verdict


def answer(text, reason="stop"):
    """A server's ordinary answer."""
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}]}


@contextmanager
def serving(reply):
    """A server whose `reply(body, nth time this very request is made)` gives (status, JSON or bytes, headers)."""
    times, lock, asked = Counter(), threading.Lock(), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                key = json.dumps(body, sort_keys=True)
                times[key] += 1
                nth = times[key]
                asked.append(body)
            status, data, *headers = reply(body, nth)
            payload = data if isinstance(data, bytes) else json.dumps(data).encode()
            try:
                self.send_response(status)
                for name, value in (headers[0] if headers else {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)
            except OSError:
                self.close_connection = True  # the client had no patience

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        server.server_close()
