"""From a model's answer to a candidate's source: find the code block, parse it, find the class and the kernels.

Runs in the judge, never in the process that will run the code. What is found here is evidence and feedback: alone it
convicts nobody, except of what no loader could make sense of (nothing there, no Python, the class nowhere). Everything
goes through the syntax tree, since names inside strings and comments prove nothing.
"""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass, field

from env.bindings import Bindings, kernel_names

# The parser costs up to 15 us a character and holds the interpreter lock meanwhile, whole lines of comments next to
# nothing: a million statements are 20 s and 2 GB. 100 000 characters are some 25 000 tokens, more than answers have.
MAX_CHARS = 4 << 20
MAX_CODE_CHARS = 100_000

# A fence opens with ``` or ~~~ at the start of a line (up to three blanks before it) and closes with the same mark.
_FENCE = re.compile(r"^[ \t]{0,3}(```+|~~~+)[ \t]*([A-Za-z0-9_+-]*)[^\n]*$", re.MULTILINE)
_PYTHON_TAGS = ("", "python", "py", "python3", "triton")
_FILE = "<candidate>"

# A candidate with a thousand invalid escapes would have the parser print a thousand warnings.
warnings.filterwarnings("ignore", module=re.escape(_FILE))


@dataclass
class StaticReport:
    """What the source shows without being run. `error` is set where it can't be a candidate at all."""

    error: str = ""
    kernels: list[str] = field(default_factory=list)


def _normalise(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")


def _without_thinking(text: str) -> str:
    """The answer behind the thoughts. Not a regular expression: a megabyte of opening tags costs one minutes."""
    kept, at = [], 0
    while (start := text.find("<think>", at)) >= 0 and (end := text.find("</think>", start)) >= 0:
        kept.append(text[at:start])
        at = end + len("</think>")
    # Thoughts that never end hold drafts, no answer.
    kept.append(text[at:start] if start >= 0 else text[at:])
    # A closing tag that is left belongs to thinking that the prompt opened.
    return "".join(kept).rsplit("</think>", 1)[-1]


def code_blocks(response: str) -> list[str]:
    """The closed fenced blocks of a response, in order. One whose fence never closes was cut off and is left out."""
    blocks: list[str] = []
    opened: re.Match[str] | None = None
    for mark in _FENCE.finditer(response):
        if opened is None:
            opened = mark
        elif (
            mark.group(1)[0] == opened.group(1)[0] and not mark.group(2) and len(mark.group(1)) >= len(opened.group(1))
        ):
            if opened.group(2).lower() in _PYTHON_TAGS:
                blocks.append(response[opened.end() + 1 : mark.start()])
            opened = None
    return blocks


def _code_chars(source: str) -> int:
    """Characters outside blank lines and whole lines of comment (or of text in a string, which costs as little)."""
    if len(source) <= MAX_CODE_CHARS:
        return len(source)
    return sum(len(line) for line in source.split("\n") if line and not line.isspace() and line.lstrip()[0] != "#")


def _parse(source: str) -> ast.Module:
    """Raises SyntaxError, ValueError (null bytes, lone surrogates), RecursionError, MemoryError: nested too deep."""
    return ast.parse(source, _FILE)


def _dedent(block: str) -> str:
    """Take off the indentation that a block shares when it stands in a list item."""
    lines = block.split("\n")
    indents = [len(line) - len(line.lstrip(" ")) for line in lines if line.strip()]
    shared = min(indents, default=0)
    return "\n".join(line[shared:] for line in lines)


def extract_code(response: str, entry_point: str = "Model") -> str | None:
    """Code of the last Python block that defines `<entry_point>New`; thinking is skipped. None where there is none.

    A block that only might define it (in a function, through `globals()` or `exec`) is taken where no other does. An
    answer without any fence that is itself Python defining the class is taken as it is.
    """
    response = _without_thinking(_normalise(response))
    name = f"{entry_point}New"
    if not _FENCE.search(response):
        return response if _definition(response, name, MAX_CODE_CHARS, by_words=False) else None
    perhaps, budget = None, MAX_CODE_CHARS
    for block in reversed(code_blocks(response)):
        if name not in block:
            continue
        code = _dedent(block)
        found = _definition(code, name, budget)
        if found == "certain":
            return code
        if found == "possible" and perhaps is None:
            perhaps = code
        budget -= _code_chars(code)
    return perhaps


def _definition(source: str, name: str, budget: int, by_words: bool = True) -> str:
    """ "certain", "possible" or "": whether a source binds the name. Longer ones than `budget` are judged by words."""
    if name not in source:
        return ""
    if _code_chars(source) <= budget:
        try:
            bindings = Bindings.of(_parse(source), name)
            return "certain" if bindings.certain else "possible" if bindings.possible else ""
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            if not by_words:
                return ""
    # The words say which block was meant, so that its author is shown what is wrong with it.
    words = rf"^[ \t]*(class|def)[ \t]+{re.escape(name)}\b|^{re.escape(name)}[ \t]*="
    return "certain" if re.search(words, source, re.MULTILINE) else ""


def clean_source(source: str) -> str:
    """A candidate handed over as source: byte order mark and line ends made plain, so that parser and loader agree."""
    return _normalise(source)


def candidate_source(response: str, raw: bool, entry_point: str = "Model") -> str | None:
    """What is judged: the code in a model's whole answer (`raw`; None where there is none), or plain source."""
    return extract_code(response, entry_point) if raw else clean_source(response)


def inspect_source(source: str, entry_point: str = "Model") -> StaticReport:
    """Parse a candidate and say what it defines. `error` is a sentence for its author where it can't be judged.

    A class that may come to be while the module runs is left to the loader, and so is what the parser gives up on.
    """
    name = f"{entry_point}New"
    if not source or source.isspace():
        return StaticReport(error="The answer is empty: no code was found.")
    if len(source) > MAX_CHARS:
        return StaticReport(
            error=f"The source is too large to be judged: {len(source):,} characters, at most {MAX_CHARS:,} are read."
        )
    if (size := _code_chars(source)) > MAX_CODE_CHARS:
        return StaticReport(
            error=f"The source is too large to be judged: {size:,} characters outside comments, at most "
            f"{MAX_CODE_CHARS:,} are read."
        )
    if "\0" in source:
        line = source.count("\n", 0, source.index("\0")) + 1
        return StaticReport(error=f"The source isn't text: a null byte in line {line}.")
    try:
        tree = _parse(source)
    except UnicodeEncodeError as error:
        line = source.count("\n", 0, error.start) + 1
        return StaticReport(
            error=f"The source isn't text: half a surrogate pair in line {line}, which no file can hold."
        )
    except SyntaxError as error:
        line = (error.text or "").strip()[:120]
        return StaticReport(error=f"SyntaxError: {error.msg} (line {error.lineno}: {line!r})")
    except ValueError as error:
        return StaticReport(error=f"The source can't be parsed: {type(error).__name__}: {error}")
    except (RecursionError, MemoryError):
        return StaticReport(error="" if name in source else f"No class {name} is defined.")
    kernels = kernel_names(tree)
    bindings = Bindings.of(tree, name)
    if bindings.possible:
        return StaticReport(kernels=kernels)
    if not bindings.certain:
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        seen = f" (classes found: {', '.join(classes)})"[:400] if classes else ""
        return StaticReport(error=f"No class {name} is defined at the top level{seen}.", kernels=kernels)
    if bindings.plain_function:
        return StaticReport(
            error=f"{name} is a function; it must be a class derived from torch.nn.Module.", kernels=kernels
        )
    return StaticReport(kernels=kernels)
