"""The plain engine: samples from a Hugging Face model in this process. CPU or one GPU.

On a CPU it decodes batch after batch with a cache that grows, and takes finished rows out; on a GPU, where launches
would cost more than the computation, with a static cache and a captured graph (rl/engines/static.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from transformers import DynamicCache

from rl.engines import probe
from rl.engines.base import Completion, EngineError, Request, Sampling, Source
from rl.engines.sampling import sample, uniform_table
from rl.engines.static import StaticDecoder, fits

# Finished rows are computed on until they are this share of the batch: taking rows out copies the cache.
COMPACT_SHARE = 0.125


class HFEngine:
    """Samples from `model` itself, in its own dtype: no copy of the weights, so a learner that shares it needs no push.

    batch_size: sequences decoded at once. static: decode with the static cache; None: on a GPU, for models that it
    gives the same log-probs as their own forward pass.
    """

    takes = "ids"

    def __init__(self, model: torch.nn.Module, batch_size: int, static: bool | None = None) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size = {batch_size}; it must be at least 1")
        self.batch_size = batch_size
        self._static = static
        self.push(model)

    def push(self, model: torch.nn.Module) -> None:
        """Sample from `model` from now on. Nothing is copied: a model that is trained in place is always current."""
        if getattr(self, "model", None) is model:
            return
        self.model = model
        on_gpu = next(model.parameters()).device.type == "cuda"
        self._use_static = fits(model) if self._static is None and on_gpu else bool(self._static)
        self.decoder: StaticDecoder | None = None

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return next(self.model.parameters()).dtype

    def probe(self) -> list[int]:
        """The fixed prompt whose log-probs tell whether weights have arrived."""
        return probe.prompt(self.vocabulary, self.model.config.max_position_embeddings)

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        return self.model.get_input_embeddings().num_embeddings

    @torch.no_grad()
    def push_named(self, weights: Iterable[tuple[str, torch.Tensor]], expected: Sequence[float]) -> None:
        """Copy weights of another process's model, by parameter name and whole, into this one's, in place (so that
        captured graphs stay right). expected: log-probs of `probe()[1:]` under them, at temperature 1. Raises
        EngineError where names or log-probs are others."""
        own = dict(self.model.named_parameters())
        for name, weight in weights:
            held = own.pop(name, None)
            if held is None or held.shape != weight.shape:
                raise EngineError(f"weights were pushed of another model: {name} {tuple(weight.shape)} has no place")
            held.copy_(weight)
        if own:
            raise EngineError(f"weights were pushed without {', '.join(sorted(own)[:3])} ({len(own)} are missing)")
        remedy = "run the same command again, and look for a damaged sft/model if it comes back"
        probe.check("the plain engine", probe.logprobs(self.model, self.probe()), expected, self.dtype, remedy)

    def stream(self, source: Source, sampling: Sampling) -> Iterator[tuple[Request, Completion]]:
        """Requests with their completions (rl/engines/base.py). Raises ValueError for a prompt that has no answer."""
        if self._use_static:
            yield from self._stream_static(source, sampling)
            return
        with one_thread():
            while requests := source.take(source.most, wait=True):
                for request in requests:
                    _check(request, sampling)
                # By length, so that prompts of a batch need little padding.
                order = sorted(requests, key=lambda request: len(request.prompt))
                for begin in range(0, len(order), self.batch_size):
                    yield from self._decode(order[begin : begin + self.batch_size], sampling)

    @torch.inference_mode()
    def _stream_static(self, source: Source, sampling: Sampling) -> Iterator[tuple[Request, Completion]]:
        """Every slot takes a new request as soon as its last one is finished."""
        decoder = self.decoder
        if decoder is None or not decoder.serves(min(self.batch_size, source.most), sampling):
            self.decoder = None  # gives its memory back before the next one asks for it
            decoder = self.decoder = StaticDecoder(self.model, min(self.batch_size, source.most), sampling)
        decoder.clear()
        while True:
            requests = source.take(decoder.free, wait=decoder.idle) if decoder.free else []
            for request in requests:
                _check(request, sampling)
            decoder.load(requests)
            if decoder.idle:
                break
            yield from decoder.advance()
        if decoder.large:
            self.decoder = None  # the learner may need the room

    @torch.inference_mode()
    def _decode(self, requests: list[Request], sampling: Sampling) -> Iterator[tuple[Request, Completion]]:
        """Decode one batch: prompts padded on the left, one token a row a step, finished rows yielded at once."""
        device = next(self.model.parameters()).device
        ids, attended = pad_left([request.prompt for request in requests])
        ids, attended = ids.to(device), attended.to(device)
        positions = (attended.cumsum(-1) - 1).clamp_min(0)
        draws = uniform_table([request.seed for request in requests], sampling.max_new_tokens).to(device)
        cache = DynamicCache()
        stops = frozenset(sampling.stop_ids)
        limits = [sampling.limit(len(request.prompt)) for request in requests]
        sampled: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        rows = list(range(len(requests)))  # which request each row of the tensors belongs to
        done: set[int] = set()
        for step in range(max(limits)):
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
                if token in stops or step == limits[row] - 1:
                    done.add(row)
                    reason = sampling.reason(token, limits[row])
                    yield requests[row], Completion(sampled[row], logprobs[row], reason, requests[row].prompt)
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


def _check(request: Request, sampling: Sampling) -> None:
    if not request.prompt:
        raise ValueError(f"prompt {request.key} is empty: nothing predicts its first token")
    sampling.limit(len(request.prompt))


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
