"""Decoding on a GPU: slots with a static key-value cache, a whole decode step captured as a CUDA graph.

A step of a small model is some hundred kernels of a few microseconds: launched one by one they take ten times as long
as they run. Captured once and replayed, the step costs what its kernels cost. Everything a step reads or writes stands
in tensors that never move; whether a row goes on is decided on the GPU, and the driver looks only every few steps. A
slot whose answer is finished is given the next request at once.

The model's own forward pass is used, with a cache and an attention function of ours (rl/engines/slots.py); `fits`
compares the result with its ordinary forward pass. The same code runs without a graph on a CPU, for tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rl.engines.base import Completion, Request, Sampling
from rl.engines.sampling import sample, uniform_table
from rl.engines.slots import SlotCache, using_attention

# Steps between two looks at which rows are done: a look stalls the GPU for some 50 us, a finished row wastes its steps.
LOOK_EVERY = 8
# The cache grows in such steps: a graph belongs to one length, and capturing takes a second.
CAPACITY_STEP = 256
# Prompt tokens (padding included) computed at once.
PREFILL_TOKENS = 32768
# A cache of more than this is freed when the engine has nothing to do.
LARGE_BYTES = 4 * 2**30


class StaticDecoder:
    """`slots` rows under one Sampling. `load` requests into free slots, then `advance` until `idle`."""

    def __init__(self, model: torch.nn.Module, slots: int, sampling: Sampling, graph: bool | None = None) -> None:
        """graph: capture the step; None: on a GPU."""
        device = next(model.parameters()).device
        self.model, self.slots, self.sampling, self.device = model, slots, sampling, device
        self._capture = device.type == "cuda" if graph is None else graph
        self._graph: torch.cuda.CUDAGraph | None = None
        longest = sampling.max_new_tokens

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        # [slots]: the last token, where it goes, tokens sampled, the most allowed, whether the row goes on.
        self.tokens, self.positions, self.counts, self.limits = (zeros(slots) for _ in range(4))
        self.active = zeros(slots, dtype=torch.bool)
        self.draws = zeros(slots, longest, dtype=torch.float64)
        # One column more than is read: rows that are done write there.
        self.sampled, self.logprobs = zeros(slots, longest + 1), zeros(slots, longest + 1, dtype=torch.float32)
        self.spare = torch.full((slots,), longest, device=device)
        self.stops = torch.tensor(sampling.stop_ids, dtype=torch.long, device=device)
        self.cache = SlotCache(self.positions, CAPACITY_STEP)
        self.columns = torch.arange(self.cache.capacity, device=device)
        self._requests: dict[int, Request] = {}

    def serves(self, slots: int, sampling: Sampling) -> bool:
        """Whether this decoder can be used again for so many slots under `sampling`."""
        return self.sampling == sampling and slots <= self.slots <= 2 * slots

    @property
    def free(self) -> int:
        """Slots without a request."""
        return self.slots - len(self._requests)

    @property
    def idle(self) -> bool:
        return not self._requests

    @property
    def captured(self) -> bool:
        """Whether steps are replayed from a CUDA graph."""
        return self._graph is not None

    @property
    def large(self) -> bool:
        """Whether the cache takes memory that others may need."""
        return sum(t.numel() * t.element_size() for pair in self.cache.pairs for t in pair) > LARGE_BYTES

    def clear(self) -> None:
        """Forget what an earlier use has left."""
        self._requests.clear()
        self.active.zero_()

    def load(self, requests: Sequence[Request]) -> None:
        """Put requests into free slots: compute the cache of each prompt but its last token, which the first step
        takes in."""
        if not requests:
            return
        self._make_room(max(len(r.prompt) + self.sampling.limit(len(r.prompt)) for r in requests))
        free = [slot for slot in range(self.slots) if slot not in self._requests]
        placed = sorted(zip(free, requests), key=lambda pair: len(pair[1].prompt))
        for chunk in _chunks(placed):
            self._prefill(chunk)
        slots = torch.tensor([slot for slot, _ in placed], device=self.device)

        def put(target: torch.Tensor, values: Sequence[Any]) -> None:
            target[slots] = torch.tensor(values, dtype=target.dtype).to(self.device)

        put(self.tokens, [r.prompt[-1] for _, r in placed])
        put(self.positions, [len(r.prompt) - 1 for _, r in placed])
        put(self.limits, [self.sampling.limit(len(r.prompt)) for _, r in placed])
        put(self.counts, [0] * len(placed))
        put(self.active, [True] * len(placed))
        table = uniform_table([r.seed for _, r in placed], self.sampling.max_new_tokens)
        self.draws[slots] = table.to(self.device)
        self._requests.update(placed)

    def advance(self) -> list[tuple[Request, Completion]]:
        """Some steps of all rows; returns those that are finished, and frees their slots."""
        for _ in range(LOOK_EVERY):
            if self._graph is not None:
                self._graph.replay()
            else:
                self.step()
        active = self.active.tolist()
        done = [slot for slot in sorted(self._requests) if not active[slot]]
        if not done:
            return []
        where = torch.tensor(done, device=self.device)
        columns = (self.counts, self.limits, self.sampled, self.logprobs)
        rows = zip(done, *(column[where].tolist() for column in columns))
        finished = []
        for slot, count, limit, ids, logprobs in rows:
            request, reason = self._requests.pop(slot), self.sampling.reason(ids[count - 1], limit)
            finished.append((request, Completion(ids[:count], logprobs[:count], reason, request.prompt)))
        return finished

    def step(self) -> None:
        """One token for every row that goes on; the others compute along and change nothing that is read."""
        tokens, logprobs = sample(
            self.logits(),
            self.draws.gather(1, self.counts.clamp(max=self.draws.shape[1] - 1).unsqueeze(1)).squeeze(1),
            self.sampling.temperature,
            self.sampling.top_p,
        )
        column = torch.where(self.active, self.counts, self.spare).unsqueeze(1)
        self.sampled.scatter_(1, column, tokens.unsqueeze(1))
        self.logprobs.scatter_(1, column, logprobs.unsqueeze(1))
        self.tokens.copy_(torch.where(self.active, tokens, self.tokens))
        self.counts.add_(self.active)
        self.positions.copy_((self.positions + self.active).clamp(max=self.cache.capacity - 1))
        stopped = (tokens.unsqueeze(1) == self.stops).any(1)
        self.active.logical_and_(~stopped & (self.counts < self.limits))

    def logits(self) -> torch.Tensor:
        """[slots, vocabulary] behind each row's last token, whose keys and values go into the cache."""
        dtype = self.model.get_input_embeddings().weight.dtype
        seen = self.columns <= self.positions.unsqueeze(1)
        mask = torch.zeros(seen.shape, dtype=dtype, device=self.device).masked_fill_(~seen, -torch.inf)
        with using_attention(self.model, self.device):
            output = self.model(
                input_ids=self.tokens.unsqueeze(1),
                attention_mask=mask[:, None, None, :],
                position_ids=self.positions.unsqueeze(1),
                past_key_values=self.cache,
                use_cache=True,
            )
        return output.logits[:, -1]

    def _prefill(self, placed: Sequence[tuple[int, Request]]) -> None:
        longest = max(len(request.prompt) for _, request in placed) - 1
        if not longest:
            return
        # Padded on the right: a causal model computes nothing of a prompt from what stands behind it.
        ids = torch.zeros(len(placed), longest, dtype=torch.long)
        for row, (_, request) in enumerate(placed):
            ids[row, : len(request.prompt) - 1] = torch.tensor(list(request.prompt[:-1]))
        filled = self.model(input_ids=ids.to(self.device), use_cache=True, logits_to_keep=1).past_key_values
        self.cache.fill(torch.tensor([slot for slot, _ in placed], device=self.device), filled.layers)

    def _make_room(self, tokens: int) -> None:
        """Let the cache hold rows of `tokens`, and have a graph for it."""
        if tokens > self.cache.capacity:
            self._graph = None
            self.cache.grow(-(-tokens // CAPACITY_STEP) * CAPACITY_STEP)
            self.columns = torch.arange(self.cache.capacity, device=self.device)
        if self.cache.pairs and (self._graph is not None or not self._capture):
            return
        # With all rows at rest a step changes nothing, so it can be run to make the cache, to warm up, to capture.
        going = self.active.clone()
        self.active.zero_()
        self.step()
        if self._capture:
            self._capture_step()
        self.active.copy_(going)

    def _capture_step(self) -> None:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                self.step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.step()
        except RuntimeError as error:  # the model asks the GPU for a value, or copies one to it
            print(f"engine: the decode step can't be captured ({error}); sampling is slower", flush=True)
            self._capture = False
            return
        self._graph = graph


@torch.inference_mode()
def fits(model: torch.nn.Module) -> bool:
    """Whether a model decodes here as in its own forward pass; says so on the console where it doesn't.

    Sliding windows, recurrent layers and the like need caches of their own.
    """
    prompts = [[0, 1, 2, 3, 1, 2], [3, 1]]
    sampling = Sampling(1)
    try:
        decoder = StaticDecoder(model, 2, sampling, graph=False)
        decoder.load([Request(i, prompt, i) for i, prompt in enumerate(prompts)])
        got = decoder.logits().float().log_softmax(-1)
        ids = [torch.tensor([prompt], device=decoder.device) for prompt in prompts]
        own = torch.stack([model(input_ids=i, use_cache=False).logits[0, -1].float().log_softmax(-1) for i in ids])
        gap = (got - own).abs().mean().item()
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError, KeyError) as error:
        gap, why = float("inf"), f"{type(error).__name__}: {error}"
    else:
        why = f"log-probs differ by {gap:.3g}"
    windows = {"full_attention"} != set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if windows or not gap < (1e-3 if model.get_input_embeddings().weight.dtype == torch.float32 else 0.1):
        reason = "it has layers without full attention" if windows else why
        print(f"engine: {type(model).__name__} can't use the static cache ({reason}); sampling is slower", flush=True)
        return False
    return True


def _chunks(placed: Sequence[tuple[int, Request]]) -> Iterator[list[tuple[int, Request]]]:
    """Prompts in order of length, in groups of at most PREFILL_TOKENS with padding (at least one prompt)."""
    chunk: list[tuple[int, Request]] = []
    for pair in placed:
        if chunk and (len(chunk) + 1) * len(pair[1].prompt) > PREFILL_TOKENS:
            yield chunk
            chunk = []
        chunk.append(pair)
    if chunk:
        yield chunk
