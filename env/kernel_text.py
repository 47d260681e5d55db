"""Triton kernels as text: taken from a process that runs foreign code, checked and built anew in one that doesn't.

`describe` runs in the candidate's worker, `build` in the one that replays its program (CPU, `env.trace`). Under the
interpreter a kernel is any Python function: it could keep tiles between programs, call numpy, look at the counter. What
is built here can say only what Triton compiles: its functions and methods, other kernels, plain constants.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.interpreter import InterpretedFunction

MAX_UNITS, MAX_TEXT = 200, 200_000
# By the names that they may be reached by; their public functions and classes are what a kernel may use of them.
MODULES = {
    "triton": triton, "triton.language": tl, "triton.language.core": tl.core, "triton.language.math": tl.math,
    "triton.language.random": tl.random, "triton.language.standard": tl.standard, "triton.language.extra": tl.extra,
    "triton.language.extra.libdevice": libdevice, "math": math,
}  # fmt: skip
_OF_TRITON = ("language", "cdiv", "next_power_of_2")
_BUILTINS = ("range", "min", "max", "len", "int", "float", "bool", "abs", "print", "tuple", "isinstance")
# What the interpreter itself puts among a kernel's names.
_RESERVED = ("interpreter_semantic", "__builtins__")
_NODES = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For,
    ast.While, ast.If, ast.Pass, ast.Break, ast.Continue, ast.Assert, ast.Expr, ast.BoolOp, ast.BinOp, ast.UnaryOp,
    ast.IfExp, ast.Compare, ast.Call, ast.keyword, ast.JoinedStr, ast.FormattedValue, ast.Constant, ast.Attribute,
    ast.Subscript, ast.Name, ast.List, ast.Tuple, ast.Slice, ast.Starred, ast.expr_context, ast.boolop, ast.operator,
    ast.unaryop, ast.cmpop,
)  # fmt: skip


def _public(thing: Any) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


# Of a tensor, a type, a constant: never `handle`, behind which lie numpy's arrays.
_OF_VALUES = set().union(
    *map(_public, (tl.tensor, tl.dtype, tl.pointer_type, tl.block_type, tl.constexpr, tl.core.tensor_descriptor)),
    ("type", "dtype", "shape", "strides", "numel", "value", "element_ty", "primitive_bitwidth", "int_bitwidth"),
    ("fp_mantissa_width", "name", "address_space", "ALL", "NONE"),
) - {"handle", "data", "to_ir", "mangle", "codegen_name", "cache_key_part"}


class Refused(Exception):
    """A program that can't be told as text, or a text that says more than a program may."""


# In the candidate's worker -------------------------------------------------------------------------------------------


def describe(kernel: Any, units: list[dict[str, Any]], known: dict[int, int], own_file: str, name: str = "") -> int:
    """The place in `units` of a kernel, which is added with all that it calls. known: {id of a kernel: its place}.

    Raises Refused.
    """
    if id(kernel) in known:
        return known[id(kernel)]
    if len(units) >= MAX_UNITS:
        raise Refused(f"more than {MAX_UNITS} kernels")
    function = kernel.fn
    node = _definition(function)
    place = known[id(kernel)] = len(units)
    own = function.__code__.co_filename == own_file
    unit: dict[str, Any] = {"name": name or function.__name__, "own": own, "text": ast.unparse(node), "names": {}}
    units.append(unit)
    for wanted in sorted(_free_names(node)):
        if wanted in function.__globals__:
            value = function.__globals__[wanted]
            unit["names"][wanted] = _binding(wanted, value, units, known, own_file)
    return place


def _definition(function: Any) -> ast.FunctionDef:
    """The text of a function without its decorators, parsed."""
    try:
        parsed = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError) as error:
        raise Refused(f"the kernel {function.__name__} has no source") from error
    node = parsed.body[0]
    if not isinstance(node, ast.FunctionDef):
        raise Refused(f"the kernel {function.__name__} isn't written as a function")
    node.decorator_list = []
    return node


