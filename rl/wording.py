"""What is said to the policy: the messages of a first and a later turn, from template files. Runs in the driver.

A template folder holds first_turn.txt ($entry_point, $source) and next_turn.txt ($feedback). rl/templates/ has
`default` (task, rules and a worked example, for models that read English) and `mini` (a line, for the small model);
`prompts.templates` names one of them or any other folder, e.g. with the texts that a released model was trained on.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path

from env.records import Problem
from rl.config import ConfigError, Prompts

TEMPLATES = Path(__file__).parent / "templates"
# Names that a template may use -> whether it can't do without.
FIRST_TURN = {"entry_point": False, "source": True}
NEXT_TURN = {"feedback": True}


@dataclass(frozen=True)
class Wording:
    """Two templates and how much of a feedback is quoted."""

    first_turn: string.Template
    next_turn: string.Template
    feedback_lines: int
    feedback_columns: int

    @classmethod
    def load(cls, config: Prompts) -> Wording:
        """The wording that the settings name. Raises ConfigError that names the file, its fault and what is allowed."""
        folder = template_folder(config.templates)
        return cls(
            _template(folder / "first_turn.txt", FIRST_TURN),
            _template(folder / "next_turn.txt", NEXT_TURN),
            config.feedback_lines,
            config.feedback_columns,
        )

    def first_message(self, problem: Problem) -> str:
        """The user's message of turn 1: the task and the reference."""
        text = self.first_turn.substitute(entry_point=problem.entry_point, source=problem.source.strip("\n"))
        return text.strip()

    def next_message(self, feedback: str) -> str:
        """The user's message of a later turn: the verdict's feedback, shortened, and the request to improve."""
        quoted = shorten(feedback, self.feedback_lines, self.feedback_columns)
        return self.next_turn.substitute(feedback=quoted).strip()


def template_folder(name: str) -> Path:
    """The folder that `prompts.templates` means: one in rl/templates/ by its name, or any path."""
    own = TEMPLATES / name
    if own.is_dir() and "/" not in name:
        return own
    if Path(name).is_dir():
        return Path(name)
    known = ", ".join(sorted(path.name for path in TEMPLATES.iterdir() if path.is_dir()))
    raise ConfigError(
        f"prompts.templates = {name!r}: no such folder; give one with first_turn.txt and next_turn.txt in it, or one "
        f"of {known}"
    )


def shorten(text: str, lines: int, columns: int) -> str:
    """At most `lines` lines of at most `columns` characters, cut in the middle: the start names the error, the end
    often says why."""
    kept = [_cut(line, columns, " ... ") for line in text.strip().split("\n")]
    if len(kept) > lines:
        kept = _cut(kept, lines, ["..."])
    return "\n".join(kept)


def _template(path: Path, names: dict[str, bool]) -> string.Template:
    allowed = ", ".join(f"${name}" for name in names)
    try:
        template = string.Template(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read ({error}); it must hold text with {allowed}") from error
    if not template.is_valid():
        raise ConfigError(f"{path}: a $ that begins no name; write $$ for a dollar sign. Names: {allowed}")
    used = set(template.get_identifiers())
    if unknown := sorted(used - set(names)):
        raise ConfigError(f"{path}: unknown ${unknown[0]}; write $$ for a dollar sign. Names: {allowed}")
    if missing := [name for name, needed in names.items() if needed and name not in used]:
        raise ConfigError(f"{path}: ${missing[0]} is missing: without it the policy can't know what to do")
    return template


def _cut(sequence, limit: int, mark):
    """A str or list of at most `limit` items; where it is longer, `mark` takes the place of its middle."""
    if len(sequence) <= limit:
        return sequence
    head = (limit - len(mark) + 1) // 2
    tail = limit - len(mark) - head
    return sequence[:head] + mark + sequence[len(sequence) - tail :]
