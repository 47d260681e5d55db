"""Cold-start data: a teacher answers the training problems through the judge. `python -m rl.collect --run DIR`.

Runs in the driver. The teacher is the script (rl/teacher.py) or a model behind a server (`collect.teacher`). Reads
DIR/problems/train.jsonl and writes DIR/collect/trajectories.jsonl (texts and verdicts, no token ids), wall.jsonl, and
DONE last. Run again, it goes on with the samples that are not in the file yet.
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
from rl import checkpoint, seeding
from rl.config import Config, ConfigError, load_run
from rl.engines.base import Engine, EngineError, Sampling
from rl.plan import Plan
from rl.prompts import TextChat, conversation_text
from rl.records import Trajectory, Turn, append_trajectories, read_trajectories
from rl.rewards import reward
from rl.rollout import Judge, evaluate_problems, make_pool, write_trajectories
from rl.wording import Wording

# Samples between the teacher and the judge at a time: enough to keep every slot busy, few to lose in a kill.
IN_FLIGHT = 32

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
    wording = Wording.load(config.prompts)
    flying: list[_Sample] = []
    seconds: dict[int, float] = {}
    while True:
        while len(flying) < IN_FLIGHT and (new := next(missing, None)) is not None:
            problem, index = new
            sample = _Sample(problem, Trajectory(problem.id, index, []), wording.first_message(problem))
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
                sample.message = wording.next_message(verdict.feedback)
                _ask(teacher, judge, sample, config)


def _ask(teacher: Teacher, judge: Judge, sample: _Sample, config: Config) -> None:
    trajectory = sample.trajectory
    rng = seeding.rng(config.seed, "teacher", trajectory.problem_id, trajectory.sample_index, len(trajectory.turns))
    sample.answer = teacher(conversation_text(trajectory, sample.message), rng)
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


def collect_from_server(
    engine: Engine, judge: Judge, problems: Sequence[Problem], config: Config, folder: Path
) -> None:
    """The same with a strong model that `engine` asks: its samples go on side by side, each as its verdicts come in.

    Resumed by groups of problems; what can't be judged is dropped. Raises RuntimeError where nothing could be judged.
    """
    wanted = config.collect.trajectories
    samples = -(-wanted // len(problems))
    plan = Plan(
        samples=samples,
        turns=config.collect.turns,
        sampling=Sampling(config.rollout.max_new_tokens, config.rollout.temperature, config.rollout.top_p),
        reward=config.reward,
        wording=Wording.load(config.prompts),
        seed=seeding.derive(config.seed, "teacher"),
        schedule="free",
    )
    asked = problems[: -(-wanted // samples)]
    path = folder / "asked.jsonl"
    found = evaluate_problems(engine, judge, TextChat(), asked, plan, path, "cold start")[:wanted]
    kept = [trajectory for trajectory in found if trajectory.turns and trajectory.ended != "infra"]
    if not kept:
        raise RuntimeError(f"not one of {len(found)} samples could be judged; see {path}")
    write_trajectories(folder / "trajectories.jsonl", kept)


def _note_wall(path: Path, step: int, seconds: float) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "seconds/judge": round(seconds, 3)}) + "\n")


def main(run: Path) -> None:
    """The whole stage on a run folder; returns at once where DONE is there."""
    folder = run / "collect"
    if (folder / "DONE").exists():
        print(f"{folder}: done before")
        return
    config = load_run(run)
    problems = load_jsonl(run / "problems" / "train.jsonl")
    folder.mkdir(parents=True, exist_ok=True)
    if config.collect.teacher == "server":
        from rl.engines.openai import OpenAIEngine

        engine = OpenAIEngine(config.server)
        with make_pool(config) as pool:
            collect_from_server(engine, pool, problems, config, folder)
    else:
        teacher = _script(problems, config)
        with make_pool(config) as pool:
            collect(teacher, pool, problems, config, folder)
    checkpoint.mark_done(folder)


def _script(problems: Sequence[Problem], config: Config) -> Teacher:
    """The scripted teacher. Raises ConfigError for problems that it doesn't know, before any is judged."""
    from rl.teacher import ScriptedTeacher, reference_chain

    wording = Wording.load(config.prompts)
    for problem in problems:
        try:
            reference_chain(wording.first_message(problem))
        except ValueError as error:
            raise ConfigError(
                f"problem {problem.id}: {error}. The script knows the generator's problems only: set "
                "problems.source=generator, or collect.teacher=server with server.url and server.model"
            ) from error
    script, shares = ScriptedTeacher(), asdict(config.collect.shares)
    return lambda text, rng: script.respond(text, rng, shares)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Cold-start collection: the teacher answers through the judge.")
    parser.add_argument("--run", type=Path, required=True, help="run folder, with config.json and problems/")
    arguments = parser.parse_args()
    try:
        main(arguments.run)
    except (ConfigError, EngineError, FileNotFoundError, PoolError, ProblemError, RuntimeError) as error:
        sys.exit(f"rl.collect: {error}")
