"""Reinforcement learning: `python -m rl.train --run DIR`, or on N devices of one machine
`torchrun --standalone --nproc-per-node N -m -- rl.train --run DIR` (without the --, torchrun takes --run for its own).

Reads DIR/problems/train.jsonl and DIR/sft/model and writes below DIR/rl: trajectories/step_*.jsonl, metrics.jsonl,
wall.jsonl, checkpoints/, and at the end model/ and DONE. Run again after a kill, it goes on from the newest checkpoint,
and on the CPU ends in the same bytes as a run that was never killed.

Under torchrun the learner is sharded over the ranks. Rank 0 alone samples, judges and writes: then a step has one
writer and one order of samples, and its trajectories are those of a run in one process. They are broadcast, and from
there on all ranks compute the same. With engine.name = vllm every rank answers its share of what rank 0 samples, and
sleeps while the learner works.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from env.pool import PoolError
from env.problems import ProblemError, load_jsonl
from env.records import Problem
from rl import checkpoint, distributed, resuming, run_lock, seeding, weight_sync
from rl.advantages import advantages
from rl.batch import Row, rows_of
from rl.config import Config, ConfigError, load_run
from rl.engines.base import Engine, EngineError
from rl.engines.ranks import RankEngine, together
from rl.idle import Idle
from rl.learner import Learner
from rl.loss import kl_k3
from rl.metrics import DamagedFile, MetricsWriter, evaluation_metrics, gpu_memory, rollout_metrics
from rl.plan import evaluation_plan, least_answer, short_context, training_plan
from rl.prompts import Chat
from rl.records import Trajectory
from rl.rejection import importance_metrics, importance_weights, mismatch_masks, mismatch_metrics, prs_rejects
from rl.rewards import TrainingPaused, refuse_broken_step, returns_to_go
from rl.rollout import Judge, evaluate_problems, make_pool, rollout, write_trajectories
from rl.wording import Wording


def pick_problems(problems: Sequence[Problem], count: int, seed: int, step: int) -> list[Problem]:
    """The problems of a step (from 1): an epoch is a seeded permutation cut into batches of `count`.

    What is left over at an epoch's end waits for the next permutation, so a batch never holds a problem twice. The step
    alone is the data cursor: nothing else has to be saved. Raises ConfigError where there are fewer than `count`.
    """
    if len(problems) < count:
        raise ConfigError(f"rollout.prompts_per_step = {count}, but there are only {len(problems)} training problems")
    epoch, batch = divmod(step - 1, len(problems) // count)
    order = list(range(len(problems)))
    seeding.rng(seed, "problems", epoch).shuffle(order)
    return [problems[i] for i in order[batch * count : (batch + 1) * count]]


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
    step: int,
    learner: Learner,
    engine: Engine | None,
    judge: Judge | None,
    chat: Chat,
    problems: Sequence[Problem],
    config: Config,
    path: Path,
) -> tuple[dict[str, float], dict[str, float]]:
    """One step of RL on `problems`; trajectories go to `path`. Returns (metrics, wall-clock values).

    judge is there on rank 0, and None on the others; so is an engine that isn't each rank's own.
    """
    begun = time.perf_counter()
    plan = training_plan(config, chat, step, learner.version, learner.vocabulary)

    def sample() -> tuple[list[Trajectory], dict[str, float]]:
        path.unlink(missing_ok=True)
        return rollout(engine, judge, chat, problems, plan, path, f"step {step}")

    trajectories, wall = together(engine, sample)
    refuse_broken_step(trajectories, config.rollout.max_infra_share)
    learning = time.perf_counter()
    if config.engine.name == "vllm":
        engine.sleep()  # its memory is the learner's now; the push wakes it
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
    metrics = rollout_metrics(trajectories)
    metrics |= mismatch_metrics(before.logprobs, sampled) | importance_metrics(weights, config.rejection)
    metrics["policy/entropy"] = before.entropy()
    metrics["policy/kl"] = kl_k3(before.logprobs, sampled)
    metrics |= learner.update(rows, before.logprobs, weights)
    metrics["policy/version"] = learner.version
    wall["seconds/push"] = weight_sync.push(learner, engine)
    ended = time.perf_counter()
    wall["seconds/learn"] = ended - learning
    wall["seconds/step"] = ended - begun
    wall["tokens_per_s"] = sum(len(row.ids) for row in rows) / (ended - begun)
    answered = sum(len(logprobs) for logprobs in sampled)
    wall["tokens_per_s/rollout"] = answered / wall["seconds/rollout"] if wall["seconds/rollout"] else None
    return metrics, wall | gpu_memory()


def evaluate_step(
    learner: Learner,
    engine: Engine | None,
    judge: Judge | None,
    chat: Chat,
    problems: Sequence[Problem],
    config: Config,
    path: Path,
) -> tuple[dict[str, float], dict[str, float]]:
    """The present policy on held-out problems, as metrics eval/* and wall-clock values; trajectories go to `path`."""
    begun = time.perf_counter()

    def sample() -> dict[str, float]:
        path.unlink(missing_ok=True)
        plan = evaluation_plan(config, chat.stop_ids, config.eval.during_samples, learner.version)
        return evaluation_metrics(evaluate_problems(engine, judge, chat, problems, plan, path))

    metrics = together(engine, sample)
    return metrics, {"seconds/evaluate": time.perf_counter() - begun}


def resume(learner: Learner, folder: Path, config: Config, inputs: Mapping[str, str] | None = None) -> tuple[int, Idle]:
    """Take over the newest checkpoint and remove what later steps left. Returns the number of steps done, and how many
    of the last ones trained nothing.

    Settings may have changed since (more steps, another learning rate): said, not refused. Other problems or another
    tokenizer are refused, and so is a folder that has lost its checkpoints (CheckpointError). inputs: their digests
    (rl/resuming.py); compared where both sides have them.
    """
    newest = checkpoint.newest(folder / "checkpoints")
    done, idle = 0, Idle()
    if newest is None:
        distributed.agree(lambda: resuming.refuse_lost_checkpoints(folder, config.train.checkpoint_every))
    else:
        done = checkpoint.step_of(newest)
        if inputs:
            resuming.refuse_other_inputs(checkpoint.plain_part(newest).get("inputs") or {}, inputs, folder.parent)
        plain = checkpoint.load(newest, learner.tensors())
        learner.restored(plain["learner"])
        idle = Idle.restored(plain.get("idle"))
        generators = plain["rng"]
        if distributed.rank() < len(generators):
            seeding.set_rng_state(generators[distributed.rank()])
        else:  # more ranks than before
            seeding.seed_everything(seeding.derive(config.seed, "resume", done, distributed.rank()))
        if distributed.first():
            changed = checkpoint.changed_settings(plain["config"], config.to_json())
            print(f"RL goes on after step {done}", *changed, sep="\n  changed: ", flush=True)

    def remove_later() -> None:
        resuming.mark(folder, newest is not None)
        for name in ("trajectories", "evaluation"):
            for path in (folder / name).glob("*step_*.jsonl"):
                if int(path.stem.rpartition("_")[2]) > done:
                    path.unlink()

    distributed.agree(remove_later)
    return done, idle


def make_engine(config: Config, learner: Learner, model_folder: Path) -> Engine | None:
    """What samples, with the learner's present weights. The plain engine shares the learner's own model, on rank 0
    alone; vLLM is started from `model_folder` on every rank. Raises EngineError."""
    if config.engine.name == "hf":
        from rl.engines.hf import HFEngine

        model = learner.plain_model()
        return HFEngine(model, config.rollout.batch_size) if distributed.first() else None
    from rl.engines.vllm import engine_for

    own = engine_for(config, model_folder, config.train.autocast, distributed.world())
    engine = RankEngine(own) if distributed.world() > 1 else own
    weight_sync.push(learner, engine)  # those of the checkpoint, if there is one; and checked before the first step
    return engine


def save(
    learner: Learner, folder: Path, step: int, config: Config, idle: Idle, inputs: Mapping[str, str] | None = None
) -> None:
    """A checkpoint after `step`, which is the data cursor too (`pick_problems`). inputs: as for `resume`."""
    plain = {
        "step": step,
        "learner": learner.state(),
        "rng": distributed.gather(seeding.rng_state()),
        "config": config.to_json(),
        "idle": idle.state(),
        "inputs": dict(inputs or {}),
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
    done, idle = resume(learner, folder, config, inputs)
    steps, every, first = config.train.steps, config.train.checkpoint_every, distributed.first()
    if done > steps:
        raise ConfigError(
            f"train.steps = {steps}, but {folder}/checkpoints holds {done} steps: set it to {done} or more, or remove "
            "the newer checkpoints to go on from an earlier one"
        )
    engine = make_engine(config, learner, run / "sft" / "model")
    with (
        make_pool(config) if first else contextlib.nullcontext() as judge,
        MetricsWriter(folder, resume_step=done + 1 if done else 0) if first else contextlib.nullcontext() as writer,
        tqdm(total=steps, initial=done, desc="RL", unit="step", mininterval=1.0, disable=not first) as bar,
    ):
        if config.eval.every and not done:
            path = folder / "evaluation" / "step_00000.jsonl"
            metrics, wall = evaluate_step(learner, engine, judge, chat, heldout, config, path)
            if writer:
                writer.write(0, metrics)
                writer.write_wall(0, wall)
        for step in range(done + 1, steps + 1):
            chosen = pick_problems(problems, config.rollout.prompts_per_step, config.seed, step)
            path = folder / "trajectories" / f"step_{step:05d}.jsonl"
            try:
                metrics, wall = train_step(step, learner, engine, judge, chat, chosen, config, path)
                # Before this step is saved: it is taken again, and only then is a run with idle last steps complete.
                idle.after(metrics).refuse(metrics, config)
            except TrainingPaused:
                if step - 1 > done and (step - 1) % every:  # what was learned since the last checkpoint
                    save(learner, folder, step - 1, config, idle, inputs)
                raise
            idle = idle.after(metrics)
            if config.eval.every and step % config.eval.every == 0:
                path = folder / "evaluation" / path.name
                evaluation, seconds = evaluate_step(learner, engine, judge, chat, heldout, config, path)
                metrics, wall = metrics | evaluation, wall | seconds
            if writer:
                writer.write(step, metrics)
                writer.write_wall(step, wall)
            if step % every == 0 or step == steps:
                save(learner, folder, step, config, idle, inputs)
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
