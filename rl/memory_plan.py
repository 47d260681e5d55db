"""GiB a GPU that a step of a recipe takes on a box, by phase and part, for both placements; what doesn't fit, by how
much, and what would help. Runs anywhere; estimated from above, by arithmetic.

Colocated, every GPU learns, samples and judges in turn. Split, a GPU does one of them, and a phase is a kind of GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from rl.boxes import COSTS, GIB, Box, Shape
from rl.config import Config
from rl.logprobs import CHUNK_LOGITS
from rl.roles import division

# Lanes of a judge where env.lanes is 0 (env/pool.py), and what one takes of a GPU: 38.5 GiB were measured with 24.
JUDGE_LANES = 24
LANE_BYTES = int(1.6 * GIB)
FEWEST_LANES = 4  # with less, judging takes longer than all the rest


def phases(config: Config, shape: Shape, box: Box) -> dict[str, dict[str, int]]:
    """Bytes on a GPU by part, of each phase: starting, learning, sampling, and judging where GPUs do that alone."""
    ranks = division(config, box.gpus).learn
    found = {
        "starting": starting_memory(shape, ranks),
        "learning": learning_memory(config, shape, ranks),
        "sampling": sampling_memory(config, shape, ranks, box),
    }
    if config.env.placement == "apart":
        found["judging"] = {"judge": _lanes(config), "contexts": COSTS.contexts}
    return found


def starting_memory(shape: Shape, ranks: int) -> dict[str, int]:
    """Bytes on a GPU of the learner before its model is sharded: every rank loads it whole."""
    return {
        "learner: weights (fp32, whole)": 4 * shape.parameters,
        "learner: its shard": 4 * shape.parameters // ranks if ranks > 1 else 0,
        "contexts": COSTS.contexts,
    }


def host_memory(config: Config, shape: Shape, gpus: int) -> dict[str, int]:
    """Bytes of the host, by what they are for; the judge's workers come on top."""
    split, ranks = config.placement.kind == "split", division(config, gpus).learn
    return {
        "at the start: the whole model in fp32, a rank": 4 * shape.parameters * ranks,
        "weights on their way to the rollout processes (bf16, two versions)": 4 * shape.parameters * split,
        "Adam's moments": 8 * shape.parameters * config.train.offload_optimizer,
    }


def _lanes(config: Config) -> int:
    return (config.env.lanes or JUDGE_LANES) * LANE_BYTES


def judge_memory(config: Config) -> int:
    """Bytes of a judge on the GPU of an engine."""
    return _lanes(config) if config.env.placement == "shared" else 0


def pass_activations(config: Config, shape: Shape) -> int:
    """Bytes that the forward pass of a micro-batch leaves for the backward pass.

    Measured: a Qwen3-1.7B shape in bf16 held 135 kB a token and layer, 2 * (18 * width + 5 * mlp).
    """
    size = 2 if config.train.autocast else 4
    layer = (18 * shape.width + 5 * shape.mlp) * size
    held = shape.width * size * shape.layers + layer if config.train.recompute else layer * shape.layers
    return config.train.micro_batch_tokens * held


def _moments(config: Config, shape: Shape, ranks: int) -> int:
    """Bytes of Adam's moments on a GPU: its shard, or, where the host keeps them, one parameter's."""
    return 8 * (shape.largest if config.train.offload_optimizer else shape.parameters) // ranks


def learning_memory(config: Config, shape: Shape, ranks: int) -> dict[str, int]:
    """Bytes on each GPU while the learner works and an engine there sleeps."""
    colocated = config.placement.kind == "colocated"
    logits = 2 * 4 * min(shape.vocabulary * config.train.micro_batch_tokens, CHUNK_LOGITS)
    return {
        "learner: weights and gradients (fp32, its shard)": 8 * shape.parameters // ranks,
        "learner: Adam's moments (fp32, its shard)": _moments(config, shape, ranks),
        "learner: embedding, head and two layers put together": 8 * shape.root_parameters + 10 * shape.layer_parameters,
        "learner: activations of a pass": pass_activations(config, shape),
        "learner: logits and their gradients": logits,
        "engine: asleep": COSTS.asleep * colocated,
        "judge": judge_memory(config) * colocated,
        "contexts": COSTS.contexts,
    }


