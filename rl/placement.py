"""What a step of a recipe takes on a box of GPUs, by arithmetic: GiB a GPU by part, seconds a phase. Runs anywhere.

All ranks learn together (FSDP2); each also has an engine, which sleeps while the learner works, and a judge. Memory is
estimated from above. Seconds come from unit costs that were measured on one H200 (COSTS), scaled to the model's size
and the box; what could not be measured there is marked as assumed. A plan to choose settings by, not a measurement.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rl.config import Config, ConfigError
from rl.logprobs import CHUNK_LOGITS
from rl.plan import least_answer

GIB = 2**30
# Lanes of a judge where env.lanes is 0 (env/pool.py), and what one takes of a GPU: 38.5 GiB were measured with 24.
JUDGE_LANES = 24
LANE_BYTES = int(1.6 * GIB)
FEWEST_LANES = 4  # with less, judging takes longer than all the rest


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
    """

    train_flops: float = 0.518 * 789e12
    train_flops_recompute: float = 0.420 * 789e12
    decode_step_s: float = 0.006
    load_s_per_parameter: float = 0.015 / 1.72e9
    verdicts_per_s: float = 4.5
    gather_bandwidth: float = 300e9
    sleep_and_wake_s: float = 0.3
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


def judge_memory(config: Config) -> int:
    """Bytes of a judge on the policy's GPU."""
    return (config.env.lanes or JUDGE_LANES) * LANE_BYTES if config.env.placement == "shared" else 0


def pass_activations(config: Config, shape: Shape) -> int:
    """Bytes that the forward pass of a micro-batch leaves for the backward pass.

    Measured: a Qwen3-1.7B shape in bf16 held 135 kB a token and layer, 2 * (18 * width + 5 * mlp).
    """
    size = 2 if config.train.autocast else 4
    layer = (18 * shape.width + 5 * shape.mlp) * size
    held = shape.width * size * shape.layers + layer if config.train.recompute else layer * shape.layers
    return config.train.micro_batch_tokens * held


def learning_memory(config: Config, shape: Shape, ranks: int) -> dict[str, int]:
    """Bytes on each GPU while the learner works and the engine sleeps."""
    return {
        "learner: weights, gradients, Adam's moments (fp32, its shard)": 16 * shape.parameters // ranks,
        "learner: embedding, head and two layers put together": 8 * shape.root_parameters + 10 * shape.layer_parameters,
        "learner: activations of a pass": pass_activations(config, shape),
        "learner: logits and their gradients": 2
        * 4
        * min(shape.vocabulary * config.train.micro_batch_tokens, CHUNK_LOGITS),
        "engine: asleep": COSTS.asleep,
        "judge": judge_memory(config),
        "contexts": COSTS.contexts,
    }


def sampling_memory(config: Config, shape: Shape, ranks: int, box: Box) -> dict[str, int]:
    """Bytes on each GPU while engine and judge take turns; the learner keeps weights and moments."""
    part = int(config.engine.memory_share * box.memory)
    cache = cache_memory(config, shape, box)
    return {
        "learner: weights and Adam's moments (fp32, its shard)": 12 * shape.parameters // ranks,
        "engine: weights (bf16, whole)": 2 * shape.parameters,
        "engine: keys and values": cache,
        "engine: buffers and graphs": max(COSTS.awake_beside, 0 if config.engine.kv_cache_gib else
                                          part - cache - 2 * shape.parameters),
        "judge": judge_memory(config),
        "contexts": COSTS.contexts,
    }  # fmt: skip


def cache_memory(config: Config, shape: Shape, box: Box) -> int:
    """Bytes of the engine's key-value cache: as set, or what its part of the GPU leaves."""
    if config.engine.kv_cache_gib:
        return int(config.engine.kv_cache_gib * GIB)
    part = int(config.engine.memory_share * box.memory)
    return max(0, part - 2 * shape.parameters - COSTS.awake_beside)


def faults(config: Config, shape: Shape, box: Box) -> list[str]:
    """What doesn't fit, by how much, and which settings would help; [] where all fits."""
    said = []
    row = 2 * shape.cached_values * config.model.context
    short = row - cache_memory(config, shape, box)
    if short > 0:
        needed = (2 * shape.parameters + COSTS.awake_beside + row) / box.memory
        said.append(
            f"the engine's cache is {short / GIB:.1f} GiB too small for one row of {config.model.context} tokens: "
            f"engine.memory_share must be {needed:.2f} at least"
        )
    for phase in ("learning", "sampling"):
        excess = _excess(config, shape, box, phase)
        if excess > 0:
            helps = "; ".join(_remedies(config, shape, box, phase)) or "more GPUs, or a smaller model"
            said.append(f"{phase} needs {excess / GIB:.1f} GiB a GPU more than there are: {helps}")
    return said


def largest_share(config: Config, shape: Shape, box: Box) -> float:
    """The largest engine.memory_share that fits beside learner and judge, in hundredths."""
    parts = sampling_memory(config, shape, box.gpus, box)
    others = sum(size for name, size in parts.items() if not name.startswith("engine"))
    return max(0, int(100 * (box.memory - others) / box.memory)) / 100


def _excess(config: Config, shape: Shape, box: Box, phase: str) -> int:
    parts = (
        learning_memory(config, shape, box.gpus)
        if phase == "learning"
        else sampling_memory(config, shape, box.gpus, box)
    )
    return sum(parts.values()) - box.memory


