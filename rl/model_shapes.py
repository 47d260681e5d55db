"""Whether a model folder's config.json and weights belong together: names and shapes in the headers of its safetensors
files against those of the model that the configuration describes. Runs in scripts.prepare; no weights are loaded.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
NAMED = 3  # tensors that a message lists

Shapes = dict[str, tuple[int, ...]]


def header(file: Path) -> tuple[int, dict]:
    """(bytes of the whole file as its header says, the header's entries by tensor name). Raises ValueError saying what
    is wrong with a file that has none."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        start = opened.read(8)
        if start == b"version ":
            raise ValueError(f"{file.name} is a Git LFS pointer, not the weights (git lfs pull fetches them)")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= size - 8:
            raise ValueError(f"{file.name} is cut or no safetensors file ({size} bytes)")
        try:
            tensors = json.loads(opened.read(length))
            tensors.pop("__metadata__", None)
            ends = [entry["data_offsets"][1] for entry in tensors.values()]
            whole = 8 + length + max(ends, default=0)
            for entry in tensors.values():
                tuple(map(int, entry["shape"]))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{file.name} has a damaged header ({type(error).__name__})") from error
    return whole, tensors


def stored(path: Path) -> Shapes:
    """Shapes by name in the folder's safetensors files; of those that an index names, where there is one."""
    files = sorted(path.glob("*.safetensors"))
    if (index := path / "model.safetensors.index.json").is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = [path / name for name in sorted(set(weight_map.values()))]
    return {name: tuple(entry["shape"]) for file in files for name, entry in header(file)[1].items()}


def settings(path: Path, written: dict) -> dict:
    """Everything in a folder's configuration, with what its class adds to config.json (`written`): Mistral's has a
    window by default. `written` alone where that describes no configuration, which `described` refuses."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True).get_text_config().to_dict()
    except Exception:  # of any kind, as in `described`
        return written


def described(path: Path) -> tuple[Shapes, str, list[str]]:
    """Shapes by name of the model that config.json describes, the name of its inner model ("model"), and patterns of
    tensors that it leaves aside (layers for other ways of decoding). Raises ValueError where it describes none."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM  # seconds to import: only for a model folder

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.device("meta"):  # shapes without memory
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # of any kind: a model's class does arithmetic with sizes that may be anything
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"its config.json describes no model that can be built ({reason})") from error
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    return shapes, model.base_model_prefix, list(model._keys_to_ignore_on_load_unexpected or ())


def faults(path: Path) -> list[str]:
    """What in a folder's weights isn't as its config.json says. Both must be readable (rl/preflight.py). Raises
    ValueError for a configuration that describes no model."""
    if not any(path.glob("*.safetensors")):
        return []
    if "quantization_config" in json.loads((path / "config.json").read_text(encoding="utf-8")):
        return []  # packed weights have shapes of their own
    found, (wanted, prefix, aside) = stored(path), described(path)
    found = {name: shape for name, shape in found.items() if not any(re.search(each, name) for each in aside)}
    if not found.keys() & wanted.keys():  # weights of the inner model alone
        found = {f"{prefix}.{name}": shape for name, shape in found.items()}
    same = sorted(found.keys() & wanted.keys())
    if not same:
        return [f"none of its tensors belongs to the model in config.json: it has {next(iter(found), 'none')!r}, not "
                f"{next(iter(wanted), 'none')!r}"]  # fmt: skip
    layers, present = _layers(wanted), _layers(found)
    if layers != present:
        return [f"config.json says {layers} layers, the weights have {present}"]
    said = [
        f"{name} is {list(found[name])} in the weights and {list(wanted[name])} by config.json"
        for name in same
        if found[name] != wanted[name]
    ]
    if len(said) > NAMED:
        said[NAMED:] = [f"and {len(said) - NAMED} more tensors"]
    missing = sorted(wanted.keys() - found.keys())
    if missing and not found.keys() - wanted.keys():  # else they may be stored under other names
        said.append(f"{missing[0]} is missing ({len(missing)} of {len(wanted)} tensors)")
    return said


def _layers(shapes: Shapes) -> int:
    """Number of different layers that the names speak of."""
    return len({found[1] for name in shapes if (found := LAYER.search(name))})