def sampling_memory(config: Config, shape: Shape, ranks: int, box: Box) -> dict[str, int]:
    """Bytes on each GPU that samples. Colocated, engine and judge take turns there, and the learner keeps weights and
    moments."""
    part = int(config.engine.memory_share * box.memory)
    cache, weights = cache_memory(config, shape, box), 2 * shape.parameters
    colocated = config.placement.kind == "colocated"
    beside = 0 if config.engine.kv_cache_gib else part - cache - weights
    moments = 0 if config.train.offload_optimizer else 8 * shape.parameters // ranks
    return {
        "learner: weights (fp32, its shard)": 4 * shape.parameters // ranks * colocated,
        "learner: Adam's moments (fp32, its shard)": moments * colocated,
        "engine: weights (bf16, whole)": weights,
        "engine: keys and values": cache,
        "engine: buffers and graphs": max(COSTS.awake_beside, beside),
        "judge": judge_memory(config),
        "contexts": COSTS.contexts,
    }


def cache_memory(config: Config, shape: Shape, box: Box) -> int:
    """Bytes of the engine's key-value cache: as set, or what its part of the GPU leaves."""
    if config.engine.kv_cache_gib:
        return int(config.engine.kv_cache_gib * GIB)
    part = int(config.engine.memory_share * box.memory)
    return max(0, part - 2 * shape.parameters - COSTS.awake_beside)


def faults(config: Config, shape: Shape, box: Box) -> list[str]:
    """What doesn't fit, by how much, and which settings would help; [] where all fits."""
    if division(config, box.gpus).learn < 1:
        return [f"no GPU of {box.gpus} is left to learn: lower placement.rollout_gpus or placement.judge_gpus"]
    said = []
    row = 2 * shape.cached_values * config.model.context
    short = row - cache_memory(config, shape, box)
    if short > 0:
        needed = (2 * shape.parameters + COSTS.awake_beside + row) / box.memory
        said.append(
            f"the engine's cache is {short / GIB:.1f} GiB too small for one row of {config.model.context} tokens: "
            f"engine.memory_share must be {needed:.2f} at least"
        )
    for phase in phases(config, shape, box):
        excess = _excess(config, shape, box, phase)
        if excess > 0:
            helps = "; ".join(_remedies(config, shape, box, phase)) or "more GPUs, or a smaller model"
            if phase == "starting":
                helps = "GPUs with more memory, or a smaller model: each rank loads it whole before it is sharded"
            said.append(f"{phase} needs {excess / GIB:.1f} GiB a GPU more than there are: {helps}")
    return said


def largest_share(config: Config, shape: Shape, box: Box) -> float:
    """The largest engine.memory_share that fits beside what else its GPU holds, in hundredths, up to 0.95."""
    parts = phases(config, shape, box)["sampling"]
    others = sum(size for name, size in parts.items() if not name.startswith("engine"))
    return min(0.95, max(0, int(100 * (box.memory - others) / box.memory)) / 100)


def _excess(config: Config, shape: Shape, box: Box, phase: str) -> int:
    return sum(phases(config, shape, box)[phase].values()) - box.memory


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
    colocated = config.placement.kind == "colocated"
    if phase == "learning":
        if not train.recompute:
            yield "train.recompute=true", replace(config, train=replace(train, recompute=True))
        if train.micro_batch_tokens > config.model.context:
            tokens = config.model.context
            yield (
                f"train.micro_batch_tokens={tokens}",
                replace(config, train=replace(train, micro_batch_tokens=tokens)),
            )
    elif phase == "sampling" and not engine.kv_cache_gib:
        share = largest_share(config, shape, box)
        if 0 < share < engine.memory_share:
            yield f"engine.memory_share={share:g}", replace(config, engine=replace(engine, memory_share=share))
    if not train.offload_optimizer and (phase == "learning" or (phase == "sampling" and colocated)):
        yield "train.offload_optimizer=true", replace(config, train=replace(train, offload_optimizer=True))
    lanes = env.lanes or JUDGE_LANES
    fewer = max(FEWEST_LANES, lanes - math.ceil(_excess(config, shape, box, phase) / LANE_BYTES))
    judges = any(part == "judge" and size for part, size in phases(config, shape, box)[phase].items())
    if judges and fewer < lanes:
        yield f"env.lanes={fewer}", replace(config, env=replace(env, lanes=fewer))