def _remedies(config: Config, shape: Shape, box: Box, phase: str) -> Iterator[str]:
    """Single settings that make a phase fit, or, where none does alone, how far each goes."""
    tried = []
    for text, changed in _changes(config, shape, box, phase):
        left = _excess(changed, shape, box, phase)
        tried.append((left, text))
    enough = [text for left, text in tried if left <= 0]
    if enough:
        yield f"any of {', '.join(enough)}" if len(enough) > 1 else enough[0]
    elif tried:
        yield "together " + ", ".join(f"{text} (leaves {left / GIB:.1f} GiB)" for left, text in tried)


def _changes(config: Config, shape: Shape, box: Box, phase: str) -> Iterator[tuple[str, Config]]:
    """Settings that take less memory in a phase than the present ones."""
    train, env, engine = config.train, config.env, config.engine
    if phase == "learning":
        if not train.recompute:
            yield "train.recompute=true", replace(config, train=replace(train, recompute=True))
        if train.micro_batch_tokens > config.model.context:
            tokens = config.model.context
            yield (
                f"train.micro_batch_tokens={tokens}",
                replace(config, train=replace(train, micro_batch_tokens=tokens)),
            )
    elif not engine.kv_cache_gib:
        share = largest_share(config, shape, box)
        if 0 < share < engine.memory_share:
            yield f"engine.memory_share={share:g}", replace(config, engine=replace(engine, memory_share=share))
    lanes = env.lanes or JUDGE_LANES
    fewer = max(FEWEST_LANES, lanes - math.ceil(_excess(config, shape, box, phase) / LANE_BYTES))
    if env.placement == "shared" and fewer < lanes:
        yield f"env.lanes={fewer}", replace(config, env=replace(env, lanes=fewer))


def seconds(config: Config, shape: Shape, box: Box, lengths: Lengths) -> dict[str, float]:
    """Seconds of a training step, by phase."""
    rollout, ranks = config.rollout, box.gpus
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    prompts = list(_prompts(config, lengths))
    answer = min(lengths.answer, rollout.max_new_tokens)
    cached, weights = 2 * shape.cached_values, 2 * shape.parameters
    room = cache_memory(config, shape, box) / cached
    mine = samples / ranks
    sampling = 0.0
    for prompt in prompts:
        together = max(1.0, min(mine, rollout.batch_size, room / (prompt + answer)))
        step = COSTS.decode_step_s + (weights + together * (prompt + answer / 2) * cached) / box.bandwidth
        # Behind the mean, the longest answer goes on alone to its limit: nobody is judged before it ends.
        alone = (rollout.max_new_tokens - answer) * (COSTS.decode_step_s + weights / box.bandwidth)
        sampling += mine / together * answer * step + alone
    lanes = (config.env.lanes or JUDGE_LANES) / JUDGE_LANES
    rows = [(prompt, prompt + answer) for prompt in prompts]
    counted = samples / ranks * sum(
        row * (6 * shape.parameters + 6 * shape.layers * shape.width * row) for _, row in rows
    )  # fmt: skip
    rate = COSTS.train_flops_recompute if config.train.recompute else COSTS.train_flops
    gathered = weights * (ranks - 1) / ranks / COSTS.gather_bandwidth
    return {
        "sampling": sampling,
        "judging": samples * len(prompts) / ranks / (COSTS.verdicts_per_s * min(1.0, lanes)),
        "log-probs before the update": counted / 3 / COSTS.train_flops,
        "update": counted / rate,
        "sleep, push of weights, wake": COSTS.sleep_and_wake_s
        + gathered
        + shape.parameters * COSTS.load_s_per_parameter,
    }


def _prompts(config: Config, lengths: Lengths) -> Iterator[int]:
    """Mean tokens of each turn's prompt, as long as another answer has room."""
    answer = min(lengths.answer, config.rollout.max_new_tokens)
    prompt = lengths.first_prompt
    for _ in range(config.rollout.turns):
        if prompt + least_answer(config) > config.model.context:
            return
        yield prompt
        prompt += answer + lengths.feedback


def describe(config: Config, shape: Shape, box: Box) -> list[str]:
    """Lines for a person: memory by phase and part, what doesn't fit, seconds a phase."""
    lines = [f"On {box.name}, all {box.gpus} learning, sampling and judging in turn; by arithmetic, not measured:"]
    for title, parts in (
        ("while learning", learning_memory(config, shape, box.gpus)),
        ("while sampling and judging", sampling_memory(config, shape, box.gpus, box)),
    ):
        total = sum(parts.values())
        lines.append(f"  GiB a GPU {title}: {total / GIB:.1f} of {box.memory / GIB:.1f}")
        lines += [f"    {size / GIB:6.1f}  {name}" for name, size in parts.items()]
    rows = cache_memory(config, shape, box) / (2 * shape.cached_values * config.model.context)
    lines.append(
        f"  the engine's cache holds {rows:.1f} whole rows of {config.model.context} tokens; engine.memory_share up to "
        f"{largest_share(config, shape, box):.2f} fits"
    )
    found = faults(config, shape, box)
    lines += [f"  DOES NOT FIT: {fault}" for fault in found]
    for answer in dict.fromkeys((min(2048, config.rollout.max_new_tokens), config.rollout.max_new_tokens)):
        lengths = Lengths(answer)
        phases = seconds(config, shape, box, lengths)
        turns = len(list(_prompts(config, lengths)))
        lines.append(
            f"  seconds a step if answers have {answer} tokens on average (room for {turns} of {config.rollout.turns} "
            f"turns): {sum(phases.values()):,.0f}"
        )
        lines += [f"    {value:7.1f}  {name}" for name, value in phases.items()]
    return lines
