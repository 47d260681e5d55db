"""The plan of a run in words: how much of what, on which device, and about how much memory it takes. Runs in
scripts.prepare for a dry run; reads settings and a model folder's config.json only.

`python -m scripts.plan RECIPE [--set a.b=c ...] [--brief]` prints it alone, on any machine. Recipes that sample with
vLLM are planned for boxes of eight GPUs, whatever is here (rl/placement.py).
"""

from __future__ import annotations

import argparse
import math
import sys

from env.pool import visible_gpus
from rl import memory_plan
from rl import placement as on_boxes
from rl.boxes import BOXES, GIB, Box, Shape, shape_of
from rl.config import Config, ConfigError, load_recipe
from rl.logprobs import CHUNK_LOGITS
from rl.rollout import policy_gpus
from scripts import machine
from scripts.machine import Gpu

# Contexts of an evaluator and its workers, and the buffers of one problem; roughly.
JUDGE_BYTES = 8 * GIB


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
        "weights, gradients and Adam's moments in fp32": _state(config, shape, ranks),
        "weights to compute and sample with": 2 * count if config.train.autocast else 0,
        "activations of a pass": tokens * held,
        "logits and their gradients": 2 * 4 * min(shape.vocabulary * tokens, CHUNK_LOGITS),
        "keys and values of the engine": config.rollout.batch_size * config.model.context * cached,
    }


def _state(config: Config, shape: Shape, ranks: int) -> int:
    """Bytes of the learner's own state on a device."""
    offloads = config.train.offload_optimizer and config.device == "cuda"
    return (8 if offloads else 16) * shape.parameters // ranks


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
    ]
    if config.engine.name == "vllm" and config.device == "cuda":
        return lines + [line for box in (*here(found), *BOXES) for line in on_boxes.describe(config, shape, box)]
    lines += [
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


def here(found: list[Gpu]) -> list[Box]:
    """This machine as a box, where it has GPUs of one kind; their bandwidth is taken for that of an H200."""
    if len({(gpu.name, gpu.total) for gpu in found}) != 1 or not found[0].total:
        return []
    name = f"this machine's {len(found)} x {found[0].name} (its bandwidth taken for an H200's)"
    return [Box(name, len(found), found[0].total, BOXES[-1].bandwidth)]


def placement(config: Config, found: list[Gpu], ranks: int) -> list[str]:
    """Who works where, one line a device."""
    if config.device == "cpu":
        split = config.placement.kind == "split"
        return [
            "CPU: the policy and the judge (Triton's interpreter, modelled times)"
            + (", the learner in a process of its own" if split else "")
        ]
    names = [f"GPU {gpu.index} ({gpu.name})" for gpu in found] or ["a GPU (none is seen here)"]
    if config.placement.kind == "split":
        return _split(config, names, ranks)
    if config.env.placement == "apart":
        return [f"{name}: {'the policy' if i < ranks else 'the judge'}" for i, name in enumerate(names)]
    judges = config.env.slots or len(names)
    roles = [
        [*(["the policy"] if i < ranks else []), *(["the judge"] if i < judges else [])] for i in range(len(names))
    ]
    return [f"{name}: {', then '.join(role) or 'nothing'}" for name, role in zip(names, roles)]


def _split(config: Config, names: list[str], ranks: int) -> list[str]:
    gpus = len(names)
    sample, judge = config.placement.rollout_gpus, config.placement.judge_gpus
    if config.env.placement == "shared":
        roles = ["the learner"] * ranks + ["sampling, then the judge"] * sample
    else:
        roles = ["the learner"] * ranks + ["sampling"] * sample + ["the judge"] * judge
    return [f"{name}: {role}" for name, role in zip(names, roles + ["nothing"] * (gpus - len(roles)))]


def faults(config: Config, found: list[Gpu]) -> list[str]:
    """What can't fit, whatever is lowered: the learner's own state on the smallest GPU."""
    totals = [gpu.total for gpu in found if gpu.total]
    if not totals:
        return []
    shape, ranks = shape_of(config), policy_gpus()
    state = _state(config, shape, ranks)
    if state <= min(totals):
        return []
    needed = math.ceil(_state(config, shape, 1) / (0.8 * min(totals)))
    return [
        f"{shape.parameters / 1e9:.1f} G parameters take {state / GIB:.0f} GiB a GPU (weights, gradients, Adam's "
        f"moments in fp32) and the smallest has {min(totals) / GIB:.0f}: start the stages under torchrun with at least "
        f"{needed} ranks, or take a smaller model"
        + ("" if config.train.offload_optimizer else ", or halve it with train.offload_optimizer=true")
    ]


def doubts(config: Config, found: list[Gpu], host: int) -> list[str]:
    """What won't fit on this machine by arithmetic: said, not refused, since it estimates from above. host: bytes of
    its memory."""
    if config.engine.name != "vllm" or not found:
        return []
    shape = shape_of(config)
    said = [f"by the plan, {fault}" for box in here(found) for fault in memory_plan.faults(config, shape, box)]
    parts = memory_plan.host_memory(config, shape, len(found))
    if sum(parts.values()) > host:
        what = ", ".join(f"{size / GIB:.0f} {name}" for name, size in parts.items() if size)
        said.append(
            f"by the plan, up to {sum(parts.values()) / GIB:.0f} GiB of the host's memory are taken ({what}) and it "
            f"has {host / GIB:.0f}: start fewer ranks (RANKS=N), or use a host with more"
        )
    return said


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts.plan", description="The plan of a recipe; nothing is run or written."
    )
    parser.add_argument("recipe", help="a name in rl/recipes/ or a .toml file")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--brief", action="store_true", help="boxes of eight GPUs alone, totals without their parts")
    options = parser.parse_args(arguments)
    try:
        config = load_recipe(options.recipe, options.overrides)
        if options.brief:
            print(*(line for box in BOXES for line in on_boxes.brief(config, shape_of(config), box)), sep="\n")
            return 0
        lines = describe(config, machine.gpus(visible_gpus()) if config.device == "cuda" else [])
    except ConfigError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
