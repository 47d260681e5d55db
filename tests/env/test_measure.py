"""The measurement without a GPU: real blocks (`env.bench`) and the real judge's side, on a clock that the test turns.

Programs run on CPU tensors; what they "take" is added to the clock, and so is what a call costs beside it. That shows
what the judge makes of honest programs and of those that claim less than they took, skip the flush, stop working, work
on a stream that isn't joined, or return other outputs when timed.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from env import bench, measure, tensors
from env.clocks import Clocks
from env.compare import OURS
from env.gate import DeviceGate
from env.measure import Stopwatch
from env.reference import Rejected, Trial, TrialKind
from env.rules import PROFILES, Rules
from env.session import Outputs, ProtocolError

pytestmark = pytest.mark.budget(30)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.rng = np.random.default_rng(0)

    def __call__(self) -> float:
        return self.now

    def spend(self, microseconds: float, noise: float = 0.0) -> None:
        self.now += microseconds * 1e-6 * float(np.exp(noise * self.rng.standard_normal()))


class FakeEvent:
    clock: Clock
    offset_us = 0.0  # what this process finds longer than others

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.at = self.clock()

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at - self.at) * 1e3 + self.offset_us * 1e-3


class FakeWorker:
    ended = False

    def __init__(self) -> None:
        self.stopped = 0

    def pause(self) -> None:
        self.stopped += 1

    def resume(self) -> None:
        self.stopped = 0


class FakeSession:
    """A worker in this process: `program(x)` makes the outputs, `takes_us` is its time, `cheat` changes a reply."""

    def __init__(
        self, clock: Clock, program, takes_us: float, cheat=None, overhead_us: float = 100.0, offset_us: float = 0.0
    ) -> None:
        self.clock, self.program, self.takes_us, self.cheat = clock, program, takes_us, cheat
        self.gate, self.worker, self.buffers, self.peers = DeviceGate(), FakeWorker(), {}, []
        self.bench = bench.Bench.__new__(bench.Bench)
        flush = SimpleNamespace(zero_=lambda: clock.spend(overhead_us, 0.05), device=torch.device("cpu"))
        self.bench.flush, self.bench.work, self.bench.events, self.bench.spins = flush, None, [], []
        self.bench.clean = self.bench.sink = None
        self.bench._sum = lambda *_, **__: None
        self.bench._event = type("Event", (FakeEvent,), {"clock": clock, "offset_us": offset_us})
        self.bench._current_stream = lambda: None
        self.bench._synchronize = lambda: None
        self.bench._sleep = lambda cycles: clock.spend(cycles / bench.SLEEP_CYCLES_PER_US)
        self.bench._clock = clock
        self.asked: list[dict] = []

    def buffer(self, name: str, nbytes: int) -> SimpleNamespace:
        if name not in self.buffers or self.buffers[name].tensor.numel() < nbytes:
            self.buffers[name] = SimpleNamespace(tensor=torch.zeros(nbytes, dtype=torch.uint8))
        return self.buffers[name]

    def synchronise(self) -> None:
        self.clock.spend(1.0)

    def give_back(self, nbytes: int) -> None:
        pass

    def set_inputs(self, layout: dict, data: torch.Tensor) -> None:
        self.inputs = data

    def facts(self, reply: dict) -> dict:
        return reply

    def _call(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.spend(self.takes_us, 0.01)
        return self.program(x)

    def ask(self, op: str, timeout_s: float, **request) -> dict:
        assert not self.worker.stopped, "the side that runs was stopped"
        if op == "profile":
            return {"rows": [{"name": "k", "own": True, "count": 1, "time_us": self.takes_us}]}
        assert op == "time" and all(peer.stopped or len(self.asked) < 1 for peer in self.peers)
        self.asked.append(request)
        reply = self.bench.block(self._call, self.buffers, request)
        self.clock.spend(150.0, 0.3)  # the way there and back
        return self.cheat(reply, self) if self.cheat else reply


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def sets(count: int = 4) -> list[Trial]:
    trials = []
    for number in range(count):
        x = torch.randn(300, generator=torch.Generator().manual_seed(number))
        layout, held, nbytes = tensors.plan([x], keep_strides=True)
        data = torch.zeros(nbytes, dtype=torch.uint8)
        tensors.pack(layout, held, data)
        out_layout, out_held, out_bytes = tensors.plan(x * 2, keep_strides=False)
        out = torch.zeros(out_bytes, dtype=torch.uint8)
        tensors.pack(out_layout, out_held, out)
        trials.append(Trial(TrialKind(f"timed{number}"), layout, data, Outputs(out_layout, out, {}, [False])))
    return trials


def stopwatch(program=double, takes_us: float = 50.0, cheat=None, rules: Rules | None = None, **changes) -> Stopwatch:
    clock = Clock()
    reference = FakeSession(clock, changes.get("reference", double), 100.0)
    overhead_us, offset_us = changes.get("overhead_us", 100.0), changes.get("offset_us", 0.0)
    candidate = FakeSession(clock, program, takes_us, cheat, overhead_us, offset_us)
    watch = Stopwatch(
        SimpleNamespace(session=reference, timed=None, lock=contextlib.nullcontext()),
        candidate,
        sets(),
        rules or Rules(),
        OURS,
        **({"headroom": changes["headroom"]} if "headroom" in changes else {}),
    )
    return watch


@pytest.fixture(autouse=True)
def turned_clock(monkeypatch):
    """`env.measure` reads the clock of whatever stopwatch is measuring."""
    original = Stopwatch.measure

    def measured(self):
        with monkeypatch.context() as patch:
            patch.setattr(measure.time, "perf_counter", self.sides["candidate"].session.clock)
            return original(self)

    monkeypatch.setattr(Stopwatch, "measure", measured)


def test_honest_program():
    watch = stopwatch()
    found = watch.measure()
    for mode in ("eager", "device"):
        assert found.times[mode]["speedup"] == pytest.approx(2.0, rel=0.02)
        assert found.times[mode]["speedup_low"] < 2.0 < found.times[mode]["speedup_high"]
        assert found.times[mode]["candidate_us"] == pytest.approx(50.0, rel=0.02)
    assert found.rows[0]["own"] and found.exclusive_s > 0
    assert found.evidence["timed_outputs"] == f"{watch.sides['candidate'].calls} compared"


def test_a_pattern_of_four_calls_doesnt_move_the_speedup():
    """Each side is somewhere else in the pattern; single calls would be up to 10 % apart."""

    def patterned(shift: int):
        def reply(reply, session):
            pattern = (1.08, 1.02, 1.0, 0.98)
            times = [t * pattern[(i + shift + len(session.asked)) % 4] for i, t in enumerate(reply["times_us"])]
            return {**reply, "times_us": times}

        return reply

    watch = stopwatch(takes_us=12.0, cheat=patterned(0))
    watch.sides["reference"].session.takes_us, watch.sides["reference"].session.cheat = 12.0, patterned(2)
    found = watch.measure()
    assert watch.calls % measure.GROUP == 0 and watch.calls >= 2 * measure.GROUP
    assert found.times["device"]["speedup"] == pytest.approx(1.0, abs=0.004)
    assert found.times["device"]["candidate_us"] == pytest.approx(12.0 * 1.02, rel=0.01)


@pytest.mark.parametrize("offset_us", [0.25, -0.25])
def test_what_a_process_finds_longer_of_everything_is_taken_off(offset_us):
    """Programs of 5 us: a quarter of a microsecond that is only the process's fault would be 5 % of the speedup."""
    watch = stopwatch(takes_us=5.0, offset_us=offset_us)
    watch.sides["reference"].session.takes_us = 5.0
    found = watch.measure()
    assert found.evidence["offset_us"] == pytest.approx(offset_us, abs=0.01)
    assert found.times["device"]["speedup"] == pytest.approx(1.0, abs=0.01)


