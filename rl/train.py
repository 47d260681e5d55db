"""Reinforcement learning: `python -m rl.train --run DIR`. One process, one device; the judge has processes of its own.

Reads DIR/problems/train.jsonl and DIR/sft/model and writes below DIR/rl: trajectories/step_*.jsonl, metrics.jsonl,
wall.jsonl, checkpoints/, and at the end model/ and DONE. Run again after a kill, it goes on from the newest checkpoint,
and on the CPU ends in the same bytes as a run that was never killed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from env.pool import PoolError
from env.problems import ProblemError, load_jsonl
from env.records import Problem
from rl import checkpoint, prompts, seeding
from rl.advantages import advantages
from rl.batch import Row, rows_of
from rl.config import Config, ConfigError, load_run
from rl.engines.base import Engine, Sampling
from rl.learner import Learner
from rl.metrics import MetricsWriter, rollout_metrics
from rl.records import Trajectory
from rl.rejection import mismatch_masks, mismatch_metrics, prs_rejects
from rl.rewards import returns_to_go
from rl.rollout import Judge, Plan, make_pool, rollout, write_trajectories


def pick_problems(problems: Sequence[Problem], count: int, seed: int, step: int) -> list[Problem]:
    """The problems of a step (from 1): an epoch is a seeded permutation cut into batches of `count`.

    What is left over at an epoch's end waits for the next permutation, so a batch never holds a problem twice. The step
    alone is the data cursor: nothing else has to be saved. Raises ValueError where there are fewer than `count`.
    """
    if len(problems) < count:
        raise ValueError(f"rollout.prompts_per_step = {count}, but there are only {len(problems)} training problems")
    epoch, batch = divmod(step - 1, len(problems) // count)
    order = list(range(len(problems)))
    seeding.rng(seed, "problems", epoch).shuffle(order)
    return [problems[i] for i in order[batch * count : (batch + 1) * count]]


def set_advantages(trajectories: Sequence[Trajectory], config: Config) -> None:
    """Fill every turn's advantage. Turns that have none, since a verdict is nobody's fault, get the mask "infra"."""
    returns = [returns_to_go([turn.reward for turn in t.turns], config.advantage.gamma) for t in trajectories]
    groups = [(t.problem_id, t.step) for t in trajectories]
    for trajectory, values in zip(trajectories, advantages(returns, groups, config.advantage.estimator)):
        for turn, value in zip(trajectory.turns, values):
            turn.advantage = value
            if value is None:
                turn.masks.append("infra")


def set_masks(
    rows: Sequence[Row],
    learner_logprobs: Sequence[torch.Tensor],
    trajectories: Sequence[Trajectory],
    config: Config,
) -> None:
    """Add the reasons of MRS, the token veto and PRS to the rows' masks (shared with their turns)."""
    sampled = [torch.tensor(row.rollout_logprobs) for row in rows]
    mismatched = mismatch_masks(learner_logprobs, sampled, [row.trajectory for row in rows], config.rejection)
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    for row, turn, reasons in zip(rows, turns, mismatched, strict=True):
        row.masks += reasons
        draw = seeding.uniform(config.seed, "prs", row.step, row.problem_id, row.sample_index, row.turn)
        correct = turn.reward is not None and turn.reward_parts["correct"] == 1
        if prs_rejects(correct, turn.verdict["profiling_ratio"], draw, config.rejection):
            row.masks.append("prs")


