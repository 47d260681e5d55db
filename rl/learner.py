"""The learner: log-probs of sampled tokens, and one optimiser step from rows with advantages. One process, one device.

fp32 weights; on CUDA the forward pass may compute in bf16 (`train.autocast`). The model stays in eval mode: dropout
would make the log-probs of two passes differ, and the ratio with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl.batch import Batch, Row, make_batch, micro_batches
from rl.config import Config, Optim
from rl.loss import LossInput, policy_loss


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
    """Holds the model, its optimiser and the policy version (optimiser steps taken)."""

    def __init__(self, model: torch.nn.Module, config: Config) -> None:
        """model: any Hugging Face causal LM, moved to `config.device` here. Raises ValueError for one whose logits are
        not its head applied to its last hidden states (soft-capped, scaled)."""
        self.config = config
        self.device = torch.device(config.device)
        self.model = model.to(self.device).float().eval()
        self.optimizer = make_optimizer(self.model, config.optim, config.optim.lr)
        self.version = 0
        check_head(self.model)

    def logprobs(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """[rows] of [completion tokens]: log-probs under the sampling temperature, on the CPU."""
        return self.evaluate(rows).logprobs

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Row]) -> TokenStats:
        """Log-probs and entropies of all rows' completion tokens under the present weights, in the order of `rows`."""
        stats = TokenStats([torch.empty(0) for _ in rows], [torch.empty(0) for _ in rows])
        for batch in self._batches(rows, range(len(rows))):
            logits = self._logits(batch)
            parts = token_logprobs(logits, batch.targets), token_entropies(logits)
            for values, results in zip(parts, (stats.logprobs, stats.entropies)):
                for member, piece in zip(batch.members, values.cpu().split(batch.target_counts)):
                    results[member] = piece
        return stats

    def gradient(self, rows: Sequence[Row], old_logprobs: Sequence[torch.Tensor] | None = None) -> dict[str, float]:
        """Put the gradient of the loss (rl/loss.py) into the parameters' `.grad`; old_logprobs as in `update`.

        The denominator is fixed before the loop: rows with an advantage, masked or not. The result doesn't depend on
        the order of rows or on the size of micro-batches (beyond rounding).
        Returns policy/loss and policy/clip_share; {} where no row trains, and then there is no gradient either.
        """
        self.optimizer.zero_grad(set_to_none=True)
        counted = sum(row.advantage is not None for row in rows)
        # An advantage of 0 has a gradient of exactly 0: leaving such rows out saves the time and changes nothing.
        trained = [i for i, row in enumerate(rows) if row.advantage and not row.masks]
        loss, clipped, tokens = 0.0, 0, 0
        for batch in self._batches(rows, trained):
            new = token_logprobs(self._logits(batch), batch.targets)
            old = torch.cat([old_logprobs[m] for m in batch.members]).to(new) if old_logprobs else new.detach()
            counts = torch.tensor(batch.target_counts)
            by_row = torch.tensor([rows[m].advantage for m in batch.members], dtype=new.dtype)
            advantages = by_row.repeat_interleave(counts).to(self.device)
            part = policy_loss(LossInput(new, old, advantages, counted), self.config.loss)
            part.loss.backward()
            loss, clipped, tokens = loss + part.loss.item(), clipped + part.clipped, tokens + part.tokens
        return {"policy/loss": loss, "policy/clip_share": clipped / tokens} if tokens else {}

    def update(self, rows: Sequence[Row], old_logprobs: Sequence[torch.Tensor] | None = None) -> dict[str, float]:
        """One optimiser step on the rows that have an advantage and no mask.

        old_logprobs: [rows] of [completion tokens] under the weights before the first step on these rows; None: this is
        the first step, and the ratio is exactly 1.
        Returns policy/loss, policy/clip_share, policy/grad_norm (before clipping), policy/lr, policy/skipped. Where no
        row trains, or the gradient isn't finite, no step is taken: policy/skipped is 1, weights and version stay.
        """
        optim = self.config.optim
        lr = optim.lr * min(1.0, (self.version + 1) / max(1, optim.warmup_steps))
        metrics = {"policy/lr": lr, "policy/skipped": 1.0, **self.gradient(rows, old_logprobs)}
        if "policy/loss" not in metrics:
            return metrics
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), optim.max_grad_norm)
        metrics["policy/grad_norm"] = norm.item()
        if torch.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.version += 1
            metrics["policy/skipped"] = 0.0
        self.optimizer.zero_grad(set_to_none=True)
        return metrics

    def state(self) -> dict[str, Any]:
        """Model, optimiser and version, as rl.checkpoint saves them."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "learner": {"version": self.version},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned. Raises torch's errors for another model's weights."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.version = state["learner"]["version"]

    def _batches(self, rows: Sequence[Row], members: Sequence[int]) -> Iterator[Batch]:
        """Padded micro-batches of the members that have a completion (a full context leaves no room for one)."""
        sequences = [row.ids for row in rows]
        positions = [row.target_positions for row in rows]
        members = [m for m in members if positions[m]]
        for part in micro_batches([len(ids) for ids in sequences], members, self.config.train.micro_batch_tokens):
            yield make_batch(sequences, positions, part, self.device)

    def _logits(self, batch: Batch) -> torch.Tensor:
        return target_logits(self.model, batch, self.config.train.autocast) / self.config.rollout.temperature


def target_logits(model: torch.nn.Module, batch: Batch, autocast: bool) -> torch.Tensor:
    """fp32 logits [targets, vocabulary] at the positions that predict a target, and only there.

    Prompts are most of a multi-turn row: a [rows, tokens, vocabulary] tensor for them would be the largest of all.
    """
    context = torch.autocast("cuda", dtype=torch.bfloat16) if autocast else contextlib.nullcontext()
    with context:
        hidden = model.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        return model.get_output_embeddings()(hidden[batch.where]).float()


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Log-softmax of `logits` [targets, vocabulary] at `targets` [targets]."""
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def token_entropies(logits: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of softmax(logits), [targets, vocabulary] -> [targets]."""
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def make_optimizer(model: torch.nn.Module, config: Optim, lr: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: decaying norms' gains and biases pulls them to 0 for nothing."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(config.beta1, config.beta2), fused=parameters[0].is_cuda)


@torch.no_grad()
def check_head(model: torch.nn.Module) -> None:
    """Raise ValueError unless the model's own logits are what `target_logits` computes."""
    ids = torch.arange(4, device=next(model.parameters()).device).unsqueeze(0)
    batch = make_batch(ids.tolist(), [[1, 2, 3]], [0], ids.device)
    own = model(input_ids=ids, use_cache=False).logits[0, :3].float()
    if not torch.allclose(target_logits(model, batch, autocast=False), own, rtol=1e-3, atol=1e-3):
        raise ValueError(
            f"{type(model).__name__} does more to its logits than its output head (soft-capping, scaling?): it can't "
            "be trained here; use a model with a plain head, e.g. Qwen3 or Llama"
        )