def test_an_offset_that_no_process_has_is_not_believed():
    def slow_spins(reply, session):
        return {**reply, "spin_us": [t + 2.0 for t in reply["spin_us"]]}

    found = stopwatch(takes_us=10.0, cheat=slow_spins).measure()
    assert found.evidence["offset_us"] == 0.0
    assert found.times["device"]["candidate_us"] == pytest.approx(10.0, rel=0.02)


def test_as_others_measure_nothing_is_taken_off():
    rules = PROFILES["kernelbench"]
    watch = stopwatch(takes_us=5.0, offset_us=0.25, rules=rules)
    assert "offset_us" not in watch.measure().evidence


def test_both_sides_get_the_same_calls_and_every_set_is_used():
    watch = stopwatch()
    watch.measure()
    asked = [[request["calls"] for request in side.session.asked] for side in watch.sides.values()]
    assert asked[0] == asked[1]
    assert {index for calls in asked[0] for index, _ in calls} == {0, 1, 2, 3}


def test_stops_when_the_interval_is_tight_and_not_before():
    quiet = stopwatch().measure().evidence["rounds"]
    assert measure.MIN_ROUNDS <= quiet < measure.MAX_ROUNDS
    slow = stopwatch(takes_us=40_000.0).measure()
    assert slow.evidence["rounds"] == measure.MIN_ROUNDS, "the budget ends it"


