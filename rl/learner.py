"""The learner: log-probs of sampled tokens, and one optimiser step from rows with advantages.

Runs in one process, or in several that torchrun started: then the weights are sharded over the ranks, every rank is
given all rows and computes its share of them, and every rank gets the same results. fp32 weights; on CUDA computation
may be in bf16 (`train.autocast`).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl import checkpoint, distributed
from rl.batch import Pack, Row, deal, make_pack, send
from rl.config import Config
from rl.loss import LossInput, count_rows, policy_loss
from rl.optimizer import Masters, learning_rate, make_optimizer
from rl.policy import Policy, decoder_layers


@dataclass(frozen=True)
class TokenStats:
    """Of every row, [rows] of [completion tokens] on the CPU: log-prob of the sampled token, entropy (nats) there."""

    logprobs: list[torch.Tensor]
    entropies: list[torch.Tensor]

    def entropy(self) -> float | None:
        """Mean over all tokens, in nats: the metric policy/entropy. None without a token."""
        joined = torch.cat([*self.entropies, torch.empty(0)])
        return joined.double().mean().item() if joined.numel() else None


class Learner:
    """Holds the model, its optimiser and the policy version (optimiser steps taken).

    With several ranks every method must be called by all of them, with the same arguments.
    """

    def __init__(self, model: torch.nn.Module, config: Config, temperature: float | None = None) -> None:
        """model: any Hugging Face causal LM, moved to this rank's device here. temperature: of the distribution that
        log-probs are of; None: that of rollouts. Raises ConfigError for a model that can't be trained here
        (rl/policy.py)."""
        self.config = config
        train = config.train
        self.device = distributed.start(config.device)
        self.model = model.to(self.device).float()
        self._copy: torch.nn.Module | None = None
        samples = config.engine.name == "hf" and config.placement.kind == "colocated"
        if distributed.world() > 1 and distributed.first() and samples:
            self._copy = plain_copy(self.model, torch.bfloat16 if train.autocast else torch.float32)
        temperature = config.rollout.temperature if temperature is None else temperature
        self.policy = Policy(self.model, temperature, train.recompute, train.compile)
        self.names, parameters = zip(*((n, p) for n, p in self.model.named_parameters() if p.requires_grad))
        self.masters: Masters | None = None
        if distributed.world() > 1:
            distributed.shard(self.policy, decoder_layers(self.model), self.device, train.autocast)
            parameters = [p for p in self.model.parameters() if p.requires_grad]
        elif train.autocast:
            self.masters = Masters(parameters)
            parameters = self.masters.weights
        self.weights = list(parameters)
        self.optimizer = make_optimizer(self.weights, config.optim, config.optim.lr, train.offload_optimizer)
        self.version = 0

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        return self.model.get_input_embeddings().num_embeddings

    def logprobs(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """[rows] of [completion tokens]: log-probs under the sampling temperature, on the CPU."""
        return self.evaluate(rows).logprobs

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Row]) -> TokenStats:
        """Log-probs and entropies of all rows' completion tokens under the present weights, in the order of `rows`."""
        mine = []
        for pack in self.packs(*_sequences(rows), range(len(rows))):
            values = self.policy(pack)
            mine.append((pack.members, pack.target_counts, values.logprobs, values.entropies))
        # Only now to the CPU: each copy waits for the GPU. Whole packs: a slice would be pickled with all its storage.
        mine = [(members, counts, logprobs.cpu(), entropies.cpu()) for members, counts, logprobs, entropies in mine]
        stats = TokenStats([torch.empty(0) for _ in rows], [torch.empty(0) for _ in rows])
        for members, counts, *values in itertools.chain(*distributed.gather(mine)):
            for results, value in zip((stats.logprobs, stats.entropies), values):
                for member, piece in zip(members, value.split(counts)):
                    results[member] = piece
        return stats

    def gradient(
        self,
        rows: Sequence[Row],
        old_logprobs: Sequence[torch.Tensor] | None = None,
        weights: Sequence[torch.Tensor] | None = None,
    ) -> dict[str, float]:
        """Put the gradient of the loss (rl/loss.py) into the weights' `.grad`; arguments as in `update`.

        The denominator is fixed before the loop, over all rows. The result depends neither on the order of rows, nor on
        the size of micro-batches, nor on the number of ranks (beyond rounding).
        Returns policy/loss and policy/clip_share; {} where no row trains, and then there is no gradient either.
        """
        self.optimizer.zero_grad(set_to_none=True)
        counted = count_rows(rows, self.config.loss)
        # An advantage of 0 has a gradient of exactly 0: leaving such rows out saves the time and changes nothing.
        trained = [i for i, row in enumerate(rows) if row.advantage and not row.masks]
        sums, tokens = torch.zeros(2, dtype=torch.float64, device=self.device), 0
        for pack in self.packs(*_sequences(rows), trained):
            new = self.policy(pack).logprobs
            old = self._by_token([old_logprobs[m] for m in pack.members], pack) if old_logprobs else new.detach()
            advantages = self._by_token([torch.tensor(rows[m].advantage) for m in pack.members], pack)
            weight = self._by_token([weights[m] for m in pack.members], pack) if weights else None
            part = policy_loss(LossInput(new, old, advantages, counted, weight), self.config.loss)
            self.backward(part.loss)
            sums += torch.stack([part.loss.detach().double(), part.clipped])
            tokens += part.tokens
        loss, clipped, tokens = (sum(values) for values in zip(*distributed.gather((*sums.tolist(), tokens))))
        return {"policy/loss": loss, "policy/clip_share": clipped / tokens} if tokens else {}

    def update(
        self,
        rows: Sequence[Row],
        old_logprobs: Sequence[torch.Tensor] | None = None,
        weights: Sequence[torch.Tensor] | None = None,
    ) -> dict[str, float]:
        """One optimiser step on the rows that have an advantage and no mask.

        old_logprobs: [rows] of [completion tokens] under the weights before the first step on these rows; None: this is
        the first step, and the ratio is exactly 1. weights: [rows] of importance weights, [completion tokens] or one
        number each; None: all 1.
        Returns policy/loss, policy/clip_share, policy/grad_norm (before clipping), policy/lr, policy/skipped. Where no
        row trains, or the gradient isn't finite, no step is taken: policy/skipped is 1, weights and version stay.
        """
        optim = self.config.optim
        lr = learning_rate(
            self.version, self.config.train.steps, optim.lr, optim.warmup_steps, optim.schedule, optim.final_lr_share
        )
        metrics = {"policy/lr": lr, "policy/skipped": 1.0, **self.gradient(rows, old_logprobs, weights)}
        if "policy/loss" in metrics:
            metrics["policy/grad_norm"], stepped = self.step(lr)
            metrics["policy/skipped"] = float(not stepped)
        return metrics

    def packs(
        self, sequences: Sequence[Sequence[int]], target_positions: Sequence[Sequence[int]], members: Sequence[int]
    ) -> Iterator[Pack]:
        """This rank's micro-batches of the members that have a target (a full context leaves no room for one). All
        ranks get the same number, if need be of packs without members."""
        members = [m for m in members if target_positions[m]]
        lengths = [len(ids) for ids in sequences]
        shares = deal(lengths, members, self.config.train.micro_batch_tokens, distributed.world())
        for part in shares[distributed.rank()]:
            yield make_pack(sequences, target_positions, part, self.device)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of one micro-batch's part of a loss, which is the sum of all parts on all ranks."""
        (loss * distributed.world()).backward()  # FSDP takes the ranks' mean

    def step(self, lr: float) -> tuple[float, bool]:
        """Clip the gradient's norm, step, clear the gradient. Returns (norm before clipping, whether it was finite and
        a step was taken)."""
        norm = torch.nn.utils.clip_grad_norm_(self.weights, self.config.optim.max_grad_norm)
        norm = distributed.full(norm).item()
        finite = math.isfinite(norm)
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.version += 1
            if self.masters:
                self.masters.refresh()
        self.optimizer.zero_grad(set_to_none=True)
        return norm, finite

    def _by_token(self, values: Sequence[torch.Tensor], pack: Pack) -> torch.Tensor:
        """fp32 [targets] on the device: each member's value, a number or one a token, at its tokens."""
        spread = [value.float().expand(count) for value, count in zip(values, pack.target_counts, strict=True)]
        return send(torch.cat([*spread, torch.empty(0)]), self.device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights (fp32) and the optimiser's state by name, each this rank's shard: what a checkpoint holds, and
        what it is loaded into. Buffers don't train and come with the model."""
        values = {f"model.{name}": weight.detach() for name, weight in zip(self.names, self.weights)}
        for name, weight in zip(self.names, self.weights):
            for key, value in self.optimizer.state[weight].items():
                values[f"optimizer.{name}.{key}"] = value
        return values

    def state(self) -> dict[str, Any]:
        """What else a checkpoint holds of the learner."""
        return {"version": self.version}

    def restored(self, state: dict[str, Any]) -> None:
        """Go on from `tensors` that were loaded, and the `state` saved with them."""
        self.version = state["version"]
        if self.masters:
            self.masters.refresh()

    @torch.no_grad()
    def plain_model(self) -> torch.nn.Module | None:
        """An ordinary model with the present weights, for an engine to sample from, in the dtype that is computed in:
        the learner's own in one process; with several ranks a copy on rank 0, and None on the others (and everywhere
        where engines have weights of their own: rl/weight_sync.py)."""
        if distributed.world() == 1:
            return self.model
        targets = dict(self._copy.named_parameters()) if self._copy is not None else {}
        for name, weight in zip(self.names, self.weights):
            value = distributed.full(weight)
            if targets:
                targets[name].copy_(value)
        return self._copy

    @torch.no_grad()
    def export(self, tokenizer: Any, folder: Path) -> None:
        """Write the present weights in fp32, with the tokenizer, as an ordinary Hugging Face folder."""
        whole: dict[str, torch.Tensor] = {}
        for name, weight in zip(self.names, self.weights):
            value = distributed.full(weight.detach())  # all ranks take part in this, rank 0 keeps it
            if distributed.first():
                whole[name] = value.cpu()
        with torch.device("meta"):  # for its configuration alone: the weights are given
            model = type(self.model)(self.model.config)
        generation = self.model.generation_config  # the folder's own end tokens and sampling settings
        with contextlib.suppress(ValueError):  # transformers doesn't write settings that contradict each other
            generation.validate(strict=True)
            model.generation_config = generation
        distributed.agree(lambda: checkpoint.save_folder(model, tokenizer, folder, whole))


def plain_copy(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """A copy whose parameters, and no buffers, are `dtype`."""
    twin = copy.deepcopy(model)
    for p in twin.parameters():
        p.data = p.data.to(dtype)
    return twin


def _sequences(rows: Sequence[Row]) -> tuple[list[list[int]], list[range]]:
    return [row.ids for row in rows], [row.target_positions for row in rows]
