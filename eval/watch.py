"""Progress and wall-clock time of an evaluation, seen from outside: around the engine and around the judge.

Runs in the driver. What it measures goes to wall.jsonl, never into trajectories: equal runs have equal trajectories and
other times. After a kill the file also holds the time of work that was done again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tqdm import tqdm

from env.records import Problem, Verdict, sha256
from rl.engines.base import Completion, Engine, Request, Sampling, Source
from rl.rollout import Judge

# Parts of an evaluation whose sampling is told apart.
SEQUENCE, BESIDE = "samples", "best-of"


class Watch:
    """A context manager: one progress bar over all verdicts, with rate and time left, and wall.jsonl."""

    def __init__(self, path: Path, total: int, done: int, title: str) -> None:
        self.path, self.total, self.done, self.title = path, total, done, title
        self._lock = threading.Lock()

    def __enter__(self) -> Watch:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a", encoding="utf-8")
        self.bar = tqdm(
            total=self.total, initial=self.done, desc=self.title, unit="verdict", mininterval=1.0, position=0
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        self._file.close()

    def note(self, steps: int = 0, **line: Any) -> None:
        """A line for wall.jsonl, and `steps` of the bar. Called from any thread."""
        with self._lock:
            if not self._file.closed:
                self._file.write(json.dumps(line, sort_keys=True) + "\n")
                self._file.flush()
                self.bar.update(steps)


class WatchedJudge:
    """A judge that notes each verdict's seconds."""

    def __init__(self, judge: Judge, watch: Watch) -> None:
        self.judge, self.watch = judge, watch

    def submit(self, problem: Problem, response: str, raw: bool = True) -> Future[Verdict]:
        future = self.judge.submit(problem, response, raw)
        key = answer_key(problem.id, response)
        future.add_done_callback(lambda done: self._note(done, key))
        return future

    def _note(self, done: Future[Verdict], key: str) -> None:
        if not done.cancelled() and done.exception() is None:
            verdict = done.result()
            self.watch.note(1, kind="verdict", answer=key, status=verdict.status, seconds=verdict.cost.get("total_s"))


class WatchedEngine:
    """An engine that notes the seconds it samples, without those in which it waits for verdicts."""

    def __init__(self, engine: Engine, watch: Watch) -> None:
        self.engine, self.watch, self.takes = engine, watch, engine.takes
        self.part = SEQUENCE

    def push(self, model: Any) -> None:
        self.engine.push(model)

    def stream(self, source: Source, sampling: Sampling) -> Iterator[tuple[Request, Completion]]:
        timed = _TimedSource(source)
        seconds, tokens, answers = 0.0, 0, 0
        stream = iter(self.engine.stream(timed, sampling))
        while True:
            begun, waited = time.perf_counter(), timed.seconds
            pair = next(stream, None)
            seconds += time.perf_counter() - begun - (timed.seconds - waited)
            if pair is None:
                break
            tokens, answers = tokens + len(pair[1].ids), answers + 1
            yield pair
        self.watch.note(kind="sampling", part=self.part, seconds=round(seconds, 4), tokens=tokens, answers=answers)


class _TimedSource:
    """Counts the seconds that an engine waits for requests."""

    def __init__(self, source: Source) -> None:
        self._source, self.most, self.seconds = source, source.most, 0.0

    def take(self, limit: int, wait: bool) -> list[Request]:
        begun = time.perf_counter()
        try:
            return self._source.take(limit, wait)
        finally:
            self.seconds += time.perf_counter() - begun


def answer_key(problem_id: str, answer: str) -> str:
    """Names an answer to a problem in wall.jsonl."""
    return sha256(f"{problem_id}\n{answer}")[:16]


def read_wall(path: Path) -> tuple[float, dict[str, float]]:
    """(seconds of sampling the samples, seconds of the judge by answer) from wall.jsonl; nothing without one."""
    sampling, judged = 0.0, {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # cut short by a kill
            if entry["kind"] == "sampling":
                sampling += entry["seconds"] if entry["part"] == SEQUENCE else 0.0
            elif entry["seconds"] is not None:
                judged[entry["answer"]] = entry["seconds"]
    return sampling, judged
