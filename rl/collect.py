"""Cold-start data: a teacher answers the training problems through the judge. `python -m rl.collect --run DIR`.

Runs in the driver. Reads DIR/problems/train.jsonl and writes DIR/collect/trajectories.jsonl (texts and verdicts, no
token ids), wall.jsonl, and DONE last. Run again, it goes on with the samples that are not in the file yet.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from env.pool import PoolError
from env.problems import ProblemError, load_jsonl
from env.records import Problem, Verdict
from rl import checkpoint, prompts, seeding
from rl.config import Config, ConfigError, load_run
from rl.records import Trajectory, Turn, append_trajectories, read_trajectories
from rl.rewards import reward
from rl.rollout import Judge, make_pool, write_trajectories

# Samples between the teacher and the judge at a time: enough to keep every slot busy, few to lose in a kill.
IN_FLIGHT = 32

# A teacher is text in, text out, so that a server of a large model can take the script's place:
# (conversation so far, the random generator that belongs to this turn) -> answer.
Teacher = Callable[[str, random.Random], str]


@dataclass
class _Sample:
    """A sample in the making: its record, the user's last message, the answer to it and its verdict to come."""

    problem: Problem
    trajectory: Trajectory
    message: str
    answer: str = ""
    future: Future[Verdict] | None = None


def collect(teacher: Teacher, judge: Judge, problems: Sequence[Problem], config: Config, folder: Path) -> None:
    """Bring folder/trajectories.jsonl to `config.collect.trajectories` samples, problem by problem in turn.

    A sample whose judging failed by nobody's fault is dropped. While it grows, the file is in the order in which
    samples were finished; at the end it is put in the order of samples. Raises RuntimeError where nothing could be
    judged.
    """
    path = folder / "trajectories.jsonl"
    wanted = [(problems[i % len(problems)], i // len(problems)) for i in range(config.collect.trajectories)]
    kept = list(read_trajectories(path)) if path.is_file() else []
    if kept:
        write_trajectories(path, kept)  # a last line that a kill cut short goes, before more is appended
    have = {(t.problem_id, t.sample_index) for t in kept}
    missing = iter([(problem, index) for problem, index in wanted if (problem.id, index) not in have])
    dropped = 0
    with tqdm(total=len(wanted), initial=len(have), desc="cold start", unit="sample", mininterval=1.0) as bar:
        for sample, seconds in _run(teacher, judge, missing, config):
            bar.update()
            if sample.trajectory.ended:
                dropped += 1
                continue
            kept.append(sample.trajectory)
            append_trajectories(path, [sample.trajectory])
            _note_wall(folder / "wall.jsonl", len(kept), seconds)
    if not kept:
        last = sample.trajectory.turns[-1].verdict
        raise RuntimeError(f"not one of {len(wanted)} samples could be judged; the last verdict: {last['message']}")
    if dropped:
        print(f"{dropped} of {len(wanted)} samples were dropped: they could not be judged", flush=True)
    order = {(problem.id, index): place for place, (problem, index) in enumerate(wanted)}
    write_trajectories(path, sorted(kept, key=lambda t: order[t.problem_id, t.sample_index]))


def _run(
    teacher: Teacher, judge: Judge, missing: Iterator[tuple[Problem, int]], config: Config
) -> Iterator[tuple[_Sample, float]]:
    """Yield (sample, seconds of judging) as samples are finished, IN_FLIGHT of them under way."""
    flying: list[_Sample] = []
    seconds: dict[int, float] = {}
    while True:
        while len(flying) < IN_FLIGHT and (new := next(missing, None)) is not None:
            problem, index = new
            sample = _Sample(problem, Trajectory(problem.id, index, []), prompts.first_message(problem))
            _ask(teacher, judge, sample, config)
            flying.append(sample)
        if not flying:
            return
        # Two samples with equal answers share a future, so samples are looked up by it and not the other way round.
        wait([sample.future for sample in flying], return_when=FIRST_COMPLETED)
        for sample in [s for s in flying if s.future.done()]:
            verdict = sample.future.result()
            seconds[id(sample)] = seconds.get(id(sample), 0.0) + verdict.cost.get("total_s", 0.0)
            _note(sample, verdict, config)
            if sample.trajectory.ended or len(sample.trajectory.turns) == config.collect.turns:
                flying.remove(sample)
                yield sample, seconds.pop(id(sample))
            else:
                sample.message = prompts.next_message(verdict.feedback)
                _ask(teacher, judge, sample, config)


def _ask(teacher: Teacher, judge: Judge, sample: _Sample, config: Config) -> None:
    trajectory = sample.trajectory
    rng = seeding.rng(config.seed, "teacher", trajectory.problem_id, trajectory.sample_index, len(trajectory.turns))
    sample.answer = teacher(prompts.conversation_text(trajectory, sample.message), rng)
    sample.future = judge.submit(sample.problem, sample.answer, raw=True)


def _note(sample: _Sample, verdict: Verdict, config: Config) -> None:
    record = verdict.to_json()
    del record["cost"]
    value, parts = reward(record, config.reward)
    sample.trajectory.turns.append(
        Turn(
            prompt_ids=[],
            completion_ids=[],
            logprobs=[],
            policy_version=0,
            finish_reason="stop",
            prompt_text=sample.message,
            completion_text=sample.answer,
            verdict=record,
            reward=value,
            reward_parts=parts,
        )
    )
    if verdict.blameless:
        sample.trajectory.ended = "infra"


def _note_wall(path: Path, step: int, seconds: float) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "seconds/judge": round(seconds, 3)}) + "\n")


def main(run: Path) -> None:
    """The whole stage on a run folder; returns at once where DONE is there."""
    folder = run / "collect"
    if (folder / "DONE").exists():
        print(f"{folder}: done before")
        return
    from rl.teacher import ScriptedTeacher

    config = load_run(run)
    problems = load_jsonl(run / "problems" / "train.jsonl")
    folder.mkdir(parents=True, exist_ok=True)
    script, shares = ScriptedTeacher(), asdict(config.collect.shares)
    with make_pool(config) as pool:
        collect(lambda text, rng: script.respond(text, rng, shares), pool, problems, config, folder)
    checkpoint.mark_done(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Cold-start collection: the teacher answers through the judge.")
    parser.add_argument("--run", type=Path, required=True, help="run folder, with config.json and problems/")
    arguments = parser.parse_args()
    try:
        main(arguments.run)
    except (ConfigError, FileNotFoundError, PoolError, ProblemError, RuntimeError) as error:
        sys.exit(f"rl.collect: {error}")
