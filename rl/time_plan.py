"""Seconds that a step of a recipe takes on a box, by phase, for both placements. Runs anywhere: arithmetic from unit
costs (rl/boxes.py), most of them measured on one H200, scaled to the model's size and the box."""

from __future__ import annotations

from rl.boxes import COSTS, Box, Lengths, Shape, prompts_of
from rl.config import Config
from rl.memory_plan import JUDGE_LANES, cache_memory
from rl.roles import division


def seconds(config: Config, shape: Shape, box: Box, lengths: Lengths) -> dict[str, float]:
    """Seconds of a training step, by phase; `together` says what they add up to."""
    gpus = division(config, box.gpus)
    rollout = config.rollout
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    prompts = list(prompts_of(config, lengths))
    answer = min(lengths.answer, rollout.max_new_tokens)
    lanes = (config.env.lanes or JUDGE_LANES) / JUDGE_LANES
    counted = samples / gpus.learn * sum(
        row * (6 * shape.parameters + 6 * shape.layers * shape.width * row)
        for row in (prompt + answer for prompt in prompts)
    )  # fmt: skip
    rate = COSTS.train_flops_recompute if config.train.recompute else COSTS.train_flops
    moments = 16 * shape.parameters / gpus.learn / COSTS.offload_bandwidth if config.train.offload_optimizer else 0.0
    return {
        "sampling": _sampling(config, shape, box, prompts, answer),
        "judging": samples * len(prompts) / gpus.judge / (COSTS.verdicts_per_s * min(1.0, lanes)),
        "log-probs before the update": counted / 3 / COSTS.train_flops,
        "update": counted / rate + moments,
        **_push(config, shape, gpus.learn),
    }


def _sampling(config: Config, shape: Shape, box: Box, prompts: list[int], answer: int) -> float:
    """Seconds of decoding the answers (mean tokens) to all prompts of a step."""
    rollout = config.rollout
    cached, weights = 2 * shape.cached_values, 2 * shape.parameters
    room = cache_memory(config, shape, box) / cached
    mine = rollout.prompts_per_step * rollout.samples_per_prompt / division(config, box.gpus).sample
    total = 0.0
    for prompt in prompts:
        together = max(1.0, min(mine, rollout.batch_size, room / (prompt + answer)))
        step = COSTS.decode_step_s + (weights + together * (prompt + answer / 2) * cached) / box.bandwidth
        # Behind the mean, the longest answer goes on alone to its limit: nobody is judged before it ends.
        alone = (rollout.max_new_tokens - answer) * (COSTS.decode_step_s + weights / box.bandwidth)
        total += mine / together * answer * step + alone
    return total


def _push(config: Config, shape: Shape, ranks: int) -> dict[str, float]:
    weights = 2 * shape.parameters
    gathered = weights * (ranks - 1) / ranks / COSTS.gather_bandwidth
    load = shape.parameters * COSTS.load_s_per_parameter
    if config.placement.kind == "colocated":
        return {"sleep, push of weights, wake": COSTS.sleep_and_wake_s + gathered + load}
    through_host = weights / COSTS.host_write + weights / COSTS.host_read
    return {"push of weights, through shared memory": gathered + through_host + load}


def together(config: Config, phases: dict[str, float]) -> float:
    """Seconds of a step, from those of its phases (`seconds`, whose last one is the push). Colocated: their sum. Split:
    max(sampling + judging, learning) + push; where the judge has GPUs of its own, an answer is judged while others are
    sampled: the longer of the two."""
    sampling, judging, *learning, push = phases.values()
    if config.placement.kind == "colocated" and config.env.placement == "shared":
        return sum(phases.values())
    rollouts = max(sampling, judging) if config.env.placement == "apart" else sampling + judging
    if config.placement.kind == "colocated" or not config.placement.staleness:
        return rollouts + sum(learning) + push
    return max(rollouts, sum(learning)) + push