def test_a_claim_below_what_the_judges_clock_saw_is_not_believed():
    def forged(reply, session):
        return {**reply, "times_us": [t / 10 for t in reply["times_us"]]}

    with pytest.raises(Rejected, match="judge's clock") as error:
        stopwatch(takes_us=500.0, cheat=forged).measure()
    assert error.value.status == "infra_error"
    seen = error.value.evidence["clock"]
    assert min(seen["candidate"]["overhead_us"]) > max(seen["reference"]["overhead_us"]) + 300.0
    assert seen["candidate"]["host_us"] > 0


def test_a_second_try_sleeps_longer_for_a_slow_host():
    usual, patient = (
        [request["sleep_us"]["device"] / sum(mode == "device" for _, mode in request["calls"]) for request in asked[1:]]
        for asked in (_asked(stopwatch(takes_us=300.0)), _asked(stopwatch(takes_us=300.0, headroom=2.0)))
    )
    assert min(patient) > 1.5 * max(usual)


def _asked(watch: Stopwatch) -> list[dict]:
    watch.measure()
    return watch.sides["candidate"].session.asked


def test_a_claim_that_is_forged_now_and_then_gains_nothing():
    """Blocks that don't agree with the judge's clock are left out: what counts are the others."""

    def forged(reply, session):
        lies = len(session.asked) % 3 == 0
        return {**reply, "times_us": [t / 10 for t in reply["times_us"]]} if lies else reply

    found = stopwatch(takes_us=500.0, cheat=forged).measure()
    assert found.evidence["clock"]["blocks_left_out"] > 0
    assert found.times["device"]["speedup"] == pytest.approx(0.2, rel=0.02)


def test_skipping_the_flush_shows_on_the_judges_clock():
    with pytest.raises(Rejected, match="judge's clock"):
        stopwatch(takes_us=20.0, overhead_us=10.0).measure()


@pytest.mark.parametrize(
    ("reasons", "slowed"), [(0x0, []), (0x1, []), (0x4, []), (0x40, ["too hot (hardware)"]), (0x28, None)]
)
def test_a_gpu_that_is_slowed_down_measures_nothing(reasons, slowed):
    nvml = SimpleNamespace(
        NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetClockInfo=lambda handle, which: 1000 * which,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: reasons,
    )  # fmt: skip
    watch = stopwatch()
    watch.gate._clocks = Clocks(nvml, "GPU-1")
    if slowed == []:
        assert watch.measure().evidence["gpu"] == {"sm_mhz": 1000, "memory_mhz": 2000, "slowed": []}
        return
    with pytest.raises(Rejected, match="slowed down") as error:
        watch.measure()
    assert error.value.status == "infra_error"


def test_a_host_time_that_is_made_up_does_not_hold_the_gpu():
    def slow(reply, session):
        return {**reply, "host_us": [1e9] * len(reply["host_us"])}

    watch = stopwatch(cheat=slow)
    watch.measure()
    assert watch.sides["candidate"].host_us < 1_000


def test_no_program_is_faster_than_writing_its_output():
    with pytest.raises(Rejected, match="below") as error:
        stopwatch(takes_us=0.2).measure()
    assert error.value.status == "infra_error"


@pytest.mark.parametrize(
    "make",
    [
        lambda: _after(10, lambda x: torch.zeros_like(x)),
        lambda: _last_input(),
        lambda: _remembers(),
    ],
    ids=["stops working", "reads the last call's inputs", "answers from memory"],
)
def test_wrong_when_timed(make):
    with pytest.raises(Rejected, match="wrong when timed") as error:
        stopwatch(program=make()).measure()
    assert error.value.status == "hack" and error.value.evidence["rule"] == "timed_output_differs"


def _after(calls: int, then):
    count = iter(range(10**6))
    return lambda x: double(x) if next(count) < calls else then(x)


def _last_input():
    """What work on a stream that isn't joined sees: the inputs of the call before."""
    seen: list[torch.Tensor] = []

    def program(x):
        seen.append(x.clone())
        return double(seen[-2] if len(seen) > 1 else x)

    return program


def _remembers():
    memory: list[torch.Tensor] = []

    def program(x):
        memory.append(double(x))
        return memory[0]

    return program


def test_a_random_reference_is_not_held_against_the_candidate():
    found = stopwatch(program=lambda x: torch.zeros_like(x), reference=lambda x: torch.rand_like(x)).measure()
    assert found.evidence["timed_outputs"].startswith("not comparable")


