"""A reference out of a kernel's own test cases, for requests that bring no reference. Runs in the driver.

Such a file has, beside `ModelNew`, `get_inputs()` and a `get_cases()` that makes inputs, computes what is expected of
them with plain PyTorch and returns `[{"inputs": [...], "outputs": ...}]`. Its expected values can't be used as they
are: the code under test would have made them. But the way in which they are computed can: it becomes the forward of a
reference, which runs in a process of its own. Nothing is run here; only the syntax tree is read.
"""

from __future__ import annotations

import ast

from env.extract import MAX_CODE_CHARS

_HOW = (
    "get_cases() has to build its inputs, compute what is expected by PyTorch operators, and end with "
    'return [{"inputs": [x, ...], "outputs": expected}]; or send workflow "kernelbench" with a reference_code'
)


class NoReference(ValueError):
    """No reference can be made of this file: why."""


def _names(node: ast.AST, context: type) -> set[str]:
    return {found.id for found in ast.walk(node) if isinstance(found, ast.Name) and isinstance(found.ctx, context)}


def _is_kernel(node: ast.stmt) -> bool:
    """A function with a decorator that ends in jit or autotune: no plain PyTorch."""
    words = ("jit", "autotune", "heuristics")
    return isinstance(node, ast.FunctionDef) and any(
        isinstance(part, ast.Attribute | ast.Name)
        and (part.attr if isinstance(part, ast.Attribute) else part.id) in words
        for decorator in node.decorator_list
        for part in ast.walk(decorator)
    )


def _case(function: ast.FunctionDef) -> tuple[list[str], ast.expr]:
    """(names of the inputs, the expression of what is expected) of the one case that the function returns."""
    last = function.body[-1]
    cases = last.value if isinstance(last, ast.Return) else None
    if not isinstance(cases, ast.List) or len(cases.elts) != 1 or not isinstance(cases.elts[0], ast.Dict):
        raise NoReference(_HOW)
    parts = {
        key.value: value
        for key, value in zip(cases.elts[0].keys, cases.elts[0].values)
        if isinstance(key, ast.Constant)
    }
    inputs, outputs = parts.get("inputs"), parts.get("outputs")
    if (
        outputs is None
        or not isinstance(inputs, ast.List | ast.Tuple)
        or not all(isinstance(x, ast.Name) for x in inputs.elts)
    ):
        raise NoReference(_HOW)
    return [x.id for x in inputs.elts], outputs


def reference_of(source: str, entry_point: str = "Model") -> str:
    """A reference with class `entry_point` from the cases of a file that defines its rival. Raises NoReference."""
    if len(source) > MAX_CODE_CHARS:
        raise NoReference(f"kernel_code has {len(source)} characters, the limit is {MAX_CODE_CHARS}")
    try:
        tree = ast.parse(source.replace("\r\n", "\n"), "<candidate>")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NoReference(f"kernel_code is no Python: {str(error)[:200]}") from error
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    missing = [name for name in ("get_inputs", "get_cases") if name not in functions]
    if missing:
        raise NoReference(f"kernel_code defines no {' and no '.join(missing)}. {_HOW}")
    inputs, outputs = _case(functions["get_cases"])
    # Statements that make the inputs are left out: forward is given others. What is left must not need more than them.
    forward = [node for node in functions["get_cases"].body[:-1] if not _names(node, ast.Store) & set(inputs)]
    forward.append(ast.Return(outputs))
    kept = [
        node
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign)
        or (isinstance(node, ast.FunctionDef) and node.name != "get_cases" and not _is_kernel(node))
    ]
    defined = {
        alias.asname or alias.name.partition(".")[0] for node in kept if hasattr(node, "names") for alias in node.names
    }
    defined |= {node.name for node in kept if isinstance(node, ast.FunctionDef)}
    defined = defined.union(*[_names(node, ast.Store) for node in kept])
    left_out = {node.name for node in tree.body if hasattr(node, "name")} - defined
    used = set().union(*[_names(node, ast.Load) for node in forward])
    if used & left_out:
        raise NoReference(
            f"what is expected is computed by {', '.join(sorted(used & left_out))}, the code under test. {_HOW}"
        )
    if not used & set(inputs):
        raise NoReference(f"what is expected doesn't depend on the inputs. {_HOW}")
    model = ast.parse(
        f"import torch\nclass {entry_point}(torch.nn.Module):\n"
        f"    def forward(self, {', '.join(inputs)}):\n        pass\n"
    )
    model.body[1].body[0].body = forward
    if "get_init_inputs" not in functions:
        model.body += ast.parse("def get_init_inputs():\n    return []\n").body
    module = ast.Module(body=kept + model.body, type_ignores=[])
    try:
        return ast.unparse(ast.fix_missing_locations(module)) + "\n"
    except RecursionError as error:
        raise NoReference(f"kernel_code is nested too deeply. {_HOW}") from error
