"""What a rollout samples, and when: read off the settings. Runs in the driver.

When a sample takes its next turn is the plan's `schedule`:

| schedule | where | |
| --- | --- | --- |
| turns | CPU | all samples take a turn together, in sample order: batches, and so every bit, are the same from run to run. An answer goes to the judge the moment it is finished, while the engine still writes the others |
| phases | judge and policy on one GPU | all answers of a turn, then all verdicts: decoding would be in every measured time |
| free | judge on GPUs of its own, or the policy on a server | a sample's next turn starts as soon as its own verdict is in |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from env.records import Problem
from rl import seeding
from rl.config import Config, ConfigError, Reward
from rl.engines.base import Sampling
from rl.prompts import Chat
from rl.wording import Wording


@dataclass(frozen=True)
class Plan:
    """What to sample: `samples` a problem, `turns` a sample, worded by `wording`, rewarded by `reward`.

    seed: every draw comes from (seed, step, problem, sample, turn). step and policy_version are noted in the records.
    min_new_tokens: a turn begins only where so many tokens fit into `sampling.context` behind its prompt; 0: a whole
    answer of `sampling.max_new_tokens`.
    """

    samples: int
    turns: int
    sampling: Sampling
    reward: Reward
    wording: Wording
    seed: int
    step: int = 0
    policy_version: int = 0
    min_new_tokens: int = 0
    schedule: Literal["turns", "phases", "free"] = "turns"

    @property
    def least_answer(self) -> int:
        """Tokens that must fit into the context behind a prompt for a turn to begin."""
        return _least(self.min_new_tokens, self.sampling.max_new_tokens)


def pick_problems(problems: Sequence[Problem], count: int, seed: int, step: int) -> list[Problem]:
    """The problems of a step (from 1): an epoch is a seeded permutation cut into batches of `count`.

    What is left over at an epoch's end waits for the next permutation, so a batch never holds a problem twice. The step
    alone is the data cursor: nothing else has to be saved. Raises ConfigError where there are fewer than `count`.
    """
    if len(problems) < count:
        raise ConfigError(f"rollout.prompts_per_step = {count}, but there are only {len(problems)} training problems")
    epoch, batch = divmod(step - 1, len(problems) // count)
    order = list(range(len(problems)))
    seeding.rng(seed, "problems", epoch).shuffle(order)
    return [problems[i] for i in order[batch * count : (batch + 1) * count]]


def schedule_of(config: Config) -> Literal["turns", "phases", "free"]:
    """When samples of a policy in this process take their turns."""
    if config.device == "cpu":
        return "turns"
    return "free" if config.env.placement == "apart" else "phases"


def least_answer(config: Config) -> int:
    """Plan.least_answer of the plans that these settings make."""
    return _least(config.rollout.min_new_tokens, config.rollout.max_new_tokens)


def _least(least: int, most: int) -> int:
    return min(least or most, most)


def short_context(prompts: Sequence[int], config: Config) -> str | None:
    """What is wrong with `model.context`, where it has no room for any of these first prompts (their tokens) and an
    answer; None where it has for one at least."""
    shortest, needed = min(prompts), least_answer(config)
    if shortest + needed <= config.model.context:
        return None
    key = "rollout.min_new_tokens" if config.rollout.min_new_tokens else "rollout.max_new_tokens"
    return (
        f"model.context = {config.model.context} is too small: the shortest first prompt has {shortest} tokens, and a "
        f"turn begins only where {needed} more fit ({key}), so nothing would ever be asked; set it to "
        f"{shortest + needed} at least, or ask for shorter answers"
    )


def training_plan(config: Config, chat: Chat, step: int, policy_version: int, vocabulary: int = 0) -> Plan:
    """The plan of a training step. vocabulary: the policy's, 0 where it isn't known."""
    settings = config.rollout
    sampling = Sampling(
        settings.max_new_tokens, settings.temperature, settings.top_p, chat.stop_ids, config.model.context, vocabulary
    )
    return Plan(
        samples=settings.samples_per_prompt,
        turns=settings.turns,
        sampling=sampling,
        reward=config.reward,
        wording=Wording.load(config.prompts),
        seed=config.seed,
        step=step,
        policy_version=policy_version,
        min_new_tokens=settings.min_new_tokens,
        schedule=schedule_of(config),
    )


def evaluation_plan(config: Config, stop_ids: tuple[int, ...], samples: int, policy_version: int = 0) -> Plan:
    """The plan of an evaluation. Its seed knows neither step nor stage: policies are compared under the same draws."""
    settings = config.eval
    return Plan(
        samples=samples,
        turns=settings.turns,
        sampling=Sampling(
            config.rollout.max_new_tokens, settings.temperature, settings.top_p, stop_ids, config.model.context
        ),
        reward=config.reward,
        wording=Wording.load(config.prompts),
        seed=seeding.derive(config.seed, "heldout"),
        policy_version=policy_version,
        min_new_tokens=config.rollout.min_new_tokens,
        schedule=schedule_of(config),
    )