@pytest.mark.parametrize(
    "reply",
    [
        {"times_us": []},
        {"times_us": [1.0]},
        {"times_us": ["fast"] * 8},
        {"times_us": [-1.0] * 8},
        {"times_us": [float("nan")] * 8},
        {"times_us": None},
        {"which": None},
        {"which": [[]] * 24},
        {"which": [1] * 24},
        {"which": [True] * 24},
        {"layouts": None},
        {"layouts": [{"layout": {"kind": "tensor"}, "packed": True}]},
        {"layouts": [None]},
        {"which": [0]},
    ],
)
def test_replies_that_no_runner_would_send(reply):
    def forged(honest, session):
        return honest if len(session.asked) == 1 else {**honest, **reply}

    with pytest.raises((Rejected, ProtocolError)):
        stopwatch(cheat=forged).measure()


def test_outputs_that_are_too_many_to_keep(monkeypatch):
    monkeypatch.setattr(measure, "OUTPUTS_BYTES", 100)
    watch = stopwatch()
    assert not watch.keeps_all
    assert watch.measure().times["eager"]["speedup"] == pytest.approx(2.0, rel=0.02)
    with pytest.raises(Rejected, match="wrong when timed"):
        stopwatch(program=_after(10, lambda x: torch.zeros_like(x))).measure()


@pytest.mark.parametrize("profile", ["kernelbench", "paper"])
def test_other_evaluators_rules(profile):
    watch = stopwatch(rules=PROFILES[profile])
    found = watch.measure()
    assert list(found.times) == ["eager"] and found.times["eager"]["speedup"] == pytest.approx(2.0, rel=0.02)
    timed = watch.sides["candidate"].session.asked[1:]
    assert sum(len(request["calls"]) - request["lead"] for request in timed) == 100 and not any(
        request["cold"] for request in timed
    )


def test_inputs_whose_shapes_change_with_the_seed_are_not_timed():
    trials = sets()
    trials[1].layout["items"][0]["shape"] = [299]
    with pytest.raises(Rejected, match="other shapes"):
        Stopwatch(SimpleNamespace(session=FakeSession(Clock(), double, 1.0), timed=None, lock=contextlib.nullcontext()),
                  FakeSession(Clock(), double, 1.0), trials, Rules(), OURS)  # fmt: skip


def test_one_kind_of_calls_where_the_host_is_ahead_anyway():
    # The fake programs spend their time on the host: over the head start, device times need calls of their own.
    watch = stopwatch()
    watch.sides["reference"].session.takes_us = 60.0
    found = watch.measure()
    assert watch.modes == ("eager",) and found.times["device"] == found.times["eager"]
    slow = stopwatch(takes_us=bench.HEAD_START_US + 20)
    assert set(slow.measure().times) == {"eager", "device"} and slow.modes == measure.MODES


def test_the_host_has_handed_over_all_device_calls_before_the_first_one_starts():
    host_us = bench.HEAD_START_US + 20
    watch = stopwatch(takes_us=host_us)
    watch.measure()
    for request in watch.sides["candidate"].session.asked:
        counts = {mode: sum(asked == mode for _, asked in request["calls"]) for mode in measure.MODES}
        assert request["sleep_us"]["device"] >= counts["device"] * host_us and request["sleep_us"]["eager"] == 0
    quick = stopwatch()
    quick.sides["reference"].session.takes_us = 60.0
    quick.measure()
    # One kind of calls stands for device times as well.
    block = quick.sides["candidate"].session.asked[-1]
    assert block["sleep_us"]["eager"] >= len(block["calls"]) * quick.sides["reference"].host_us


def test_a_host_time_that_is_denied_leaves_the_time_where_it_was():
    def quick(reply, session):
        return {**reply, "forward_us": [1.0] * len(reply["forward_us"])}

    watch = stopwatch(takes_us=400.0, cheat=quick, reference=double)
    found = watch.measure()
    assert found.times["device"]["candidate_us"] == pytest.approx(400.0, rel=0.05)


def test_outputs_too_large_to_copy_are_compared_at_once(monkeypatch):
    monkeypatch.setattr(measure, "COPIED_OUTPUTS_BYTES", 0)
    watch = stopwatch()
    found = watch.measure()
    assert not watch.sides["candidate"].snapshots and "compared" in found.evidence["timed_outputs"]
    with pytest.raises(Rejected, match="wrong when timed"):
        stopwatch(program=_after(10, lambda x: torch.zeros_like(x))).measure()
    random = stopwatch(program=lambda x: torch.zeros_like(x), reference=lambda x: torch.rand_like(x)).measure()
    assert random.evidence["timed_outputs"].startswith("not comparable")
