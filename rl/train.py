"""Reinforcement learning: `python -m rl.train --run DIR`, or on N devices of one machine
`torchrun --standalone --nproc-per-node N -m -- rl.train --run DIR` (without the --, torchrun takes --run for its own).

Reads DIR/problems/train.jsonl and DIR/sft/model and writes below DIR/rl: trajectories/step_*.jsonl, metrics.jsonl,
wall.jsonl, checkpoints/, and at the end model/ and DONE. Run again after a kill, it goes on from the newest checkpoint,
and on the CPU ends in the same bytes as a run that was never killed.

Under torchrun the learner is sharded over the ranks. Rank 0 alone has rollouts made, and writes: then a step has one
writer and one order of samples, and its trajectories are those of a run in one process. They are broadcast, and from
there on all ranks compute the same. Where rollouts are made is the placement: here, before a step is learned from
(rl/colocated.py), or in a process of its own, while the learner is at the step before (rl/split.py).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from env.pool import PoolError
from env.problems import ProblemError, load_jsonl
from env.records import Problem
from rl import checkpoint, distributed, resuming, run_lock, seeding, split
from rl.advantages import advantages
from rl.batch import Row, rows_of
from rl.colocated import Colocated, make_engine
from rl.config import Config, ConfigError, load_run
from rl.engines.base import EngineError
from rl.idle import Idle
from rl.learner import Learner
from rl.loss import kl_k3
from rl.metrics import DamagedFile, MetricsWriter, gpu_memory, rollout_metrics
from rl.plan import least_answer, short_context
from rl.prompts import Chat
from rl.records import Trajectory, step_path
from rl.rejection import importance_metrics, importance_weights, mismatch_masks, mismatch_metrics, prs_rejects
from rl.rewards import TrainingPaused, refuse_broken_step, returns_to_go
from rl.rollout import make_pool, write_trajectories
from rl.split import Split
from rl.staleness import refuse_stale, staleness_metrics
from rl.wording import Wording


def refuse_short_context(chat: Chat, problems: Sequence[Problem], config: Config) -> None:
    """Raise TrainingPaused where the context has room for no problem's first prompt and an answer; where it has for
    some, say for how many it has not."""
    wording = Wording.load(config.prompts)
    lengths = [len(chat.first_prompt(wording.first_message(problem))) for problem in problems]
    if fault := short_context(lengths, config):
        raise TrainingPaused(fault)
    left_out = sum(length + least_answer(config) > config.model.context for length in lengths)
    if left_out and distributed.first():
        print(
            f"RL: {left_out} of {len(problems)} problems are never asked: their first prompts and an answer are longer "
            f"than model.context = {config.model.context}",
            flush=True,
        )


def set_advantages(trajectories: Sequence[Trajectory], config: Config) -> None:
    """Fill every turn's advantage. Turns that have none, since a verdict is nobody's fault, get the mask "infra".

    With `rejection.baseline` "drop", turns that are masked already are in nobody else's baseline.
    """
    returns = [returns_to_go([turn.reward for turn in t.turns], config.advantage.gamma) for t in trajectories]
    groups = [(t.problem_id, t.step) for t in trajectories]
    masked = {(i, n) for i, t in enumerate(trajectories) for n, turn in enumerate(t.turns) if turn.masks}
    apart = masked if config.rejection.baseline == "drop" else ()
    for trajectory, values in zip(trajectories, advantages(returns, groups, config.advantage.estimator, apart)):
        for turn, value in zip(trajectory.turns, values):
            turn.advantage = value
            if value is None and "infra" not in turn.masks:
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
    step: int, learner: Learner, sampler: Colocated | Split, config: Config, path: Path
) -> tuple[dict[str, float], dict[str, float]]:
    """One step of RL; its trajectories are in `path`. Returns (metrics, wall-clock values)."""
    begun = time.perf_counter()
    trajectories, wall = sampler.sample(step)
    refuse_broken_step(trajectories, config.rollout.max_infra_share)
    refuse_stale(trajectories, learner.version, config.placement.staleness if config.placement.kind == "split" else 0)
    learning = time.perf_counter()
    set_advantages(trajectories, config)
    rows = [row for trajectory in trajectories for row in rows_of(trajectory)]
    sampled = [torch.tensor(row.rollout_logprobs) for row in rows]
    before = learner.evaluate(rows)
    set_masks(rows, before.logprobs, trajectories, config)
    if config.rejection.baseline == "drop":
        set_advantages(trajectories, config)
        rows = [row for trajectory in trajectories for row in rows_of(trajectory)]
    weights = importance_weights(before.logprobs, sampled, config.rejection)
    distributed.agree(lambda: write_trajectories(path, trajectories))  # once more, now with advantages and masks
    metrics = rollout_metrics(trajectories) | staleness_metrics(trajectories, learner.version)
    metrics |= mismatch_metrics(before.logprobs, sampled) | importance_metrics(weights, config.rejection)
    metrics["policy/entropy"] = before.entropy()
    metrics["policy/kl"] = kl_k3(before.logprobs, sampled)
    metrics |= learner.update(rows, before.logprobs, weights)
    metrics["policy/version"] = learner.version
    wall["seconds/push"] = sampler.push(step)
    ended = time.perf_counter()
    wall["seconds/learn"] = ended - learning
    wall["seconds/step"] = ended - begun
    wall["tokens_per_s"] = sum(len(row.ids) for row in rows) / (ended - begun)
    answered = sum(len(logprobs) for logprobs in sampled)
    sampling = wall.get("seconds/rollout")  # not there where the run before this one sampled
    wall["tokens_per_s/rollout"] = answered / sampling if sampling else None
    return metrics, wall | gpu_memory()


def resume(
    learner: Learner,
    folder: Path,
    config: Config,
    inputs: Mapping[str, str] | None = None,
    problems: Sequence[Problem] = (),
) -> tuple[int, Idle, list[dict[str, Any]]]:
    """Take over the newest checkpoint and remove what later steps left. Returns the number of steps done, how many of
    the last ones trained nothing, and, with placement.kind = split, what the checkpoint says of the rollouts that were
    ahead of it, which stay (rl/staleness.py). problems: to train on.

    Settings may have changed since (more steps, another learning rate): said, not refused. Other problems or another
    tokenizer are refused, and so is a folder that has lost its checkpoints (CheckpointError). inputs: their digests
    (rl/resuming.py); compared where both sides have them.
    """
    newest = checkpoint.newest(folder / "checkpoints")
    done, idle, ahead = 0, Idle(), []
    if newest is None:
        distributed.agree(lambda: resuming.refuse_lost_checkpoints(folder, config.train.checkpoint_every))
    else:
        done = checkpoint.step_of(newest)
        if inputs:
            resuming.refuse_other_inputs(checkpoint.plain_part(newest).get("inputs") or {}, inputs, folder.parent)
        plain = checkpoint.load(newest, learner.tensors())
        learner.restored(plain["learner"])
        idle = Idle.restored(plain.get("idle"))
        if config.placement.kind == "split":
            ahead = [said for said in plain.get("ahead") or [] if said["step"] <= config.train.steps]
            distributed.agree(lambda: [split.kept(said, folder, problems, config) for said in ahead] and None)
        generators = plain["rng"]
        if distributed.rank() < len(generators):
            seeding.set_rng_state(generators[distributed.rank()])
        else:  # more ranks than before
            seeding.seed_everything(seeding.derive(config.seed, "resume", done, distributed.rank()))
        if distributed.first():
            changed = checkpoint.changed_settings(plain["config"], config.to_json(), Config().to_json())
            print(f"RL goes on after step {done}", *changed, sep="\n  changed: ", flush=True)

    def remove_later() -> None:
        resuming.mark(folder, newest is not None)
        left = {step_path(folder, said["step"]) for said in ahead}
        for name in ("trajectories", "evaluation"):
            for path in (folder / name).glob("*step_*.jsonl"):
                if int(path.stem.rpartition("_")[2]) > done and path not in left:
                    path.unlink()

    distributed.agree(remove_later)
    return done, idle, ahead


def save(
    learner: Learner,
    folder: Path,
    step: int,
    config: Config,
    idle: Idle,
    inputs: Mapping[str, str] | None = None,
    ahead: Sequence[Mapping[str, Any]] = (),
) -> None:
    """A checkpoint after `step`, which is the data cursor too (`pick_problems`). inputs, ahead: as for `resume`."""
    plain = {
        "step": step,
        "learner": learner.state(),
        "rng": distributed.gather(seeding.rng_state()),
        "config": config.to_json(),
        "idle": idle.state(),
        "inputs": dict(inputs or {}),
        "ahead": [dict(said) for said in ahead],
    }
    checkpoint.save(folder / "checkpoints", step, learner.tensors(), plain, config.train.keep_checkpoints)
    distributed.agree(lambda: resuming.mark(folder, True))


def main(run: Path) -> None:
    """The whole stage on a run folder; returns at once where DONE is there."""
    folder = run / "rl"
    if checkpoint.is_done(folder, "model"):
        print(f"{folder}: done before")
        return
    config = load_run(run)
    distributed.start(config.device)
    with run_lock.held(folder):
        _stage(run, folder, config)


@contextlib.contextmanager
def open_sampler(
    learner: Learner,
    run: Path,
    chat: Chat,
    problems: Sequence[Problem],
    heldout: Sequence[Problem],
    config: Config,
    done: int,
    ahead: Sequence[Mapping[str, Any]],
) -> Iterator[Colocated | Split]:
    """What makes the rollouts of steps behind `done`, as the placement says; ahead: those that are there already."""
    if config.placement.kind == "split":
        with Split(learner, problems, config, run, done, ahead) as sampler:
            yield sampler
        return
    engine = make_engine(config, learner, run / "sft" / "model")
    with make_pool(config) if distributed.first() else contextlib.nullcontext() as judge:
        yield Colocated(learner, engine, judge, chat, problems, heldout, config, run / "rl")


def _stage(run: Path, folder: Path, config: Config) -> None:
    problems = load_jsonl(run / "problems" / "train.jsonl")
    heldout = load_jsonl(run / "problems" / "heldout.jsonl") if config.eval.every else []
    seeding.seed_everything(config.seed)
    from rl import modeling  # imports transformers, which takes seconds: not for a finished stage

    model, tokenizer = modeling.load(run / "sft" / "model", config.device)
    chat = Chat(tokenizer)
    refuse_short_context(chat, problems, config)
    learner = Learner(model, config)
    inputs = distributed.agree(lambda: resuming.digests(run, problems))
    done, idle, ahead = resume(learner, folder, config, inputs, problems)
    steps, every, first = config.train.steps, config.train.checkpoint_every, distributed.first()
    if done > steps:
        raise ConfigError(
            f"train.steps = {steps}, but {folder}/checkpoints holds {done} steps: set it to {done} or more, or remove "
            "the newer checkpoints to go on from an earlier one"
        )
    with (
        open_sampler(learner, run, chat, problems, heldout, config, done, ahead) as sampler,
        MetricsWriter(folder, resume_step=done + 1 if done else 0) if first else contextlib.nullcontext() as writer,
        tqdm(total=steps, initial=done, desc="RL", unit="step", mininterval=1.0, disable=not first) as bar,
    ):
        if config.eval.every and not done:
            metrics, wall = sampler.evaluate(0)
            if writer:
                writer.write(0, metrics)
                writer.write_wall(0, wall)
        for step in range(done + 1, steps + 1):
            try:
                metrics, wall = train_step(step, learner, sampler, config, step_path(folder, step))
                # Before this step is saved: it is taken again, and only then is a run with idle last steps complete.
                idle.after(metrics).refuse(metrics, config)
            except TrainingPaused:
                # What was learned since the last checkpoint; and without rollouts ahead, which would pause it again.
                if step > 1 and (config.placement.kind == "split" or (step - 1 > done and (step - 1) % every)):
                    save(learner, folder, step - 1, config, idle, inputs)
                raise
            idle = idle.after(metrics)
            if config.eval.every and step % config.eval.every == 0:
                evaluation, seconds = sampler.evaluate(step)
                metrics, wall = metrics | evaluation, wall | seconds
            if writer:
                writer.write(step, metrics)
                writer.write_wall(step, wall)
            if step % every == 0 or step == steps:
                save(learner, folder, step, config, idle, inputs, sampler.ahead(step))
            fast = metrics.get("fast/1.2_turn1", 0.0)
            bar.set_postfix_str(f"reward {metrics.get('reward/mean', 0.0):.2f}, fast@1.2 {fast:.0%}", refresh=False)
            bar.update()
    learner.export(tokenizer, folder / "model")
    distributed.agree(lambda: checkpoint.mark_done(folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Reinforcement learning from the SFT model of a run.")
    parser.add_argument("--run", type=Path, required=True, help="run folder, with config.json, problems/ and sft/model")
    arguments = parser.parse_args()
    try:
        main(arguments.run)
        distributed.stop()
    except (
        ConfigError,
        DamagedFile,
        EngineError,
        OSError,
        PoolError,
        ProblemError,
        TrainingPaused,
        checkpoint.CheckpointError,
        distributed.RankError,
        run_lock.FolderInUse,
    ) as error:
        sys.exit(f"rl.train: {error}")
