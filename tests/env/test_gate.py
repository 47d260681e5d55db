"""Who may be on the device: many at once or one alone, in turns that starve nobody, with everybody else stopped."""

from __future__ import annotations

import threading
import time

import pytest

from env.gate import DeviceGate

pytestmark = pytest.mark.budget(20)


class FakeWorker:
    def __init__(self) -> None:
        self.ended, self.stopped = False, False

    def pause(self) -> None:
        self.stopped = True

    def resume(self) -> None:
        self.stopped = False


def run(*jobs) -> list[threading.Thread]:
    threads = [threading.Thread(target=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    return threads


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads), "somebody waits for ever"


def test_many_are_inside_at_once():
    gate, barrier = DeviceGate(), threading.Barrier(3)

    def visit():
        with gate:
            barrier.wait(5)

    join(run(visit, visit, visit))


def test_alone_means_alone_and_every_other_worker_stands_still():
    gate, workers = DeviceGate(), [FakeWorker() for _ in range(4)]
    for worker in workers:
        gate.register(worker)
    inside, seen = threading.Event(), []

    def visit():
        inside.wait(5)
        with gate:
            seen.append("visitor")

    threads = run(visit)
    with gate.alone(workers[:2]):
        inside.set()
        late = FakeWorker()
        gate.register(late)
        time.sleep(0.05)
        assert not seen
        assert [worker.stopped for worker in (*workers, late)] == [False, False, True, True, True]
        with gate, gate:  # whoever is alone passes freely
            seen.append("owner")
    join(threads)
    assert seen == ["owner", "visitor"] and not any(worker.stopped for worker in (*workers, late))


def test_nobody_is_alone_while_others_are_inside():
    gate, order, entered, leave = DeviceGate(), [], threading.Event(), threading.Event()

    def visit():
        with gate:
            entered.set()
            leave.wait(5)
            order.append("visitor")

    def take():
        entered.wait(5)
        with gate.alone([]):
            order.append("alone")

    threads = run(visit, take)
    entered.wait(5)
    time.sleep(0.05)
    leave.set()
    join(threads)
    assert order == ["visitor", "alone"]


def test_turns_alternate_so_that_nobody_starves():
    """Both kinds ask without a pause; each gets its share."""
    gate, counts, stop = DeviceGate(), {"visits": 0, "alone": 0}, threading.Event()

    def visit():
        while not stop.is_set():
            with gate:
                time.sleep(0.001)
            counts["visits"] += 1

    def take():
        while not stop.is_set():
            with gate.alone([]):
                time.sleep(0.001)
            counts["alone"] += 1

    threads = run(visit, visit, visit, take, take, take)
    time.sleep(1.0)
    stop.set()
    join(threads)
    assert counts["visits"] > 30 and counts["alone"] > 30, counts


def test_an_exception_inside_gives_the_gate_back():
    gate = DeviceGate()
    with pytest.raises(ZeroDivisionError), gate.alone([]):
        1 / 0  # noqa: B018
    with pytest.raises(ZeroDivisionError), gate:
        1 / 0  # noqa: B018
    with gate.alone([]):
        pass


def test_those_that_warm_up_stand_still_for_the_profiler_only():
    gate, warming, used = DeviceGate(), FakeWorker(), FakeWorker()
    gate.warms(warming)
    gate.register(used)
    with gate.alone([]):
        assert used.stopped and not warming.stopped
        with gate.driver_alone():
            late = FakeWorker()
            gate.warms(late)
            assert warming.stopped and late.stopped
            gate.register(late)  # a lane takes it: now it waits like all others that are used
            assert late.stopped
        assert not warming.stopped and late.stopped
    assert not used.stopped and not late.stopped