def train_step(
    step: int,
    learner: Learner,
    engine: Engine,
    judge: Judge,
    tokenizer: Any,
    problems: Sequence[Problem],
    config: Config,
    path: Path,
) -> tuple[dict[str, float], dict[str, float]]:
    """One step of RL on `problems`; trajectories go to `path`. Returns (metrics, wall-clock values)."""
    settings = config.rollout
    begun = time.perf_counter()
    plan = Plan(
        samples=settings.samples_per_prompt,
        turns=settings.turns,
        context=config.model.context,
        sampling=Sampling(settings.max_new_tokens, settings.temperature, settings.top_p, prompts.stop_ids(tokenizer)),
        reward=config.reward,
        seed=config.seed,
        step=step,
        policy_version=learner.version,
        overlap=config.device == "cpu",
    )
    path.unlink(missing_ok=True)
    trajectories, wall = rollout(engine, judge, tokenizer, problems, plan, path, f"step {step}")
    learning = time.perf_counter()
    set_advantages(trajectories, config)
    rows = [row for trajectory in trajectories for row in rows_of(trajectory)]
    before = learner.evaluate(rows)
    set_masks(rows, before.logprobs, trajectories, config)
    write_trajectories(path, trajectories)  # once more, now with advantages and masks
    metrics = rollout_metrics(trajectories)
    metrics |= mismatch_metrics(before.logprobs, [torch.tensor(row.rollout_logprobs) for row in rows])
    metrics["policy/entropy"] = before.entropy()
    metrics |= learner.update(rows, before.logprobs)
    metrics["policy/version"] = learner.version
    engine.push(learner.model)
    ended = time.perf_counter()
    wall["seconds/learn"] = ended - learning
    wall["seconds/step"] = ended - begun
    wall["tokens_per_s"] = sum(len(row.ids) for row in rows) / (ended - begun)
    return metrics, wall


def resume(learner: Learner, folder: Path) -> int:
    """Take over the newest checkpoint and remove what later steps left. Returns the number of steps done."""
    newest = checkpoint.load_newest(folder / "checkpoints", str(learner.device))
    done = 0
    if newest is not None:
        done, state = newest
        learner.load_state(state)
        seeding.set_rng_state(state["rng"])
        print(f"RL goes on after step {done}", flush=True)
    for path in (folder / "trajectories").glob("*step_*.jsonl"):
        if int(path.stem.rpartition("_")[2]) > done:
            path.unlink()
    return done


def main(run: Path) -> None:
    """The whole stage on a run folder; returns at once where DONE is there."""
    folder = run / "rl"
    if (folder / "DONE").exists():
        print(f"{folder}: done before")
        return
    config = load_run(run)
    problems = load_jsonl(run / "problems" / "train.jsonl")
    seeding.seed_everything(config.seed)
    from rl import modeling  # imports transformers, which takes seconds: not for a finished stage
    from rl.engines.hf import HFEngine

    model, tokenizer = modeling.load(run / "sft" / "model", config.device)
    learner = Learner(model, config)
    engine = HFEngine(learner.model, config.rollout.batch_size, config.train.autocast)
    done = resume(learner, folder)
    steps, every = config.train.steps, config.train.checkpoint_every
    with (
        make_pool(config) as judge,
        MetricsWriter(folder, resume_step=done + 1) as writer,
        tqdm(total=steps, initial=done, desc="RL", unit="step", mininterval=1.0) as bar,
    ):
        for step in range(done + 1, steps + 1):
            chosen = pick_problems(problems, config.rollout.prompts_per_step, config.seed, step)
            path = folder / "trajectories" / f"step_{step:05d}.jsonl"
            metrics, wall = train_step(step, learner, engine, judge, tokenizer, chosen, config, path)
            writer.write(step, metrics)
            writer.write_wall(step, wall)
            if step % every == 0 or step == steps:
                state = {**learner.state(), "rng": seeding.rng_state()}
                checkpoint.save(folder / "checkpoints", step, state, config.train.keep_checkpoints)
            fast = metrics.get("fast/1.2_turn1", 0.0)
            bar.set_postfix_str(f"reward {metrics.get('reward/mean', 0.0):.2f}, fast@1.2 {fast:.0%}", refresh=False)
            bar.update()
    checkpoint.save_folder(learner.model, tokenizer, folder / "model")
    checkpoint.mark_done(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Reinforcement learning from the SFT model of a run.")
    parser.add_argument("--run", type=Path, required=True, help="run folder, with config.json, problems/ and sft/model")
    arguments = parser.parse_args()
    try:
        main(arguments.run)
    except (ConfigError, FileNotFoundError, PoolError, ProblemError, checkpoint.CheckpointError) as error:
        sys.exit(f"rl.train: {error}")
