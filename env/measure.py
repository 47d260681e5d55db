"""The two programs timed against each other, alone on the GPU, until the ratio is known well enough.

Runs in the evaluator. The workers' times are claims of processes that run foreign code (`attested`); what bounds them
is the judge's own: its clock over each block, the bytes that must move, and the outputs of the timed calls, which it
compares. Where claim and clock disagree beyond noise, nothing was measured.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from env import timing
from env.bench import HEAD_START_US, MAX_PLACES, SETTLE_US, aligned, sleep_us
from env.compare import Tolerance, compare
from env.profile_table import valid_rows
from env.reference import Reference, Rejected, Trial
from env.rules import Rules
from env.session import ProtocolError, Session, checked_layout
from env.tensors import tensor_nodes

MODES = ("eager", "device")
ABBA = ("reference", "candidate", "candidate", "reference")
# Exclusive seconds a verdict: what the stop rule may use. The profile and the others' stop come on top.
BUDGET_S = 0.060
TARGET = {"eager": 0.010, "device": 0.003}  # standard error of the ratio at which it may stop earlier
MIN_ROUNDS, MAX_ROUNDS = 2, 12
# Of one side's turn by how many modes it has, all calls and what they need beside the program: shorter ones would be
# all switching. Two rounds are eight of them.
BLOCK_US = {1: 4_300.0, 2: 5_800.0}
MIN_CALLS, MAX_CALLS = 3, 28
# Calls whose host is ahead of the GPU are averaged by so many: what a flush leaves in the cache's bookkeeping differs
# from call to call in a pattern of four. A 12 us kernel takes 12.3, 11.6, 11.5, 11.2 us, again and again (an H200).
GROUP = 4
# Of each mode before anything counts: Python specialises code that has run a few times, the reference's has by then.
WARM_CALLS = 8
# Of a block, they don't count: the GPU has just changed hands, and where the host's time counts its caches are cold.
LEAD_CALLS, SLOW_CALL_US = {1: 1, 2: 3}, 400.0
KEPT_CALLS = 2 * MAX_CALLS + max(LEAD_CALLS.values())
# Beside the program itself, for planning: what a call costs on an H200.
FLUSH_US, COPIED_BYTES_PER_US, USUAL_HOST_US = 70.0, 4.0e6, 150.0
# What the judge's clock can't tell from the host's own jitter between two synchronised calls.
CLOCK_SLACK_US, CLOCK_SLACK_SHARE, CLAIM_SLACK_SHARE = 40.0, 0.25, 0.03
WORKING_COPY_BYTES = 1 << 30
OUTPUTS_BYTES = 512 << 20
# Of a block: what is copied, to be compared when others may go on.
COPIED_OUTPUTS_BYTES = 512 << 20
# No GPU writes faster than this to memory (an H200: 4.8 TB/s), nor than this to its cache.
MEMORY_BYTES_PER_US, CACHE_BYTES_PER_US, CACHE_BYTES = 5.5e6, 2.5e7, 128 << 20
EMPTY_CALL_US = 1.0  # two events in a row take 1.3 us on an H200
# What the spins of two processes may differ by: an H200's by 0.3 us at most. More is something else.
MAX_OFFSET_US = 0.3


@dataclass
class Snapshot:
    """What a block left: its calls, how their outputs are said to lie (call i's as layouts[which[i]]), the outputs'
    bytes.
    """

    calls: list[list[Any]]
    layouts: Any
    which: Any
    data: torch.Tensor


@dataclass
class Side:
    """One of the two programs: its session and what was claimed of it, by mode and block."""

    session: Session
    times_us: dict[str, list[list[float]]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    overhead_us: list[float] = field(default_factory=list)
    spin_us: list[float] = field(default_factory=list)  # a fixed spin as this process times it
    host_us: float = 50.0  # of a whole call on the host
    forward_us: float = 50.0  # of the program on the host
    snapshots: list[Snapshot] = field(default_factory=list)
    wrong: str = ""  # what was found already of outputs too large to copy, and how many those were
    compared: int = 0
    launches: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    calls: int = 0


@dataclass
class Measurement:
    """times: {mode: {reference_us, candidate_us, speedup, speedup_low, speedup_high}}; rows: kernel table; launches:
    (calls, the worker's facts) of each of the candidate's blocks.
    """

    times: dict[str, dict[str, float]]
    rows: list[dict[str, Any]]
    exclusive_s: float
    evidence: dict[str, Any]
    launches: list[tuple[int, dict[str, Any]]]


class Stopwatch:
    """Times one candidate against its reference on `sets` of inputs that it hasn't met.

    headroom: how much slower than when it was prepared a program's host may be while its calls are handed over. What it
    is slower beyond shows in the judge's clock but not in the device's times, as work that isn't claimed would.
    """

    def __init__(
        self,
        reference: Reference,
        session: Session,
        sets: list[Trial],
        rules: Rules,
        tolerance: Tolerance,
        headroom: float = 1.25,
    ):
        self.reference = reference
        self.rules = rules
        self.sets = sets
        self.tolerance = tolerance
        self.headroom = headroom
        self.gate = session.gate
        self.sides = {"reference": Side(reference.session), "candidate": Side(session)}
        self.stride = aligned(max(trial.inputs.numel() for trial in sets))
        self.slot = aligned(max(trial.outputs.data.numel() for trial in sets))
        if len({str(trial.layout) for trial in sets}) != 1:
            raise Rejected("infra_error", "not measured: get_inputs() gives other shapes with every seed")
        self.lead = 1
        self.keeps_all = self.slot * KEPT_CALLS <= OUTPUTS_BYTES
        self.random = random.SystemRandom()
        self.orders: dict[int, list[int]] = {}
        self.running: Side | None = None
        self.modes: tuple[str, ...] = MODES
        self.ahead_us = {"eager": 0.0, "device": USUAL_HOST_US}  # by mode: host time a call that the stream sleeps away

    # Preparation, off the clock -------------------------------------------------------------------------------------

    def _prepare(self, name: str) -> float:
        """Lend a side the inputs, and let it run some times each way: what is slow at first is over then. Returns its
        quickest call (us). A reference that was timed on these before is ready.
        """
        side = self.sides[name]
        session = side.session
        outputs = session.buffer("outputs", self.slot * (KEPT_CALLS if self.keeps_all else 1))
        sets = session.buffer("sets", self.stride * len(self.sets))
        lent = (id(outputs), id(sets), self.stride, self.slot)
        if name == "reference" and self.reference.timed and self.reference.timed[0] == lent:
            side.host_us, side.forward_us, quickest_us = self.reference.timed[1:]
            return quickest_us
        with self.gate:
            for number, trial in enumerate(self.sets):
                at = number * self.stride
                sets.tensor[at : at + trial.inputs.numel()].copy_(trial.inputs)
            session.synchronise()
        session.give_back(self.stride)
        calls = [[i % len(self.sets), mode] for mode in MODES for i in range(WARM_CALLS)]
        facts, seconds = self._ask(side, calls)
        # A claim as well: no call took longer than the whole block by the judge's clock.
        at_most = seconds * 1e6 / len(calls)
        side.host_us = min(statistics.median(_numbers(facts, "host_us")[2:]), at_most)
        # The better calls': others are busy on the cores now and stand still when it counts.
        side.forward_us = min(statistics.quantiles(_numbers(facts, "forward_us")[2:], n=4)[0], at_most)
        self._poison(session)
        quickest_us = max(min(_numbers(facts, "times_us")), 1.0)
        if name == "reference":
            self.reference.timed = (lent, side.host_us, side.forward_us, quickest_us)
        return quickest_us

    def _plan_blocks(self, quickest_us: float) -> None:
        """How many calls a block holds: as many of each mode as fit into its time. One mode is enough where the host is
        ahead of the GPU in eager calls (who claims less host time than it needs has the rest in both times).
        """
        moved = 2 * (self.stride + self.slot) / COPIED_BYTES_PER_US
        slowest_us = max(side.host_us for side in self.sides.values())
        if max(side.forward_us for side in self.sides.values()) < HEAD_START_US:
            self.modes = ("eager",)
        self.ahead_us[self.modes[-1]] = slowest_us
        gpu_us = FLUSH_US + SETTLE_US + moved + quickest_us
        call_us = max(min(slowest_us, USUAL_HOST_US), gpu_us)
        modes = len(self.modes)
        self.lead = LEAD_CALLS[modes] if call_us < SLOW_CALL_US else 1
        both_us = (modes - 1) * call_us + sleep_us(slowest_us, 1, self.headroom) + gpu_us
        calls = int(max(MIN_CALLS, min(MAX_CALLS, (BLOCK_US[modes] - self.lead * call_us) / both_us)))
        self.calls = calls - calls % GROUP if calls > GROUP else calls

    def _sleep_us(self, calls: list[list[Any]]) -> dict[str, float]:
        return {
            mode: sleep_us(us, sum(asked == mode for _, asked in calls), self.headroom)
            for mode, us in self.ahead_us.items()
        }

    def _poison(self, session: Session) -> None:
        """NaN in every float: an output that was never written, or written too late, can't look right."""
        with self.gate:
            session.buffers["outputs"].tensor.fill_(0xFF)
            session.synchronise()

    def _ask(self, side: Side, calls: list[list[Any]], lead: int = 0) -> tuple[dict[str, Any], float]:
        """A block of timed calls. Returns (the worker's claims, seconds by the judge's clock)."""
        before = time.perf_counter()
        reply = side.session.ask(
            "time",
            self.rules.run_timeout_s,
            layout=self.sets[0].layout,
            stride=self.stride,
            slot=self.slot if self.keeps_all else 0,
            alive=min(MAX_PLACES - 1, OUTPUTS_BYTES // self.slot),
            calls=calls,
            lead=lead,
            sleep_us=self._sleep_us(calls),
            cold=self.rules.mean_of is None,
            copies=self.stride <= WORKING_COPY_BYTES,
            train=True,
            seed=0,
        )
        return reply, time.perf_counter() - before

    # Alone on the GPU -----------------------------------------------------------------------------------------------

    def measure(self) -> Measurement:
        """Raises Rejected where nothing could be measured, and what a session raises where a program fails."""
        quickest_us = self._prepare("candidate")
        with self.reference.lock:
            return self._measure(min(quickest_us, self._prepare("reference")))

    def _measure(self, quickest_us: float) -> Measurement:
        self._plan_blocks(quickest_us)
        reference, candidate = self.sides["reference"], self.sides["candidate"]
        workers = [reference.session.worker, candidate.session.worker]
        with self.gate.alone(workers) as since:
            held = [since, time.perf_counter()]
            self.gate.wait_until_quiet()
            held.append(time.perf_counter())
            rounds = self._fixed_rounds() if self.rules.mean_of else self._rounds(held[0])
            held.append(time.perf_counter())
            with self.gate.driver_alone():
                rows = self._profile(candidate)
            held.append(time.perf_counter())
            clocks = self.gate.clocks()
        held.append(time.perf_counter())
        exclusive_s = held[-1] - held[0]
        steps = ("stop_others", "wait_until_quiet", "rounds", "profile", "let_others_go_on")
        held_ms = {step: round(1e3 * (after - before), 2) for step, before, after in zip(steps, held, held[1:])}
        if clocks is not None and clocks["slowed"]:
            raise Rejected("infra_error", f"not measured: the GPU was slowed down ({', '.join(clocks['slowed'])})")
        evidence = {"rounds": rounds, "calls": candidate.calls, "held_ms": held_ms, "gpu": clocks}
        evidence["host_us"] = {name: round(side.host_us, 1) for name, side in self.sides.items()}
        evidence["clock"] = self._check_clock()
        if not self.rules.mean_of:
            evidence["offset_us"] = self._level()
        kind = {mode: "mean" if self.rules.mean_of else timing.KIND[mode] for mode in MODES}
        times = {
            mode: timing.interval(reference.times_us[mode], candidate.times_us[mode], seed=0, kind=kind[mode])
            for mode in MODES
            if reference.times_us[mode]
        }
        if not self.rules.mean_of and self.modes == ("eager",):
            times["device"] = dict(times["eager"])
        evidence["blocks_us"] = {
            name: {
                mode: [round(float(timing.CENTERS[kind[mode]](np.asarray(block))), 3) for block in blocks]
                for mode, blocks in side.times_us.items()
            }
            for name, side in self.sides.items()
        }
        self._check_floor(times)
        evidence["timed_outputs"] = self._check_outputs()
        return Measurement(times, rows, exclusive_s, evidence, candidate.launches)

    def _rounds(self, started: float) -> int:
        """ABBA until both ratios are known to their target, or another round would be over the budget."""
        # Where one mode stands for both, it has to be as sure as either.
        targets = TARGET if self.modes == MODES else dict.fromkeys(self.modes, min(TARGET.values()))
        for number in range(MAX_ROUNDS):
            for name in ABBA:
                self._block(self.sides[name], number, self.modes)
            if number + 1 < MIN_ROUNDS:
                continue
            used_s = time.perf_counter() - started
            over = used_s + used_s / (number + 1) > BUDGET_S
            if over or all(self._error(mode) < target for mode, target in targets.items()):
                return number + 1
        return MAX_ROUNDS

    def _fixed_rounds(self) -> int:
        """As others measure: a fixed number of warm calls a side, eager."""
        self.calls = max(1, self.rules.mean_of // 4)
        for number in range(2):
            for name in ABBA:
                self._block(self.sides[name], number, ("eager",))
        return 2

    def _error(self, mode: str) -> float:
        errors = [timing.relative_error(side.times_us[mode], timing.KIND[mode]) for side in self.sides.values()]
        return sum(error * error for error in errors) ** 0.5

    def _block(self, side: Side, number: int, modes: tuple[str, ...]) -> None:
        # In an order that nobody knows beforehand; the same for both sides.
        order = [index for _ in range(-(-self.calls // len(self.sets))) for index in self._shuffled(number)]
        calls = [[index, mode] for mode in modes for index in order[: self.calls]]
        lead = [[index, modes[0]] for index in order[: self.lead]]
        self._let_run(side)
        facts, seconds = self._ask(side, lead + calls, len(lead))
        times = _numbers(facts, "times_us")
        if len(times) != len(calls):
            raise Rejected("infra_error", "not measured: the timed calls gave no times")
        for mode in modes:
            side.times_us[mode].append(self._grouped([t for t, (_, asked) in zip(times, calls) if asked == mode], mode))
        if not self.rules.mean_of:
            side.spin_us += _numbers(facts, "spin_us")
        sleeps = sum(self._sleep_us([*lead, *calls]).values())
        lead_us = len(lead) * statistics.median(times)
        side.overhead_us.append((seconds * 1e6 - sum(times) - lead_us - sleeps) / (len(calls) + len(lead)))
        side.calls += len(calls)
        side.launches.append((len(calls) + len(lead), facts))
        self._snapshot(side, facts, calls, len(lead))

    def _grouped(self, times: list[float], mode: str) -> list[float]:
        """Means of GROUP calls in a row, where the times are the device's alone and the calls are that many."""
        if self.rules.mean_of or mode != self.modes[-1] or len(times) % GROUP:
            return times
        return [statistics.fmean(times[i : i + GROUP]) for i in range(0, len(times), GROUP)]

    def _let_run(self, side: Side) -> None:
        """Only this side from now on: the other one stands still until it is its turn."""
        if side is not self.running:
            for other in self.sides.values():
                if other is not side:
                    other.session.worker.pause()
            side.session.worker.resume()
            self.running = side

    def _shuffled(self, number: int) -> list[int]:
        if number not in self.orders:
            self.orders[number] = self.random.sample(range(len(self.sets)), len(self.sets))
        return self.orders[number]

    def _snapshot(self, side: Side, facts: dict[str, Any], calls: list[list[Any]], lead: int) -> None:
        """A private copy of the outputs, looked at when the GPU is free for others again; gigabytes are looked at now.
        Then the buffer is poisoned for the next block."""
        first, last = (lead, lead + len(calls)) if self.keeps_all else (0, 1)
        data = side.session.buffers["outputs"].tensor[first * self.slot : last * self.slot]
        snapshot = Snapshot(calls, facts.get("layouts"), facts.get("which"), data)
        if data.numel() > COPIED_OUTPUTS_BYTES:
            side.wrong = side.wrong or self._wrong([snapshot])
            side.compared += 1
        else:
            with self.gate:
                snapshot.data = data.clone()
            side.snapshots.append(snapshot)
        self._poison(side.session)

    def _outputs(self, snapshots: list[Snapshot]) -> Iterator[tuple[int, dict, torch.Tensor]]:
        """(set, layout, bytes) of each kept output."""
        for snapshot in snapshots:
            calls, which = snapshot.calls, snapshot.which
            if not isinstance(which, list) or len(which) != len(calls) or not isinstance(snapshot.layouts, list):
                raise ProtocolError("timed calls without their outputs")
            layouts: dict[int, dict] = {}
            for number, (place, (index, _)) in enumerate(zip(which, calls)):
                if not self.keeps_all and number < len(calls) - 1:
                    continue
                if type(place) is not int or not 0 <= place < len(snapshot.layouts):
                    raise ProtocolError("a timed call without its outputs")
                if place not in layouts:
                    layouts[place] = self._layout(snapshot.layouts[place])
                at = number * self.slot if self.keeps_all else 0
                yield index, layouts[place], snapshot.data[at : at + self.slot]

    def _layout(self, reply: Any) -> dict:
        if not isinstance(reply, dict) or reply.get("packed") is not True:
            raise ProtocolError("a timed call returned outputs of another size")
        return checked_layout(reply, self.slot)

    def _profile(self, candidate: Side) -> list[dict[str, Any]]:
        session, trial = candidate.session, self.sets[0]
        self._let_run(candidate)
        session.set_inputs(trial.layout, trial.inputs)
        return valid_rows(
            session.ask("profile", self.rules.run_timeout_s, layout=trial.layout, train=True, seed=0).get("rows")
        )

    # What bounds the claims -----------------------------------------------------------------------------------------

    def _check_clock(self) -> dict[str, float]:
        """A call costs both sides the same beside what it claims (copies, flush, the way there and back): a candidate
        that claims less than it took, or skips the flush, is off by the difference. Blocks in which the two clocks
        don't agree are left out with their pair; where that is most of them, nothing was measured.
        """
        reference, candidate = self.sides["reference"], self.sides["candidate"]
        expected = statistics.median(reference.overhead_us)
        found = statistics.median(candidate.overhead_us)
        claim = statistics.median(t for mode in MODES for block in candidate.times_us[mode] for t in block)
        slack = CLOCK_SLACK_US + CLOCK_SLACK_SHARE * abs(expected) + CLAIM_SLACK_SHARE * claim
        pairs = list(zip(reference.overhead_us, candidate.overhead_us, strict=True))
        good = [i for i, pair in enumerate(pairs) if all(abs(overhead - expected) <= slack for overhead in pair)]
        clock = {"expected_us": round(expected, 1), "found_us": round(found, 1), "slack_us": round(slack, 1)}
        clock["blocks"], clock["blocks_left_out"] = len(pairs), len(pairs) - len(good)
        for side in (reference, candidate):
            side.times_us = {m: [blocks[i] for i in good] if blocks else [] for m, blocks in side.times_us.items()}
        if 2 * len(good) < len(pairs):
            raise Rejected(
                "infra_error",
                f"not measured: beside the times that were claimed, a call took {found:.0f} us by the judge's clock "
                f"where the reference took {expected:.0f} us",
                clock=clock | self._overheads(),
            )
        return clock

    def _level(self) -> float:
        """Time both programs as if in one process: what one finds longer of a fixed spin (`env.bench`), it finds longer
        of every call. Half of the difference is taken from one side's times and added to the other's. Returns it (us).
        """
        reference, candidate = (statistics.median(side.spin_us) for side in self.sides.values())
        offset = candidate - reference
        if abs(offset) > MAX_OFFSET_US:
            return 0.0
        for side, share in zip(self.sides.values(), (0.5, -0.5), strict=True):
            side.times_us = {
                mode: [[max(t + share * offset, t / 2) for t in block] for block in blocks]
                for mode, blocks in side.times_us.items()
            }
        return round(offset, 3)

    def _overheads(self) -> dict[str, dict[str, Any]]:
        """By side, what a call took beside its claim, by block, and what its host was taken to need (us)."""
        return {
            name: {"overhead_us": [round(us, 1) for us in side.overhead_us], "host_us": round(side.host_us, 1)}
            for name, side in self.sides.items()
        }

    def _check_floor(self, times: dict[str, dict[str, float]]) -> None:
        nbytes = sum(node["nbytes"] for node in tensor_nodes(self.sets[0].outputs.layout))
        rate = MEMORY_BYTES_PER_US if nbytes > CACHE_BYTES else CACHE_BYTES_PER_US
        floor = max(EMPTY_CALL_US, nbytes / rate)
        for found in times.values():
            if found["candidate_us"] < floor:
                raise Rejected(
                    "infra_error",
                    f"not measured: {found['candidate_us']:.2f} us is below the {floor:.2f} us that writing the output "
                    "takes",
                )

    def _check_outputs(self) -> str:
        """Every kept output of a timed call against what the reference made of the same inputs when it was checked."""
        reference, candidate = self.sides["reference"], self.sides["candidate"]
        if reference.wrong or self._wrong(reference.snapshots):
            return "not comparable: the reference's own timed outputs differ from its first ones (random or stateful)"
        wrong = candidate.wrong or self._wrong(candidate.snapshots)
        if wrong:
            raise Rejected("hack", f"right when checked, wrong when timed: {wrong}", rule="timed_output_differs")
        return f"{candidate.compared + sum(1 for _ in self._outputs(candidate.snapshots))} compared"

    def _wrong(self, snapshots: list[Snapshot]) -> str:
        """What the first wrong timed output is, empty where none is. Equal bytes are compared in full only once."""
        right: dict[int, torch.Tensor] = {}
        for index, layout, data in self._outputs(snapshots):
            expected = self.sets[index].outputs
            if index in right and torch.equal(right[index], data):
                continue
            with self.gate:
                result = compare(expected.layout, expected.data, layout, data, self.tolerance)
            if not result.match:
                return result.message
            right[index] = data
        return ""


def _numbers(facts: dict[str, Any], name: str) -> list[float]:
    found = facts.get(name)
    if not isinstance(found, list) or not all(isinstance(t, float) and 0 < t < 1e12 for t in found):
        raise Rejected("infra_error", "not measured: the timed calls gave no times")
    return found
