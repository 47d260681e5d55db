"""Steps that train nothing: counted, and training pauses before they pass for a run. Runs in the driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl.config import Config
from rl.rewards import TrainingPaused

# Why a row didn't train, and what to look at.
CAUSES = {
    "veto": "the engine's log-probs are not the learner's (token veto; policy/logprob_gap {gap}): look at the engine, "
    "its sampling options and its weights, and at rollout.temperature; rejection.token_veto is the limit",
    "mrs": "the engine's log-probs are not the learner's (MRS; policy/logprob_gap {gap}): look at the engine, its "
    "sampling options and its precision, and at rejection.mrs_low and rejection.mrs_high",
    "prs": "profiling ratios are below what PRS keeps (reward/profiling_ratio {ratio}): look at rejection.prs_tau and "
    "at what the judge measures",
    "infra": "verdicts were nobody's fault: look at the judge (python -m env.doctor)",
    "gradient": "the gradient was not finite: look at policy/grad_norm and policy/loss, lower optim.lr, and check the "
    "weights that training started from",
    "equal": "all answers to a problem earned the same (reward/mean {reward}), so no advantage is above or below 0: "
    "take more rollout.samples_per_prompt or easier problems, or a longer cold start",
}


@dataclass
class Idle:
    """Steps in a row, up to the present one, that took no optimiser step, and why. Kept in checkpoints."""

    steps: int = 0
    causes: Counter[str] = field(default_factory=Counter)

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, "causes": dict(self.causes)}

    @classmethod
    def restored(cls, state: Mapping[str, Any] | None) -> Idle:
        return cls(state["steps"], Counter(state["causes"])) if state else cls()

    def after(self, metrics: Mapping[str, float | None]) -> Idle:
        """Behind a step with these metrics."""
        return Idle(self.steps + 1, self.causes + causes(metrics)) if metrics["policy/skipped"] else Idle()

    def refuse(self, metrics: Mapping[str, float | None], config: Config) -> None:
        """Raise TrainingPaused where there are too many: train.max_skipped, or all steps of a shorter run.

        Equal rewards alone are no fault of a short run: then only train.max_skipped counts.
        """
        most = config.train.max_skipped
        if not most or not self.steps:
            return
        ((cause, _),) = self.causes.most_common(1) or [("equal", 0)]
        limit = most if cause == "equal" else min(most, config.train.steps)
        if self.steps < limit:
            return
        shares = {"gap": "policy/logprob_gap", "ratio": "reward/profiling_ratio", "reward": "reward/mean"}
        values = {word: f"{metrics.get(name) or 0:.3g}" for word, name in shares.items()}
        raise TrainingPaused(
            f"the last {self.steps} steps trained nothing; mostly {CAUSES[cause].format(**values)}. Mend it and run "
            "the same command again: it goes on from the newest checkpoint (train.max_skipped allows "
            f"{most} such steps in a row; 0: any number)"
        )


def causes(metrics: Mapping[str, float | None]) -> Counter[str]:
    """Shares of a step's rows by the reason why they did not train, of a step that trained none."""
    found = Counter({name: metrics.get(f"mask/{name}") or 0.0 for name in ("veto", "mrs", "prs", "infra")})
    found["gradient" if "policy/loss" in metrics else "equal"] = metrics.get("mask/trained") or 0.0
    return +found
