"""A verdict as text for the next turn's prompt: compact, stable, the same words for the same fact.

Runs in the judge. First line `status: …`; numbers are rounded, so that noise doesn't rewrite the prompt.
"""

from __future__ import annotations

from typing import Any

from env.records import Verdict

MAX_ROWS = 5
MAX_MESSAGE = 600


def _cut(text: str, limit: int) -> str:
    """Cut in the middle: the start names the error, the end often says why."""
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return text[:half] + " ... " + text[-half:]


def kernel_rows(profile: list[dict[str, Any]]) -> list[str]:
    total = sum(row["time_us"] for row in profile) or 1.0
    lines = []
    for row in profile[:MAX_ROWS]:
        mine = "triton" if row["own"] else "torch"
        lines.append(f"- {mine} {row['name'][:60]} x{row['count']}: {100 * row['time_us'] / total:.0f}%")
    if len(profile) > MAX_ROWS:
        lines.append(f"- and {len(profile) - MAX_ROWS} more")
    return lines


def render(verdict: Verdict) -> str:
    """Feedback of a verdict. Nothing in it tells the candidate what is only the judge's business (seeds, limits)."""
    lines = [f"status: {verdict.status}"]
    if verdict.status == "correct":
        kind = " (modelled)" if verdict.time_kind == "modelled" else ""
        lines.append(f"speedup: {verdict.speedup:.2f}x{kind}")
        lines.append(f"profiling ratio: {verdict.profiling_ratio:.2f}")
        lines += kernel_rows(verdict.profile)
    elif verdict.blameless:
        lines.append("not measured: this attempt was not judged")
    else:
        lines.append(_cut(verdict.message, MAX_MESSAGE))
        lines += verdict.evidence.get("lines", [])[-3:]
    return "\n".join(lines)