def _locals(node: ast.FunctionDef) -> set[str]:
    arguments = {argument.arg for argument in ast.walk(node) if isinstance(argument, ast.arg)}
    return arguments | {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _free_names(node: ast.FunctionDef) -> set[str]:
    loaded = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    # An annotation or a default is read outside of the function.
    outside = [*node.args.defaults, *(argument.annotation for argument in node.args.args if argument.annotation)]
    outer = {n.id for part in outside for n in ast.walk(part) if isinstance(n, ast.Name)}
    return (loaded - _locals(node)) | outer


def _binding(name: str, value: Any, units: list, known: dict[int, int], own_file: str) -> dict[str, Any]:
    if isinstance(value, ModuleType):
        for path, module in MODULES.items():
            if value is module:
                return {"module": path}
        raise Refused(f"a kernel uses the module {value.__name__}")
    # Triton's own functions are kernels as well: they are there on the other side.
    if callable(value):
        for path, module in MODULES.items():
            for found, other in vars(module).items():
                if other is value and not found.startswith("_"):
                    return {"of": path, "name": found}
    return encode(value, units, known, own_file, f"the name {name}")


def encode(value: Any, units: list, known: dict[int, int], own_file: str, what: str) -> dict[str, Any]:
    """A constant, a type or a kernel as JSON; `decode` gives it back. Raises Refused, naming `what`."""
    if isinstance(value, tl.constexpr):
        return {"constexpr": encode(value.value, units, known, own_file, what)}
    if isinstance(value, InterpretedFunction):
        return {"unit": describe(value, units, known, own_file)}
    if isinstance(value, (tuple, list)):
        return {"tuple": [encode(item, units, known, own_file, what) for item in value]}
    if isinstance(value, tl.dtype):
        for name, found in vars(tl).items():
            if found is value:
                return {"type": name}
    if isinstance(value, torch.dtype):
        return {"torch": str(value).removeprefix("torch.")}
    if hasattr(value, "item") and type(value).__module__ == "numpy":
        value = value.item()
    if value is None or type(value) in (bool, int, str):
        return {"value": value}
    if type(value) is float:
        return {"float": repr(value)}
    raise Refused(f"{what} is a {type(value).__name__}")


# In the worker that replays ------------------------------------------------------------------------------------------


def build(units: list[dict[str, Any]], folder: Path) -> list[InterpretedFunction]:
    """Kernels that say what their texts say and nothing else, in files of `folder`. The candidate's own are those of
    the file `own.py`. Raises Refused.
    """
    if not isinstance(units, list) or len(units) > MAX_UNITS:
        raise Refused("a list of kernels that isn't one")
    allowed = {name: getattr(builtins, name) for name in _BUILTINS}
    spaces: list[dict[str, Any]] = [{"__builtins__": dict(allowed)} for _ in units]
    nodes = [_checked(unit) for unit in units]
    texts = [ast.unparse(node) for node in nodes]
    kernels: list[Any] = [None] * len(units)
    for own in (True, False):
        path, lines = folder / ("own.py" if own else "other.py"), []
        chosen = [number for number, unit in enumerate(units) if (unit["own"] is True) == own]
        starts = {}
        for number in chosen:
            starts[number] = len(lines) + 1
            lines += texts[number].split("\n")
        # The interpreter reads a kernel's text again from its file.
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        for number in chosen:
            for name, binding in units[number]["names"].items():
                if name in _RESERVED:
                    raise Refused(f"a kernel's name {name}")
                if "unit" not in binding:
                    spaces[number][name] = decode(binding, kernels)
            spaces[number].setdefault("__name__", "kernels")
            # Its functions are put in place of Triton's for the time of a launch, where a kernel can see them.
            spaces[number].setdefault("tl", tl)
            code = compile("\n" * (starts[number] - 1) + texts[number] + "\n", str(path), "exec", dont_inherit=True)
            _bind_units(spaces[number], units[number], kernels)
            exec(code, spaces[number])
            kernels[number] = InterpretedFunction(spaces[number][nodes[number].name])
    for number, unit in enumerate(units):
        _bind_units(spaces[number], unit, kernels)
    return kernels


def _bind_units(space: dict[str, Any], unit: dict[str, Any], kernels: list[Any]) -> None:
    """Names of other kernels; those that aren't built yet are bound later."""
    for name, binding in unit["names"].items():
        if "unit" in binding:
            space[name] = kernels[binding["unit"]]


def decode(value: dict[str, Any], kernels: list[Any]) -> Any:
    """What `encode` said. Raises Refused."""
    if not isinstance(value, dict):
        raise Refused("a value that isn't one")
    match value:
        case {"value": plain} if plain is None or type(plain) in (bool, int, str):
            return plain
        case {"float": str(text)}:
            return float(text)
        case {"tuple": list(items)}:
            return tuple(decode(item, kernels) for item in items)
        case {"constexpr": inner}:
            return tl.constexpr(decode(inner, kernels))
        case {"unit": int(number)} if 0 <= number < len(kernels):
            return kernels[number]
        case {"type": str(name)} if isinstance(getattr(tl, name, None), tl.dtype):
            return getattr(tl, name)
        case {"torch": str(name)} if isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        case {"module": str(path)} if path in MODULES:
            return MODULES[path]
        case {"of": str(path), "name": str(name)} if path in MODULES and not name.startswith("_"):
            return _member(MODULES[path], name)
    raise Refused(f"a value that isn't one: {str(value)[:80]}")


def _member(module: ModuleType, name: str) -> Any:
    """A public member of a module that kernels may use. Raises Refused."""
    found = getattr(module, name, None)
    if found is None or name.startswith("_"):
        raise Refused(f"{module.__name__} has no {name} for kernels")
    if isinstance(found, ModuleType):
        if not any(found is known for known in MODULES.values()):
            raise Refused(f"a kernel uses the module {found.__name__}")
    elif module is triton:
        if name not in _OF_TRITON:
            raise Refused(f"a kernel uses triton.{name}")
    elif module is tl.core and not any(found is public for public in vars(tl).values()):
        raise Refused(f"a kernel uses triton.language.core.{name}")
    return found


def _checked(unit: dict[str, Any]) -> ast.FunctionDef:
    """A unit's function, once everything in it is known. Raises Refused."""
    text, names = unit.get("text"), unit.get("names")
    if type(text) is not str or len(text) > MAX_TEXT or not isinstance(names, dict):
        raise Refused("a kernel without its text")
    if type(unit.get("name")) is not str or not re.fullmatch(r"\w{1,200}(:\d{1,8})?", unit["name"]):
        raise Refused("a kernel without a name")
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Refused("a kernel's text can't be parsed") from error
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef) or body[0].decorator_list:
        raise Refused("a kernel's text is more than a function")
    _Check(body[0], names).visit(body[0])
    return body[0]


