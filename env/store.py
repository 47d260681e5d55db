"""Jobs and their verdicts on disk (SQLite), for a server that may be killed at any instant. Standard library only.

Runs in the driver. A job is a name for a question; equal questions share one piece of work and are judged once. One
thread writes, and what came in meanwhile shares one transaction: a future that `submit` or `finish` gave is resolved
once its transaction is on the disk. What has no verdict when the file is opened is waiting again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from env.records import Problem, sha256

VERSION = 1
# One fsync is some milliseconds: so many requests may share it.
GROUP = 512

_SCHEMA = """
CREATE TABLE work (
    id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL, question TEXT, status TEXT, verdict TEXT,
    accepted REAL NOT NULL, finished REAL
);
CREATE INDEX work_by_key ON work (key);
CREATE INDEX work_waiting ON work (id) WHERE finished IS NULL;
CREATE INDEX work_finished ON work (finished) WHERE finished IS NOT NULL;
CREATE TABLE job (id TEXT PRIMARY KEY, work INTEGER NOT NULL REFERENCES work (id), accepted REAL NOT NULL);
CREATE INDEX job_by_work ON job (work);
CREATE TABLE judged_by (rules TEXT NOT NULL);
"""


class StoreError(RuntimeError):
    """The file can't be used: why, and what to do."""


class QueueFull(Exception):
    """Nothing was accepted: `waiting` pieces of work wait already."""

    def __init__(self, waiting: int, limit: int):
        self.waiting, self.limit = waiting, limit
        super().__init__(f"the queue is full: {waiting} candidates wait for a verdict, the limit is {limit}")


class IdTaken(Exception):
    """The id belongs to another question."""


@dataclass(frozen=True)
class Question:
    """What is asked of the judge. raw: `response` is a model's whole answer, else plain source."""

    reference: str
    response: str
    raw: bool = False
    entry_point: str = "Model"

    def problem(self, name: str) -> Problem:
        return Problem(id=name, source=self.reference, entry_point=self.entry_point)

    @property
    def key(self) -> str:
        """Equal questions have equal keys, whatever their ids."""
        return sha256(f"{self.problem('').sha256}:{self.raw}:{sha256(self.response)}")


@dataclass(frozen=True)
class Receipt:
    """An accepted job. known: no new work, since an equal question was asked before."""

    id: str
    work: int
    known: bool


@dataclass(frozen=True)
class State:
    """Where a job stands. verdict: JSON text. finished and verdict are None while it waits; times in Unix seconds."""

    id: str
    work: int
    accepted: float
    finished: float | None
    status: str | None
    verdict: str | None


