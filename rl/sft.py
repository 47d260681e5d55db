"""Supervised fine-tuning on the collected trajectories: `python -m rl.sft --run DIR`. One process, one device.

Reads DIR/collect/trajectories.jsonl, trains on completion tokens only, one sequence a trajectory, and writes
DIR/sft/model (a Hugging Face folder), metrics.jsonl, wall.jsonl, and DONE last. A checkpoint an epoch; run again, it
goes on from there.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from rl import checkpoint, seeding
from rl.batch import make_batch, micro_batches
from rl.config import Config, ConfigError, load_run
from rl.learner import make_optimizer, target_logits, token_logprobs
from rl.metrics import MetricsWriter
from rl.records import read_trajectories


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


def learning_rate(step: int, total_steps: int, peak: float, warmup_share: float) -> float:
    """Linear from peak/warmup to peak over the first share of steps, then a cosine to 0. `step` counts from 0."""
    warmup = math.ceil(warmup_share * total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total_steps - warmup)))


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, examples: Sequence[Example], config: Config, lr: float
) -> dict[str, float]:
    """One optimiser step on the mean loss of all trained tokens of `examples`; returns the step's sft/* metrics."""
    device = next(model.parameters()).device
    tokens = sum(len(e.target_positions) for e in examples)
    sequences, positions = [e.ids for e in examples], [e.target_positions for e in examples]
    optimizer.zero_grad(set_to_none=True)
    loss, right = 0.0, 0
    limit = config.train.micro_batch_tokens
    for members in micro_batches([len(ids) for ids in sequences], range(len(examples)), limit):
        batch = make_batch(sequences, positions, members, device)
        logits = target_logits(model, batch, config.train.autocast)
        part = -token_logprobs(logits, batch.targets).sum() / tokens
        part.backward()
        loss += part.item()
        right += int((logits.argmax(-1) == batch.targets).sum())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm).item()
    if not math.isfinite(norm):
        raise FloatingPointError(f"the gradient's norm is {norm}: lower sft.lr (now {config.sft.lr:g}) and run again")
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return {"sft/loss": loss, "sft/lr": lr, "sft/grad_norm": norm, "sft/accuracy": right / tokens}


def train(model: torch.nn.Module, examples: Sequence[Example], config: Config, folder: Path) -> None:
    """Train `model` in place for `config.sft.epochs`, going on from the newest checkpoint in folder/checkpoints.

    Steps are counted from 1. Raises ValueError without examples.
    """
    if not examples:
        raise ValueError("no example to train on")
    model.to(config.device).float().eval()  # no dropout: what is learned is what the engine samples from
    optimizer = make_optimizer(model, config.optim, config.sft.lr)
    lengths = [len(e.ids) for e in examples]
    epochs = [epoch_batches(lengths, config.sft.batch_tokens, config.seed, e) for e in range(config.sft.epochs)]
    total = sum(len(batches) for batches in epochs)
    done_epochs = 0
    newest = checkpoint.load_newest(folder / "checkpoints")
    if newest is not None:
        done_epochs, state = newest
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    step = sum(len(batches) for batches in epochs[:done_epochs])
    with (
        MetricsWriter(folder, resume_step=step + 1) as metrics,
        tqdm(total=total, initial=step, desc="SFT", unit="step", mininterval=1.0) as bar,
    ):
        for epoch in range(done_epochs, len(epochs)):
            for batch in epochs[epoch]:
                begun = time.perf_counter()
                lr = learning_rate(step, total, config.sft.lr, config.sft.warmup_share)
                step += 1
                values = train_step(model, optimizer, [examples[i] for i in batch], config, lr)
                metrics.write(step, values)
                seconds = time.perf_counter() - begun
                rate = sum(lengths[i] for i in batch) / seconds
                metrics.write_wall(step, {"seconds/learn": seconds, "tokens_per_s": rate})
                bar.set_postfix_str(f"loss {values['sft/loss']:.3f}, {rate:,.0f} tokens/s", refresh=False)
                bar.update()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoint.save(folder / "checkpoints", epoch + 1, state, config.train.keep_checkpoints)


def load_examples(source: Path, tokenizer, context: int) -> list[Example]:
    """The collected trajectories as Examples. Raises ValueError where none can be trained on."""
    from rl.prompts import encode_trajectory

    encoded = [encode_trajectory(tokenizer, trajectory) for trajectory in read_trajectories(source)]
    examples = [e for ids, mask in encoded if (e := example(ids, mask, context)) is not None]
    if not examples:
        raise ValueError(
            f"{source}: nothing to train on in the first {context} tokens of any trajectory; raise model.context"
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
    if (folder / "DONE").exists():
        print(f"{folder}: done before")
        return
    config = load_run(run)
    source = run / "collect" / "trajectories.jsonl"
    if not source.is_file():
        raise FileNotFoundError(f"{source} is missing: run `python -m rl.collect --run {run}` first")
    seeding.seed_everything(config.seed)
    from rl import modeling  # imports transformers, which takes seconds: not for a finished stage

    start = Path(config.model.path) if config.model.path else folder / "init"
    if not config.model.path and not (start / "config.json").is_file():
        texts = [
            text
            for trajectory in read_trajectories(source)
            for turn in trajectory.turns
            for text in (turn.prompt_text, turn.completion_text)
        ]
        modeling.build_initial(config, texts, start)
    model, tokenizer = modeling.load(start, config.device)
    examples = load_examples(source, tokenizer, config.model.context)
    print(f"SFT: {len(examples)} trajectories, {sum(len(e.ids) for e in examples):,} tokens an epoch", flush=True)
    train(model, examples, config, folder)
    checkpoint.save_folder(model, tokenizer, folder / "model")
    checkpoint.mark_done(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Supervised fine-tuning on the collected trajectories of a run.")
    parser.add_argument("--run", type=Path, required=True, help="run folder, with config.json and collect/")
    arguments = parser.parse_args()
    try:
        main(arguments.run)
    except (ConfigError, FileNotFoundError, checkpoint.CheckpointError) as error:
        sys.exit(f"rl.sft: {error}")
