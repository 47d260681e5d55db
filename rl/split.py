"""Where a step's rollouts come from with placement.kind = split: from the rollout process, which samples them while the
learner is at the step before. Runs in every rank of rl.train; rank 0 has the link.

With staleness k (placement.staleness, 0 or 1) step s is sampled from the weights behind step s - 1 - k, the first ones
from the initial weights: always the same, however fast either side is, so that equal seeds give equal runs.

    rollouts   1 [W0]  2 [W0]   3 [W1]    4 [W2]   ...
    learner            1 -> W1  2 -> W2   3 -> W3  ...

A checkpoint behind step n is written when the rollouts of step n + k are whole on disk, since it doesn't hold the
weights that sampled them; a resumed run uses them (rl/staleness.py). Where there are none (training paused, or a
finished run got more steps), the next k + 1 steps are sampled from the checkpoint's own weights.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from env.pool import visible_gpus
from env.records import Problem
from rl import distributed, staleness, weight_sync
from rl.config import Config
from rl.learner import Learner
from rl.plan import pick_problems
from rl.records import Trajectory, read_trajectories, step_path
from rl.rewards import TrainingPaused, refuse_broken_step
from rl.roles import roles
from rl.rollout import policy_gpus
from rl.rollout_link import Link


class Split:
    """A context manager. Same methods as rl/colocated.py; every rank calls them."""

    def __init__(
        self,
        learner: Learner,
        problems: Sequence[Problem],
        config: Config,
        run: Path,
        done: int,
        kept: Sequence[Mapping[str, Any]],
    ) -> None:
        """done: steps that were learned from; kept: what the checkpoint says of rollouts behind them. Raises
        ConfigError where there are too few GPUs, EngineError where nothing can sample."""
        self.learner, self.problems, self.config, self.folder = learner, problems, config, run / "rl"
        self._kept = {said["step"]: said for said in kept}
        self._asked = done + len(self._kept)  # the last step that is sampled, or will be
        self._versions = {step: said["version"] for step, said in self._kept.items()}
        self._answers: dict[tuple[str, int], dict[str, Any]] = {}  # rank 0: not asked for yet
        self._taken: dict[int, tuple[list[Trajectory], dict[str, float]]] = {}  # rank 0: for `sample`
        self._learning: list[tuple[float, float]] = []  # when the learner was at work, clock of all processes
        self._learns_since = 0.0
        shapes = [(name, tuple(weight.shape)) for name, weight in zip(learner.names, learner.weights)]
        self.link: Link | None = None  # on rank 0

        def start() -> None:
            gpus = visible_gpus() if config.device == "cuda" else []
            self.link = Link(run, roles(config, gpus, policy_gpus()), shapes)
            self.link.ready()

        try:
            distributed.agree(start)
            self._hand_over(done, evaluates=bool(config.eval.every) and not done)
        except BaseException:
            self.__exit__(BaseException)
            raise

    def __enter__(self) -> Split:
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        if self.link is not None:
            self.link.close(abruptly=kind is not None)

    def sample(self, step: int) -> tuple[list[Trajectory], dict[str, float]]:
        """The rollouts of a step, on every rank, and wall-clock values: seconds/wait until they were there,
        seconds/overlap of their sampling in which the learner was at work. Raises EngineError."""
        begun = time.perf_counter()
        trajectories, wall = distributed.agree(lambda: self._taken.pop(step, None) or self._take(step))
        self._learns_since = time.perf_counter()
        return trajectories, wall | {"seconds/wait": self._learns_since - begun}

    def push(self, step: int) -> float:
        """Behind a step's update: hand over the new weights and ask for what is to be sampled from them. Returns the
        seconds that it took."""
        self._learning = [*self._learning[-3:], (self._learns_since, time.perf_counter())]
        every = self.config.eval.every
        return self._hand_over(step, evaluates=bool(every) and step % every == 0)

    def evaluate(self, step: int) -> tuple[dict[str, float], dict[str, float]]:
        """The policy behind a step on held-out problems, as metrics eval/*, and wall-clock values."""
        answer = distributed.agree(lambda: self._answer("evaluate", step))
        return answer["metrics"], answer["wall"]

    def ahead(self, step: int) -> list[dict[str, Any]]:
        """What a checkpoint behind `step` must say of the rollouts of later steps, waiting until they are on disk.

        Rollouts that training refuses are left out: they are sampled again, once the judge is mended.
        """
        return distributed.agree(lambda: self._ahead(step))

    def _ahead(self, step: int) -> list[dict[str, Any]]:
        said = []
        last = min(step + self.config.placement.staleness, self.config.train.steps)
        for later in range(step + 1, last + 1):
            self._taken[later] = trajectories, _ = self._take(later)
            with contextlib.suppress(TrainingPaused):
                refuse_broken_step(trajectories, self.config.rollout.max_infra_share)
                said.append(staleness.entry(trajectories, later, self._versions[later]))
        return said

    def _hand_over(self, behind: int, evaluates: bool) -> float:
        """The weights behind a step, if something is to be sampled from them, and what."""
        last = min(behind + 1 + self.config.placement.staleness, self.config.train.steps)
        steps = range(self._asked + 1, last + 1)
        if not steps and not evaluates:
            return 0.0
        seconds = weight_sync.push(self.learner, self.link)
        self._asked = max(self._asked, last)
        self._versions |= dict.fromkeys(steps, self.learner.version)
        distributed.agree(lambda: self._ask(behind, evaluates, steps))
        return seconds

    def _ask(self, behind: int, evaluates: bool, steps: range) -> None:
        common = {"version": self.learner.version, "vocabulary": self.learner.vocabulary}
        if evaluates:
            self.link.send({"do": "evaluate", "step": behind, **common})
        for step in steps:
            self.link.send({"do": "sample", "step": step, **common})

    def _answer(self, kind: str, step: int) -> dict[str, Any]:
        while (kind, step) not in self._answers:
            answer = self.link.hear(self.config.placement.rollout_timeout_s, f"waiting to {kind} step {step}")
            self._answers[answer["done"], answer["step"]] = answer
        return self._answers.pop((kind, step))

    def _take(self, step: int) -> tuple[list[Trajectory], dict[str, float]]:
        path = step_path(self.folder, step)
        if step in self._kept:
            return kept(self._kept[step], self.folder, self.problems, self.config), {}
        answer = self._answer("sample", step)
        begun, ended = answer["begun"], answer["ended"]
        overlap = sum(max(0.0, min(ended, end) - max(begun, start)) for start, end in self._learning)
        return list(read_trajectories(path)), answer["wall"] | {"seconds/overlap": overlap}


def kept(said: Mapping[str, Any], folder: Path, problems: Sequence[Problem], config: Config) -> list[Trajectory]:
    """The rollouts that a checkpoint names, as sampled. Raises CheckpointError where they aren't there whole."""
    chosen = pick_problems(problems, config.rollout.prompts_per_step, config.seed, said["step"])
    return staleness.kept(step_path(folder, said["step"]), said, chosen, config.rollout.samples_per_prompt)