class _Check(ast.NodeVisitor):
    """Raises Refused at the first thing that Triton wouldn't compile."""

    def __init__(self, node: ast.FunctionDef, names: dict[str, Any]) -> None:
        self.kernel, self.names, self.locals = node, names, _locals(node)
        arguments = node.args
        if arguments.vararg or arguments.kwarg or arguments.kwonlyargs:
            self.refuse("takes arguments by * or **")
        for default in arguments.defaults:
            # A list would be the same one in every program: `+=` adds to it.
            if any(isinstance(part, (ast.List, ast.Tuple, ast.JoinedStr)) for part in ast.walk(default)):
                self.refuse("has a default that could be kept")

    def refuse(self, what: str) -> None:
        raise Refused(f"the kernel {self.kernel.name} {what}")

    def generic_visit(self, node: ast.AST) -> None:
        if not isinstance(node, _NODES) or (isinstance(node, ast.FunctionDef) and node is not self.kernel):
            self.refuse(f"uses {type(node).__name__}, which Triton doesn't compile")
        super().generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in _RESERVED or not (node.id in self.locals or node.id in self.names or node.id in _BUILTINS):
            self.refuse(f"uses {node.id}, which isn't known here")

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.refuse("assigns to an item")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.refuse(f"assigns to the attribute {node.attr}")
        if self._module(node) is None and node.attr not in _OF_VALUES:
            owner = self._module(node.value) if isinstance(node.value, (ast.Name, ast.Attribute)) else None
            if owner is None:
                self.refuse(f"uses the attribute {node.attr}")
            _member(owner, node.attr)
        self.visit(node.value)

    def _module(self, node: ast.AST) -> ModuleType | None:
        """The module that an expression stands for."""
        if isinstance(node, ast.Name) and node.id not in self.locals:
            found = self.names.get(node.id)
            return MODULES.get(found.get("module")) if isinstance(found, dict) else None
        if isinstance(node, ast.Attribute):
            owner = self._module(node.value)
            found = _member(owner, node.attr) if owner is not None else None
            return found if isinstance(found, ModuleType) else None
        return None
