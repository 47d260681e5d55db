"""A rollout: samples of problems, over turns, with their verdicts and rewards. Runs in the driver.

When a sample takes its next turn is the plan's `schedule` (rl/plan.py). Trajectories are forced to disk before they are
returned.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from env.pool import Pool, visible_gpus
from env.records import Problem, Verdict
from env.rules import rules_for
from rl import seeding
from rl.config import Config
from rl.engines.base import Batch, Completion, Engine, EngineError, Request, checked
from rl.plan import Plan
from rl.prompts import Chat, TextChat
from rl.records import DamagedRecords, Trajectory, Turn, append_trajectories, read_trajectories
from rl.rewards import BadVerdict, reward

# Samples in work together when many problems are evaluated, by schedule. A judge on a GPU takes seconds for a verdict
# and has 24 lanes a GPU: in groups of 32 samples it stood idle half of the time, waiting for the last of each. On the
# CPU a kill should cost little, and the engine's batches are small.
AT_ONCE = {"turns": 16, "phases": 256, "free": 256}


class Judge(Protocol):
    """What a rollout needs of env.pool.Pool."""

    def submit(self, problem: Problem, response: str, raw: bool = True) -> Future[Verdict]: ...


def rollout(
    engine: Engine,
    judge: Judge,
    chat: Chat | TextChat,
    problems: Sequence[Problem],
    plan: Plan,
    out_path: Path,
    title: str = "rollout",
    window: int = 0,
    skip: int = 0,
) -> tuple[list[Trajectory], dict[str, float]]:
    """Trajectories, problem after problem and sample after sample, appended to `out_path`; and wall-clock seconds.

    window: with schedule "free", so many samples under way at once, and each is written as soon as all before it are
    finished; 0: all of them at once, written together at the end. skip: so many of the first samples are left out.
    A trajectory ends early (`Trajectory.ended`) where its next prompt leaves too little room in the context, and after
    a verdict that is nobody's fault. The seconds: "seconds/rollout" sampling, "seconds/judge" waiting for verdicts
    apart from it, "seconds/judge_work" spent by the judge in all its processes. Raises EngineError for an engine that
    answers something else than it was asked.
    """
    under_way = _Rollout(engine, judge, chat, problems, plan, window, skip, out_path)
    total = (len(under_way.samples) - skip) * plan.turns
    with tqdm(total=total, desc=title, unit="turn", mininterval=1.0, delay=2.0, leave=False) as bar:
        under_way.bar = bar
        if plan.schedule == "free":
            under_way.run_freely()
        else:
            under_way.run_in_turns()
    under_way.write()
    return [sample.trajectory for sample in under_way.samples[skip:]], under_way.seconds


@dataclass(eq=False)
class _Sample:
    """A sample in the making: its record, the message and prompt that it answers next, the answer being judged."""

    number: int
    problem: Problem
    trajectory: Trajectory
    message: str
    prompt: Sequence[Any]
    completion: Completion | None = None
    text: str = ""
    verdict: Future[Verdict] | None = None
    finished: bool = False


@dataclass
class _Rollout:
    """All samples of a rollout. With schedule "free" it is the engine's Source: it hands out whoever is ready."""

    engine: Engine
    judge: Judge
    chat: Chat | TextChat
    problems: Sequence[Problem]
    plan: Plan
    window: int
    skip: int
    out_path: Path
    bar: Any = None
    samples: list[_Sample] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seconds = {"seconds/rollout": 0.0, "seconds/judge": 0.0, "seconds/judge_work": 0.0}
        self._fresh: deque[_Sample] = deque()  # not begun
        self._ready: deque[_Sample] = deque()  # their verdict is in
        self._begun = self._finished = self._written = self.skip
        self._judging: list[_Sample] = []
        self._paid: dict[int, Future[Verdict]] = {}  # equal answers share a verdict, whose cost counts once
        for problem in self.problems:
            message = self.plan.wording.first_message(problem)
            prompt = self.chat.first_prompt(message)
            for index in range(self.plan.samples):
                trajectory = Trajectory(problem.id, index, [], self.plan.step)
                self.samples.append(_Sample(len(self.samples), problem, trajectory, message, prompt))
        self.most = min(self.window or len(self.samples), len(self.samples))

    def run_in_turns(self) -> None:
        """All samples take a turn together, and their verdicts are awaited before the next."""
        for _ in range(self.plan.turns):
            active = [sample for sample in self.samples if self._may_begin(sample)]
            begun = time.perf_counter()
            stream = checked(self.engine, Batch([self._request(sample) for sample in active]), self.plan.sampling)
            if self.plan.schedule == "phases":
                stream = list(stream)
            sampled = time.perf_counter() if self.plan.schedule == "phases" else None
            for request, completion in stream:
                self._submit(self._sample(request), completion)
            sampled = sampled or time.perf_counter()
            for sample in active:
                if sample.verdict is not None:
                    self._note(sample)
            self.seconds["seconds/rollout"] += sampled - begun
            self.seconds["seconds/judge"] += time.perf_counter() - sampled

    def run_freely(self) -> None:
        """A sample goes on as soon as its own verdict is in."""
        begun = time.perf_counter()
        self._fresh.extend(self.samples[self.skip :])
        try:
            for request, completion in checked(self.engine, self, self.plan.sampling):
                sample = self._sample(request)
                self._submit(sample, completion)
                if sample.verdict is not None:
                    self._judging.append(sample)
                else:
                    self._go_on(sample)
        except EngineError:
            while self.window and self._judging:  # answers that are there are kept with their verdicts
                self._collect(blocking=True)
            raise
        self.seconds["seconds/rollout"] = time.perf_counter() - begun - self.seconds["seconds/judge"]

    def take(self, limit: int, wait: bool) -> list[Request]:
        """rl.engines.base.Source: samples whose verdict is in, and new ones where the window has room."""
        self._collect()
        self._begin()
        while wait and not self._ready and self._judging:
            self._collect(blocking=True)
            self._begin()
        count = min(limit, len(self._ready))
        return [self._request(self._ready.popleft()) for _ in range(count)]

    def _begin(self) -> None:
        """Let new samples in, behind those that go on: what is begun gets finished, and so written, first."""
        while self._fresh and self._begun - self._finished < self.most:
            self._begun += 1
            self._go_on(self._fresh.popleft())

    def _go_on(self, sample: _Sample) -> None:
        if self._may_begin(sample):
            self._ready.append(sample)
        else:
            sample.finished = True
            self._finished += 1

    def write(self, finished_only: bool = False) -> None:
        """Append the samples that aren't in the file; finished_only: up to the first that is still under way."""
        end = len(self.samples)
        if finished_only:
            end = next((s.number for s in self.samples[self._written :] if not s.finished), end)
        if end > self._written:
            append_trajectories(self.out_path, [sample.trajectory for sample in self.samples[self._written : end]])
            self._written = end

    def _collect(self, blocking: bool = False) -> None:
        """Take in verdicts that are there; blocking: at least one."""
        begun = time.perf_counter()
        if blocking:
            futures.wait([sample.verdict for sample in self._judging], return_when=futures.FIRST_COMPLETED)
        self.seconds["seconds/judge"] += time.perf_counter() - begun
        for sample in [s for s in self._judging if s.verdict.done()]:
            self._judging.remove(sample)
            self._note(sample)
            self._go_on(sample)
        if self.window:
            self.write(finished_only=True)

    def _may_begin(self, sample: _Sample) -> bool:
        """Whether a sample has another turn; ends it where the context has too little room for one."""
        trajectory, plan = sample.trajectory, self.plan
        left = plan.turns - len(trajectory.turns)
        if trajectory.ended or not left:
            return False
        if plan.sampling.context and self.chat.length(sample.prompt) + plan.least_answer > plan.sampling.context:
            trajectory.ended = "context"
            self.bar.update(left)
        return not trajectory.ended

    def _request(self, sample: _Sample) -> Request:
        trajectory, plan = sample.trajectory, self.plan
        sample.completion = sample.verdict = None  # those of the turn before are noted
        names = (plan.step, trajectory.problem_id, trajectory.sample_index, len(trajectory.turns))
        # No key twice, and the sample's number in it.
        key = len(trajectory.turns) * len(self.samples) + sample.number
        return Request(key, sample.prompt, seeding.derive(plan.seed, "sample", *names), _name(sample))

    def _sample(self, request: Request) -> _Sample:
        return self.samples[request.key % len(self.samples)]

    def _submit(self, sample: _Sample, completion: Completion) -> None:
        if self.engine.takes == "messages" and completion.finish_reason == "context":
            # A server without room for the conversation: there is no answer, and so no turn.
            sample.trajectory.ended = "context"
            self.bar.update(self.plan.turns - len(sample.trajectory.turns))
            return
        sample.completion, sample.text = completion, self.chat.answer_text(completion)
        sample.verdict = self.judge.submit(sample.problem, sample.text, raw=True)

    def _note(self, sample: _Sample) -> None:
        """Note the turn with its verdict, and prepare the next prompt from the feedback."""
        verdict, completion = sample.verdict.result(), sample.completion
        if id(sample.verdict) not in self._paid:
            self._paid[id(sample.verdict)] = sample.verdict
            self.seconds["seconds/judge_work"] += verdict.cost.get("total_s", 0.0)
        record = verdict.to_json()
        del record["cost"]  # wall-clock: the one thing in which two equal runs differ
        try:
            value, parts = reward(record, self.plan.reward)
        except BadVerdict as error:
            raise BadVerdict(f"{_name(sample)}: {error}") from error
        turns = sample.trajectory.turns
        turns.append(
            Turn(
                prompt_ids=list(completion.prompt_ids),
                completion_ids=completion.ids,
                logprobs=completion.logprobs,
                policy_version=self.plan.policy_version,
                finish_reason=completion.finish_reason,
                prompt_text=sample.message,
                completion_text=sample.text,
                verdict=record,
                reward=value,
                reward_parts=parts,
            )
        )
        last = len(turns) == self.plan.turns
        if not last and verdict.blameless:
            sample.trajectory.ended = "infra"
        elif not last:
            sample.message = self.plan.wording.next_message(verdict.feedback)
            sample.prompt = self.chat.next_prompt(turns, sample.message)
        self.bar.update(1 + (self.plan.turns - len(turns) if sample.trajectory.ended else 0))


