"""Where a step's rollouts come from with placement.kind = colocated: from this process, before it is learned from.

Runs in every rank of rl.train. Rank 0 samples, judges and writes; with vLLM every rank answers its share, and sleeps
while the learner works. rl/split.py is the other placement, behind the same methods.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from env.records import Problem
from rl import distributed, weight_sync
from rl.config import Config
from rl.engines.base import Engine
from rl.engines.ranks import RankEngine, together
from rl.learner import Learner
from rl.metrics import evaluation_metrics
from rl.plan import evaluation_plan, pick_problems, training_plan
from rl.prompts import Chat
from rl.records import Trajectory, step_path
from rl.rollout import Judge, evaluate_problems, rollout


class Colocated:
    """Samples with the learner's present weights. engine, judge: None on ranks that have none."""

    def __init__(
        self,
        learner: Learner,
        engine: Engine | RankEngine | None,
        judge: Judge | None,
        chat: Chat,
        train: Sequence[Problem],
        heldout: Sequence[Problem],
        config: Config,
        folder: Path,
    ) -> None:
        """folder: <run>/rl."""
        self.learner, self.engine, self.judge, self.chat = learner, engine, judge, chat
        self.train, self.heldout, self.config, self.folder = train, heldout, config, folder

    def sample(self, step: int) -> tuple[list[Trajectory], dict[str, float]]:
        """The rollouts of a step, on disk and on every rank, and wall-clock values."""
        config, path = self.config, step_path(self.folder, step)
        problems = pick_problems(self.train, config.rollout.prompts_per_step, config.seed, step)
        plan = training_plan(config, self.chat, step, self.learner.version, self.learner.vocabulary)

        def action() -> tuple[list[Trajectory], dict[str, float]]:
            path.unlink(missing_ok=True)
            return rollout(self.engine, self.judge, self.chat, problems, plan, path, f"step {step}")

        trajectories, wall = together(self.engine, action)
        if config.engine.name == "vllm":
            self.engine.sleep()  # its memory is the learner's now; the push wakes it
        return trajectories, wall

    def push(self, step: int) -> float:
        """Behind a step's update: sample from the new weights. Returns the seconds that it took."""
        return weight_sync.push(self.learner, self.engine)

    def evaluate(self, step: int) -> tuple[dict[str, float], dict[str, float]]:
        """The policy behind a step on held-out problems, as metrics eval/*, and wall-clock values."""
        begun, config, path = time.perf_counter(), self.config, step_path(self.folder, step, "evaluation")

        def action() -> dict[str, float]:
            path.unlink(missing_ok=True)
            plan = evaluation_plan(config, self.chat.stop_ids, config.eval.during_samples, self.learner.version)
            return evaluation_metrics(evaluate_problems(self.engine, self.judge, self.chat, self.heldout, plan, path))

        metrics = together(self.engine, action)
        return metrics, {"seconds/evaluate": time.perf_counter() - begun}

    def ahead(self, step: int) -> list[dict[str, Any]]:
        """What a checkpoint behind `step` must say of rollouts of later steps: there are none."""
        return []


def make_engine(config: Config, learner: Learner, model_folder: Path) -> Engine | RankEngine | None:
    """What samples, with the learner's present weights. The plain engine shares the learner's own model, on rank 0
    alone; vLLM is started from `model_folder` on every rank. Raises EngineError."""
    if config.engine.name == "hf":
        from rl.engines.hf import HFEngine

        model = learner.plain_model()
        return HFEngine(model, config.rollout.batch_size) if distributed.first() else None
    from rl.engines.vllm import engine_for

    own = engine_for(config, model_folder, config.train.autocast, distributed.world())
    engine = RankEngine(own) if distributed.world() > 1 else own
    weight_sync.push(learner, engine)  # those of the checkpoint, if there is one; and checked before the first step
    return engine
