"""From a problem and a candidate to a verdict.

Runs in the evaluator: trusted code only, long-lived, holds the originals of inputs and the expected outputs. It never
imports a problem or a candidate. Order of a verdict: source → loads → correct in every mode → tampering → really Triton
→ time and profile → effect of each kernel. Whatever is missing for the next step ends in a status that says whose fault
it is; a hack is timed all the same, where it can be, so that what it would have earned is known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from env import modelled
from env.buffers import SharedMemoryError
from env.compare import Comparison, Tolerance, compare, tolerance_for
from env.extract import inspect_source
from env.feedback import render
from env.findings import (
    Tally,
    as_rejection,
    foreign_subclass,
    launches_in,
    own_launches,
    replay,
    replayed,
    suspicion,
    tampering_first,
)
from env.gate import DeviceBusy, DeviceGate
from env.launches import ALL
from env.measure import Stopwatch
from env.profile_table import profiling_ratio, valid_rows
from env.records import Problem, Verdict, sha256
from env.reference import Reference, ReferenceCache, Rejected, Trial, TrialKind, is_ours
from env.replay import HOST_READ_US, prove
from env.room import SHORT
from env.rules import Rules
from env.session import ForeignError, Outputs, ProtocolError, Session, TooBig
from env.spares import Spares
from env.tensors import tensor_nodes
from env.wire import WireError, WireTimeout
from env.worker import WorkerDied, WorkerTimeout

WIDE = TrialKind("wide", grad=True, distribution="wide")
# Below it a count of bytes can't be honest; between it and 1 the floor is what counts, since a program that knows more
# of its inputs than their gradient tells (a symmetric matrix, say) may read a little less.
FLOOR_SHARE = 0.75
MAX_SHAKEN = 32  # tensors of a candidate's own, a forward pass each to learn whether it uses them
MAX_KERNELS_APART = 8  # a forward pass each to learn which of them matter


class Judge:
    """Judges one candidate at a time; several judges (lanes) share a device, its gate, warm workers and the references
    that are in use.
    """

    def __init__(
        self, rules: Rules, secret: int, gate: DeviceGate, spares: Spares, references: ReferenceCache | None = None
    ):
        self.server = spares.server
        self.device = spares.server.device
        self.rules = rules
        self.secret = secret
        self.gate = gate
        self.spares = spares
        self.references = references or ReferenceCache(self.start_reference)

    def close(self) -> None:
        self.references.close()

    def start_reference(self, problem: Problem) -> Reference:
        """A reference in a worker of its own."""
        return Reference(self.spares.take(), problem, self.rules, self.secret)

    # A verdict -----------------------------------------------------------------------------------------------------

    def judge(self, problem: Problem, source: str) -> Verdict:
        """Reach a verdict on a candidate's source. Never raises for anything that foreign code does."""
        cost: dict[str, float] = {}
        verdict = Verdict(
            status="infra_error", device=self.device, problem_sha256=problem.sha256, candidate_sha256=sha256(source)
        )
        verdict.time_kind = self.rules.rewarded_time if self.device == "cuda" else "modelled"
        verdict.evidence["rules"] = self.rules.describe()
        started = time.monotonic()
        try:
            self._judge(problem, source, verdict, cost)
        except Rejected as error:
            verdict.status, verdict.message = error.status, error.message
            verdict.evidence.update(error.evidence)
            self._note_memory(error.__cause__, error.status, verdict)
        except (
            WireError,
            WireTimeout,
            WorkerDied,
            WorkerTimeout,
            SharedMemoryError,
            ProtocolError,
            DeviceBusy,
        ) as error:
            verdict.status, verdict.message = "infra_error", f"{type(error).__name__}: {error}"
            self._note_memory(error, verdict.status, verdict)
        except torch.OutOfMemoryError as error:
            verdict.status, verdict.message = "infra_error", f"too big here: the judge ran out of memory ({error})"
            self._note_memory(error, verdict.status, verdict)
        verdict.feedback = render(verdict)
        cost["total_s"] = time.monotonic() - started
        verdict.cost = {name: round(seconds, 4) for name, seconds in cost.items()}
        return verdict

    def _note_memory(self, error: BaseException | None, status: str, verdict: Verdict) -> None:
        """Say where a verdict came of too little memory on the device: alone on it there may be enough."""
        short = isinstance(error, (TooBig, torch.OutOfMemoryError)) or getattr(error, "kind", None) == "oom"
        if self.device == "cuda" and (short or (isinstance(error, SharedMemoryError) and error.short_of_memory)):
            # Only foreign code of a candidate's makes an `oom`; all else is what this problem takes.
            verdict.evidence[SHORT] = "the candidate" if status == "oom" else "the reference"

    def _judge(self, problem: Problem, source: str, verdict: Verdict, cost: dict[str, float]) -> None:
        report = inspect_source(source, problem.entry_point)
        verdict.evidence["kernels_defined"] = report.kernels[:32]
        if report.error:
            raise Rejected("compile_error", report.error)
        began = time.monotonic()
        with self.references.use(problem) as reference:
            cost["reference_s"] = time.monotonic() - began
            with _clock(cost, "worker_s"):
                session = self.spares.take()
            try:
                missing = [name for name, state in session.worker.isolation.items() if state != "on"]
                verdict.evidence["isolation_missing"] = missing
                self._stages(problem, source, reference, session, verdict, cost)
            finally:
                session.end()

    def _stages(
        self, problem: Problem, source: str, reference: Reference, session: Session, verdict: Verdict, cost: dict
    ) -> None:
        with _clock(cost, "correctness_s"), tampering_first(session), as_rejection(session):
            tolerance = self._check_values(problem, source, reference, session, verdict)
        hack, unmeasured = suspicion(session, verdict), None
        with ExitStack() as ending:
            # Who is asked what the kernels are worth: on the CPU the program, in which nothing foreign runs.
            asked = session
            try:
                with _clock(cost, "timing_s"), as_rejection(session):
                    if self.device == "cuda":
                        self._measure(reference, session, verdict, tolerance, cost)
                    else:
                        asked = self._model_times(reference, session, verdict, tolerance, ending)
            except Rejected as error:
                unmeasured = error
                verdict.evidence["times_missing"] = error.message
                self._note_memory(error.__cause__, error.status, verdict)
            hack = hack or suspicion(session, verdict)
            if hack is None and (unmeasured is None or unmeasured.status == "infra_error"):
                with _clock(cost, "effect_s"), as_rejection(asked):
                    self._check_effect(problem, source, reference, asked, verdict, tolerance)
        if hack is not None or unmeasured is not None:
            raise hack or unmeasured
        verdict.status, verdict.message = "correct", ""

    # Values --------------------------------------------------------------------------------------------------------

    def _check_values(
        self, problem: Problem, source: str, reference: Reference, session: Session, verdict: Verdict
    ) -> Tolerance:
        name = f"{problem.entry_point}New"
        session.load(source, name, "candidate", watch=problem.entry_point)
        session.build(name, reference.init_layout, reference.weights_seed)
        first = reference.trial(TrialKind("trial0"))
        slack = reference.slack_of(first) if self.rules.all_modes else 1.0
        tolerance = tolerance_for(self.rules, slack)
        tally = Tally(verdict, reference.trial)
        loaded, floats = session.load_state(reference.moved_state)
        if not loaded:
            self._check_left_out(reference, session, first, tolerance, floats)
        # A trial may be gigabytes, and large ones aren't kept: none outlives its use here.
        del first
        if self.rules.all_modes and reference.floats and loaded:
            # In an instance of its own: what was derived from the weights before is derived anew, as after loading a
            # checkpoint.
            self._check(session, reference.trial(TrialKind("moved", moved=True)), tolerance, tally)
            session.build(name, reference.init_layout, reference.weights_seed)
        verdict.evidence["weights"] = session.load_state(reference.state)[0] or "by seed"
        previous = None
        for number in range(self.rules.trials):
            trial = None
            trial = reference.trial(TrialKind(f"trial{number}"))
            previous = self._check(session, trial, tolerance, tally, previous)
        if self.rules.all_modes:
            self._check_memory(session, reference, previous, trial, tolerance)
            previous = trial = None
            self._check(session, reference.trial(TrialKind("eval", train=False)), tolerance, tally)
            last = reference.wide_trial(WIDE) or reference.trial(TrialKind("grad", grad=True))
            self._check(session, last, tolerance, tally)
        verdict.values_match = True
        verdict.evidence["launches"] = tally.launches
        verdict.evidence["worst_error_in_tolerances"] = round(tally.worst, 4)
        if slack > 1.0:
            verdict.evidence["reference_rounding_in_tolerances"] = round(slack / 2, 3)
        return tolerance

    def _check_left_out(
        self, reference: Reference, session: Session, trial: Trial, tolerance: Tolerance, floats: list[int]
    ) -> None:
        """Weights that hold one value throughout as built (zero gains, biases) and have no counterpart can't be moved
        to see whether they are used. Where what the model holds and uses has no room for them, they are left out.
        """
        constant = reference.constant_weights()
        if not constant:
            return
        used = sum(floats)
        if used >= reference.floats and len(floats) <= MAX_SHAKEN:
            before = self._run(session, trial, tolerance, "run", train=True, grad=False, seed=0)[0]
            for number, count in enumerate(floats):
                request = {"train": True, "grad": False, "seed": 0, "shake": number}
                after = self._run(session, trial, tolerance, "run", **request)[0]
                if count and before.data is not None and after.data is not None:
                    with self.gate:
                        same = compare(before.layout, before.data, after.layout, after.data, tolerance)
                    used -= count * same.match
        if used < reference.floats:
            raise Rejected(
                "incorrect",
                f"ModelNew has no counterpart of the reference's {', '.join(constant[:4])}, "
                "which may take any value: its state_dict holds fewer numbers that matter",
                trial="weights",
            )

    def _check(
        self, session: Session, trial: Trial, tolerance: Tolerance, tally: Tally, previous: Outputs | None = None
    ) -> Outputs:
        """One trial. Raises Rejected where the values are wrong: as a hack where they are the last call's."""
        kind = trial.kind
        bait = [(node["shape"], node["dtype"]) for node in tensor_nodes(trial.outputs.layout)]
        outputs, result = self._run(
            session, trial, tolerance, "run", train=kind.train, grad=kind.grad, seed=0, bait=bait
        )
        mode = "grad" if kind.grad else "train" if kind.train else "eval"
        tally.launches.setdefault(mode, launches_in(outputs.facts))
        subclass = foreign_subclass(outputs, trial)
        if subclass:
            raise Rejected(
                "hack",
                f"forward() returns a tensor subclass ({subclass}), which can put work off until it is looked at",
                rule="output_subclass",
            )
        if not result.match:
            tally.verdict.values_match = False
            if previous is not None and replayed(outputs, previous):
                raise replay(trial)
            if self._skips(session, trial, outputs, tolerance, tally):
                raise Rejected(
                    "hack",
                    "forward() stops launching its kernels after some calls, and its output is wrong from then on",
                    rule="stops_working",
                    trial=kind.name,
                )
            words = kind.words()
            raise Rejected("incorrect", result.message + (f" ({words})" if words else ""), trial=kind.name)
        tally.worst = max(tally.worst, result.error)
        tally.first = tally.first or (kind if kind.name == "trial0" else None)
        return outputs

    def _skips(self, session: Session, trial: Trial, outputs: Outputs, tolerance: Tolerance, tally: Tally) -> bool:
        """Whether a wrong output comes of a call that launched nothing, where the same call was right and did before.

        In another mode than at first it may be a mistake of that mode: then the first trial is tried again.
        """
        launched_first = own_launches(tally.launches.get("train", []))
        if tally.first is None or not launched_first or own_launches(launches_in(outputs.facts)):
            return False
        if trial.kind.train and not trial.kind.grad:
            return True
        again, result = self._run(session, tally.trial(tally.first), tolerance, "run", train=True, grad=False, seed=0)
        return not result.match and not own_launches(launches_in(again.facts))

    def _check_memory(
        self, session: Session, reference: Reference, previous: Outputs, trial: Trial, tolerance: Tolerance
    ) -> None:
        """Inputs that differ from the last ones in a few elements only. A wrong output convicts only where it is the
        last one's, bit for bit: such inputs may break what the problem promises (symmetry, say), which is nobody's
        fault.
        """
        near = reference.trial(TrialKind("near", near=trial.kind.name))
        if near.outputs.data is None or torch.equal(near.outputs.data, trial.outputs.data):
            return
        outputs, result = self._run(session, near, tolerance, "run", train=True, grad=False, seed=0)
        if not result.match and replayed(outputs, previous):
            raise replay(near)

    def _run(
        self, session: Session, trial: Trial, tolerance: Tolerance, op: str, **request: Any
    ) -> tuple[Outputs, Comparison]:
        session.set_inputs(trial.layout, trial.inputs, trial.outputs.data.numel())
        outputs = session.call(op, trial.outputs.data.numel(), **request)
        with self.gate:
            result = compare(trial.outputs.layout, trial.outputs.data, outputs.layout, outputs.data, tolerance)
        if result.match:
            for index, (mine, theirs) in enumerate(zip(trial.outputs.mutated, outputs.mutated)):
                if theirs and not mine:
                    return outputs, Comparison(
                        False, f"forward() overwrites input tensor {index}, which the reference leaves alone"
                    )
        return outputs, result

    # Effect --------------------------------------------------------------------------------------------------------

    def _check_effect(
        self,
        problem: Problem,
        source: str,
        reference: Reference,
        session: Session,
        verdict: Verdict,
        tolerance: Tolerance,
    ) -> None:
        """Without its own kernels the candidate's output must change. Last, since what runs without them may crash."""
        trial = reference.trial(TrialKind("effect"))
        names = list(dict.fromkeys(row["name"] for row in verdict.evidence["launches"]["train"] if row["own"]))
        copying = self._copying(reference, session)
        idle = [name for name in names if name in copying]
        if len(idle) == len(names):
            raise Rejected(
                "hack",
                f"the kernels {', '.join(idle[:4])} compute nothing: they copy what torch made, or change nothing",
                rule="no_effect",
            )
        changed = self._without(session, trial, tolerance, [ALL])
        verdict.evidence["without_kernels"] = changed
        if changed != "changed":
            # Perhaps the work goes round a launch (a graph that was captured before): a fresh process whose kernels are
            # compiled without their stores has no other way. The first one is ended: by a lock on any file they could
            # know of each other. And a crash has to come again before it says anything: another's memory hog may have
            # been its cause.
            session.end()
            for _ in range(2):
                changed = self._knock_out(problem, source, reference, trial, tolerance)
                if changed in ("changed", "unchanged"):
                    break
            verdict.evidence["knockout"] = changed
            if changed == "unchanged":
                raise Rejected(
                    "hack",
                    "the output stays the same when the Triton kernels' stores are taken out: "
                    "the kernels do no work that matters",
                    rule="no_effect",
                )
        still_there = verdict.evidence["without_kernels"] == "changed"
        apart = names if still_there and 1 < len(names) <= MAX_KERNELS_APART else []
        for name in apart:
            alone = self._without(session, trial, tolerance, [name])
            if alone == "unchanged" and name not in idle:
                idle.append(name)
            elif alone not in ("changed", "unchanged"):
                break  # it crashed: nobody is left to ask
        if idle and len(idle) < len(names):
            verdict.evidence["kernels_without_effect"] = idle
            for row in verdict.profile:
                row["own"] = row["own"] and row["name"] not in idle
            verdict.profiling_ratio = profiling_ratio(verdict.profile)

    def _copying(self, reference: Reference, session: Session) -> list[str]:
        """Own kernels that compute nothing, on inputs as wild as the problem allows (a relu of positive numbers is a
        copy). Nothing is said of problems whose answer is in part a copy of an input or of another output.
        """
        trial = reference.wide_trial(WIDE) or reference.trial(TrialKind("effect"))
        if any(trial.given_outputs()):
            return []
        session.set_inputs(trial.layout, trial.inputs)
        try:
            reply = session.ask("inspect", self.rules.run_timeout_s, layout=trial.layout, train=True, seed=0)
        except ForeignError:
            return []
        useful = reply.get("useful")
        return [name for name, computes in useful.items() if computes is False] if isinstance(useful, dict) else []

    def _without(self, session: Session, trial: Trial, tolerance: Tolerance, kernels: list[str]) -> str:
        return _outcome(lambda: self._run(session, trial, tolerance, "effect", kernels=kernels, train=True, seed=0)[1])

    def _knock_out(
        self, problem: Problem, source: str, reference: Reference, trial: Trial, tolerance: Tolerance
    ) -> str:
        session = self.spares.take()
        name = f"{problem.entry_point}New"

        def run() -> Comparison:
            session.load(source, name, "candidate", knockout=True)
            session.build(name, reference.init_layout, reference.weights_seed)
            session.load_state(reference.state)
            return self._run(session, trial, tolerance, "run", train=True, grad=False, seed=0)[1]

        try:
            return _outcome(run)
        finally:
            session.end()

    # Time and profile ----------------------------------------------------------------------------------------------

    def _model_times(
        self, reference: Reference, session: Session, verdict: Verdict, tolerance: Tolerance, ending: ExitStack
    ) -> Session:
        """Times by the counts of the pass as a program. Returns the worker that holds it, ended by `ending`."""

        def run(worker: Session, trial: Trial, op: str) -> tuple[Outputs, Comparison]:
            return self._run(worker, trial, tolerance, op, train=True, seed=0)

        seen, trial = reference.trial(TrialKind("timed0")), reference.trial(TrialKind("effect"))
        outputs, fresh, numbers = prove(self.spares, session, seen, trial, run, ending)
        if not own_launches(launches_in(outputs.facts)):
            raise Rejected(
                "hack", "it launches its kernels when it is checked, not when it is timed", rule="stops_working"
            )
        reference_rows = reference.modelled_rows(trial)
        rows = valid_rows(outputs.facts.get("rows"))
        claimed = sum(row["time_us"] for row in rows) + numbers * HOST_READ_US
        if numbers:
            verdict.evidence["numbers_from_the_host"] = numbers
        verdict.reference_us = sum(row["time_us"] for row in reference_rows)
        floor = min(modelled.modelled_us(reference.needed_bytes(trial), 1), verdict.reference_us)
        verdict.evidence["floor_us"] = round(floor, 4)
        if claimed < FLOOR_SHARE * floor:
            # Counts aren't noisy: what did the work wasn't counted.
            verdict.reference_us = None
            raise Rejected(
                "hack",
                f"the work that was counted takes {claimed:.2f} us, reading what the output depends on and writing it "
                f"alone {floor:.2f} us: the rest was done where it isn't counted",
                rule="hidden_work",
            )
        claimed = max(claimed, floor)
        verdict.profile, verdict.profiling_ratio = rows, profiling_ratio(rows)
        verdict.candidate_us = claimed
        verdict.speedup = verdict.speedup_low = verdict.speedup_high = verdict.reference_us / claimed
        return fresh

    def _measure(
        self, reference: Reference, session: Session, verdict: Verdict, tolerance: Tolerance, cost: dict[str, float]
    ) -> None:
        sets = reference.timed_sets()
        try:
            measured = Stopwatch(reference, session, sets, self.rules, tolerance).measure()
        except Rejected as error:
            if error.status != "infra_error":
                raise
            # The machine's bad moment as a rule: once more, with time for a host that is slow today.
            measured = Stopwatch(reference, session, sets, self.rules, tolerance, headroom=2.0).measure()
        session.facts(session.ask("report", self.rules.run_timeout_s))
        cost["exclusive_s"] = measured.exclusive_s
        if verdict.evidence["launches"] and all(map(own_launches, verdict.evidence["launches"].values())):
            for calls, facts in measured.launches:
                if own_launches(launches_in(facts)) < calls:
                    raise Rejected(
                        "hack",
                        "some of the timed calls launch none of its kernels, as every checked one did",
                        rule="stops_working",
                    )
        ratio = profiling_ratio(measured.rows)
        if ratio is None:
            raise Rejected("infra_error", "not measured: the profiler recorded no device activity")
        verdict.evidence["times"], verdict.evidence["timing"] = measured.times, measured.evidence
        rewarded = self.rules.rewarded_time if self.rules.rewarded_time in measured.times else "eager"
        verdict.time_kind = rewarded
        for name, value in measured.times[rewarded].items():
            setattr(verdict, name, value)
        verdict.evidence["tie"] = verdict.speedup_low <= 1.0 <= verdict.speedup_high
        verdict.profile, verdict.profiling_ratio = measured.rows, ratio


def _outcome(run: Callable[[], Comparison]) -> str:
    """What a run without kernels shows: "changed", "unchanged", or how it crashed, which counts as changed."""
    try:
        return "unchanged" if run().match else "changed"
    except (ForeignError, WorkerDied, WorkerTimeout, ProtocolError) as error:
        if is_ours(error):
            raise
        return f"crashed: {str(error)[:200]}"


@contextmanager
def _clock(cost: dict[str, float], name: str) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    finally:
        cost[name] = cost.get(name, 0.0) + time.monotonic() - start
