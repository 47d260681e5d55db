"""Metrics: what is read off a step's trajectories, and the writer. Runs in the driver. Names: rl/metric_names.py.

<folder>/metrics.jsonl holds what is the same for equal seeds, <folder>/wall.jsonl what the clock says; TensorBoard
event files in <folder>/tb show both.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from env.files import append_durably, explained, write_atomic
from env.records import STATUSES
from rl.metric_names import known
from rl.outcomes import fast_at, is_judged
from rl.records import Trajectory, Turn

log = logging.getLogger(__name__)

SAID = 5  # steps that a message names
FAST_THRESHOLDS = (1.0, 1.2)


class DamagedFile(ValueError):
    """A file of metrics with a line that this program didn't write."""


class MetricsWriter:
    """Appends a line a step to metrics.jsonl and wall.jsonl, and the same to TensorBoard. A context manager."""

    def __init__(self, folder: Path, resume_step: int = 0) -> None:
        """resume_step: the first step that will be written. Lines of this or later steps, written by a run that was
        killed after its last checkpoint, are cut off, so that no step appears twice."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "wall.jsonl"):
            _cut(folder / name, resume_step)
        with explained(folder / "tb"):
            self.board = SummaryWriter(str(folder / "tb"), purge_step=resume_step)

    def write(self, step: int, values: dict[str, float | None]) -> None:
        """One line of metrics. None and numbers that aren't finite become null; raises ValueError for unknown names."""
        self._append("metrics.jsonl", step, values)

    def write_wall(self, step: int, values: dict[str, float | None]) -> None:
        """One line of wall-clock values."""
        self._append("wall.jsonl", step, values)

    def close(self) -> None:
        with explained(self.folder / "tb"):
            self.board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _append(self, file_name: str, step: int, values: dict[str, float | None]) -> None:
        unknown = sorted(name for name in values if not known(name))
        if unknown:
            raise ValueError(f"unknown metric {', '.join(unknown)}; add it with its meaning to rl/metric_names.py")
        clean = {name: float(v) if v is not None and math.isfinite(v) else None for name, v in values.items()}
        line = json.dumps({"step": step, **dict(sorted(clean.items()))}, allow_nan=False)
        append_durably(self.folder / file_name, line + "\n")
        with explained(self.folder / "tb"):
            for name, value in clean.items():
                if value is not None:
                    self.board.add_scalar(name, value, step)
            self.board.flush()


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What a step's trajectories say: reward/*, status/*, hack/ratio, fast/*, turns/*, mask/*, group/*, tokens/*.

    Turns need verdict, reward, reward_parts, advantage and masks. A mean over nothing is left out.
    """
    turns = [turn for t in trajectories for turn in t.turns]
    groups = Counter(
        (t.problem_id, number)
        for t in trajectories
        for number, turn in enumerate(t.turns, 1)
        if turn.advantage is not None
    )
    values = _outcome_metrics(trajectories)
    for reason in ("mrs", "veto", "prs"):
        values[f"mask/{reason}"] = _mean([reason in turn.masks for turn in turns])
    values["mask/infra"] = _mean([turn.advantage is None for turn in turns])
    values["mask/trained"] = _mean([turn.advantage is not None and not turn.masks for turn in turns])
    values["group/size_mean"] = _mean(list(groups.values()))
    values["group/single"] = _mean([size == 1 for size in groups.values()])
    for number in range(1, _most_turns(trajectories) + 1):
        sizes = [size for (_, turn), size in groups.items() if turn == number]
        values[f"group/size_mean_turn{number}"] = _mean(sizes)
    values["tokens/total"] = float(sum(len(turn.prompt_ids) + len(turn.completion_ids) for turn in turns))
    return {name: value for name, value in values.items() if value is not None}


def evaluation_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What held-out trajectories say, as eval/*: rewards, statuses, hack ratio, Fast@p, lengths."""
    return {f"eval/{name}": value for name, value in _outcome_metrics(trajectories).items() if value is not None}


def gpu_memory() -> dict[str, float]:
    """memory/*, since the last call, of this process's GPU; {} without one."""
    if not torch.cuda.is_available():
        return {}
    values = {
        "memory/allocated_gib": torch.cuda.memory_allocated() / 2**30,
        "memory/peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }
    torch.cuda.reset_peak_memory_stats()
    return values


def _outcome_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float | None]:
    turns = [turn for t in trajectories for turn in t.turns]
    values: dict[str, float | None] = {f"reward/{name}": value for name, value in _reward_metrics(turns).items()}
    values |= {f"status/{status}": _share(turns, status) for status in STATUSES}
    values["hack/ratio"] = _share([turn for turn in turns if is_judged(turn)], "hack")
    for number in range(1, _most_turns(trajectories) + 1):
        same = [t.turns[number - 1] for t in trajectories if len(t.turns) >= number]
        values[f"reward/mean_turn{number}"] = _mean([turn.reward for turn in same if turn.reward is not None])
        values |= {f"status/{status}_turn{number}": _share(same, status) for status in STATUSES}
        values[f"hack/ratio_turn{number}"] = _share([turn for turn in same if is_judged(turn)], "hack")
        for p in FAST_THRESHOLDS:
            outcomes = [fast_at(trajectory, p, number) for trajectory in trajectories]
            values[f"fast/{p}_turn{number}"] = _mean([fast for fast in outcomes if fast is not None])
    values["turns/ended_context"] = _mean([t.ended == "context" for t in trajectories])
    values["tokens/completion_mean"] = _mean([len(turn.completion_ids) for turn in turns])
    values["tokens/cut"] = _mean([turn.finish_reason == "length" for turn in turns])
    values["tokens/context"] = _mean([turn.finish_reason == "context" for turn in turns])
    return values


def _most_turns(trajectories: Sequence[Trajectory]) -> int:
    return max((len(t.turns) for t in trajectories), default=0)


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
    """Keep the lines of steps before `first_step`; a last line that a kill cut short goes too. Atomic. Steps before
    `first_step` that have no line are said."""
    if not path.exists():
        if first_step > 1:
            log.warning("%s is missing: of steps 1 to %d there will be no values", path, first_step - 1)
        return
    kept, steps = [], []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DamagedFile(f"{path} is not UTF-8 ({error}); restore it, or move it away") from error
    lines = [line + "\n" for line in lines[:-1]] + lines[-1:] * bool(lines[-1])
    for number, line in enumerate(lines, 1):
        try:
            step: Any = json.loads(line)["step"]
            if type(step) is not int:
                raise TypeError(f"its step is {step!r}")
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise DamagedFile(f"{path}:{number} is no line of metrics ({error}); delete the line") from error
        if step < first_step and line.endswith("\n"):
            kept.append(line)
            steps.append(step)
    write_atomic(path, "".join(kept))
    if gaps := _gaps(steps, first_step):
        log.warning("%s: %s; restore the file from a copy, or its figures stay as they are", path, gaps)


def _gaps(steps: Sequence[int], first_step: int) -> str:
    """What is wrong with the steps of a file that should have each from 1 to the one before `first_step` once, in order
    (step 0, an evaluation before training, may be there); "" where nothing is."""
    missing = sorted(set(range(1, first_step)) - set(steps))
    if missing:
        more = f" and {len(missing) - SAID} more" if len(missing) > SAID else ""
        named = ", ".join(map(str, missing[:SAID])) + more
        return f"no line of step {named}, though {first_step - 1} were taken"
    return "" if steps == sorted(set(steps)) else "steps are there twice or out of order"