def _name(sample: _Sample) -> str:
    """A sample's present turn, as messages call it."""
    trajectory = sample.trajectory
    return f"problem {trajectory.problem_id}, sample {trajectory.sample_index}, turn {len(trajectory.turns) + 1}"


def evaluate_problems(
    engine: Engine,
    judge: Judge,
    chat: Chat | TextChat,
    problems: Sequence[Problem],
    plan: Plan,
    out_path: Path,
    title: str = "evaluation",
) -> list[Trajectory]:
    """`rollout` for many problems, resumable: those in `out_path` already are kept.

    Equal `plan.seed`: two policies are compared under the same draws. With schedule "free" the file grows sample by
    sample. Otherwise groups are fixed (`AT_ONCE`), and one that a kill cut short is done again whole, so that a resumed
    file has the same bytes as one written in one go.
    """
    done = list(read_trajectories(out_path)) if out_path.is_file() else []
    refuse_others(done, problems, plan.samples, out_path)
    free, at_once = plan.schedule == "free", AT_ONCE[plan.schedule]
    problems_at_once = max(1, at_once // plan.samples)
    size = 1 if free else problems_at_once * plan.samples
    whole = len(problems) * plan.samples if len(done) == len(problems) * plan.samples else len(done) // size * size
    if out_path.is_file():
        write_trajectories(out_path, done[:whole])
    trajectories = done[:whole]
    if free and whole < len(problems) * plan.samples:
        return trajectories + rollout(engine, judge, chat, problems, plan, out_path, title, at_once, whole)[0]
    for begin in range(whole // plan.samples, len(problems), problems_at_once):
        group = problems[begin : begin + problems_at_once]
        label = f"{title}: problems {begin + 1} to {begin + len(group)} of {len(problems)}"
        trajectories += rollout(engine, judge, chat, group, plan, out_path, label)[0]
    return trajectories


def refuse_others(done: Sequence[Trajectory], problems: Sequence[Problem], samples: int, path: Path) -> None:
    """Raise DamagedRecords where a file's trajectories are not those of these problems in order, `samples` of each and
    with their verdicts: what comes behind a missing line would be taken for the wrong sample."""
    places = [(problem.id, index) for problem in problems for index in range(samples)]
    for number, trajectory in enumerate(done, 1):
        found = trajectory.problem_id, trajectory.sample_index
        if found not in places[number - 1 : number]:
            raise DamagedRecords(
                f"{path}:{number}: problem {found[0]}, sample {found[1]}, is out of place: a line is missing or moved, "
                "or the file is of other problems; restore it, or delete it to start over"
            )
        if any(turn.verdict is None for turn in trajectory.turns):
            raise DamagedRecords(f"{path}:{number}: a turn without a verdict; restore the file or delete it")


def write_trajectories(path: Path, trajectories: Sequence[Trajectory]) -> None:
    """Replace a file of trajectories by these: the old content or the new one is there, never half of it."""
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.unlink(missing_ok=True)
    append_trajectories(temporary, list(trajectories))
    temporary.replace(path)


def policy_gpus() -> int:
    """GPUs that the learner takes: one a rank of torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def make_pool(config: Config, gpus: list[str] | None = None) -> Pool:
    """The judge of a run. On the CPU its secret inputs come from the run's seed, so that equal runs have equal
    verdicts; on a GPU, where timings differ anyway, they are drawn anew. gpus: its own;
    without, all, or, with env.placement "apart", those that the learner doesn't take."""
    rules = rules_for(
        config.env.profile,
        config.device,
        trials=config.env.trials,
        precision=config.env.precision,
        reference=config.env.reference,
        rewarded_time=config.env.time,
        compile_timeout_s=config.env.compile_timeout_s,
        run_timeout_s=config.env.run_timeout_s,
    )
    seed = seeding.derive(config.seed, "judge") if config.device == "cpu" else None
    if not gpus:
        gpus = visible_gpus()[policy_gpus() :] if config.env.placement == "apart" else None
    return Pool(device=config.device, slots=config.env.slots, lanes=config.env.lanes, seed=seed, rules=rules, gpus=gpus)
