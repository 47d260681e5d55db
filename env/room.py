"""Who may use how much of the device's memory: many candidates share it, one that found too little gets all of it.

Runs in the evaluator. Inputs of a single problem may take half of a GPU, while other lanes, idle references and warm
workers hold the rest: what failed for want of memory beside them is judged once more without them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from env.records import Verdict

# Under this name a verdict's evidence says that the device had too little memory, and for whom.
SHORT = "device_memory_short_for"


class Room:
    """A lock that many share or one holds alone; whoever waits to be alone keeps newcomers out."""

    def __init__(self, clear: Callable[[], None]):
        """clear: gives back what nobody uses at the moment; called by the one who is alone."""
        self._clear = clear
        self._turn = threading.Condition()
        self._inside, self._waiting, self._alone = 0, 0, False
        self._large: set[str] = set()

    @contextmanager
    def _shared(self) -> Iterator[None]:
        with self._turn:
            while self._alone or self._waiting:
                self._turn.wait()
            self._inside += 1
        try:
            yield
        finally:
            with self._turn:
                self._inside -= 1
                self._turn.notify_all()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        with self._turn:
            self._waiting += 1
            while self._alone or self._inside:
                self._turn.wait()
            self._waiting -= 1
            self._alone = True
        try:
            self._clear()
            yield
        finally:
            with self._turn:
                self._alone = False
                self._turn.notify_all()

    def judge(self, problem_sha256: str, judge: Callable[[], Verdict]) -> Verdict:
        """`judge()`'s verdict beside others; where memory was short, that of a second try alone.

        A problem whose reference found too little is judged alone from then on. What a candidate took for itself alone
        says nothing about the next one.
        """
        if problem_sha256 not in self._large:
            with self._shared():
                verdict = judge()
            who = verdict.evidence.get(SHORT)
            if who is None:
                return verdict
            if who == "the reference":
                self._large.add(problem_sha256)
        with self._whole():
            return judge()
