"""Supervised fine-tuning on the collected trajectories: `python -m rl.sft --run DIR`, alone or under torchrun
(`torchrun --standalone --nproc-per-node N -m -- rl.sft --run DIR`).

Reads DIR/collect/trajectories.jsonl, trains on completion tokens only, one sequence a trajectory, and writes
DIR/sft/model (a Hugging Face folder), metrics.jsonl, wall.jsonl, and DONE last. A checkpoint an epoch; run again, it
goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from rl import checkpoint, distributed, run_lock, seeding
from rl.config import Config, ConfigError, load_run
from rl.learner import Learner
from rl.metrics import DamagedFile, MetricsWriter
from rl.optimizer import learning_rate
from rl.records import DamagedRecords, Trajectory, read_trajectories, utf8


@dataclass(frozen=True)
class Example:
    """One trajectory as a training sequence: ids [tokens], and the positions in it that are trained on."""

    ids: list[int]
    target_positions: list[int]


def example(ids: Sequence[int], loss_mask: Sequence[int | bool], context: int) -> Example | None:
    """An Example of the first `context` tokens; None if no trained token is among them.

    A later turn that doesn't fit is cut: every token that is left keeps its right target.
    """
    if len(ids) != len(loss_mask):
        raise ValueError(f"{len(ids)} ids and {len(loss_mask)} mask entries")
    kept = list(ids[:context])
    positions = [i for i in range(1, len(kept)) if loss_mask[i]]
    return Example(kept, positions) if positions else None


def epoch_batches(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of the examples in an epoch's order, cut into batches of at most `batch_tokens` tokens (at least one
    example). The order comes from (seed, epoch) alone, so a resumed run has the same."""
    order = list(range(len(lengths)))
    seeding.rng(seed, "sft", "order", epoch).shuffle(order)
    batches: list[list[int]] = []
    room = 0
    for index in order:
        if not batches or lengths[index] > room:
            batches.append([])
            room = batch_tokens
        batches[-1].append(index)
        room -= lengths[index]
    return batches


def train_step(learner: Learner, examples: Sequence[Example], lr: float) -> dict[str, float]:
    """One optimiser step on the mean loss of all trained tokens of `examples`; returns the step's sft/* metrics.

    Raises FloatingPointError where the gradient isn't finite.
    """
    tokens = sum(len(e.target_positions) for e in examples)
    sequences, positions = [e.ids for e in examples], [e.target_positions for e in examples]
    sums = torch.zeros(2, dtype=torch.float64, device=learner.device)
    for pack in learner.packs(sequences, positions, range(len(examples))):
        values = learner.policy(pack)
        part = -values.logprobs.sum() / tokens
        learner.backward(part)
        sums += torch.stack([part.detach().double(), values.greedy.sum()])
    loss, right = (sum(parts) for parts in zip(*distributed.gather(sums.tolist())))
    norm, stepped = learner.step(lr)
    if not stepped:
        now = learner.config.sft.lr
        raise FloatingPointError(f"the gradient's norm is {norm}: lower sft.lr (now {now:g}) and run again")
    return {"sft/loss": loss, "sft/lr": lr, "sft/grad_norm": norm, "sft/accuracy": right / tokens}


def train(model: torch.nn.Module, examples: Sequence[Example], config: Config, folder: Path) -> Learner:
    """Train `model` for `config.sft.epochs`, going on from the newest checkpoint in folder/checkpoints.

    Steps are counted from 1. Returns the learner that holds the result. Raises ValueError without examples.
    """
    if not examples:
        raise ValueError("no example to train on")
    settings = config.sft
    learner = Learner(model, config, temperature=1.0)
    lengths = [len(e.ids) for e in examples]
    epochs = [epoch_batches(lengths, settings.batch_tokens, config.seed, e) for e in range(settings.epochs)]
    total = sum(len(batches) for batches in epochs)
    warmup = math.ceil(settings.warmup_share * total)
    done_epochs = 0
    newest = checkpoint.newest(folder / "checkpoints")
    if newest is not None:
        done_epochs = checkpoint.step_of(newest)
        plain = checkpoint.load(newest, learner.tensors())
        learner.restored(plain["learner"])
        if distributed.first():
            changed = checkpoint.changed_settings(plain["config"], config.to_json(), Config().to_json())
            print(f"SFT goes on after epoch {done_epochs}", *changed, sep="\n  changed: ", flush=True)
    step = sum(len(batches) for batches in epochs[:done_epochs])
    quiet = not distributed.first()
    with (
        contextlib.nullcontext() if quiet else MetricsWriter(folder, resume_step=step + 1) as metrics,
        tqdm(total=total, initial=step, desc="SFT", unit="step", mininterval=1.0, disable=quiet) as bar,
    ):
        for epoch in range(done_epochs, len(epochs)):
            for batch in epochs[epoch]:
                begun = time.perf_counter()
                lr = learning_rate(step, total, settings.lr, warmup, settings.schedule)
                step += 1
                values = train_step(learner, [examples[i] for i in batch], lr)
                seconds = time.perf_counter() - begun
                rate = sum(lengths[i] for i in batch) / seconds
                if metrics:
                    metrics.write(step, values)
                    metrics.write_wall(step, {"seconds/learn": seconds, "tokens_per_s": rate})
                bar.set_postfix_str(f"loss {values['sft/loss']:.3f}, {rate:,.0f} tokens/s", refresh=False)
                bar.update()
            plain = {"learner": learner.state(), "config": config.to_json()}
            checkpoint.save(folder / "checkpoints", epoch + 1, learner.tensors(), plain, config.train.keep_checkpoints)
    return learner


