"""The plain engine: samples from a Hugging Face model in this process, with a key-value cache. CPU or one GPU.

Every draw is an inverse-CDF lookup of a uniform number that belongs to (the sequence's seed, the position), so the
company that a sequence is decoded in changes its tokens only where rounding moves a boundary of the CDF over the draw.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from transformers import DynamicCache

from rl.engines.base import Completion, Sampling, in_order

# Finished rows are computed on until they are this share of the batch: taking rows out copies the cache.
COMPACT_SHARE = 0.125


class HFEngine:
    """Samples from `model` itself: no copy of the weights, so a learner that shares it needs no push.

    batch_size: sequences decoded at once. autocast: compute in bf16, as a learner with `train.autocast` does, so that
    the two sides' log-probs stay close; CUDA only.
    """

    def __init__(self, model: torch.nn.Module, batch_size: int, autocast: bool = False) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size = {batch_size}; it must be at least 1")
        self.model = model
        self.batch_size = batch_size
        self.autocast = autocast

    def push(self, model: torch.nn.Module) -> None:
        """Sample from `model` from now on. Nothing is copied: a model that is trained in place is always current."""
        self.model = model

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        """All completions, in the order of the prompts (rl/engines/base.py)."""
        return in_order(self.stream(prompts, sampling, seeds))

    def stream(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> Iterator[tuple[int, Completion]]:
        """(index, completion) as each is finished. Raises ValueError for an empty prompt or a missing seed."""
        if len(seeds) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(seeds)} seeds; each prompt needs its own")
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {index} is empty: nothing predicts its first token")
        # By length, so that prompts of a batch need little padding.
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
        with one_thread():
            for begin in range(0, len(order), self.batch_size):
                members = order[begin : begin + self.batch_size]
                batch = [prompts[i] for i in members], sampling, [seeds[i] for i in members]
                for row, completion in self._decode(*batch):
                    yield members[row], completion

    @torch.inference_mode()
    def _decode(
        self, prompts: list[Sequence[int]], sampling: Sampling, seeds: list[int]
    ) -> Iterator[tuple[int, Completion]]:
        """Decode one batch: prompts padded on the left, one token a row a step, finished rows yielded at once."""
        device = next(self.model.parameters()).device
        ids, attended = pad_left(prompts)
        ids, attended = ids.to(device), attended.to(device)
        positions = (attended.cumsum(-1) - 1).clamp_min(0)
        draws = uniform_table(seeds, sampling.max_new_tokens).to(device)
        cache = DynamicCache()
        stops = frozenset(sampling.stop_ids)
        sampled: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        rows = list(range(len(prompts)))  # which prompt each row of the tensors belongs to
        done: set[int] = set()
        for step in range(sampling.max_new_tokens):
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.autocast):
                logits = self.model(
                    input_ids=ids,
                    attention_mask=attended,
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                ).logits[:, -1]
            tokens, chosen = sample(logits, draws[:, step], sampling.temperature, sampling.top_p)
            for row, token, logprob in zip(rows, tokens.tolist(), chosen.tolist()):
                if row in done:
                    continue
                sampled[row].append(token)
                logprobs[row].append(logprob)
                last = step == sampling.max_new_tokens - 1
                if token in stops or last:
                    done.add(row)
                    yield row, Completion(sampled[row], logprobs[row], "stop" if token in stops else "length")
            ids = tokens.unsqueeze(-1)
            positions = positions[:, -1:] + 1
            attended = torch.cat([attended, attended.new_ones(len(rows), 1)], dim=-1)
            going = [i for i, row in enumerate(rows) if row not in done]
            if not going:
                return
            if len(rows) - len(going) >= max(1, COMPACT_SHARE * len(rows)):
                kept = torch.tensor(going, device=device)
                ids, positions, attended, draws = ids[kept], positions[kept], attended[kept], draws[kept]
                cache.batch_select_indices(kept)
                rows = [rows[i] for i in going]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """CPU operators on one core for a while. The judge works on the others meanwhile, and threads of one operator that
    wait for each other on busy cores spin: two were measured 4 times slower than one beside two busy evaluators."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def pad_left(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, attention mask), each [prompts, longest], so that all prompts end at the same column."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    attended = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(list(prompt))
        attended[row, longest - len(prompt) :] = 1
    return ids, attended


def uniform_table(seeds: Sequence[int], count: int) -> torch.Tensor:
    """[seeds, count] float64 draws from [0, 1): row i is a function of seeds[i] alone."""
    return torch.stack(
        [torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in seeds]
    )


def sample(
    logits: torch.Tensor, draws: torch.Tensor, temperature: float, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [rows], log-probs [rows] fp32): the token where the CDF of each row passes its draw.

    logits [rows, vocabulary], draws [rows] from [0, 1). With top_p < 1 the distribution is cut to the smallest set of
    most likely tokens that holds top_p, and the log-prob is under the cut, renormalised distribution.
    """
    logprobs = (logits.float() / temperature).log_softmax(-1)
    if top_p < 1:
        ordered, where = torch.sort(logprobs, dim=-1, descending=True, stable=True)
        probabilities = ordered.double().exp()
        outside = (probabilities.cumsum(-1) - probabilities) >= top_p  # never the first
        logprobs = logprobs.masked_fill(outside.gather(-1, where.argsort(-1)), -torch.inf).log_softmax(-1)
    cdf = logprobs.double().exp().cumsum(-1)
    total = cdf[:, -1:]
    # The draw times the total may round up to the total, beyond which there is no token.
    target = torch.minimum(draws.unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
    # right: the first token whose CDF is above the target, so one of probability 0 is never chosen.
    tokens = torch.searchsorted(cdf, target, right=True)
    return tokens.squeeze(-1), logprobs.gather(-1, tokens).squeeze(-1)
