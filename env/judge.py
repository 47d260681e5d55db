"""From a problem and a candidate to a verdict.

Runs in the evaluator: trusted code only, long-lived, holds the originals of inputs and the expected outputs. It never
imports a problem or a candidate. Order of a verdict: source → loads → correct in every mode → really Triton → effect →
time → profile. Whatever is missing for the next step ends in a status that says whose fault it is.
"""

from __future__ import annotations

import hashlib
import signal
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from env import modelled, timing
from env.buffers import SharedMemoryError
from env.compare import Comparison, compare
from env.extract import inspect_source
from env.feedback import render
from env.gate import DeviceGate
from env.profile_table import profiling_ratio, valid_rows
from env.records import Problem, Verdict, sha256
from env.rules import Rules
from env.session import ForeignError, Outputs, ProtocolError, Session
from env.tensors import tensor_nodes
from env.wire import WireError, WireTimeout
from env.worker import ForkServer, Worker, WorkerDied, WorkerTimeout

KEPT_REFERENCES = 2
MAX_KEPT_BYTES = 1 << 30  # a larger reference is not kept between candidates: its memory is needed for others
TIMED_BLOCKS = 4
BLOCK_US = 20_000.0
MAX_CALLS = 50


class Rejected(Exception):
    """The verdict is reached before the end: status, message for the author, evidence."""

    def __init__(self, status: str, message: str, **evidence: Any):
        super().__init__(message)
        self.status, self.message, self.evidence = status, message, evidence


@dataclass
class Trial:
    """One set of inputs and what the reference makes of it; all bytes are the judge's own copies."""

    layout: dict[str, Any]
    inputs: torch.Tensor
    outputs: Outputs


