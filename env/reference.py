"""What a candidate is held against: inputs that the judge draws in secret, and what the reference makes of them.

Runs in the evaluator, shared by its lanes. One reference worker a problem is kept while the problem is in use, and so
are its trials: candidates of one problem meet the same inputs, which none of them can know. All bytes kept here are the
judge's own copies; the reference's code runs in a sandboxed worker like any candidate's.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from env.compare import agreement, compare, tolerance_for
from env.profile_table import valid_rows
from env.records import Problem
from env.rules import Rules
from env.session import ForeignError, Outputs, ProtocolError, Session, TooBig
from env.tensors import DTYPES, tensor_nodes, view
from env.worker import WorkerDied, WorkerTimeout

KEPT_PROBLEMS = 8
# Bytes of one trial that are kept for the next candidate, and of a reference that stays in memory at all.
KEPT_TRIAL_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
KEPT_LENT_BYTES = 1 << 30
TIMED_SETS_BYTES, MAX_TIMED_SETS = 256 << 20, 12
# The judge's own, those lent to both sides, and one set each for timing.
INPUT_COPIES = 5
NEAR_SHARE = 0.02
MAX_SLACK = 8.0
# A float64 run costs a copy of everything: for large problems the tolerance alone must do.
MAX_DOUBLE_BYTES = 1 << 30


class Rejected(Exception):
    """The verdict is reached before the end: status, message for the author, evidence."""

    def __init__(self, status: str, message: str, **evidence: Any):
        super().__init__(message)
        self.status, self.message, self.evidence = status, message, evidence


@dataclass(frozen=True)
class TrialKind:
    """Which inputs, which mode, which weights. `seed` tells trials of one kind apart."""

    name: str
    train: bool = True
    grad: bool = False
    distribution: str = "plain"
    moved: bool = False
    near: str = ""

    def words(self) -> str:
        """What is special about it, for the author of a candidate that fails it; empty where nothing is."""
        said = [
            "" if self.train else "in eval mode",
            "with gradients on" if self.grad else "",
            "with other weights" if self.moved else "",
            "on inputs of both signs and heavy tails" if self.distribution == "wide" else "",
        ]
        return ", ".join(word for word in said if word)


@dataclass
class Trial:
    """One set of inputs and what the reference makes of it; all bytes are the judge's own copies."""

    kind: TrialKind
    layout: dict[str, Any]
    inputs: torch.Tensor
    outputs: Outputs

    def nbytes(self) -> int:
        return self.inputs.numel() + (self.outputs.data.numel() if self.outputs.data is not None else 0)

    def given_outputs(self) -> list[bool]:
        """Of each output whether it holds, in the same order, what an input or an earlier output holds: nobody has to
        compute it.
        """
        known = [view(node, self.inputs).reshape(-1) for node in tensor_nodes(self.layout)]
        given = []
        for output in self._outputs():
            flat = output.reshape(-1)
            given.append(any(flat.dtype == other.dtype and torch.equal(flat, other) for other in known))
            known.append(flat)
        return given

    def repeats(self) -> list[int]:
        """How often each output holds the same along its dimensions: a program may return one of them, expanded."""
        return [
            math.prod(
                size
                for dim, size in enumerate(output.shape)
                if size > 1 and bool((output == output.narrow(dim, 0, 1)).all())
            )
            for output in self._outputs()
        ]

    def _outputs(self) -> list[torch.Tensor]:
        return [view(node, self.outputs.data) for node in tensor_nodes(self.outputs.layout)]


