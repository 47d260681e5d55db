"""Nested dicts into a tree of frozen dataclasses: unknown keys, wrong types and values out of range are refused.

Runs in every process. Knows nothing of what the settings mean; rl/config.py does.
"""

from __future__ import annotations

import difflib
import math
import sys
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, field, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

# From dotted keys to the place that set (one of) them, for messages.
Where = Callable[..., str]


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as {"a.b": value}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def differing(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, old value, new value) of every setting that differs; one that a side lacks is "(absent)" there."""
    old, new = flatten(old), flatten(new)
    pairs = [(key, old.get(key, "(absent)"), new.get(key, "(absent)")) for key in sorted(old.keys() | new.keys())]
    return [(key, before, after) for key, before, after in pairs if before != after]


# Of an integer without a limit of its own: a count beyond it is a slip of the keyboard.
LARGEST = 2**31 - 1


class ConfigError(ValueError):
    """A setting that can't be used; the message names the place, the key and what is allowed."""


def ranged(default: Any, low: float | None = None, high: float | None = None, above: float | None = None) -> Any:
    """A field whose value must satisfy low <= value <= high and value > above, where given."""
    return field(default=default, metadata={"low": low, "high": high, "above": above})


def override(data: dict[str, Any], text: str, origins: dict[str, str]) -> None:
    """Write one "a.b=c" into the nested dict and note its key's origin."""
    key, equals, value_text = text.partition("=")
    key, value_text = key.strip(), value_text.strip()
    where = f"--set {text}"
    if not equals or not all(key.split(".")):
        raise ConfigError(f"{where}: expected key=value, e.g. train.steps=3")
    try:
        parsed = tomllib.loads(f"value = {value_text}")
    except tomllib.TOMLDecodeError:
        parsed = {"value": value_text}  # a bare word, so that device=cuda needs no quotes inside the shell's
    except ValueError as error:  # an integer of thousands of digits
        raise ConfigError(f"--set {key}: {error}") from error
    if len(parsed) > 1:
        raise ConfigError(f"--set {key}: one key a --set, this value goes on in a second line with another key")
    value = parsed["value"]
    *sections, last = key.split(".")
    for depth, name in enumerate(sections, 1):
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{where}: {'.'.join(sections[:depth])} is a value, not a section")
    data[last] = value
    origins[key] = where


def section(cls: type, data: Any, prefix: str, where: Where) -> Any:
    """An instance of the dataclass `cls` from a dict, every value checked. `prefix`: its dotted path, "" at the top."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where(prefix)}: {prefix} is a section with keys {_names(cls)}, got {data!r}")
    hints = get_type_hints(cls)
    for key in data:
        if key not in hints:
            dotted = f"{prefix}.{key}" if prefix else key
            raise ConfigError(
                f"{where(dotted)}: unknown key {dotted!r}{nearest(key, list(hints))}; "
                f"known{f' in {prefix}' if prefix else ''}: {_names(cls)}"
            )
    values = {}
    for spec in fields(cls):
        dotted = f"{prefix}.{spec.name}" if prefix else spec.name
        if is_dataclass(hints[spec.name]):
            values[spec.name] = section(hints[spec.name], data.get(spec.name, {}), dotted, where)
        elif spec.name in data:
            values[spec.name] = _value(data[spec.name], hints[spec.name], spec.metadata, dotted, where(dotted))
        elif spec.default is MISSING:
            raise ConfigError(f"{where(dotted)}: {dotted} is missing")
    return cls(**values)


def _value(value: Any, kind: Any, limits: Any, key: str, where: str) -> Any:
    """`value` as type `kind` within its limits, or ConfigError."""
    if get_origin(kind) is Literal:
        allowed = get_args(kind)
        if value not in allowed:
            hint = nearest(value, list(allowed)) if isinstance(value, str) else ""
            raise ConfigError(f"{where}: {key} = {value!r}{hint}; allowed: {', '.join(allowed)}")
        return value
    if kind is float and type(value) is int:
        # What no float can hold is refused below, like the infinity that it would be if it had a decimal point.
        value = float(value) if abs(value) <= sys.float_info.max else math.inf
    if type(value) is not kind:  # not isinstance: True is an int to Python, and steps = true is a mistake
        words = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
        raise ConfigError(f"{where}: {key} must be {words[kind]}, got {value!r} ({type(value).__name__})")
    low, high, above = limits.get("low"), limits.get("high"), limits.get("above")
    if kind is int and high is None:
        high = LARGEST
    inside = kind not in (int, float) or (
        (kind is int or math.isfinite(value))
        and (low is None or value >= low)
        and (high is None or value <= high)
        and (above is None or value > above)
    )
    if not inside:
        parts = [f">= {low}" if low is not None else "", f"> {above}" if above is not None else ""]
        parts += [f"<= {high}" if high is not None else "", "finite"]
        raise ConfigError(f"{where}: {key} = {value!r}; allowed: {' and '.join(filter(None, parts))}")
    return value


def _names(cls: type) -> str:
    return ", ".join(spec.name for spec in fields(cls))


def nearest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""