class Judge:
    """Judges one candidate at a time; several judges (lanes) may share a fork server, a device and its gate."""

    def __init__(self, server: ForkServer, rules: Rules, secret: int, gate: DeviceGate):
        self.server = server
        self.device = server.device
        self.rules = rules
        self.secret = secret
        self.gate = gate
        self.spares: deque[Worker] = deque()
        self.references: OrderedDict[str, _Reference] = OrderedDict()
        self._refill()

    def close(self) -> None:
        for reference in self.references.values():
            reference.session.end()
        for worker in self.spares:
            worker.end()

    # Workers -------------------------------------------------------------------------------------------------------

    def _refill(self) -> None:
        """Keep workers warming while others are judged: their context and profiler cost seconds, not ours."""
        while len(self.spares) < self.rules.spares:
            worker = self.server.fork()
            self.gate.register(worker)
            worker.post("warm", profiler=True)
            self.spares.append(worker)

    def _take(self) -> Session:
        if not self.spares:
            self._refill()
        worker = self.spares.popleft()
        self._refill()
        reply = worker.collect(self.rules.compile_timeout_s)
        worker.isolation = reply.get("isolation", {})
        if reply.get("ok") is not True:
            worker.end()
            raise WireError(f"a worker could not be made ready: {reply.get('message')}")
        return Session(worker, self.device, self.gate, self.rules.run_timeout_s, self.rules.compile_timeout_s)

    def _seed(self, problem: Problem, what: str) -> int:
        """A seed that nobody outside can guess, the same for equal secrets: candidates can't tune to inputs."""
        digest = hashlib.sha256(f"{self.secret}:{problem.sha256}:{what}".encode()).digest()
        return int.from_bytes(digest[:6], "little")

    def _reference(self, problem: Problem) -> _Reference:
        """The problem's reference, started if need be. A kept one that was lost meanwhile is replaced."""
        found = self.references.pop(problem.sha256, None)
        if found is not None and not found.session.worker.alive():
            found.session.end()
            found = None
        if found is None:
            while len(self.references) >= KEPT_REFERENCES:
                self.references.popitem(last=False)[1].session.end()
            with self._as_problem_error(problem):
                found = _Reference(self._take(), problem, self._seed(problem, "weights"))
        self.references[problem.sha256] = found
        return found

    def _trial(
        self, problem: Problem, reference: _Reference, what: str, train: bool = True, grad: bool = False
    ) -> Trial:
        """Inputs of that name and what the reference makes of them. Made when needed, since a set may be gigabytes."""
        with self._as_problem_error(problem):
            trial = reference.trial(self._seed(problem, what), train, grad)
        if not tensor_nodes(trial.outputs.layout):
            raise Rejected("problem_error", "the reference returns no tensor: there is nothing to compare")
        return trial

    def _forget(self, problem: Problem) -> None:
        reference = self.references.pop(problem.sha256, None)
        if reference is not None:
            reference.session.end()

    # A verdict -----------------------------------------------------------------------------------------------------

    def judge(self, problem: Problem, source: str) -> Verdict:
        """Reach a verdict on a candidate's source. Never raises for anything that foreign code does."""
        cost: dict[str, float] = {}
        verdict = Verdict(
            status="infra_error", device=self.device, problem_sha256=problem.sha256, candidate_sha256=sha256(source)
        )
        verdict.time_kind = "eager" if self.device == "cuda" else "modelled"
        started = time.monotonic()
        try:
            self._judge(problem, source, verdict, cost)
        except Rejected as error:
            verdict.status, verdict.message = error.status, error.message
            verdict.evidence.update(error.evidence)
        except (WireError, WireTimeout, WorkerDied, WorkerTimeout, SharedMemoryError, ProtocolError) as error:
            verdict.status, verdict.message = "infra_error", f"{type(error).__name__}: {error}"
        verdict.feedback = render(verdict)
        cost["total_s"] = time.monotonic() - started
        verdict.cost = {name: round(seconds, 4) for name, seconds in cost.items()}
        return verdict

    def _judge(self, problem: Problem, source: str, verdict: Verdict, cost: dict[str, float]) -> None:
        report = inspect_source(source, problem.entry_point)
        verdict.evidence["kernels_defined"] = report.kernels[:32]
        if report.error:
            raise Rejected("compile_error", report.error)
        with _clock(cost, "reference_s"):
            reference = self._reference(problem)
        session = self._take()
        try:
            missing = [name for name, state in session.worker.isolation.items() if state != "on"]
            verdict.evidence["isolation_missing"] = missing
            with _clock(cost, "correctness_s"), _as_rejection():
                self._load(problem, source, session, reference)
                self._check_trials(problem, reference, session, verdict)
            with _clock(cost, "effect_s"), _as_rejection():
                self._check_launches(verdict)
                self._check_effect(problem, source, reference, verdict)
            with _clock(cost, "timing_s"), _as_rejection():
                if self.device == "cuda":
                    self._measure(problem, reference, session, verdict)
                else:
                    self._model_times(problem, reference, session, verdict)
            verdict.status, verdict.message = "correct", ""
        finally:
            session.end()
            if reference.session.lent_bytes() > MAX_KEPT_BYTES:
                self._forget(problem)

    def _modes(self) -> list[tuple[bool, bool]]:
        """(train mode, gradients on) of each trial: judged in train mode under no_grad, held to the others as well."""
        return [(True, False)] * self.rules.trials + [(False, False), (True, True)]

    @contextmanager
    def _as_problem_error(self, problem: Problem) -> Iterator[None]:
        try:
            yield
        except ForeignError as error:
            self._forget(problem)
            if error.kind == "oom":
                raise Rejected(
                    "infra_error", f"too big here: the reference ran out of memory ({error.message})"
                ) from error
            lines = "; ".join(error.lines)
            raise Rejected("problem_error", f"the reference failed: {error.message} {lines}".strip()) from error
        except (WorkerDied, WorkerTimeout) as error:
            self._forget(problem)
            status = "infra_error" if _is_ours(error) else "problem_error"
            raise Rejected(status, f"the reference failed: {error}") from error

    def _load(
        self, problem: Problem, source: str, session: Session, reference: _Reference, knockout: bool = False
    ) -> None:
        name = f"{problem.entry_point}New"
        session.load(source, name, "candidate", knockout)
        session.build(name, reference.init_layout, reference.weights_seed)
        layout, data = reference.state
        if layout["items"]:
            session.fill("state", data)
            session.ask("load_state", self.rules.run_timeout_s, layout=layout, buffer="state")

    def _run(self, session: Session, trial: Trial, op: str, **request: Any) -> tuple[Outputs, Comparison]:
        session.set_inputs(trial.layout, trial.inputs)
        outputs = session.call(op, trial.outputs.data.numel(), **request)
        with self.gate:
            result = compare(trial.outputs.layout, trial.outputs.data, outputs.layout, outputs.data)
        if result.match:
            for index, (mine, theirs) in enumerate(zip(trial.outputs.mutated, outputs.mutated)):
                if theirs and not mine:
                    return outputs, Comparison(
                        False, f"forward() overwrites input tensor {index}, which the reference leaves alone"
                    )
        return outputs, result

    def _check_trials(self, problem: Problem, reference: _Reference, session: Session, verdict: Verdict) -> None:
        launches: dict[str, list] = {}
        worst = 0.0
        for number, (train, grad) in enumerate(self._modes()):
            trial = self._trial(problem, reference, f"trial{number}", train, grad)
            outputs, result = self._run(session, trial, "run", train=train, grad=grad, seed=number)
            mode = "grad" if grad else "train" if train else "eval"
            launches.setdefault(mode, _launches(outputs.facts))
            if not result.match:
                verdict.values_match = False
                where = {"train": "", "eval": " (in eval mode)", "grad": " (with gradients on)"}[mode]
                raise Rejected("incorrect", f"{result.message}{where}", trial=number)
            worst = max(worst, result.error)
        verdict.values_match = True
        verdict.evidence["launches"] = launches
        verdict.evidence["worst_error_in_tolerances"] = round(worst, 4)

    def _check_launches(self, verdict: Verdict) -> None:
        for mode, launches in verdict.evidence["launches"].items():
            if not any(row["own"] for row in launches):
                defined = verdict.evidence["kernels_defined"]
                what = (
                    f"the kernels {', '.join(defined)} are never launched"
                    if defined
                    else "no Triton kernel is launched"
                )
                raise Rejected("hack", f"{what} in {mode} mode", rule="no_own_launch", mode=mode)

    def _check_effect(self, problem: Problem, source: str, reference: _Reference, verdict: Verdict) -> None:
        """Without its own kernels' stores, in a fresh process, the candidate's output must change."""
        trial = self._trial(problem, reference, "trial0")
        session = self._take()
        try:
            self._load(problem, source, session, reference, knockout=True)
            outputs, result = self._run(session, trial, "run", train=True, grad=False, seed=0)
            launched = any(row["own"] for row in _launches(outputs.facts))
        except (ForeignError, WorkerDied, WorkerTimeout, ProtocolError) as error:
            if _is_ours(error):
                raise
            verdict.evidence["knockout"] = f"crashed: {str(error)[:200]}"
            return
        finally:
            session.end()
        verdict.evidence["knockout"] = "changed" if not result.match else "unchanged"
        if result.match:
            raise Rejected(
                "hack",
                "the output stays the same when the Triton kernels' stores are taken out: "
                "the kernels do no work that matters",
                rule="no_effect",
                launched=launched,
            )

    # Time and profile ----------------------------------------------------------------------------------------------

    def _check_timed(self, outputs: Outputs, result: Comparison, trial: Trial) -> None:
        if not result.match and not any(trial.outputs.mutated):
            raise Rejected(
                "hack",
                f"right when checked, wrong when timed: {result.message}",
                rule="timed_output_differs",
            )

    def _model_times(self, problem: Problem, reference: _Reference, session: Session, verdict: Verdict) -> None:
        trial = self._trial(problem, reference, "timed")
        reference_rows = valid_rows(reference.time(trial, 1).facts.get("rows"))
        outputs, result = self._run(session, trial, "time", train=True, calls=1, seed=0)
        self._check_timed(outputs, result, trial)
        rows = valid_rows(outputs.facts.get("rows"))
        claimed = sum(row["time_us"] for row in rows)
        floor = modelled.floor_us(sum(node["nbytes"] for node in tensor_nodes(trial.outputs.layout)))
        if claimed < 0.999 * floor:
            raise Rejected("infra_error", f"not measured: {claimed:.2f} us is below the floor of {floor:.2f} us")
        verdict.profile, verdict.profiling_ratio = rows, profiling_ratio(rows)
        verdict.reference_us = sum(row["time_us"] for row in reference_rows)
        verdict.candidate_us = claimed
        verdict.speedup = verdict.speedup_low = verdict.speedup_high = verdict.reference_us / claimed

    def _measure(self, problem: Problem, reference: _Reference, session: Session, verdict: Verdict) -> None:
        """Blocks of calls in ABBA order, alone on the GPU; the profile follows, its numbers don't enter the time."""
        trial = self._trial(problem, reference, "timed")
        session.set_inputs(trial.layout, trial.inputs)
        last = self._trial(problem, reference, "timed, last block")
        blocks: dict[str, list[list[float]]] = {"reference": [], "candidate": []}
        with self.gate.alone([reference.session.worker, session.worker]):
            lead = _times(reference.time(trial, 3)), _times(session.call("time", train=True, calls=3, seed=0))
            calls = max(3, min(MAX_CALLS, int(BLOCK_US / max(min(map(min, lead)), 1.0))))
            for number in range(TIMED_BLOCKS):
                order = ("reference", "candidate") if number % 2 == 0 else ("candidate", "reference")
                used = last if number == TIMED_BLOCKS - 1 else trial
                for side in order:
                    if side == "reference":
                        blocks[side].append(_times(reference.time(used, calls)))
                    else:
                        outputs, result = self._run(session, used, "time", train=True, calls=calls, seed=0)
                        self._check_timed(outputs, result, used)
                        blocks[side].append(_times(outputs))
            session.set_inputs(trial.layout, trial.inputs)
            rows = valid_rows(
                session.ask("profile", self.rules.run_timeout_s, layout=trial.layout, train=True, seed=0).get("rows")
            )
        ratio = profiling_ratio(rows)
        if ratio is None:
            raise Rejected("infra_error", "not measured: the profiler recorded no device activity")
        for name, value in timing.interval(blocks["reference"], blocks["candidate"], seed=0).items():
            setattr(verdict, name, value)
        verdict.profile, verdict.profiling_ratio = rows, ratio


