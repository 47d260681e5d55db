"""Collected conversations as tables that other trainers read: one row a trajectory, JSONL and parquet. Runs in the
driver; `python -m rl.export TRAJECTORIES.jsonl OUT` writes OUT.jsonl and OUT.parquet.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from env.files import explained, write_atomic
from rl import checkpoint
from rl.records import Trajectory, read_trajectories, utf8


def row(trajectory: Trajectory) -> dict[str, Any]:
    """problem_id, sample_index, messages [{role, content}], and a list over turns of each: status, speedup (None where
    nothing was timed), reward (None where the verdict is nobody's fault)."""
    turns = trajectory.turns
    return {
        "problem_id": trajectory.problem_id,
        "sample_index": trajectory.sample_index,
        "messages": [
            {"role": role, "content": utf8(content)}
            for turn in turns
            for role, content in (("user", turn.prompt_text), ("assistant", turn.completion_text))
        ],
        "status": [turn.verdict["status"] for turn in turns],
        "speedup": [turn.verdict.get("speedup") for turn in turns],
        "reward": [turn.reward for turn in turns],
    }


def export(trajectories: Iterable[Trajectory], out: Path) -> list[Path]:
    """Write <out>.jsonl and, where pyarrow is installed, <out>.parquet; returns the files that are there."""
    rows = [row(trajectory) for trajectory in trajectories]
    lines, table = out.with_name(f"{out.name}.jsonl"), out.with_name(f"{out.name}.parquet")
    write_atomic(lines, "".join(json.dumps(entry, sort_keys=True) + "\n" for entry in rows))
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        print(f"{table} is left out: pyarrow isn't installed (requirements.txt has the version)", flush=True)
        return [lines]
    message = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])
    schema = pyarrow.schema(
        [
            ("problem_id", pyarrow.string()),
            ("sample_index", pyarrow.int64()),
            ("messages", pyarrow.list_(message)),
            ("status", pyarrow.list_(pyarrow.string())),
            ("speedup", pyarrow.list_(pyarrow.float64())),
            ("reward", pyarrow.list_(pyarrow.float64())),
        ]
    )
    temporary = table.with_name(f".{table.name}.tmp")
    with explained(table):
        try:
            parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), temporary)
            checkpoint.force(temporary)
            temporary.replace(table)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    return [lines, table]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Collected trajectories as JSONL and parquet tables.")
    parser.add_argument("trajectories", type=Path)
    parser.add_argument("out", type=Path, help="without an ending: .jsonl and .parquet are added")
    arguments = parser.parse_args()
    try:
        print(*export(read_trajectories(arguments.trajectories), arguments.out), sep="\n")
    except (OSError, ValueError) as error:
        sys.exit(f"rl.export: {error}")
