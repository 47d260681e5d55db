"""The plan of a run in words: how much of what, on which device, and about how much memory it takes. Runs in
scripts.prepare for a dry run; reads settings and a model folder's config.json only.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from rl.config import Config
from rl.logprobs import CHUNK_LOGITS
from rl.rollout import policy_gpus
from scripts.machine import Gpu

GIB = 2**30
# Contexts of an evaluator and its workers, and the buffers of one problem; roughly.
JUDGE_BYTES = 8 * GIB


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
    def parameters(self) -> int:
        attention = 2 * self.width * self.head_dim * (self.heads + self.kv_heads)
        layer = attention + 3 * self.width * self.mlp + 2 * self.width
        return self.layers * layer + self.vocabulary * self.width * (1 if self.tied else 2)


def shape_of(config: Config) -> Shape:
    """The policy's sizes: those of the settings, or of the folder that they name."""
    own = config.model
    if not own.path:
        head = own.width // own.heads
        return Shape(own.layers, own.width, own.mlp, own.heads, own.kv_heads, head, own.vocab_size, True)
    data = json.loads((Path(own.path) / "config.json").read_text(encoding="utf-8"))
    width, heads = data["hidden_size"], data["num_attention_heads"]
    return Shape(
        layers=data["num_hidden_layers"],
        width=width,
        mlp=data["intermediate_size"],
        heads=heads,
        kv_heads=data.get("num_key_value_heads") or heads,
        head_dim=data.get("head_dim") or width // heads,
        vocabulary=data["vocab_size"],
        tied=bool(data.get("tie_word_embeddings")),
    )


def memory(config: Config, shape: Shape, ranks: int = 1) -> dict[str, int]:
    """Bytes on one of the policy's devices, by what they are for; estimates from above.

    Activations are measured ones: a Qwen3-1.7B shape in bf16 held 135 kB a token and layer, 2 * (18 * width + 5 * mlp).
    """
    count, size = shape.parameters, 2 if config.train.autocast else 4
    tokens = config.train.micro_batch_tokens
    layer = (18 * shape.width + 5 * shape.mlp) * size
    held = shape.width * size * shape.layers + layer if config.train.recompute else layer * shape.layers
    cached = 2 * shape.kv_heads * shape.head_dim * shape.layers * size
    return {
        "weights, gradients and Adam's moments in fp32": 16 * count // ranks,
        "weights to compute and sample with": 2 * count if config.train.autocast else 0,
        "activations of a pass": tokens * held,
        "logits and their gradients": 2 * 4 * min(shape.vocabulary * tokens, CHUNK_LOGITS),
        "keys and values of the engine": config.rollout.batch_size * config.model.context * cached,
    }


def describe(config: Config, found: list[Gpu]) -> list[str]:
    """Lines for a person: amounts by stage, placement, memory."""
    collect, rollout, evaluation, train = config.collect, config.rollout, config.eval, config.train
    shape, ranks = shape_of(config), policy_gpus()
    answers = rollout.prompts_per_step * rollout.samples_per_prompt * rollout.turns
    asked = config.problems.heldout * evaluation.samples * evaluation.turns
    teacher = "the script" if collect.teacher == "script" else f"{config.server.model} at {config.server.url}"
    lines = [
        "Plan:",
        f"  problems    {config.problems.train} to train on, {config.problems.heldout} held out, from "
        f"{config.problems.path or 'the generator'}",
        f"  cold start  {collect.trajectories} trajectories of {collect.turns} turns, answered by {teacher}",
        f"  SFT         {config.sft.epochs} epochs of them",
        f"  RL          {train.steps} steps of {answers} answers ({rollout.prompts_per_step} problems x "
        f"{rollout.samples_per_prompt} samples x {rollout.turns} turns); a checkpoint every {train.checkpoint_every}",
        f"  evaluation  {asked} answers before and after ({evaluation.samples} samples a problem)"
        + (f", and every {config.eval.every} steps of RL" if config.eval.every else ""),
        "Placement:",
        *(f"  {line}" for line in placement(config, found, ranks)),
        f"Memory {'a GPU' if config.device == 'cuda' else 'of the policy'}, about, for {shape.parameters / 1e6:,.1f} M "
        "parameters:",
    ]
    parts = memory(config, shape, ranks)
    shared = config.device == "cuda" and config.env.placement == "shared"
    if shared:
        parts["the judge (contexts, buffers), when its turn comes"] = JUDGE_BYTES
    lines += [f"  {size / GIB:7.2f} GiB  {what}" for what, size in parts.items() if size]
    has = f" of {found[0].total / GIB:.0f}" if found and found[0].total else ""
    return [*lines, f"  {sum(parts.values()) / GIB:7.2f} GiB{has}  together"]


def placement(config: Config, found: list[Gpu], ranks: int) -> list[str]:
    """Who works where, one line a device."""
    if config.device == "cpu":
        return ["CPU: the policy and the judge (Triton's interpreter, modelled times)"]
    names = [f"GPU {gpu.index} ({gpu.name})" for gpu in found] or ["a GPU (none is seen here)"]
    if config.env.placement == "apart":
        return [f"{name}: {'the policy' if i < ranks else 'the judge'}" for i, name in enumerate(names)]
    judges = config.env.slots or len(names)
    roles = [
        [*(["the policy"] if i < ranks else []), *(["the judge"] if i < judges else [])] for i in range(len(names))
    ]
    return [f"{name}: {', then '.join(role) or 'nothing'}" for name, role in zip(names, roles)]


def faults(config: Config, found: list[Gpu]) -> list[str]:
    """What can't fit, whatever is lowered: the learner's own state on the smallest GPU."""
    totals = [gpu.total for gpu in found if gpu.total]
    if not totals:
        return []
    shape, ranks = shape_of(config), policy_gpus()
    state = 16 * shape.parameters // ranks
    if state <= min(totals):
        return []
    needed = math.ceil(16 * shape.parameters / (0.8 * min(totals)))
    return [
        f"{shape.parameters / 1e9:.1f} G parameters take {state / GIB:.0f} GiB a GPU (weights, gradients, Adam's "
        f"moments in fp32) and the smallest has {min(totals) / GIB:.0f}: start the stages under torchrun with at least "
        f"{needed} ranks, or take a smaller model"
    ]
