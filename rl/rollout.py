"""A rollout: samples of problems, over turns, with their verdicts and rewards. Runs in the driver.

All samples take a turn together, in sample order: that keeps the batches, and so every bit of a CPU run, the same from
run to run. On the CPU an answer goes to the judge the moment it is finished, while the engine still writes the others.
Trajectories are forced to disk before they are returned.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from env.pool import Pool
from env.records import Problem, Verdict
from env.rules import rules_for
from rl import prompts, seeding
from rl.config import Config, Reward
from rl.engines.base import Completion, Engine, Sampling
from rl.records import Trajectory, Turn, append_trajectories, read_trajectories
from rl.rewards import reward


class Judge(Protocol):
    """What a rollout needs of env.pool.Pool."""

    def submit(self, problem: Problem, response: str, raw: bool = True) -> Future[Verdict]: ...


@dataclass(frozen=True)
class Plan:
    """What to sample: `samples` a problem, `turns` a sample, prompt + answer within `context` tokens.

    seed: every draw comes from (seed, step, problem, sample, turn). step and policy_version are noted in the records.
    overlap: judge while the engine still writes. Off where both use one GPU: decoding would be in every measured time.
    """

    samples: int
    turns: int
    context: int
    sampling: Sampling
    reward: Reward
    seed: int
    step: int = 0
    policy_version: int = 0
    overlap: bool = True


@dataclass
class _Sample:
    """A sample in the making: its record, and the ids of the prompt that it answers next."""

    problem: Problem
    trajectory: Trajectory
    message: str
    prompt_ids: list[int]


def rollout(
    engine: Engine,
    judge: Judge,
    tokenizer: Any,
    problems: Sequence[Problem],
    plan: Plan,
    out_path: Path,
    title: str = "rollout",
) -> tuple[list[Trajectory], dict[str, float]]:
    """Trajectories, problem after problem and sample after sample, appended to `out_path`; and wall-clock seconds.

    A trajectory ends early (`Trajectory.ended`) where its next prompt and a full answer don't fit into the context, and
    after a verdict that is nobody's fault. The seconds: "seconds/rollout" sampling, "seconds/judge" waiting for
    verdicts after it, "seconds/judge_work" spent by the judge in all its processes.
    """
    samples = [_begin(tokenizer, problem, index, plan.step) for problem in problems for index in range(plan.samples)]
    seconds = {"seconds/rollout": 0.0, "seconds/judge": 0.0, "seconds/judge_work": 0.0}
    costs: dict[int, float] = {}  # by future: equal answers share one, and were judged once
    with tqdm(total=len(samples) * plan.turns, desc=title, unit="turn", mininterval=1.0, delay=2.0, leave=False) as bar:
        for turn in range(plan.turns):
            active = [sample for sample in samples if not sample.trajectory.ended]
            for sample in active:
                if len(sample.prompt_ids) + plan.sampling.max_new_tokens > plan.context:
                    sample.trajectory.ended = "context"
                    bar.update(plan.turns - turn)
            active = [sample for sample in active if not sample.trajectory.ended]
            begun = time.perf_counter()
            answers = _answer(engine, judge, tokenizer, active, plan, turn)
            sampled = time.perf_counter()
            for sample, (completion, text, future) in zip(active, answers):
                verdict = future.result()
                costs[id(future)] = verdict.cost.get("total_s", 0.0)
                _finish_turn(tokenizer, sample, completion, text, verdict, plan)
                bar.update(plan.turns - turn if sample.trajectory.ended else 1)
            seconds["seconds/rollout"] += sampled - begun
            seconds["seconds/judge"] += time.perf_counter() - sampled
            seconds["seconds/judge_work"] += sum(costs.values())
            costs.clear()
    trajectories = [sample.trajectory for sample in samples]
    append_trajectories(out_path, trajectories)
    return trajectories, seconds


def evaluate_problems(
    engine: Engine,
    judge: Judge,
    tokenizer: Any,
    problems: Sequence[Problem],
    plan: Plan,
    out_path: Path,
    title: str = "evaluation",
    problems_at_once: int = 8,
) -> list[Trajectory]:
    """`rollout` for many problems, resumable: `problems_at_once` at a time, those in `out_path` already are kept.

    Equal `plan.seed`: two policies are compared under the same draws. Groups are fixed, and one that a kill cut short
    is done again whole, so that a resumed file has the same bytes as one written in one go.
    """
    done = list(read_trajectories(out_path)) if out_path.is_file() else []
    size = problems_at_once * plan.samples
    whole = len(problems) * plan.samples if len(done) == len(problems) * plan.samples else len(done) // size * size
    if out_path.is_file():
        write_trajectories(out_path, done[:whole])
    trajectories = done[:whole]
    for begin in range(whole // plan.samples, len(problems), problems_at_once):
        group = problems[begin : begin + problems_at_once]
        label = f"{title}: problems {begin + 1} to {begin + len(group)} of {len(problems)}"
        trajectories += rollout(engine, judge, tokenizer, group, plan, out_path, label)[0]
    return trajectories


def write_trajectories(path: Path, trajectories: Sequence[Trajectory]) -> None:
    """Replace a file of trajectories by these: the old content or the new one is there, never half of it."""
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.unlink(missing_ok=True)
    append_trajectories(temporary, list(trajectories))
    temporary.replace(path)


def make_pool(config: Config) -> Pool:
    """The judge of a run. On the CPU its secret inputs come from the run's seed, so that equal runs have equal
    verdicts; on a GPU, where timings differ anyway, they are drawn anew."""
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
    return Pool(device=config.device, slots=config.env.slots, seed=seed, rules=rules)


def _begin(tokenizer: Any, problem: Problem, index: int, step: int) -> _Sample:
    message = prompts.first_message(problem)
    return _Sample(problem, Trajectory(problem.id, index, [], step), message, prompts.first_prompt(tokenizer, message))


def _answer(
    engine: Engine, judge: Judge, tokenizer: Any, active: list[_Sample], plan: Plan, turn: int
) -> list[tuple[Completion, str, Future[Verdict]]]:
    """Each active sample's completion, its text, and its verdict to come."""
    seeds = [
        seeding.derive(plan.seed, "sample", plan.step, s.problem.id, s.trajectory.sample_index, turn) for s in active
    ]
    stream = engine.stream([s.prompt_ids for s in active], plan.sampling, seeds)
    answers: dict[int, tuple[Completion, str, Future[Verdict]]] = {}
    for index, completion in stream if plan.overlap else list(stream):
        text = prompts.answer_text(tokenizer, completion.ids)
        answers[index] = completion, text, judge.submit(active[index].problem, text, raw=True)
    return [answers[index] for index in range(len(active))]


def _finish_turn(
    tokenizer: Any, sample: _Sample, completion: Completion, text: str, verdict: Verdict, plan: Plan
) -> None:
    """Note the turn, and prepare the sample's next prompt from the verdict's feedback."""
    record = verdict.to_json()
    del record["cost"]  # wall-clock: the one thing in which two equal runs differ
    value, parts = reward(record, plan.reward)
    sample.trajectory.turns.append(
        Turn(
            prompt_ids=sample.prompt_ids,
            completion_ids=completion.ids,
            logprobs=completion.logprobs,
            policy_version=plan.policy_version,
            finish_reason=completion.finish_reason,
            prompt_text=sample.message,
            completion_text=text,
            verdict=record,
            reward=value,
            reward_parts=parts,
        )
    )
    if len(sample.trajectory.turns) == plan.turns:
        return
    if verdict.blameless:
        sample.trajectory.ended = "infra"
        return
    sample.message = prompts.next_message(verdict.feedback)
    sample.prompt_ids = prompts.next_prompt(tokenizer, sample.prompt_ids, completion.ids, sample.message)
