"""What an RL stage must find when it is started again: its checkpoints, and the problems and tokenizer that it began
with. Runs in every rank of rl.train; reads files only, but for one mark.

Without its checkpoints a stage would start over and remove what it had made; with other problems it would go on in
another order of them, with another tokenizer on ids that mean something else. None of it would be seen in a curve.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from env.files import write_atomic
from env.records import Problem
from rl.checkpoint import CheckpointError
from rl.manifest import entry

# Says YES once a stage has written a checkpoint. Outside checkpoints/, since it is to tell when that folder is gone.
MARK, YES, NO = ".checkpointed", "yes\n", "no\n"
PROBLEMS, MODEL = "problems/train.jsonl", "sft/model"
# All files that say how text becomes ids; a folder has some of them.
TOKENIZER = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt", "special_tokens_map.json",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json",
)  # fmt: skip


def mark(folder: Path, written: bool) -> None:
    """Remember in the stage's `folder` whether it has written a checkpoint."""
    if _marked(folder) != (state := YES if written else NO):
        write_atomic(folder / MARK, state)


def _marked(folder: Path) -> str:
    """YES or NO; "" where nothing says it."""
    return (folder / MARK).read_text(encoding="utf-8") if (folder / MARK).is_file() else ""


def refuse_lost_checkpoints(folder: Path, every: int) -> None:
    """Raise CheckpointError where `folder` has no checkpoint and must have had one. Call where none was found.

    A run that was killed before its first one has trajectories and metrics too, and starts over. The mark tells the two
    apart. Without it, the steps do: before the first checkpoint they end at `every` (train.checkpoint_every) at the
    latest, whose metrics are written before its checkpoint is.
    """
    last, state = last_step(folder), _marked(folder)
    if not last or state == NO or not (state or last > every or (folder / "model").is_dir()):
        return
    raise CheckpointError(
        f"{folder}/checkpoints holds no checkpoint, though {last} steps were taken and train.checkpoint_every = "
        f"{every}: put the checkpoints back, or remove {folder} to start this stage over (its trajectories and "
        "metrics go too)"
    )


def last_step(folder: Path) -> int:
    """The last step of RL that left trajectories or a line of metrics in `folder`; 0 where none did."""
    names = [path.stem for path in (folder / "trajectories").glob("step_*.jsonl")]
    steps = [int(name.removeprefix("step_")) for name in names if re.fullmatch(r"step_\d+", name)]
    if (path := folder / "metrics.jsonl").is_file():
        # Lines that are none are refused where the file is read for good (rl/metrics.py).
        text = path.read_text(encoding="utf-8", errors="replace")
        steps += map(int, re.findall(r'^\{"step": (\d+)', text, re.MULTILINE))
    return max(steps, default=0)


def digests(run: Path, problems: Sequence[Problem]) -> dict[str, str]:
    """SHA-256 by file name in the run folder: of the problems' ids and sources in their order, and of each file of the
    tokenizer."""
    text = json.dumps([[problem.id, problem.source] for problem in problems])
    files = (f"{MODEL}/{name}" for name in TOKENIZER)
    tokenizer = {name: entry(run / name)["sha256"] for name in files if (run / name).is_file()}
    return {PROBLEMS: hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(), **tokenizer}


def refuse_other_inputs(saved: Mapping[str, str], present: Mapping[str, str], run: Path) -> None:
    """Raise CheckpointError where `digests` are others than those in the checkpoint (none in older ones: accepted)."""
    other = [name for name in sorted(saved.keys() | present.keys()) if saved.get(name) != present.get(name)]
    if not saved or not other:
        return
    begun = f"the checkpoints in {run}/rl were trained"
    faults = [f"{run / name} is not the tokenizer that {begun} with" for name in other if name != PROBLEMS][:1]
    if PROBLEMS in other:
        faults.append(f"{run / PROBLEMS} holds other problems, or in another order, than {begun} on")
    raise CheckpointError(
        f"{'; '.join(faults)}: put back what was there, or remove {run}/rl to start this stage over (its checkpoints, "
        "trajectories and metrics go too)"
    )
