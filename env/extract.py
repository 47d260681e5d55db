"""From a model's answer to a candidate's source: find the code block, parse it, find the class and the kernels.

Runs in the judge, never in the process that will run the code. What is found here is evidence and feedback: alone it
convicts nobody. Everything goes through the syntax tree, since names inside strings and comments prove nothing.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

# A fence opens with ``` or ~~~ at the start of a line (up to three blanks before it) and closes with the same mark.
_FENCE = re.compile(r"^[ \t]{0,3}(```+|~~~+)[ \t]*([A-Za-z0-9_+-]*)[^\n]*$", re.MULTILINE)
_PYTHON_TAGS = ("", "python", "py", "python3", "triton")


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
    # A closing tag that is left belongs to thinking that the prompt opened.
    return "".join([*kept, text[at:]]).rsplit("</think>", 1)[-1]


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


def _defines(source: str, name: str) -> bool:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # Not parsable: the word still says which block was meant, so that the error can be shown to its author.
        return (
            re.search(rf"^(class|def)\s+{re.escape(name)}\b|^{re.escape(name)}\s*=", source, re.MULTILINE) is not None
        )
    return _find_binding(tree, name) is not None


def _find_binding(tree: ast.Module, name: str) -> ast.stmt | None:
    """The last top-level statement that binds `name` (Python's own rule: the last binding counts)."""
    found = None
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            bound = node.name == name
        else:
            targets = node.targets if isinstance(node, ast.Assign) else []
            bound = any(isinstance(target, ast.Name) and target.id == name for target in targets)
        if bound:
            found = node
    return found


def _dedent(block: str) -> str:
    """Take off the indentation that a block shares when it stands in a list item."""
    lines = block.split("\n")
    indents = [len(line) - len(line.lstrip(" ")) for line in lines if line.strip()]
    shared = min(indents, default=0)
    return "\n".join(line[shared:] for line in lines)


def extract_code(response: str, entry_point: str = "Model") -> str | None:
    """Code of the last Python block that defines `<entry_point>New`; thinking is skipped. None where there is none.

    An answer without any fence that is itself Python defining the class is taken as it is.
    """
    response = _without_thinking(_normalise(response))
    name = f"{entry_point}New"
    for block in reversed(code_blocks(response)):
        code = _dedent(block)
        if _defines(code, name):
            return code
    if not _FENCE.search(response):
        try:
            tree = ast.parse(response)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        if _find_binding(tree, name) is not None:
            return response
    return None


def clean_source(source: str) -> str:
    """A candidate handed over as source: byte order mark and line ends made plain, so that parser and loader agree."""
    return _normalise(source)


def _is_jit(decorator: ast.expr) -> bool:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return (isinstance(target, ast.Attribute) and target.attr == "jit") or (
        isinstance(target, ast.Name) and target.id == "jit"
    )


def inspect_source(source: str, entry_point: str = "Model") -> StaticReport:
    """Parse a candidate and say what it defines. `error` is a sentence for its author where it can't be judged."""
    name = f"{entry_point}New"
    if not source.strip():
        return StaticReport(error="The answer is empty: no code was found.")
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        line = (error.text or "").strip()[:120]
        return StaticReport(error=f"SyntaxError: {error.msg} (line {error.lineno}: {line!r})")
    except (ValueError, RecursionError, MemoryError) as error:
        return StaticReport(error=f"The source can't be parsed: {type(error).__name__}: {error}")
    kernels = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list))
    ]
    binding = _find_binding(tree, name)
    if binding is None:
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        seen = f" (classes found: {', '.join(classes)})" if classes else ""
        return StaticReport(error=f"No class {name} is defined at the top level{seen}.", kernels=kernels)
    if isinstance(binding, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return StaticReport(
            error=f"{name} is a function; it must be a class derived from torch.nn.Module.", kernels=kernels
        )
    return StaticReport(kernels=kernels)
