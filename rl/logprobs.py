"""Log-probs of given tokens from hidden states, without a [tokens, vocabulary] tensor. Runs in the learner.

A row of 32 768 tokens over a vocabulary of 152 000 would need 19 GiB of logits in fp32, and as much again for their
gradient. Here at most CHUNK_LOGITS logits exist at a time, however long the rows are: the forward pass goes through
the tokens in chunks; the backward pass computes the logits once more, through the *vocabulary* in chunks, so that each
part of the head's gradient is one matrix product and only the small gradient of the hidden states is added up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Logits at a time: 512 MiB in bf16, 1 GiB in fp32.
CHUNK_LOGITS = 2**28


class TokenValues(NamedTuple):
    """Of every target: [targets] fp32, and bool.

    logprobs   log-prob of the target, with gradient
    entropies  of the distribution that it is drawn from, in nats
    greedy     whether the target is (one of) the most likely
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor
    greedy: torch.Tensor


def token_values(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    chunk_logits: int = CHUNK_LOGITS,
) -> TokenValues:
    """Values of `targets` [targets] under softmax(hidden @ weight.T / temperature).

    hidden [targets, width] and weight [vocabulary, width] in one dtype, in which logits are computed, as in an engine;
    everything after them is fp32.
    """
    return TokenValues(*_TokenValues.apply(hidden, weight, targets, temperature, chunk_logits))


class _TokenValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk_logits):
        # Results are made first: between chunks that come and go they would fragment the heap to the size of them all.
        normaliser, logprobs, entropies = (hidden.new_empty(len(targets), dtype=torch.float32) for _ in range(3))
        greedy = hidden.new_empty(len(targets), dtype=torch.bool)
        step = _chunk(chunk_logits, weight.shape[0])
        for begin in range(0, len(targets), step):
            part = slice(begin, begin + step)
            values = _statistics(hidden[part] @ weight.T, targets[part], temperature)
            for results, value in zip((normaliser, logprobs, entropies, greedy), values):
                results[part] = value
        ctx.save_for_backward(hidden, weight, targets, normaliser)
        ctx.temperature, ctx.chunk_logits = temperature, chunk_logits
        ctx.mark_non_differentiable(entropies, greedy)
        return logprobs, entropies, greedy

    @staticmethod
    def backward(ctx, gradient, *unused):
        hidden, weight, targets, normaliser = ctx.saved_tensors
        hidden_gradient = torch.zeros_like(hidden, dtype=torch.float32)
        weight_gradient = torch.empty_like(weight)
        step = _chunk(ctx.chunk_logits, max(1, len(targets)))
        for begin in range(0, len(weight), step):
            part = weight[begin : begin + step]
            logits = hidden @ part.T
            _logits_gradient_(logits, targets - begin, normaliser, gradient, ctx.temperature)
            hidden_gradient += logits @ part
            torch.mm(logits.T, hidden, out=weight_gradient[begin : begin + step])
        return hidden_gradient.to(hidden.dtype), weight_gradient, None, None, None


def _chunk(limit: int, other: int) -> int:
    """The most rows of `other` columns within `limit` elements; a multiple of 128 where it can be, for the GPU."""
    fitting = max(1, limit // other)
    return fitting // 128 * 128 or fitting


def _statistics(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, ...]:
    """(logsumexp, log-prob of the target, entropy, whether the target has the largest logit), each [targets]."""
    if _fused(logits):
        from rl import logprob_kernels

        return logprob_kernels.statistics(logits, targets, temperature)
    scaled = logits.float().div_(temperature) if logits.dtype != torch.float32 else logits.div_(temperature)
    normaliser = scaled.logsumexp(-1)
    chosen = scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    greedy = chosen >= scaled.amax(-1)
    shifted = scaled.sub_(normaliser.unsqueeze(-1))
    entropies = -(shifted.exp() * shifted).sum(-1)
    return normaliser, chosen - normaliser, entropies, greedy


def _logits_gradient_(
    logits: torch.Tensor, targets: torch.Tensor, normaliser: torch.Tensor, gradient: torch.Tensor, temperature: float
) -> None:
    """Replace a block of logits [targets, block] by the gradient with respect to them.

    targets: columns of the block; those outside it belong to other blocks. gradient [targets]: of the log-probs.
    """
    if _fused(logits):
        from rl import logprob_kernels

        return logprob_kernels.logits_gradient_(logits, targets, normaliser, gradient, temperature)
    probabilities = (logits.float() / temperature - normaliser.unsqueeze(-1)).exp_()
    inside = ((targets >= 0) & (targets < logits.shape[-1])).nonzero().squeeze(-1)
    probabilities[inside, targets[inside]] -= 1.0
    logits.copy_(probabilities.mul_((gradient / -temperature).unsqueeze(-1)))


def _fused(logits: torch.Tensor) -> bool:
    """Whether Triton does it in one pass over the logits. Its interpreter would take minutes, and bf16 wrong."""
    if not logits.is_cuda:
        return False
    import triton

    return not triton.knobs.runtime.interpret
