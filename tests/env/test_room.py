"""The device's memory among lanes: shared, or all of it for one that found too little."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from env.buffers import SharedMemoryError
from env.judge import Judge
from env.records import Verdict
from env.room import SHORT, Room
from env.session import ForeignError, TooBig

pytestmark = pytest.mark.budget(20)


class Device:
    """`free` of its memory are left beside what others hold; `clear` takes the idle part of that away."""

    def __init__(self, total: int, idle: int = 0) -> None:
        self.total, self.idle, self.used, self.most = total, idle, 0, 0
        self.lock = threading.Lock()
        self.log: list[tuple[str, int]] = []
        self.room = Room(self.clear)

    def clear(self) -> None:
        assert self.used == 0, "cleared while somebody judged"
        self.idle = 0

    def judge(self, name: str, needs: int, who: str = "the reference", takes_s: float = 0.02) -> Verdict:
        def judge() -> Verdict:
            with self.lock:
                self.log.append((name, self.used))
                if self.used + self.idle + needs > self.total:
                    return Verdict(status="infra_error", evidence={SHORT: who})
                self.used += needs
                self.most = max(self.most, self.used)
            time.sleep(takes_s)
            with self.lock:
                self.used -= needs
            return Verdict(status="correct")

        return self.room.judge(name, judge)


def run(jobs) -> list[Verdict]:
    found: list[Verdict | None] = [None] * len(jobs)

    def work(number: int) -> None:
        found[number] = jobs[number]()

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert not any(thread.is_alive() for thread in threads), "somebody waits for ever"
    return found


def test_small_ones_share_and_a_large_one_gets_all_of_it():
    device = Device(100, idle=50)
    jobs = [lambda i=i: device.judge(f"small{i}", 5) for i in range(8)] + [lambda: device.judge("large", 90)] * 3
    verdicts = run(jobs)
    assert [verdict.status for verdict in verdicts] == ["correct"] * 11
    assert device.most == 90
    assert [used for name, used in device.log if name == "large"][-1] == 0


def test_a_problem_that_was_too_large_once_is_not_tried_beside_others_again():
    device = Device(100, idle=50)
    device.judge("large", 90)
    assert len(device.log) == 2
    device.judge("large", 90)
    assert len(device.log) == 3


def test_one_greedy_candidate_does_not_send_the_next_one_to_the_back():
    device = Device(100)
    assert device.judge("problem", 200, who="the candidate").status == "infra_error"
    assert len(device.log) == 2, "it had a second chance, alone"
    assert device.judge("problem", 10).status == "correct"
    assert len(device.log) == 3


def test_what_is_too_large_alone_says_so_and_others_go_on():
    device = Device(100)
    verdicts = run([lambda: device.judge("huge", 500)] + [lambda i=i: device.judge(f"small{i}", 5) for i in range(6)])
    assert verdicts[0].evidence[SHORT] == "the reference"
    assert [verdict.status for verdict in verdicts[1:]] == ["correct"] * 6


def test_an_exception_leaves_the_room_open():
    room = Room(lambda: None)

    def fail() -> Verdict:
        raise RuntimeError("a bug")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="a bug"):
            room.judge("a", fail)
    assert room.judge("a", lambda: Verdict(status="correct")).status == "correct"


@pytest.mark.parametrize(
    "error, status, who",
    [
        (TooBig("too big here"), "infra_error", "the reference"),
        (torch.OutOfMemoryError("CUDA out of memory"), "infra_error", "the reference"),
        (ForeignError({"kind": "oom", "message": "no memory"}), "infra_error", "the reference"),
        (ForeignError({"kind": "oom", "message": "no memory"}), "oom", "the candidate"),
        (SharedMemoryError("cuMemCreate failed", short_of_memory=True), "infra_error", "the reference"),
        (SharedMemoryError("no descriptor"), "infra_error", None),
        (ForeignError({"kind": "runtime_error", "message": "no"}), "runtime_error", None),
        (None, "hack", None),
    ],
)
def test_a_verdict_says_for_whom_the_memory_was_short(error, status, who):
    for device in ("cuda", "cpu"):
        judge, verdict = Judge.__new__(Judge), Verdict(status="infra_error")
        judge.device = device
        judge._note_memory(error, status, verdict)
        assert verdict.evidence.get(SHORT) == (who if device == "cuda" else None)
