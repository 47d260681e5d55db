"""Picks a few telling trajectories out of a run and renders them as HTML, every text escaped: it is hostile.

Runs in the report's process.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Any

from rl.records import Trajectory, Turn

MAX_CHARACTERS = 20_000
FAILURES = ("incorrect", "compile_error", "runtime_error", "timeout", "oom")
# Written visibly: control characters, what reorders or hides text for the reader, and lone surrogates (not UTF-8).
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


def text(value: object) -> str:
    """Any text as HTML that shows it and does nothing else."""
    shown = str(value).replace("\r\n", "\n")
    if len(shown) > MAX_CHARACTERS:
        shown = f"{shown[:MAX_CHARACTERS]}\n… {len(shown) - MAX_CHARACTERS} more characters left out"
    return html.escape(_INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", shown))


def number(value: object, form: str = ".2f", missing: str = "—") -> str:
    """A number by format, or a dash for what wasn't measured."""
    return format(value, form) if isinstance(value, int | float) else missing


def pill(state: str) -> str:
    """A coloured word for a status or a stage's state."""
    return f"<span class='pill {text(state)}'>{text(state.replace('_', ' '))}</span>"


def _status(turn: Turn) -> str:
    return turn.verdict["status"] if turn.verdict else "unjudged"


def _speedup(trajectory: Trajectory) -> float:
    """The best measured speedup of its correct turns; 0 where there is none."""
    correct = [turn.verdict for turn in trajectory.turns if _status(turn) == "correct"]
    return max((verdict.get("speedup") or 0.0 for verdict in correct), default=0.0)


def pick(stream: Iterable[tuple[str, Trajectory]]) -> list[tuple[str, str, Trajectory]]:
    """(title, where from, trajectory): the fastest correct one, an improvement over turns, a hack, a failure.

    Of equals the first in the stream, whose order is by interest. One trajectory appears once.
    """
    best: dict[str, tuple[float, str, Trajectory]] = {}

    def offer(title: str, score: float, source: str, trajectory: Trajectory) -> None:
        if score > 0 and (title not in best or score > best[title][0]):
            best[title] = score, source, trajectory

    for source, trajectory in stream:
        statuses = [_status(turn) for turn in trajectory.turns]
        rewards = [turn.reward for turn in trajectory.turns if turn.reward is not None]
        offer("Fastest", _speedup(trajectory), source, trajectory)
        if len(rewards) > 1:
            offer("Largest improvement from the first turn to the last", rewards[-1] - rewards[0], source, trajectory)
        offer("A hack", statuses.count("hack"), source, trajectory)
        offer("A failure", float(statuses[-1] in FAILURES), source, trajectory)
    order = ("Fastest", "Largest improvement from the first turn to the last", "A hack", "A failure")
    chosen, seen = [], set()
    for title in order:
        if title in best and id(best[title][2]) not in seen:
            seen.add(id(best[title][2]))
            chosen.append((title, best[title][1], best[title][2]))
    return chosen


def _profile_table(profile: list[dict[str, Any]]) -> str:
    if not profile:
        return ""
    rows = "".join(
        f"<tr><td class='{'own' if row.get('own') else 'foreign'}'>{text(row.get('name', ''))}</td>"
        f"<td>{'own' if row.get('own') else 'foreign'}</td><td class=n>{number(row.get('count'), 'g')}</td>"
        f"<td class=n>{number(row.get('time_us'))}</td></tr>"
        for row in profile
    )
    return (
        "<table class=profile><tr><th>kernel</th><th>whose</th><th class=n>launches</th>"
        f"<th class=n>time, µs</th></tr>{rows}</table>"
    )


def _facts(turn: Turn) -> str:
    verdict = turn.verdict or {}
    interval = ""
    if verdict.get("speedup_low") is not None:
        interval = f" [{number(verdict['speedup_low'])}, {number(verdict.get('speedup_high'))}]"
    kind = verdict.get("time_kind") or ""
    facts = {
        "reward": number(turn.reward, missing="none"),
        "parts": ", ".join(f"{name} {number(value)}" for name, value in turn.reward_parts.items()) or "—",
        "advantage": number(turn.advantage, "+.3f"),
        "masks": ", ".join(turn.masks) or "none: the row counts",
        "speedup": f"{number(verdict.get('speedup'))}{interval}" + (f" ({kind})" if kind else ""),
        "reference / candidate, µs": f"{number(verdict.get('reference_us'))} / {number(verdict.get('candidate_us'))}",
        "profiling ratio": number(verdict.get("profiling_ratio")),
        "policy version": turn.policy_version,
        "ended by": turn.finish_reason,
        "answer's tokens": len(turn.completion_ids) or "—",
    }
    return "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in facts.items())


def _turn(index: int, turn: Turn) -> str:
    status = _status(turn)
    verdict = turn.verdict or {}
    message = f"<p class=message>{text(verdict['message'])}</p>" if verdict.get("message") else ""
    heading = "the task" if index == 1 else "the feedback on the turn before"
    return (
        f"<section class=turn><h4>Turn {index} {pill(status)}</h4>"
        f"<details{'' if index == 1 else ' open'}><summary>What the model was shown: {heading}</summary>"
        f"<pre>{text(turn.prompt_text)}</pre></details>"
        f"<pre class=code>{text(turn.completion_text)}</pre>{message}<dl>{_facts(turn)}</dl>"
        f"{_profile_table(verdict.get('profile') or [])}"
        "<details><summary>Feedback of the judge</summary>"
        f"<pre>{text(verdict.get('feedback') or '(none)')}</pre></details></section>"
    )


def render(title: str, source: str, trajectory: Trajectory) -> str:
    """One trajectory, all its turns."""
    ended = f", ended early ({text(trajectory.ended)})" if trajectory.ended else ""
    turns = "".join(_turn(index, turn) for index, turn in enumerate(trajectory.turns, 1))
    return (
        f"<article><h3>{text(title)}</h3><p class=source>{text(source)}, problem "
        f"<code>{text(trajectory.problem_id)}</code>, sample {text(trajectory.sample_index)}{ended}</p>"
        f"{turns}</article>"
    )
