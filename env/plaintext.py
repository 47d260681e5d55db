"""Foreign text made harmless: for a prompt, where it must not pose as the judge or as a turn, and for a terminal.

Runs in the judge. What an exception says, what a kernel is called, and every line of source belong to the candidate.
"""

from __future__ import annotations

import re

# Colour, cursor movement, window titles; the last branch takes a sequence that was cut off.
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])?")
# <|im_end|>, <think>, </s>, <start_of_turn>, [INST]: what chat templates and reasoning formats are made of.
_TAG = re.compile(r"<(?=[/|!]?[A-Za-z_][\w.:-]{0,40}[|/]?>)")
_BRACKETS = re.compile(r"\[(?=/?[A-Z_]{3,20}\])")
_PATH = re.compile(r"(?<![\w.)\]/])(?:~|\.{1,2})?/(?:[\w.+@~-]+/)+(?=[\w.+@~-])")
# Far more than is shown, far less than takes long.
_READ = 20_000
_FRAME = re.compile(r'^\s*File "([^"\n]{0,400})", line \d+')


def cut(text: str, limit: int) -> str:
    """At most `limit` characters, cut in the middle: the start names the error, the end often says why."""
    if len(text) <= limit:
        return text
    if limit < 8:
        return text[: max(0, limit)]
    half = (limit - 5) // 2
    return text[: limit - 5 - half] + " ... " + text[-half:]


def _visible(text: str) -> str:
    """Letters of any script stay, other signs only from ASCII: what can't be seen or turns a line around is a '?'."""
    return "".join(
        c if c == "\n" or (c.isascii() and c.isprintable()) or (c.isalnum() and c.isprintable()) else "?" for c in text
    )


def harmless(text: object, limit: int, lines: int = 1) -> str:
    """At most `limit` characters in at most `lines` lines, without control characters, fences, markup or folders."""
    text = cut(str(text), _READ)
    text = _ESCAPE.sub("", text.replace("\r\n", "\n").replace("\r", "\n").replace("\t", " "))
    text = _visible(text)
    rows = [row.rstrip() for row in text.split("\n") if row.strip()]
    if len(rows) > lines:
        keep = lines - lines // 2
        rows = rows[:keep] + rows[len(rows) - lines // 2 :] if lines > 1 else [" / ".join(row.strip() for row in rows)]
    text = "\n".join(rows)
    text = _PATH.sub("", text)
    # Cut first: taking something out could join two harmless halves.
    text = cut(text, limit)
    text = re.sub(r"`{3,}", "'''", text)
    text = re.sub(r"~{3,}", "~", text)
    text = text.replace("<|", "< |").replace("|>", "| >")
    return _BRACKETS.sub("[ ", _TAG.sub("< ", text))


def own_frames(message: str, own_file: str = "candidate.py") -> str:
    """A message whose tracebacks are cut to the candidate's own frames; one without a traceback stays as it is."""
    kept, skipping = [], False
    for line in cut(message, _READ).split("\n"):
        frame = _FRAME.match(line)
        if frame:
            skipping = frame.group(1).rsplit("/", 1)[-1] != own_file
        elif not line.startswith("    "):
            skipping = False
            if line.startswith("Traceback (most recent call last)"):
                continue
        if not skipping:
            kept.append(line)
    return "\n".join(kept)
