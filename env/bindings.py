"""What a syntax tree binds: is a name defined, and which functions are Triton kernels?

Runs in the judge. Both walks keep their own stack: a tree may be nested deeper than Python's recursion goes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_FUNCTIONS, ast.ClassDef, ast.Lambda)

# Whatever uses one of these may bind any name while it runs.
_DYNAMIC = frozenset(
    {
        "exec", "eval", "compile", "globals", "locals", "vars", "setattr", "getattr", "__import__", "__builtins__",
        "__dict__", "__setattr__", "__globals__", "modules", "f_globals", "f_locals", "import_module", "run_path",
        "loads",
    }
)  # fmt: skip


@dataclass
class Bindings:
    """How a module binds one name.

    certain: by a statement of the module itself that names it. possible: by an import, or by something that only
    running it can tell. plain_function: the last certain binding is an undecorated function that no condition, loop or
    handler stands around.
    """

    certain: bool = False
    possible: bool = False
    plain_function: bool = False

    @classmethod
    def of(cls, tree: ast.Module, name: str) -> Bindings:
        found = cls()
        # (node, it belongs to the module's own scope, a statement stands around it), the next one last.
        stack: list[tuple[ast.AST, bool, bool]] = [(node, True, False) for node in reversed(tree.body)]
        while stack:
            node, outer, inside = stack.pop()
            if _is_dynamic(node, name):
                found.possible = True
            elif _binds(node, name):
                if outer:
                    found.certain = True
                    found.plain_function = isinstance(node, _FUNCTIONS) and not node.decorator_list and not inside
                else:
                    found.possible = True
            if isinstance(node, ast.comprehension):
                # Its target is the comprehension's own name; what it draws from may still bind one (walrus).
                stack += [(part, outer, inside) for part in reversed([node.iter, *node.ifs])]
                continue
            local = isinstance(node, _SCOPES)
            around = inside or isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case))
            stack += [(child, outer and not local, around) for child in reversed(list(ast.iter_child_nodes(node)))]
        return found


def _is_dynamic(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Name):
        return node.id in _DYNAMIC
    if isinstance(node, ast.Attribute):
        return node.attr in _DYNAMIC or (node.attr == name and isinstance(node.ctx, ast.Store))
    if isinstance(node, ast.Global):
        return name in node.names
    # An import: usage notes name the class of the block above like that. A star may bring anything.
    return isinstance(node, ast.alias) and (node.name == "*" or (node.asname or node.name.split(".")[0]) == name)


def _binds(node: ast.AST, name: str) -> bool:
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        return node.name == name
    if isinstance(node, ast.Name):
        return node.id == name and isinstance(node.ctx, ast.Store)
    if isinstance(node, (ast.MatchAs, ast.MatchStar)):
        return node.name == name
    return isinstance(node, ast.MatchMapping) and node.rest == name


# Kernels -------------------------------------------------------------------------------------------------------------


@dataclass
class _Names:
    """Which names of a file stand for `triton.jit`, and which for modules that aren't Triton's."""

    jit: set[str]
    foreign: set[str]

    def is_jit(self, node: ast.expr, depth: int = 0) -> bool:
        """`triton.jit`, its aliases, `jit(...)` with options, `partial(jit, ...)`."""
        if isinstance(node, ast.Call) and depth < 8:
            return self.is_jit(node.func, depth + 1) or any(self.is_jit(part, depth + 1) for part in node.args)
        if isinstance(node, ast.Attribute):
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            return node.attr == "jit" and not (isinstance(root, ast.Name) and root.id in self.foreign)
        return isinstance(node, ast.Name) and node.id in self.jit


def _imported(nodes: list[ast.AST]) -> _Names:
    names = _Names(set(), set())
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] != "triton":
                    names.foreign.add(alias.asname or alias.name.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            ours = (node.module or "").split(".")[0] == "triton"
            for alias in node.names:
                if ours and alias.name == "jit":
                    names.jit.add(alias.asname or "jit")
                elif ours and alias.name == "*":
                    names.jit.add("jit")
                elif not ours:
                    names.foreign.add(alias.asname or alias.name)
    for node in nodes:
        # j = triton.jit, options = triton.jit(debug=True)
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            value = node.value
            named = isinstance(value, ast.Call) and value.args
            if not named and names.is_jit(value):
                names.jit.add(node.targets[0].id)
    return names


def _in_order(tree: ast.Module) -> Iterator[ast.AST]:
    """All nodes in the order of the text (ast.walk goes level by level)."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        yield node
        stack += reversed(list(ast.iter_child_nodes(node)))


def kernel_names(tree: ast.Module) -> list[str]:
    """Functions that `triton.jit` is applied to, as a decorator anywhere in the stack or by a call, in their order."""
    nodes = list(_in_order(tree))
    names = _imported(nodes)
    functions = {node.name for node in nodes if isinstance(node, _FUNCTIONS)}
    found: dict[str, None] = {}
    for node in nodes:
        if isinstance(node, _FUNCTIONS) and any(map(names.is_jit, node.decorator_list)):
            found[node.name] = None
        elif isinstance(node, ast.Call) and names.is_jit(node.func):
            found.update((part.id, None) for part in node.args if isinstance(part, ast.Name) and part.id in functions)
    return list(found)