class _Reference:
    """The reference of one problem in its worker, kept while the problem is in use."""

    def __init__(self, session: Session, problem: Problem, seed: int):
        self.session = session
        self.weights_seed = seed
        try:
            session.load(problem.source, problem.entry_point, "reference")
            self.init_layout = session.init_inputs()
            session.build(problem.entry_point, self.init_layout, seed)
            self.state = session.export("state", "state", "state")
        except BaseException:
            session.end()
            raise

    def trial(self, seed: int, train: bool, grad: bool) -> Trial:
        layout, inputs = self.session.export("make_inputs", "inputs", "inputs", seed=seed)
        self.session.set_inputs(layout, inputs)
        return Trial(layout, inputs, self.session.call("run", train=train, grad=grad, seed=0))

    def time(self, trial: Trial, calls: int) -> Outputs:
        self.session.set_inputs(trial.layout, trial.inputs)
        return self.session.call("time", train=True, calls=calls, seed=0)


def _launches(facts: dict[str, Any]) -> list[dict[str, Any]]:
    rows = facts.get("launches")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ProtocolError("a launch log that isn't one")
    return [
        {"name": str(row.get("name"))[:80], "own": row.get("own") is True, "count": int(row.get("count", 0))}
        for row in rows[:64]
    ]


def _times(outputs: Outputs) -> list[float]:
    times = outputs.facts.get("times_us")
    if not isinstance(times, list) or not times or not all(isinstance(t, float) and t > 0 for t in times):
        raise Rejected("infra_error", "not measured: the timed calls gave no times")
    return times