class Store:
    """An open file of jobs. `rules` says by what they are judged: verdicts of other rules are no answer.

    queue_limit: pieces of work that may wait. Raises StoreError where the file is damaged, another program's, in use,
    or of other rules.
    """

    def __init__(self, path: str | Path, rules: str = "", queue_limit: int = 10_000):
        path = Path(path)
        self.path, self.queue_limit = path, queue_limit
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock_file = open(path.with_name(path.name + ".lock"), "w")  # noqa: SIM115 (held while open)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock_file.close()
            raise StoreError(f"{path}: another server uses it; give another --store") from error
        try:
            self._write = self._open(rules)
            self._read = self._connect()
            self._waiting = self._write.execute("SELECT count(*) FROM work WHERE finished IS NULL").fetchone()[0]
        except sqlite3.Error as error:
            self._lock_file.close()
            raise StoreError(f"{path}: not a readable store ({error}); move it away or give another --store") from error
        except BaseException:
            self._lock_file.close()
            raise
        self._queued = self._waiting
        self._reading = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False
        self._orders: queue.Queue[tuple[Callable[[], Any], Future] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._write_groups, name="store", daemon=True)
        self._thread.start()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=10, isolation_level=None, check_same_thread=False)
        # WAL: reading doesn't wait for writing. FULL: on the disk when COMMIT returns, a power cut included.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        return connection

    def _open(self, rules: str) -> sqlite3.Connection:
        connection = self._connect()
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if version == 0 and tables == 0:
            connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
            connection.execute("INSERT INTO judged_by VALUES (?)", (rules,))
        elif version != VERSION:
            connection.close()
            raise StoreError(
                f"{self.path}: not a store of this version ({version}, not {VERSION}); give another --store"
            )
        before = connection.execute("SELECT rules FROM judged_by").fetchone()
        if before is None:  # killed between the two statements above: there is no job yet
            connection.execute("INSERT INTO judged_by VALUES (?)", (rules,))
        elif before[0] != rules:
            connection.close()
            raise StoreError(
                f"{self.path}: its verdicts were reached by other rules ({before[0]}; now: {rules}); start with those "
                "rules, or give another --store"
            )
        return connection

    # Asking -----------------------------------------------------------------------------------------------------------

    def submit(self, jobs: list[tuple[str, Question]], rename: bool = False) -> Future[list[Receipt]]:
        """Accept all of these (id, question) or none. Resolved once they are on the disk.

        rename: an id whose job has its verdict may be given to another question, and means that one from then on.

        The future raises QueueFull, IdTaken, or StoreError where the disk failed. The same id with the same question
        is the same job; one that the machine failed (`infra_error`) is judged again.
        """
        return self._order(lambda: self._accept(jobs, rename))

    def finish(self, work: int, status: str, verdict: str) -> Future[None]:
        """Note a verdict (JSON text). Resolved once it is on the disk."""
        return self._order(lambda: self._note(work, status, verdict))

    def forget(self, before: float) -> Future[int]:
        """Remove jobs whose verdict is older than this Unix time, and say how many."""
        return self._order(lambda: self._forget(before))

    def waiting(self, after: int, limit: int) -> list[tuple[int, Question]]:
        """Work without a verdict in the order of arrival, from the first one behind number `after`."""
        with self._reading:
            rows = self._read.execute(
                "SELECT id, question FROM work WHERE finished IS NULL AND id > ? ORDER BY id LIMIT ?", (after, limit)
            ).fetchall()
        return [(work, Question(**json.loads(text))) for work, text in rows]

    def state(self, job: str) -> State | None:
        """Where a job stands; None where there is no such job."""
        with self._reading:
            row = self._read.execute(
                "SELECT job.id, work.id, job.accepted, finished, status, verdict FROM job "
                "JOIN work ON work.id = job.work WHERE job.id = ?",
                (job,),
            ).fetchone()
        return None if row is None else State(*row)

    def position(self, work: int) -> int:
        """How many pieces of work wait in front of this one."""
        with self._reading:
            return self._read.execute(
                "SELECT count(*) FROM work WHERE finished IS NULL AND id < ?", (work,)
            ).fetchone()[0]

    def finished(self) -> dict[str, int]:
        """{status: pieces of work that have a verdict}."""
        with self._reading:
            return dict(
                self._read.execute("SELECT status, count(*) FROM work WHERE finished IS NOT NULL GROUP BY status")
            )

    @property
    def queued(self) -> int:
        """Pieces of work without a verdict."""
        return self._queued

    def close(self) -> None:
        """Write what was ordered, then close."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._orders.put(None)
        self._thread.join()
        with self._reading:
            self._read.close()
        self._write.close()
        self._lock_file.close()

    # Writing, in one thread -------------------------------------------------------------------------------------------

    def _order(self, action: Callable[[], Any]) -> Future:
        future: Future = Future()
        with self._closing:
            if self._closed:
                future.set_exception(StoreError("the store is closed"))
            else:
                self._orders.put((action, future))
        return future

    def _write_groups(self) -> None:
        last = False
        while not last:
            group = [self._orders.get()]
            with contextlib.suppress(queue.Empty):
                while len(group) < GROUP:
                    group.append(self._orders.get_nowait())
            last = None in group
            self._write_group([order for order in group if order is not None])

    def _write_group(self, group: list[tuple[Callable[[], Any], Future]]) -> None:
        before, answers = self._waiting, []  # `queued` tells of what is on the disk: not before COMMIT
        try:
            self._write.execute("BEGIN IMMEDIATE")
            for action, _ in group:
                try:
                    answers.append((action(), None))
                except (QueueFull, IdTaken) as refusal:  # it has written nothing
                    answers.append((None, refusal))
            self._write.execute("COMMIT")
        except Exception as error:
            with contextlib.suppress(sqlite3.Error):  # a full disk has rolled back on its own
                self._write.execute("ROLLBACK")
            self._waiting = before
            failure = StoreError(f"{self.path}: could not be written ({error})")
            answers = [(None, failure)] * len(group)
        self._queued = self._waiting
        for (_, future), (answer, refusal) in zip(group, answers):
            if refusal is not None:
                future.set_exception(refusal)
            else:
                future.set_result(answer)

    def _accept(self, jobs: list[tuple[str, Question]], rename: bool) -> list[Receipt]:
        """Two passes: everything is checked before anything is written."""
        known: dict[str, int | None] = {}
        named: dict[str, str] = {}
        plans = []
        for job, question in jobs:
            key = question.key
            if job not in named:
                owner, done = self._write.execute(
                    "SELECT key, finished FROM work JOIN job ON work.id = work WHERE job.id = ?", (job,)
                ).fetchone() or (key, None)
                named[job] = key if rename and done is not None else owner
            if named[job] != key:
                raise IdTaken(f"the id {job!r} belongs to another question: give a changed question a new id")
            if key not in known:
                row = self._write.execute(
                    "SELECT id, status FROM work WHERE key = ? ORDER BY id DESC LIMIT 1", (key,)
                ).fetchone()
                # The machine's fault then need not be its fault now.
                known[key] = None if row is None or row[1] == "infra_error" else row[0]
            plans.append((job, key, question))
        fresh = sum(work is None for work in known.values())
        if fresh and self._waiting + fresh > self.queue_limit:
            raise QueueFull(self._waiting, self.queue_limit)
        now, receipts = time.time(), []
        for job, key, question in plans:
            work, is_known = known[key], known[key] is not None
            if work is None:
                work = known[key] = self._write.execute(
                    "INSERT INTO work (key, question, accepted) VALUES (?, ?, ?)",
                    (key, json.dumps(asdict(question)), now),
                ).lastrowid
                self._waiting += 1
            self._write.execute(
                "INSERT INTO job VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET work = excluded.work", (job, work, now)
            )
            receipts.append(Receipt(job, work, is_known))
        return receipts

    def _note(self, work: int, status: str, verdict: str) -> None:
        # The texts have served: a repeated question is known by its key.
        changed = self._write.execute(
            "UPDATE work SET status = ?, verdict = ?, finished = ?, question = NULL WHERE id = ? AND finished IS NULL",
            (status, verdict, time.time(), work),
        )
        self._waiting -= changed.rowcount

    def _forget(self, before: float) -> int:
        old = "SELECT id FROM work WHERE finished < ?"
        gone = self._write.execute(f"DELETE FROM job WHERE work IN ({old})", (before,)).rowcount
        self._write.execute("DELETE FROM work WHERE finished < ?", (before,))
        return gone
