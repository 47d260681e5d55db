"""Is a problem of one set in another? Two references are the same where they differ only in how they are written down.

Runs in the driver, on text: nothing is imported.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict

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