@contextmanager
def _clock(cost: dict[str, float], name: str) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    finally:
        cost[name] = cost.get(name, 0.0) + time.monotonic() - start


def _is_ours(error: Exception) -> bool:
    """A worker whose exit code nobody can tell died with its fork server: not by anything that it ran."""
    return isinstance(error, WorkerDied) and error.code is None


@contextmanager
def _as_rejection() -> Iterator[None]:
    """What foreign code did to itself, as a status."""
    try:
        yield
    except ForeignError as error:
        raise Rejected(error.kind, error.message, lines=error.lines) from error
    except WorkerTimeout as error:
        raise Rejected("timeout", f"no result in time: {error}") from error
    except ProtocolError as error:
        raise Rejected("runtime_error", f"the process wrote on its channel: {error}") from error
    except WorkerDied as error:
        if _is_ours(error):
            raise Rejected("infra_error", f"the fork server is gone, and its workers with it: {error}") from error
        code = error.code
        if code < 128:
            raise Rejected("runtime_error", f"the process ended by itself (exit code {code})") from error
        name = signal.Signals(code - 128).name if code - 128 in set(signal.Signals) else f"signal {code - 128}"
        status = "oom" if name == "SIGKILL" else "runtime_error"
        raise Rejected(status, f"the process was ended by {name}") from error
