"""Warm workers: few at first, as many as wanted later, and none that is dead is handed out."""

from __future__ import annotations

import os
import signal
import time

import pytest

from env.gate import DeviceGate
from env.rules import Rules
from env.spares import Spares
from env.worker import is_running

pytestmark = pytest.mark.budget(60)


class Noted(DeviceGate):
    """Writes down which workers somebody timing would stop."""

    def __init__(self) -> None:
        super().__init__()
        self.known: list[int] = []

    def register(self, worker) -> None:
        self.known.append(worker.pid)
        super().register(worker)


@pytest.fixture
def made(fork_server):
    opened = []

    def make(spares: int) -> Spares:
        opened.append(Spares(fork_server, Rules(spares=spares), Noted()))
        return opened[-1]

    yield make
    for spares in opened:
        spares.close()


def warming(spares: Spares) -> list[int]:
    return [worker.pid for worker in spares._warming]


def test_few_warm_up_at_first_and_each_taken_one_brings_two_until_there_are_enough(made):
    spares = made(4)
    assert len(warming(spares)) == 2
    sessions, counts = [], []
    for _ in range(4):
        sessions.append(spares.take())
        counts.append(len(warming(spares)))
    assert counts == [3, 4, 4, 4]
    assert len({session.worker.pid for session in sessions}) == 4
    for session in sessions:
        session.end()


def test_only_workers_in_use_are_stopped_while_somebody_times(made):
    spares = made(2)
    session = spares.take()
    assert spares.gate.known == [session.worker.pid]
    with spares.gate.alone([]):
        assert session.worker._stopped == {session.worker.pid}
        assert all(worker._stopped == set() for worker in spares._warming)
    session.end()


def test_one_that_was_killed_while_it_waited_is_passed_over(made):
    spares = made(3)
    spares.take().end()
    dead = warming(spares)
    assert len(dead) == 3
    for pid in dead:
        os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while any(is_running(pid) for pid in dead) and time.monotonic() < end:
        time.sleep(0.01)
    session = spares.take()
    assert session.worker.pid not in dead and session.worker.alive()
    assert session.ask("warm", 10.0, precision="ieee", gpu="")["ok"]
    session.end()


def test_nothing_is_left_when_it_is_closed(made):
    spares = made(3)
    spares.take().end()
    pids = warming(spares)
    spares.close()
    assert pids and not any(is_running(pid) for pid in pids)