class Reference:
    """The reference of one problem in its worker. One lane uses it at a time (`lock`)."""

    def __init__(self, session: Session, problem: Problem, rules: Rules, secret: int):
        self.session = session
        self.problem = problem
        self.rules = rules
        self.secret = secret
        self.lock = threading.RLock()
        self.users = 0
        self.trials: dict[TrialKind, Trial] = {}
        self.wide: bool | None = None  # not tried yet
        self.slack: float | None = None
        self.rows: list[dict[str, Any]] | None = None
        self.needed: int | None = None
        # How it was timed last (`env.measure`): with which buffers; how long a call takes the host, the program on the
        # host, and a call at all (us).
        self.timed: tuple[tuple[int, ...], float, float, float] | None = None
        self.weights_seed = self.seed("weights")
        try:
            session.load(problem.source, problem.entry_point, "reference")
            self.init_layout = session.init_inputs()
            compiled = rules.reference == "compile"
            session.build(problem.entry_point, self.init_layout, self.weights_seed, compiled)
            self.state = session.export("state", "state", "state")
        except BaseException:
            session.end()
            raise
        self.moved_state = (self.state[0], _moved(*self.state, self.seed("moved weights")))

    def seed(self, what: str) -> int:
        """A seed that nobody outside can guess, the same for equal secrets: candidates can't tune to inputs."""
        digest = hashlib.sha256(f"{self.secret}:{self.problem.sha256}:{what}".encode()).digest()
        return int.from_bytes(digest[:6], "little")

    @property
    def floats(self) -> int:
        """How many numbers its weights hold."""
        nodes = [node for node in tensor_nodes(self.state[0]) if DTYPES[node["dtype"]].is_floating_point]
        return sum(math.prod(node["shape"]) for node in nodes)

    def constant_weights(self) -> list[str]:
        """Names of weights that hold one value throughout, as built: zero or one as a rule, so that leaving them out
        changes nothing."""
        names, nodes = self.state[0]["keys"], tensor_nodes(self.state[0])
        parts = {name: view(node, self.state[1]) for name, node in zip(names, nodes, strict=True)}
        return [
            name
            for name, part in parts.items()
            if part.is_floating_point() and part.numel() > 1 and bool((part == part.reshape(-1)[0]).all())
        ]

    def trial(self, kind: TrialKind) -> Trial:
        """Made when needed, kept where it is small. Raises Rejected where the reference is at fault."""
        if kind in self.trials:
            return self.trials[kind]  # without the lock: another lane may hold it while it waits for the GPU
        with self.lock, as_problem_error():
            if kind in self.trials:
                return self.trials[kind]
            try:
                trial = self._make(kind)
            except WorkerTimeout:
                self.session.worker.end()  # stuck: nobody may be handed this one again
                raise
            if trial.nbytes() <= KEPT_TRIAL_BYTES[self.session.device]:
                self.trials[kind] = trial
            return trial

    def _make(self, kind: TrialKind) -> Trial:
        if kind.near:
            base = self.trial(TrialKind(kind.near))
            layout, inputs = base.layout, _nearly(base.layout, base.inputs, self.seed(kind.name))
            del base  # gigabytes, maybe
        else:
            layout, inputs = self.session.export(
                "make_inputs",
                "inputs",
                "inputs",
                copies=INPUT_COPIES,
                seed=self.seed(kind.name),
                distribution=kind.distribution,
            )
        if kind.name.startswith("timed") and torch.equal(inputs, self.trial(TrialKind("trial0")).inputs):
            # The same inputs with every seed: a candidate that remembers them must not meet them again.
            inputs = _nearly(layout, inputs, self.seed(kind.name))
        if kind.moved:
            self.session.load_state(self.moved_state)
        try:
            self.session.set_inputs(layout, inputs)
            outputs = self.session.call("run", train=kind.train, grad=kind.grad, seed=0)
        finally:
            if kind.moved:
                self.session.load_state(self.state)
        self._refuse_bf16(layout, outputs.layout)
        if not tensor_nodes(outputs.layout):
            raise Rejected("problem_error", "the reference returns no tensor: there is nothing to compare")
        if not any(math.prod(node["shape"]) for node in tensor_nodes(outputs.layout)):
            raise Rejected("problem_error", "the reference's outputs have no elements: there is nothing to compare")
        if kind.distribution == "plain" and _is_all_nan(outputs):
            raise Rejected("problem_error", "the reference's output is NaN everywhere: any kernel would be as good")
        if kind == TrialKind("trial0"):
            self._refuse_random(layout, inputs, outputs)
        return Trial(kind, layout, inputs, outputs)

    def _refuse_bf16(self, *layouts: dict[str, Any]) -> None:
        nodes = [node for layout in (*layouts, self.state[0]) for node in tensor_nodes(layout)]
        if self.session.device == "cpu" and any(node["dtype"] == "bfloat16" for node in nodes):
            message = "bfloat16 can't be judged on the CPU: Triton's interpreter computes it wrongly"
            raise Rejected("infra_error", message)

    def _refuse_random(self, layout: dict[str, Any], inputs: torch.Tensor, outputs: Outputs) -> None:
        """Run it again: what differs by more than rounding comes of neither inputs, weights nor torch's seed."""
        self.session.set_inputs(layout, inputs)
        again = self.session.call("run", train=True, grad=False, seed=0)
        result = compare(outputs.layout, outputs.data, again.layout, again.data, tolerance_for(self.rules, MAX_SLACK))
        if not result.match:
            raise Rejected(
                "problem_error",
                f"the reference gives another output for the same inputs ({result.message}): nobody can be held to it",
            )

    def wide_trial(self, kind: TrialKind) -> Trial | None:
        """A trial on the wide distribution, or None where float32 and float64 don't agree there (or it isn't finite):
        then nobody can say what is right."""
        if self.wide is None:
            with self.lock:
                if self.wide is None:  # not decided by another lane meanwhile
                    self.wide = self._agrees(kind)
        return self.trial(kind) if self.wide else None

    def _agrees(self, kind: TrialKind) -> bool:
        try:
            error = self._own_error(self.trial(kind))
        except (ForeignError, Rejected):
            error = None
        if error is not None and error <= 0.5:
            return True
        self.trials.pop(kind, None)
        return False

    def slack_of(self, trial: Trial) -> float:
        """How far the reference's own rounding goes beyond the tolerance: a candidate may be as far off again."""
        if self.slack is None:
            with self.lock:
                if self.slack is None:
                    error = self._own_error(trial)
                    self.slack = 1.0 if error is None else min(max(1.0, 2.0 * error), MAX_SLACK)
        return self.slack

    def _own_error(self, trial: Trial) -> float | None:
        """Largest error of the reference against its own float64 run, in tolerances; None where there is none."""
        if trial.nbytes() > MAX_DOUBLE_BYTES or self.rules.reference == "compile":
            return None
        self.session.set_inputs(trial.layout, trial.inputs)
        try:
            layout, data = self.session.export(
                "run_double", "double", "double", layout=trial.layout, train=trial.kind.train, seed=0
            )
        except ForeignError:
            return None  # it names a dtype of its own, or is too large
        return agreement(trial.outputs.layout, trial.outputs.data, layout, data, self.rules)

    def modelled_rows(self, trial: Trial) -> list[dict[str, Any]]:
        """The reference's own table of modelled times (CPU): the same for every candidate."""
        with self.lock, as_problem_error():
            if self.rows is None:
                self.session.set_inputs(trial.layout, trial.inputs)
                self.rows = valid_rows(self.session.call("model_time", train=True, seed=0).facts.get("rows"))
            return self.rows

    def needed_bytes(self, trial: Trial) -> int:
        """What any program must read and write to make this trial's outputs of its inputs (CPU; `env.needed`)."""
        with self.lock, as_problem_error():
            if self.needed is None:
                self.session.set_inputs(trial.layout, trial.inputs)
                reply = self.session.ask(
                    "needed", self.rules.run_timeout_s, layout=trial.layout, train=trial.kind.train, seed=0
                )
                written = zip(reply["written"], trial.given_outputs(), trial.repeats(), strict=True)
                self.needed = reply["read"] + sum(nbytes // times for nbytes, given, times in written if not given)
            return self.needed

    def timed_sets(self) -> list[Trial]:
        """Inputs that no candidate has met when it is timed."""
        first = self.trial(TrialKind("timed0"))
        count = max(1, min(MAX_TIMED_SETS, TIMED_SETS_BYTES // max(first.nbytes(), 1)))
        return [first] + [self.trial(TrialKind(f"timed{i}")) for i in range(1, count)]

    def end(self) -> None:
        self.session.end()
        self.trials.clear()


class ReferenceCache:
    """References by problem and rules; the evaluator's device and versions are the same for all of them."""

    def __init__(self, make: Callable[[Problem], Reference]):
        self.make = make
        self.lock = threading.Lock()
        self.making: dict[str, threading.Lock] = {}
        self.kept: OrderedDict[str, Reference] = OrderedDict()

    @contextmanager
    def use(self, problem: Problem) -> Iterator[Reference]:
        """The problem's reference, started if need be. One that was lost meanwhile is replaced."""
        reference = self._take(problem)
        try:
            yield reference
        finally:
            with self.lock:
                reference.users -= 1
                worker = reference.session.worker
                broken = not worker.alive() or reference.session.lent_bytes() > KEPT_LENT_BYTES
                if broken and self.kept.get(problem.sha256) is reference:
                    del self.kept[problem.sha256]
                if reference.users == 0 and self.kept.get(problem.sha256) is not reference:
                    reference.end()

    def _take(self, problem: Problem) -> Reference:
        with self.lock:
            turn = self.making.setdefault(problem.sha256, threading.Lock())
        with turn:  # two lanes that need the same one start it once
            with self.lock:
                found = self.kept.get(problem.sha256)
                if found is not None and found.session.worker.alive():
                    self.kept.move_to_end(problem.sha256)
                    found.users += 1
                    return found
            with as_problem_error():
                made = self.make(problem)
            with self.lock:
                made.users = 1
                self.kept[problem.sha256] = made
                idle = [key for key, reference in self.kept.items() if reference.users == 0]
                while len(self.kept) > KEPT_PROBLEMS and idle:
                    self.kept.pop(idle.pop(0)).end()
                self.making = {key: lock for key, lock in self.making.items() if lock.locked()}
        return made

    def close(self) -> None:
        for reference in self.kept.values():
            reference.end()

    def let_go(self) -> None:
        """End those that nobody uses at the moment."""
        with self.lock:
            for key in [key for key, reference in self.kept.items() if reference.users == 0]:
                self.kept.pop(key).end()


@contextmanager
def as_problem_error() -> Iterator[None]:
    """What the reference's own code does wrong, as a verdict that blames no candidate."""
    try:
        yield
    except ForeignError as error:
        if error.kind == "oom":
            raise Rejected("infra_error", f"too big here: the reference ran out of memory ({error.message})") from error
        lines = "; ".join(error.lines)
        raise Rejected("problem_error", f"the reference failed: {error.message} {lines}".strip()) from error
    except ProtocolError as error:
        raise Rejected("problem_error", f"the reference returns what can't be passed on: {error}") from error
    except TooBig as error:
        raise Rejected("infra_error", str(error)) from error
    except (WorkerDied, WorkerTimeout) as error:
        if isinstance(error, WorkerDied) and error.oom:
            raise Rejected("infra_error", f"too big here: {error}") from error
        status = "infra_error" if is_ours(error) else "problem_error"
        ended = f" (its process ended with exit code {error.code})" if isinstance(error, WorkerDied) else ""
        raise Rejected(status, f"the reference failed: {error}{ended}") from error


def is_ours(error: Exception) -> bool:
    """Whether a worker was lost by nothing that it ran: with its fork server, or by a kill from outside.

    The host's memory is watched, so that the kernel seldom has to choose whom to kill.
    """
    return isinstance(error, WorkerDied) and (error.code is None or error.machine_short or error.outside)


def _is_all_nan(outputs: Outputs) -> bool:
    parts = [view(node, outputs.data) for node in tensor_nodes(outputs.layout)]
    floats = [part for part in parts if part.is_floating_point() and part.numel()]
    return bool(floats) and len(floats) == len(parts) and all(bool(torch.isnan(part).all()) for part in floats)


def _moved(layout: dict[str, Any], data: torch.Tensor, seed: int) -> torch.Tensor:
    """Weights that training might have made of these: no parameter is still zero, none changes its sign.

    Additions are positive, since some state (a running variance) may not become negative.
    """
    moved = data.clone()
    generator = torch.Generator(data.device).manual_seed(seed)
    for node in tensor_nodes(layout):
        part = view(node, moved)
        if part.is_floating_point() and part.numel():
            size = part.double().square().mean().sqrt().to(part.dtype)
            noise = torch.rand(part.shape, generator=generator, device=part.device).to(part.dtype)
            part.mul_(1 + 0.1 * noise).add_(noise * (0.05 * size + 0.02))
    return moved


def _nearly(layout: dict[str, Any], data: torch.Tensor, seed: int) -> torch.Tensor:
    """The same inputs but for a few elements: what remembers inputs by a sample of them takes these for the old ones.

    Elements shrink by a quarter, which keeps signs, zeros and ranges.
    """
    changed = data.clone()
    generator = torch.Generator(data.device).manual_seed(seed)
    for node in tensor_nodes(layout):
        part = view(node, changed)
        if part.is_floating_point() and part.numel() and 0 not in part.stride():
            chosen = torch.rand(part.shape, generator=generator, device=part.device) < NEAR_SHARE
            part.copy_(torch.where(chosen, part * 0.75, part))
    return changed
