"""The names of all metrics, with their meaning and unit: one table for the writer, figures and documentation.

Standard library only. Turns are counted from 1. A name that isn't here is refused by the writer: figures and
dashboards look for these, and a misspelt one would be a curve that is silently missing.
"""

from __future__ import annotations

import re

from env.records import STATUSES

_STATUS = "|".join(STATUSES)

# Regular expression of a name -> what it means. Those with `(eval/)?` are also measured on the held-out problems.
NAMES = {
    r"(eval/)?reward/mean": "reward of all rewarded turns, mean",
    r"(eval/)?reward/mean_turn\d+": "the same for one turn",
    r"(eval/)?reward/correct": "C, mean over rewarded turns (as the reward saw it)",
    r"(eval/)?reward/speedup": "capped speedup, mean over turns with C = 1",
    r"(eval/)?reward/profiling_ratio": "PR as rewarded, mean over turns with C = 1",
    rf"(eval/)?status/({_STATUS})(_turn\d+)?": "share of turns with this status",
    r"(eval/)?hack/ratio(_turn\d+)?": "hacks over judged turns, those without a blameless status",
    r"(eval/)?fast/\d+\.\d+_turn\d+": "Fast@p: share of samples that are correct and p times as fast at a turn",
    r"(eval/)?tokens/completion_mean": "completion tokens a turn, mean",
    r"(eval/)?tokens/(cut|context)": "share of answers cut off by the token limit, by the context",
    r"(eval/)?turns/ended_context": "share of trajectories with fewer turns, since the context was full",
    r"tokens/total": "tokens of all rows, prompts included",
    r"policy/entropy": "mean entropy of the sampling distribution at completion tokens, nats",
    r"policy/grad_norm": "norm of the gradient before clipping",
    r"policy/lr": "learning rate of the step",
    r"policy/loss": "the loss (rl/loss.py)",
    r"policy/clip_share": "share of trained tokens at which the PPO clip acts",
    r"policy/skipped": "1 where no optimiser step was taken: nothing to train on, or a gradient that isn't finite",
    r"policy/version": "optimiser steps taken",
    r"policy/staleness_(mean|max)": "optimiser steps between the weights that sampled a turn and those it trains",
    r"policy/ppl_rollout": "perplexity of completion tokens under the engine that sampled them",
    r"policy/ppl_learner": "the same under the learner",
    r"policy/logprob_gap": "mean absolute difference of the two log-probs",
    r"policy/kl": "estimate of KL(rollout || learner), nats a token (rl/loss.py)",
    r"policy/importance_mean": "importance weights after the cap, mean over completion tokens",
    r"policy/importance_capped": "share of completion tokens whose importance weight is at the cap",
    r"mask/(mrs|veto|prs|infra)": "share of rows masked for this reason",
    r"mask/trained": "share of rows that train: with an advantage and without a mask",
    r"group/size_mean(_turn\d+)?": "rollouts with a return in a (problem, turn) group, mean",
    r"group/single": "share of groups with one rollout, which have no baseline",
    r"sft/(loss|lr|grad_norm|accuracy)": "supervised training: per-token loss (nats), share of tokens predicted right",
    r"seconds/wait": "the learner's wait for a step's rollouts (split placement)",
    r"seconds/overlap": "of a step's sampling and judging, those while the learner was at work (split placement)",
    r"seconds/\w+": "wall-clock of a phase of the step",
    r"tokens_per_s": "tokens of the step over its seconds",
    r"tokens_per_s/rollout": "sampled tokens over the seconds of sampling",
    r"memory/(allocated|peak)_gib": "GPU memory that tensors hold after the step, and at most during it, GiB",
}
_KNOWN = re.compile("|".join(f"(?:{name})" for name in NAMES))


def known(name: str) -> bool:
    """Whether a metric of this name may be written."""
    return _KNOWN.fullmatch(name) is not None


def meaning(name: str) -> str:
    """What a metric says. Raises KeyError for a name that isn't in the table."""
    for pattern, words in NAMES.items():
        if re.fullmatch(pattern, name):
            return words
    raise KeyError(f"{name!r} is no metric; all names are in rl/metric_names.py")
