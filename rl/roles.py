"""How many GPUs learn, sample and judge, and with placement.kind = split which. Runs before anything takes a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl.config import Config, ConfigError


@dataclass(frozen=True)
class Roles:
    """GPUs as CUDA_VISIBLE_DEVICES names them; on the CPU there are none. The judge's may be those that sample."""

    learn: list[str]
    sample: list[str]
    judge: list[str]


@dataclass(frozen=True)
class Division:
    """GPUs by what they do. Colocated, they learn and sample in turn, and judge as well unless that happens apart."""

    learn: int
    sample: int
    judge: int


def division(config: Config, gpus: int) -> Division:
    """How a recipe divides so many GPUs, for either placement; `learn` is below 1 where there are too few."""
    apart, split = config.env.placement == "apart", config.placement
    if split.kind == "split":
        judge = split.judge_gpus if apart else split.rollout_gpus
        return Division(gpus - split.rollout_gpus - (judge if apart else 0), split.rollout_gpus, judge)
    learn = gpus // 2 if apart and gpus > 1 else gpus
    return Division(learn, learn, gpus - learn if apart else gpus)


def roles(config: Config, gpus: Sequence[str], ranks: int) -> Roles:
    """The first `ranks` GPUs learn, the next sample, the ones behind judge. Raises ConfigError where there are too few
    or, on a GPU, none."""
    if config.device == "cpu":
        return Roles([], [], [])
    sampling = config.placement.rollout_gpus
    judging = config.placement.judge_gpus if config.env.placement == "apart" else 0
    if ranks + sampling + judging > len(gpus):
        others = "placement.rollout_gpus" + (" or placement.judge_gpus" if judging else "")
        fewer = f"lower {others}, " if sampling + judging > 1 + bool(judging) else ""
        fewer += "start fewer ranks (RANKS=N), " if ranks > 1 else ""
        raise ConfigError(
            f"placement.kind = split: {ranks} learn (a GPU a rank of torchrun), {sampling} sample "
            "(placement.rollout_gpus)"
            + (f" and {judging} judge (placement.judge_gpus)" if judging else "; the judge shares those")
            + f": {ranks + sampling + judging} GPUs are needed; visible: {len(gpus)}. {fewer[:1].upper()}{fewer[1:]}"
            f"{'or use' if fewer else 'Use'} placement.kind=colocated, where they take turns"
        )
    sample = list(gpus[ranks : ranks + sampling])
    judge = list(gpus[ranks + sampling : ranks + sampling + judging]) if judging else sample
    if config.env.slots > len(judge):
        raise ConfigError(
            f"env.slots = {config.env.slots}: the judge needs a GPU a slot and has {len(judge)} of {len(gpus)}; 0 "
            "means all of them"
        )
    return Roles(list(gpus[:ranks]), sample, judge)
