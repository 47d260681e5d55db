"""Metrics: their fixed names, what is read off a step's trajectories, and the writer. Runs in the driver.

<folder>/metrics.jsonl holds what is the same for equal seeds, <folder>/wall.jsonl what the clock says; TensorBoard
event files in <folder>/tb show both.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from env.files import write_atomic
from env.records import BLAMELESS_STATUSES, STATUSES
from rl.records import Trajectory, Turn

# Turns are counted from 1 in names. A name that isn't here is refused: dashboards and figures look for these.
NAMES = {
    r"reward/mean": "reward of all rewarded turns, mean",
    r"reward/mean_turn\d+": "the same for one turn",
    r"reward/correct": "C, mean over rewarded turns (as the reward saw it)",
    r"reward/speedup": "capped speedup, mean over turns with C = 1",
    r"reward/profiling_ratio": "PR as rewarded, mean over turns with C = 1",
    rf"status/({'|'.join(STATUSES)})(_turn\d+)?": "share of turns with this status",
    r"hack/ratio": "hacks over judged turns, those without a blameless status",
    r"fast/\d+\.\d+_turn\d+": "share of judged turns that are correct and at least that fast",
    r"policy/entropy": "mean entropy of the sampling distribution at completion tokens, nats",
    r"policy/grad_norm": "norm of the gradient before clipping",
    r"policy/lr": "learning rate of the step",
    r"policy/loss": "the loss (rl/loss.py)",
    r"policy/clip_share": "share of trained tokens at which the PPO clip acts",
    r"policy/skipped": "1 where no optimiser step was taken: nothing to train on, or a gradient that isn't finite",
    r"policy/version": "optimiser steps taken",
    r"policy/ppl_rollout": "perplexity of completion tokens under the engine that sampled them",
    r"policy/ppl_learner": "the same under the learner",
    r"policy/logprob_gap": "mean absolute difference of the two log-probs",
    r"mask/(mrs|veto|prs|infra)": "share of rows masked for this reason",
    r"group/size_mean": "rollouts with a return in a (problem, turn) group, mean",
    r"tokens/completion_mean": "completion tokens a turn, mean",
    r"tokens/total": "tokens of all rows, prompts included",
    r"sft/(loss|lr|grad_norm|accuracy)": "supervised training: per-token loss (nats), share of tokens predicted right",
    r"seconds/\w+": "wall-clock of a stage of the step",
    r"tokens_per_s": "tokens of the step over its seconds",
}
_KNOWN = re.compile("|".join(f"(?:{name})" for name in NAMES))

FAST_THRESHOLDS = (1.0, 1.2)


class MetricsWriter:
    """Appends a line a step to metrics.jsonl and wall.jsonl, and the same to TensorBoard. A context manager."""

    def __init__(self, folder: Path, resume_step: int = 0) -> None:
        """resume_step: the first step that will be written. Lines of this or later steps, written by a run that was
        killed after its last checkpoint, are cut off, so that no step appears twice."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "wall.jsonl"):
            _cut(folder / name, resume_step)
        self.board = SummaryWriter(str(folder / "tb"), purge_step=resume_step)

    def write(self, step: int, values: dict[str, float | None]) -> None:
        """One line of metrics. None and numbers that aren't finite become null; raises ValueError for unknown names."""
        self._append("metrics.jsonl", step, values)

    def write_wall(self, step: int, values: dict[str, float | None]) -> None:
        """One line of wall-clock values."""
        self._append("wall.jsonl", step, values)

    def close(self) -> None:
        self.board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _append(self, file_name: str, step: int, values: dict[str, float | None]) -> None:
        unknown = sorted(name for name in values if not _KNOWN.fullmatch(name))
        if unknown:
            raise ValueError(f"unknown metric {', '.join(unknown)}; add it with its meaning to NAMES in rl/metrics.py")
        clean = {name: float(v) if v is not None and math.isfinite(v) else None for name, v in values.items()}
        line = json.dumps({"step": step, **dict(sorted(clean.items()))}, allow_nan=False)
        with open(self.folder / file_name, "a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        for name, value in clean.items():
            if value is not None:
                self.board.add_scalar(name, value, step)
        self.board.flush()


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What a step's trajectories say: reward/*, status/*, hack/ratio, fast/*, mask/*, group/size_mean, tokens/*.

    Turns need verdict, reward, reward_parts, advantage and masks. A mean over nothing is left out.
    """
    numbered = [(number, turn) for t in trajectories for number, turn in enumerate(t.turns, 1)]
    turns = [turn for _, turn in numbered]
    by_number: dict[int, list[Turn]] = defaultdict(list)
    for number, turn in numbered:
        by_number[number].append(turn)
    values = {f"reward/{name}": value for name, value in _reward_metrics(turns).items()}
    values |= {f"status/{status}": _share(turns, status) for status in STATUSES}
    judged = [turn for turn in turns if turn.verdict["status"] not in BLAMELESS_STATUSES]
    values["hack/ratio"] = _share(judged, "hack")
    for number, same in sorted(by_number.items()):
        values[f"reward/mean_turn{number}"] = _mean([turn.reward for turn in same if turn.reward is not None])
        values |= {f"status/{status}_turn{number}": _share(same, status) for status in STATUSES}
        judged = [turn.verdict for turn in same if turn.verdict["status"] not in BLAMELESS_STATUSES]
        for p in FAST_THRESHOLDS:
            fast = [v["status"] == "correct" and v["speedup"] is not None and v["speedup"] >= p for v in judged]
            values[f"fast/{p}_turn{number}"] = _mean(fast)
    for reason in ("mrs", "veto", "prs"):
        values[f"mask/{reason}"] = _mean([reason in turn.masks for turn in turns])
    values["mask/infra"] = _mean([turn.advantage is None for turn in turns])
    groups = Counter(
        (t.problem_id, number)
        for t in trajectories
        for number, turn in enumerate(t.turns)
        if turn.advantage is not None
    )
    values["group/size_mean"] = _mean(list(groups.values()))
    values["tokens/completion_mean"] = _mean([len(turn.completion_ids) for turn in turns])
    values["tokens/total"] = float(sum(len(turn.prompt_ids) + len(turn.completion_ids) for turn in turns))
    return {name: value for name, value in values.items() if value is not None}


def _reward_metrics(turns: list[Turn]) -> dict[str, float | None]:
    rewarded = [turn for turn in turns if turn.reward is not None]
    earned = [turn.reward_parts for turn in rewarded if turn.reward_parts["correct"]]
    return {
        "mean": _mean([turn.reward for turn in rewarded]),
        "correct": _mean([turn.reward_parts["correct"] for turn in rewarded]),
        "speedup": _mean([parts["speedup"] for parts in earned]),
        "profiling_ratio": _mean([parts["profiling_ratio"] for parts in earned]),
    }


def _share(turns: list[Turn], status: str) -> float | None:
    return _mean([turn.verdict["status"] == status for turn in turns])


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _cut(path: Path, first_step: int) -> None:
    """Keep the lines of steps before `first_step`; a last line that a kill cut short goes too. Atomic."""
    if not path.exists():
        return
    kept = []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            entry: Any = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise ValueError(f"{path}:{number}: not JSON ({error}); delete the line") from error
        if entry["step"] < first_step and line.endswith("\n"):
            kept.append(line)
    write_atomic(path, "".join(kept))
