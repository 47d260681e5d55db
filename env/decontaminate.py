"""Is a problem of one set in another? Two references are the same where they differ only in how they are written down.

Runs in the driver, on text: nothing is imported.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

from env.records import Problem, sha256


def same_problems(a: list[Problem], b: list[Problem]) -> list[tuple[str, str]]:
    """Pairs of ids (one of `a`, one of `b`) whose references are the same; empty where the sets share nothing."""
    theirs = defaultdict(list)
    for problem in b:
        theirs[fingerprint(problem)].append(problem.id)
    return [(problem.id, other) for problem in a for other in theirs.get(fingerprint(problem), [])]


def fingerprint(problem: Problem) -> str:
    """Digest of a reference without comments, docstrings, layout, annotations and names of its own.

    Renaming variables, arguments, functions or the class makes no other problem; another size or constant does. What
    the parser doesn't take is compared as text, blanks aside.
    """
    try:
        tree = ast.parse(problem.source)
        names = _Canonical(tree)
        return sha256(ast.dump(names.visit(tree)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return sha256(re.sub(r"\s+", " ", problem.source).strip())


# Digests of KernelBench's problems (github.com/ScalingIntelligence/KernelBench, commit 423217d), made by
# `python -m env.decontaminate FOLDER`: so that they can be kept out of training where the files themselves aren't.
KERNELBENCH = Path(__file__).parent / "kernelbench_digests.txt"


@cache
def kernelbench_digests() -> dict[str, str]:
    """`computation` to the name of the KernelBench problem that it belongs to."""
    return dict(line.split(" ", 1) for line in KERNELBENCH.read_text(encoding="utf-8").splitlines())


def kernelbench_among(problems: list[Problem], theirs: list[Problem]) -> list[tuple[str, str]]:
    """Pairs (id of one of `problems`, name of the KernelBench problem that it is, at whatever size). `theirs`: problems
    of a KernelBench folder, where there is one; the digests that are kept here are looked at in any case."""
    known = {computation(problem): problem.id for problem in theirs} | kernelbench_digests()
    return [(problem.id, known[digest]) for problem in problems if (digest := computation(problem)) in known]


def computation(problem: Problem) -> str:
    """Short digest of what a reference computes, apart from sizes: its classes and functions as `fingerprint` sees
    them, without get_inputs, get_init_inputs and constants beside them. The same under all versions of Python.
    """
    try:
        tree = ast.parse(problem.source)
        names = _Canonical(tree)
        kept = [
            part
            for part in tree.body
            if isinstance(part, (ast.ClassDef, ast.FunctionDef)) and part.name not in ("get_inputs", "get_init_inputs")
        ]
        return sha256("\n".join(_dump(names.visit(part)) for part in kept))[:20]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return fingerprint(problem)


def _dump(node: object) -> str:
    # ast.dump shows empty fields in some versions and not in others, and new versions have new ones.
    if isinstance(node, ast.AST):
        parts = ((name, value) for name, value in ast.iter_fields(node) if name not in ("ctx", "kind", "type_comment"))
        return f"{type(node).__name__}({','.join(f'{n}={_dump(v)}' for n, v in parts if v is not None and v != [])})"
    return f"[{','.join(map(_dump, node))}]" if isinstance(node, list) else repr(node)


class _Canonical(ast.NodeTransformer):
    """Names that the file itself binds become v0, v1, … in the order of the text; imported ones stay."""

    def __init__(self, tree: ast.Module):
        self.own: set[str] = set()
        self.names: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.own.add(node.id)
            elif isinstance(node, ast.arg):
                self.own.add(node.arg)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self.own.add(node.name)
        # The loader looks for these, and a method's name may be torch's (forward, __init__).
        methods = {
            part.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for part in node.body
            if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))
        }
        self.own -= methods | {"get_inputs", "get_init_inputs"}

    def _name(self, name: str) -> str:
        return self.names.setdefault(name, f"v{len(self.names)}") if name in self.own else name

    def _body(self, node):
        """Without docstrings and other lone constants, and with what is left renamed."""
        bare = [part for part in node.body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
        node.body = bare or [ast.Pass()]
        return self.generic_visit(node)

    def visit_Module(self, node: ast.Module):
        return self._body(node)

    def visit_ClassDef(self, node: ast.ClassDef):
        node.name = self._name(node.name)
        return self._body(node)

    def visit_FunctionDef(self, node: ast.FunctionDef):
        node.name, node.returns = self._name(node.name), None
        return self._body(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_arg(self, node: ast.arg):
        node.arg, node.annotation = self._name(node.arg), None
        return node

    def visit_Name(self, node: ast.Name):
        node.id = self._name(node.id)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign):
        if node.value is None:
            return ast.Pass()
        return self.visit(ast.Assign(targets=[node.target], value=node.value))


def main(argv: list[str] | None = None) -> int:
    """Digests of a folder's problems, one a line, with their names. Ends with 2 where it can't be read."""
    from env.problems import ProblemError, load_folder

    parser = argparse.ArgumentParser(
        prog="python -m env.decontaminate",
        description="Digests of the problems of a folder, one a line, with their names.",
    )
    parser.add_argument("folder", type=Path, help="of .py files in the KernelBench format, or its repository")
    try:
        problems = load_folder(parser.parse_args(argv).folder)
    except (OSError, ProblemError) as error:
        print(f"env.decontaminate: {error}", file=sys.stderr)
        return 2
    print(*sorted(f"{computation(problem)} {problem.id}" for problem in problems), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
