"""Cold-start data: a teacher answers the training problems through the judge. `python -m rl.collect --run DIR`.

Runs in the driver. The teacher is an engine of text: the script (rl/teacher.py) or a model behind a server
(`collect.teacher`); nothing else differs. Reads DIR/problems/train.jsonl and writes below DIR/collect:

| file | |
| --- | --- |
| asked.jsonl | all trajectories, texts and verdicts without token ids; it grows, and a killed run goes on with it |
| answers.jsonl | a server's answers as they came, so that none is paid for twice |
| trajectories.jsonl, manifest.json | those that `collect.keep` keeps: what SFT trains on; and their digest |
| messages.jsonl, .parquet | the same as tables for other trainers (rl/export.py) |
| DONE | last |
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from env.pool import PoolError
from env.problems import ProblemError, load_jsonl
from env.records import Problem
from rl import checkpoint, manifest, run_lock, seeding
from rl.config import Config, ConfigError, Keep, load_run
from rl.engines.base import Engine, EngineError, Sampling
from rl.export import export
from rl.plan import Plan
from rl.prompts import TextChat
from rl.records import DamagedRecords, Trajectory
from rl.rollout import Judge, evaluate_problems, make_pool, write_trajectories
from rl.wording import Wording


def collect(engine: Engine, judge: Judge, problems: Sequence[Problem], config: Config, folder: Path) -> None:
    """Bring folder/asked.jsonl to `config.collect.trajectories` samples, in equal numbers a problem, then filter them
    into folder/trajectories.jsonl and export those.

    A sample goes on as soon as its own verdict is in. Raises RuntimeError where nothing could be judged or kept.
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
    judged = [trajectory for trajectory in found if trajectory.turns and not unjudged(trajectory)]
    if not judged:
        last = found[-1].turns[-1].verdict["message"] if found[-1].turns else "none"
        raise RuntimeError(f"not one of {len(found)} samples could be judged; the last verdict: {last}; see {path}")
    if len(judged) < len(found):
        print(f"{len(found) - len(judged)} of {len(found)} samples were dropped: they could not be judged", flush=True)
    answered = [trajectory for trajectory in judged if all(turn.completion_text.strip() for turn in trajectory.turns)]
    if len(answered) < len(judged):
        print(f"{len(judged) - len(answered)} of {len(found)} samples were dropped: an answer is empty", flush=True)
    if not answered:
        raise RuntimeError(
            f"all of {len(judged)} samples have an empty answer: does the teacher spend all of rollout.max_new_tokens "
            f"on thinking, or refuse? See {path}"
        )
    kept = filtered(answered, config.collect.keep, config.seed)
    if not kept:
        raise RuntimeError(f"collect.keep leaves nothing of {len(judged)} samples; see {path}")
    final = folder / "trajectories.jsonl"
    write_trajectories(final, kept)
    manifest.write(folder, {final.name: manifest.entry(final)})
    files = export(kept, folder / "messages")
    counts = ", ".join(f"{status} {count}" for status, count in Counter(map(last_status, kept)).most_common())
    print(f"cold start: {len(kept)} of {len(found)} kept ({counts}); {', '.join(map(str, files))}", flush=True)


def last_status(trajectory: Trajectory) -> str:
    return trajectory.turns[-1].verdict["status"]


def unjudged(trajectory: Trajectory) -> bool:
    """True where a turn has no reward because the judge, not the answer, failed."""
    return trajectory.ended == "infra" or any(turn.reward is None for turn in trajectory.turns)


def filtered(trajectories: Iterable[Trajectory], keep: Keep, seed: int) -> list[Trajectory]:
    """The share of trajectories that `keep` names for the status of their last turn, in their order; which ones is
    drawn from the seed and each one's own name, so that other samples don't change it."""
    found = list(trajectories)
    classes: dict[str, list[int]] = defaultdict(list)
    for place, trajectory in enumerate(found):
        classes[last_status(trajectory)].append(place)
    kept: list[int] = []
    for status, places in classes.items():

        def draw(place: int) -> float:
            return seeding.uniform(seed, "keep", found[place].problem_id, found[place].sample_index)

        kept += sorted(places, key=draw)[: round(asdict(keep)[status] * len(places))]
    return [found[place] for place in sorted(kept)]


def main(run: Path) -> None:
    """The whole stage on a run folder; returns at once where DONE is there."""
    folder = run / "collect"
    if checkpoint.is_done(folder, "trajectories.jsonl"):
        print(f"{folder}: done before")
        return
    config = load_run(run)
    problems = load_jsonl(run / "problems" / "train.jsonl")
    with run_lock.held(folder):
        engine = make_teacher(problems, config, folder)
        with make_pool(config) as pool:
            collect(engine, pool, problems, config, folder)
        checkpoint.mark_done(folder)


def make_teacher(problems: Sequence[Problem], config: Config, folder: Path) -> Engine:
    """The engine that `collect.teacher` names. Raises ConfigError for problems that the script doesn't know, before
    any is judged."""
    if config.collect.teacher == "server":
        from rl.engines.journal import JournalEngine

        return JournalEngine(config.server, folder / "answers.jsonl")
    from rl.teacher import ScriptedEngine, reference_chain

    wording = Wording.load(config.prompts)
    for problem in problems:
        try:
            reference_chain(wording.first_message(problem))
        except ValueError as error:
            raise ConfigError(
                f"problem {problem.id}: {error}. The script knows the generator's problems only: set "
                "problems.source=generator, or collect.teacher=server with server.url and server.model"
            ) from error
    return ScriptedEngine(asdict(config.collect.shares))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Cold-start collection: the teacher answers through the judge.")
    parser.add_argument("--run", type=Path, required=True, help="run folder, with config.json and problems/")
    arguments = parser.parse_args()
    try:
        main(arguments.run)
    except (ConfigError, DamagedRecords, EngineError, OSError, PoolError, ProblemError, RuntimeError) as error:
        sys.exit(f"rl.collect: {error}")
