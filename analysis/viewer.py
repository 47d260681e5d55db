"""The report's trajectory viewer: all turns of a run behind filters, in one offline page. Runs in the report's process.

A small table of all turns and, in pieces, their texts: gzipped and in base64, so that hostile text is never markup.
viewer.js unpacks the table at once, a piece only when one of its turns is opened, and draws only the rows in sight.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from analysis.load import read_lines
from rl.records import Trajectory, Turn

SCRIPT = Path(__file__).with_name("viewer.js")
MAX_TURNS = 10_000
MAX_BYTES = 2 * 2**30  # of trajectory files read; token ids of large models are most of them
PIECE = 100
MAX_CHARACTERS = 60_000
COLUMNS = ("source", "step", "problem", "sample", "turn", "status", "speedup", "ratio", "reward", "advantage", "masks")


def script_hash() -> str:
    """What the page's content policy allows to run: this one script."""
    return base64.b64encode(hashlib.sha256(SCRIPT.read_bytes()).digest()).decode()


def files(folder: Path) -> list[tuple[str, Path]]:
    """(where from, file): final evaluations, then the steps of RL, so that any first part is spread over all of them
    (last, first, then halves, quarters, …), held-out points in training, and the cold start."""
    steps = sorted((folder / "rl" / "trajectories").glob("step_*.jsonl"))
    order: list[Path] = []
    stride = len(steps)
    while stride >= 1:
        order += [path for path in [*steps[::-stride], *steps[:1]] if path not in order]
        stride //= 2
    evaluated = {which: folder / "eval" / which / "trajectories.jsonl" for which in ("rl", "sft")}
    found = [(f"evaluation of {which.upper()}", path) for which, path in evaluated.items()]
    found += [("RL", path) for path in order]
    found += [("held out", path) for path in sorted((folder / "rl" / "evaluation").glob("step_*.jsonl"), reverse=True)]
    found.append(("cold start", folder / "collect" / "trajectories.jsonl"))
    return [(source, path) for source, path in found if path.is_file()]


def gather(folder: Path, notes: list[str], limit: int = MAX_TURNS) -> Iterator[tuple[str, Trajectory]]:
    """Trajectories until there are `limit` turns; a note says what is left out."""
    turns = read = left = 0
    for source, path in files(folder):
        read += path.stat().st_size
        if turns >= limit or (read > MAX_BYTES and turns):
            left += 1
            continue
        unread: list[str] = []  # damaged lines are noted by the report, which reads the same files
        for line in read_lines(path, unread):
            if turns >= limit:
                left += 1
                break
            try:
                trajectory = Trajectory.from_json(line)
            except (TypeError, KeyError, AttributeError):
                continue
            turns += len(trajectory.turns)
            yield source, trajectory
    if left:
        notes.append(f"the viewer holds {turns} turns; {left} files of trajectories are left out of it, or in part")


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}\n… {len(text) - MAX_CHARACTERS} more characters left out"


def _details(turn: Turn) -> dict[str, Any]:
    verdict = turn.verdict or {}
    names = ("message", "speedup_low", "speedup_high", "reference_us", "candidate_us", "time_kind", "profile")
    return {
        "answer": _cut(turn.completion_text),
        "prompt": _cut(turn.prompt_text),
        "feedback": _cut(verdict.get("feedback") or ""),
        "parts": turn.reward_parts,
        "finish": turn.finish_reason,
        "version": turn.policy_version,
        "rule": (verdict.get("evidence") or {}).get("rule", ""),
        **{name: verdict.get(name) for name in names},
    }


def _packed(value: Any) -> str:
    """gzipped JSON in base64; equal values give equal bytes."""
    data = json.dumps(value, separators=(",", ":"), sort_keys=True, allow_nan=False).encode()
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()


def _finite(value: object) -> float | None:
    """A number to four digits after the point; None for what JSON or a browser can't show."""
    return round(float(value), 4) if isinstance(value, int | float) and abs(value) < 1e300 else None


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _clean(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(inner) for inner in value]
    if isinstance(value, float):
        return _finite(value)
    return value


def section(folder: Path, notes: list[str], limit: int = MAX_TURNS) -> str:
    """The viewer's HTML with its data, or a sentence where there are no trajectories."""
    table: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    words: dict[str, dict[str, int]] = {"source": {}, "problem": {}, "status": {}}
    pieces: list[str] = []
    details: list[dict[str, Any]] = []

    def number(kind: str, word: str) -> int:
        return words[kind].setdefault(word, len(words[kind]))

    for source, trajectory in gather(folder, notes, limit):
        for place, turn in enumerate(trajectory.turns, 1):
            verdict = turn.verdict or {}
            numbers = (verdict.get("speedup"), verdict.get("profiling_ratio"), turn.reward, turn.advantage)
            row = (
                number("source", source),
                trajectory.step,
                number("problem", trajectory.problem_id),
                trajectory.sample_index,
                place,
                number("status", verdict.get("status") or "unjudged"),
                *map(_finite, numbers),
                ",".join(turn.masks),
            )
            for name, value in zip(COLUMNS, row, strict=True):
                table[name].append(value)
            details.append(_clean(_details(turn)))
            if len(details) == PIECE:
                pieces.append(_packed(details))
                details = []
    if details:
        pieces.append(_packed(details))
    if not table["turn"]:
        return "<p class=lead>No trajectories yet.</p>"
    index = {"columns": table, "words": {kind: list(numbers) for kind, numbers in words.items()}, "piece": PIECE}
    data = "".join(
        f'<script type="text/plain" id="turns-{name}">{packed}</script>'
        for name, packed in [("index", _packed(index)), *enumerate(pieces)]
    )
    lead = '<div id="viewer"><p class="lead">Needs a browser that runs scripts.</p></div>'
    return f"{lead}{data}<script>{SCRIPT.read_text(encoding='utf-8')}</script>"