def collected(source: Path) -> list[Trajectory]:
    """The trajectories to train on. Raises DamagedRecords for lines that are none, and where there is none at all."""
    found = list(read_trajectories(source))
    if not found:
        raise DamagedRecords(
            f"{source} holds no trajectory: restore it, or remove {source.parent}/DONE and collect again "
            "(python -m rl.collect)"
        )
    for number, trajectory in enumerate(found, 1):
        if not trajectory.turns:
            raise DamagedRecords(f"{source}:{number}: a trajectory without turns, nothing to train on; delete the line")
        for turn in trajectory.turns:  # a server's answers may hold half a surrogate pair, which no tokenizer takes
            turn.prompt_text, turn.completion_text = utf8(turn.prompt_text), utf8(turn.completion_text)
    return found


def load_examples(trajectories: Sequence[Trajectory], tokenizer, context: int) -> list[Example]:
    """The collected trajectories as Examples. Raises ConfigError where none can be trained on."""
    from rl.prompts import Chat

    chat = Chat(tokenizer)
    encoded = [pair for trajectory in trajectories for pair in chat.encode_trajectory(trajectory)]
    examples = [e for ids, mask in encoded if (e := example(ids, mask, context)) is not None]
    if not examples:
        raise ConfigError(
            f"nothing to train on in the first {context} tokens of any of {len(trajectories)} collected trajectories; "
            "raise model.context"
        )
    cut = sum(len(ids) > context for ids, _ in encoded)
    if cut:
        print(
            f"{cut} of {len(encoded)} trajectories are longer than model.context = {context} and were cut", flush=True
        )
    return examples


def main(run: Path) -> None:
    """The whole stage on a run folder; returns at once where DONE is there."""
    folder = run / "sft"
    if checkpoint.is_done(folder, "model"):
        print(f"{folder}: done before")
        return
    config = load_run(run)
    source = run / "collect" / "trajectories.jsonl"
    if not source.is_file():
        raise FileNotFoundError(f"{source} is missing: run `python -m rl.collect --run {run}` first")
    if damage := checkpoint.folder_damage(source.parent):
        raise ConfigError(
            f"{source.parent} isn't as the cold start left it: {damage}. Put a copy back, or remove {source.parent}"
            "/DONE: then `python -m rl.collect` makes it again from asked.jsonl. If it was changed on purpose, delete "
            "its manifest.json"
        )
    distributed.start(config.device)
    with run_lock.held(folder):
        _stage(folder, source, config)


def _stage(folder: Path, source: Path, config: Config) -> None:
    seeding.seed_everything(config.seed)
    from rl import modeling  # imports transformers, which takes seconds: not for a finished stage

    start = Path(config.model.path) if config.model.path else folder / "init"
    trajectories = collected(source)

    def build() -> None:
        if config.model.path or (start / "config.json").is_file():
            return
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        texts = [text for turn in turns for text in (turn.prompt_text, turn.completion_text)]
        modeling.build_initial(config, texts, start)

    distributed.agree(build)
    model, tokenizer = modeling.load(start, config.device)
    examples = load_examples(trajectories, tokenizer, config.model.context)
    if distributed.first():
        print(f"SFT: {len(examples)} trajectories, {sum(len(e.ids) for e in examples):,} tokens an epoch", flush=True)
    learner = train(model, examples, config, folder)
    learner.export(tokenizer, folder / "model")
    distributed.agree(lambda: checkpoint.mark_done(folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Supervised fine-tuning on the collected trajectories of a run.")
    parser.add_argument("--run", type=Path, required=True, help="run folder, with config.json and collect/")
    arguments = parser.parse_args()
    try:
        main(arguments.run)
        distributed.stop()
    except (
        ConfigError,
        DamagedFile,
        DamagedRecords,
        FloatingPointError,
        OSError,
        checkpoint.CheckpointError,
        distributed.RankError,
        run_lock.FolderInUse,
    ) as error:
        sys.exit(f"rl.sft: {error}")
