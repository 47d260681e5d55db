"""A verdict as text for the next turn's prompt: compact, stable, the same words for the same fact.

Runs in the judge. First line `status: …`; numbers are rounded, so that noise doesn't rewrite the prompt. Whatever the
candidate could have worded stands behind one of our own words on its line and goes through `env.plaintext`: it can
neither pose as a line of ours nor as the end of a turn. Seeds, folders and limits stay with the judge.
"""

from __future__ import annotations

import re
from typing import Any

from env.plaintext import cut, harmless, own_frames
from env.records import Verdict

# Of code and English a token holds about four characters, in the tokenizers of the models that are trained here.
CHARS_PER_TOKEN = 4
MAX_TOKENS = 400
MAX_ROWS = 5
MAX_MESSAGE = 600
MAX_MESSAGE_LINES = 10
MAX_SOURCE_LINES = 3

# What a rule means, and what to do about it.
RULES = {
    "no_own_launch": (
        "no Triton kernel of the answer runs",
        "launch your own kernel from forward() in train and eval mode, and return what it wrote",
    ),
    "no_effect": (
        "the Triton kernels do nothing that the output depends on",
        "let your kernels compute the output, instead of torch, and return what they wrote",
    ),
    "timed_output_differs": (
        "right when checked, wrong when timed",
        "compute every output anew from the inputs of that call, also when it is called many times",
    ),
    "replayed_output": (
        "an earlier output is returned for new inputs",
        "keep no outputs between calls: compute each one from its own inputs",
    ),
    "stops_working": (
        "the kernels are launched in the first calls only",
        "launch your kernels in every call of forward(), however often it is called",
    ),
    "hidden_work": (
        "part of the work is done where it isn't counted",
        "let your kernels do the work, and torch operators what is left, in forward() itself",
    ),
    "output_subclass": (
        "forward() returns something that only looks like a tensor",
        "return plain torch.Tensor objects whose values are computed when forward() returns",
    ),
    "tampering": (
        "the answer reaches beyond its own code",
        "leave torch, triton and the standard library as they are, start no threads or processes; "
        "define only your own kernels and ModelNew",
    ),
}
_OTHER_RULE = ("the work isn't done by the answer's own kernels", "compute the output in your own Triton kernels")
_ALLOCATION = re.compile(r"[Tt]ried to allocate ([0-9.]+ [KMGT]i?B)")


def is_tie(verdict: Verdict) -> bool:
    """True where the interval of a measured speedup spans 1: neither side is known to be faster."""
    low, high = verdict.speedup_low, verdict.speedup_high
    return verdict.time_kind != "modelled" and low is not None and high is not None and low <= 1.0 <= high


def kernel_rows(profile: list[dict[str, Any]]) -> list[str]:
    total = sum(row["time_us"] for row in profile) or 1.0
    lines = []
    for row in profile[:MAX_ROWS]:
        mine = "triton" if row["own"] else "torch"
        lines.append(f"- {mine} {kernel_name(row)} x{row['count']}: {100 * row['time_us'] / total:.0f}%")
    if len(profile) > MAX_ROWS:
        lines.append(f"- and {len(profile) - MAX_ROWS} more")
    return lines


def kernel_name(row: dict[str, Any]) -> str:
    """A row's name on one line. One of the candidate's own is an identifier, whatever it says."""
    name = harmless(row["name"], 60)
    return re.sub(r"[^\w.]", "_", name) if row["own"] else name


def reasons(verdict: Verdict) -> list[str]:
    """Why a candidate isn't correct and what to change: ours in front, then its own words and lines."""
    lines = []
    message = harmless(own_frames(verdict.message), MAX_MESSAGE, MAX_MESSAGE_LINES)
    if verdict.status == "hack":
        what, change = RULES.get(str(verdict.evidence.get("rule")), _OTHER_RULE)
        lines += [f"rule: {what}", f"change: {change}"]
    elif verdict.status == "timeout":
        message = "too slow or without end: no result came in time"
    elif verdict.status == "oom":
        found = _ALLOCATION.search(verdict.message)
        message = f"out of memory{f': it tried to allocate {found.group(1)}' if found else ''}"
    lines += (
        [f"{'| ' if number else 'why: '}{row}" for number, row in enumerate(message.split("\n"))] if message else []
    )
    own = verdict.evidence.get("lines", [])
    own = own if isinstance(own, list) else []
    return lines + [f"at {harmless(line, 160)}" for line in own[-MAX_SOURCE_LINES:]]


def render(verdict: Verdict, max_tokens: int = MAX_TOKENS) -> str:
    """Feedback of a verdict in at most about `max_tokens` tokens (four characters each); the status is always whole."""
    lines = [f"status: {verdict.status}"]
    if verdict.status == "correct":
        if verdict.speedup is not None:
            kind = " (modelled)" if verdict.time_kind == "modelled" else ""
            tie = " (a tie: within the noise)" if is_tie(verdict) else ""
            lines.append(f"speedup: {verdict.speedup:.2f}x{kind}{tie}")
        if verdict.profiling_ratio is not None:
            lines.append(f"profiling ratio: {verdict.profiling_ratio:.2f}")
        lines += kernel_rows(verdict.profile)
    elif verdict.blameless:
        lines.append("not measured: this attempt was not judged")
    else:
        lines += reasons(verdict)
    return "\n".join(_fit(lines, max_tokens * CHARS_PER_TOKEN))


def _fit(lines: list[str], limit: int) -> list[str]:
    """Take from the longest lines first, then whole lines from the middle, until all fit. The first one stays."""
    width = max(map(len, lines))
    while sum(map(len, lines)) + len(lines) - 1 > limit and width > 40:
        width = width * 3 // 4
        lines = [lines[0], *(cut(line, width) for line in lines[1:])]
    while sum(map(len, lines)) + len(lines) - 1 > limit and len(lines) > 2:
        middle = (len(lines) + 1) // 2
        lines = lines[:middle] + lines[middle + 1 :]
    if sum(map(len, lines)) + len(lines) - 1 > limit:
        left = limit - len(lines[0]) - 1
        lines = [lines[0], cut(lines[1], left)] if left > 8 and len(lines) > 1 else lines[:1]
    return lines
