"""What a step of a recipe takes on a box of GPUs, in words: GiB a GPU by part, seconds a phase, and other placements
beside it. Runs anywhere. A plan to choose settings by, from unit costs (rl/boxes.py), not a measurement."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from rl.boxes import GIB, Box, Lengths, Shape, prompts_of
from rl.config import Config, Placement
from rl.memory_plan import cache_memory, faults, host_memory, largest_share, phases
from rl.roles import division
from rl.time_plan import seconds, together


def describe(config: Config, shape: Shape, box: Box) -> list[str]:
    """Lines for a person: memory by phase and part, what doesn't fit, seconds a phase, other placements."""
    lines = [f"On {box.name}, {_who(config, box)}; by arithmetic, not measured:"]
    found = faults(config, shape, box)
    if division(config, box.gpus).learn < 1:
        return lines + [f"  DOES NOT FIT: {fault}" for fault in found]
    for phase, parts in phases(config, shape, box).items():
        lines.append(f"  GiB a GPU while {phase}: {sum(parts.values()) / GIB:.1f} of {box.memory / GIB:.1f}")
        lines += [f"    {size / GIB:6.1f}  {name}" for name, size in parts.items() if size]
    host = host_memory(config, shape, box.gpus)
    lines.append(f"  GiB of the host: {sum(host.values()) / GIB:.1f}")
    lines += [f"    {size / GIB:6.1f}  {name}" for name, size in host.items() if size]
    rows = cache_memory(config, shape, box) / (2 * shape.cached_values * config.model.context)
    lines.append(
        f"  the engine's cache holds {rows:.1f} whole rows of {config.model.context} tokens; engine.memory_share up to "
        f"{largest_share(config, shape, box):.2f} fits"
    )
    lines += [f"  DOES NOT FIT: {fault}" for fault in found]
    for answer in dict.fromkeys((min(2048, config.rollout.max_new_tokens), config.rollout.max_new_tokens)):
        lengths = Lengths(answer)
        taken = seconds(config, shape, box, lengths)
        turns = len(list(prompts_of(config, lengths)))
        lines.append(
            f"  seconds a step if answers have {answer} tokens on average (room for {turns} of {config.rollout.turns} "
            f"turns): {together(config, taken):,.0f}"
        )
        lines += [f"    {value:7.1f}  {name}" for name, value in taken.items()]
        lines += [f"  {line}" for line in _compared(config, shape, box, lengths)]
    return lines


def brief(config: Config, shape: Shape, box: Box) -> list[str]:
    """The lines of `describe` without the parts that totals are made of."""
    lines = describe(config, shape, box)
    return [line for line in lines if not line.startswith("    ") or " with placement." in line]


def _who(config: Config, box: Box) -> str:
    gpus = division(config, box.gpus)
    if config.placement.kind == "split":
        judges = f", {gpus.judge} judge" if config.env.placement == "apart" else " and judge"
        return f"{gpus.learn} learn while {gpus.sample} sample{judges}"
    if config.env.placement == "apart":
        return f"{gpus.learn} learn and sample in turn, {gpus.judge} judge"
    return f"all {box.gpus} learning, sampling and judging in turn"


def _compared(config: Config, shape: Shape, box: Box, lengths: Lengths) -> Iterator[str]:
    """The quickest placement of each kind that fits, whatever the recipe's own is."""
    best: dict[tuple[str, str], tuple[float, str]] = {}
    for settings, changed in placements(config, shape, box):
        if not faults(changed, shape, box):
            took = together(changed, seconds(changed, shape, box, lengths))
            kind = changed.placement.kind, changed.env.placement
            best[kind] = min(best.get(kind, (math.inf, "")), (took, settings))
    for took, settings in sorted(best.values()):
        yield f"{took:9,.0f} with {settings}"


def placements(config: Config, shape: Shape, box: Box) -> Iterator[tuple[str, Config]]:
    """(settings, recipe with them) of every way to divide the box: an engine decodes its whole share of a step at once
    and has all memory that its GPU has left; a judge alone on its GPU has all lanes."""
    one = replace(config, env=replace(config.env, placement="shared"))
    colocated = replace(config.placement, kind="colocated", rollout_gpus=1, judge_gpus=1)
    yield _with(one, shape, box, colocated)
    if not config.train.offload_optimizer:  # what the moments leave is the engine's cache
        settings, changed = _with(
            replace(one, train=replace(config.train, offload_optimizer=True)), shape, box, colocated
        )
        yield f"{settings} train.offload_optimizer=true", changed
    for sample in range(1, box.gpus):
        divided = replace(config.placement, kind="split", rollout_gpus=sample)
        yield _with(one, shape, box, divided)
        apart = replace(config, env=replace(config.env, placement="apart", lanes=0))
        for judge in range(1, min(3, box.gpus - sample)):
            yield _with(apart, shape, box, replace(divided, judge_gpus=judge))


def _with(config: Config, shape: Shape, box: Box, divided: Placement) -> tuple[str, Config]:
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    config = replace(config, placement=divided)
    batch = math.ceil(samples / division(config, box.gpus).sample)
    config = replace(config, rollout=replace(config.rollout, batch_size=batch))
    share = largest_share(config, shape, box)
    config = replace(config, engine=replace(config.engine, memory_share=share))
    settings = f"placement.kind={divided.kind}"
    if divided.kind == "split":
        settings += f" placement.rollout_gpus={divided.rollout_gpus}"
    if config.env.placement == "apart":
        settings += f" env.placement=apart placement.judge_gpus={divided.judge_gpus} env.lanes=0"
    return f"{settings} rollout.batch_size={batch} engine.memory_share={share:g}", config
