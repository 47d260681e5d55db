"""What plans are made of: sizes of a model and of a box of GPUs, unit costs. Runs anywhere; reads settings and a model
folder's config.json only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rl.config import Config, ConfigError
from rl.plan import least_answer

GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder-only transformer."""

    layers: int
    width: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool

    @property
    def layer_parameters(self) -> int:
        attention = 2 * self.width * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.width * self.mlp + 2 * self.width

    @property
    def root_parameters(self) -> int:
        """What belongs to no layer: embedding and head."""
        return self.vocabulary * self.width * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters

    @property
    def largest(self) -> int:
        """Parameters of the largest matrix: the embedding."""
        return self.vocabulary * self.width

    @property
    def cached_values(self) -> int:
        """Numbers that the engine's cache holds of a token."""
        return 2 * self.kv_heads * self.head_dim * self.layers


def shape_of(config: Config) -> Shape:
    """The policy's sizes: those of the folder `model.path`, or, where it isn't there (yet), of the settings. Raises
    ConfigError for a folder whose config.json doesn't say them."""
    own = config.model
    path = Path(own.path) / "config.json"
    if not own.path or not path.is_file():
        head = own.width // own.heads
        return Shape(own.layers, own.width, own.mlp, own.heads, own.kv_heads, head, own.vocab_size, not own.path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        width, heads = _size(data, "hidden_size"), _size(data, "num_attention_heads")
        return Shape(
            layers=_size(data, "num_hidden_layers"),
            width=width,
            mlp=_size(data, "intermediate_size"),
            heads=heads,
            kv_heads=_size(data, "num_key_value_heads", heads),
            head_dim=_size(data, "head_dim", width // heads),
            vocabulary=_size(data, "vocab_size"),
            tied=bool(data.get("tie_word_embeddings")),
        )
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} gives no sizes of a model ({error}): get the folder anew") from error


def _size(data: dict, key: str, default: int | None = None) -> int:
    """A size in a model's config.json: a whole number from 1; `default`, where there is one, if it isn't given."""
    value = data.get(key)
    if value is None and default is not None:
        value = default
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} is {value!r}")
    return value


@dataclass(frozen=True)
class Box:
    """GPUs of one kind in one machine. memory: bytes that torch sees of each; bandwidth: of it, bytes a second."""

    name: str
    gpus: int
    memory: int
    bandwidth: float


BOXES = (
    Box("8 x H100, 80 GB", 8, int(79.1 * GIB), 3.35e12),
    Box("8 x H200, 141 GB", 8, int(139.8 * GIB), 4.8e12),
)


@dataclass(frozen=True)
class Costs:
    """Unit costs, measured on one H200 with torch 2.11 and vLLM 0.26 unless said otherwise.

    train_flops: counted 6 N + 6 layers * width * row a token, 51.8 % of the 789e12 that a matrix product reached;
    train_flops_recompute: the same with activation checkpointing, 42.0 %. Assumed: FSDP hides what it sends.
    decode_step_s: what a decode step takes beside reading weights and cache (256 sequences of a 1.72 G model: 29 600
    tokens a second). load_s_per_parameter: loading pushed weights, 0.015 s for 1.72 G.
    verdicts_per_s: of one GPU's judge with 24 lanes, 16 cores; assumed: fewer lanes are slower in proportion.
    gather_bandwidth: assumed, NVLink between 8 GPUs. asleep: what vLLM keeps in sleep.
    host_write, host_read: bytes a second into and out of shared memory, checksums included; by one thread of a busy
    machine with two CPU cores, weights on the CPU on both sides. offload_bandwidth: assumed, of a copy between pinned
    host memory and a GPU.
    """

    train_flops: float = 0.518 * 789e12
    train_flops_recompute: float = 0.420 * 789e12
    decode_step_s: float = 0.006
    load_s_per_parameter: float = 0.015 / 1.72e9
    verdicts_per_s: float = 4.5
    gather_bandwidth: float = 300e9
    sleep_and_wake_s: float = 0.3
    host_write: float = 0.85e9
    host_read: float = 0.85e9
    offload_bandwidth: float = 40e9
    asleep: int = 5 * GIB
    awake_beside: int = 3 * GIB  # vLLM's own buffers and graphs beside weights and cache
    contexts: int = 2 * GIB  # CUDA and NCCL


COSTS = Costs()


@dataclass(frozen=True)
class Lengths:
    """Mean tokens, assumed: of a first prompt, of a feedback, of an answer."""

    answer: int
    first_prompt: int = 1500
    feedback: int = 700


def prompts_of(config: Config, lengths: Lengths) -> Iterator[int]:
    """Mean tokens of each turn's prompt, as long as another answer has room."""
    answer = min(lengths.answer, config.rollout.max_new_tokens)
    prompt = lengths.first_prompt
    for _ in range(config.rollout.turns):
        if prompt + least_answer(config) > config.model.context:
            return
        yield prompt
        prompt += answer + lengths.feedback
