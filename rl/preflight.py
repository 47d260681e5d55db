"""What can be known of a run before anything heavy starts: folders, tokenizer, templates, GPUs.

Runs in scripts.prepare. Reads files and asks nvidia-smi; no weights are loaded, no GPU is touched. What is wrong with
the settings themselves, rl.config has refused by then.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from env.pool import visible_gpus
from env.records import Problem
from rl import model_shapes
from rl.config import Config, ConfigError
from rl.engines.base import EngineError
from rl.engines.vllm import installed
from rl.plan import short_context
from rl.roles import roles
from rl.rollout import policy_gpus
from rl.wording import Wording

# About as short as a problem can be: what leaves no room for this one leaves none for any.
SHORTEST = Problem(
    "shortest",
    "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x\n"
    "def get_inputs():\n    return [torch.rand(1)]\ndef get_init_inputs():\n    return []\n",
)


def faults(config: Config) -> list[str]:
    """Everything that stands in a run's way, one message each, with the key and what to do."""
    found, wording = [], None
    try:
        wording = Wording.load(config.prompts)
    except ConfigError as error:
        found.append(str(error))
    of_model = model_faults(Path(config.model.path), config.model.context) if config.model.path else []
    if wording and not of_model and (short := short_context([_shortest_prompt(config, wording)], config)):
        found.append(short)
    found += of_model
    if config.engine.name == "vllm":
        try:
            installed()
        except EngineError as error:
            found.append(str(error))
    return found + placement_faults(config, visible_gpus() if config.device == "cuda" else [])


def doubts(config: Config) -> list[str]:
    """What a run can do and nobody is likely to want: said at the start, not refused, since a short trial of a recipe
    looks like this too."""
    said, steps = [], config.train.steps
    if config.optim.warmup_steps > steps:
        said.append(
            f"optim.warmup_steps = {config.optim.warmup_steps} is more than train.steps = {steps}: the learning rate "
            f"ends at {steps / config.optim.warmup_steps:.0%} of optim.lr"
        )
    if config.eval.every > steps:
        said.append(
            f"eval.every = {config.eval.every} is more than train.steps = {steps}: training is evaluated before its "
            "first step and never again (eval.every=0: not at all)"
        )
    stale = config.placement.kind == "split" and config.placement.staleness > 0
    if stale and config.rejection.importance == "off":
        said.append(
            "placement.staleness = 1 samples from the weights one optimiser step back, and rejection.importance = off "
            "trains as if it were the present ones; "
            + ("MRS counts that step as mismatch. " if config.rejection.mrs != "off" else "")
            + "rejection.importance=token corrects for it"
        )
    return said


def _shortest_prompt(config: Config, wording: Wording) -> int:
    """Tokens of the shortest first prompt: in the model's own tokens, or, where the tokenizer is yet to be built, what
    it takes at least: a token a line, and the markers of its roles."""
    message = wording.first_message(SHORTEST)
    if not config.model.path:
        return sum(bool(line.strip()) for line in message.splitlines()) + 3
    from transformers import AutoTokenizer

    from rl.prompts import Chat

    tokenizer = AutoTokenizer.from_pretrained(config.model.path, local_files_only=True)
    return len(Chat(tokenizer).first_prompt(message))


def placement_faults(config: Config, gpus: list[str]) -> list[str]:
    """What asks for GPUs that aren't there. gpus: those that are visible."""
    if config.device == "cpu" or not gpus:
        return []  # that there is none at all is said by the caller
    taken, seen = policy_gpus(), f"visible: {len(gpus)}"
    if config.placement.kind == "split":
        try:
            roles(config, gpus, taken)
        except ConfigError as error:
            return [str(error)]
        return []
    if taken > len(gpus):
        return [f"torchrun starts {taken} ranks, and each needs a GPU of its own; {seen}"]
    left = len(gpus) - taken if config.env.placement == "apart" else len(gpus)
    if not left:
        return [
            f"env.placement = apart needs a GPU beside the {taken} that the policy takes; {seen}. Use "
            "env.placement=shared, where sampling and judging take turns"
        ]
    if config.env.slots > left:
        return [f"env.slots = {config.env.slots}: the judge needs a GPU a slot and has {left} ({seen}); 0 means all"]
    return []


def model_faults(path: Path, context: int) -> list[str]:
    """What is wrong with the model folder `model.path`, and whether it takes `context` tokens."""
    start = f"model.path {str(path)!r}"
    if not (path / "config.json").is_file():
        return [f"{start} is not a model folder (no config.json in it); an empty path builds the small model"]
    try:
        shape = json.loads((path / "config.json").read_text(encoding="utf-8"))
        kinds, longest = shape.get("architectures") or [], shape.get("max_position_embeddings")
    except (OSError, ValueError, AttributeError) as error:
        return [f"{start}: config.json is damaged ({error}); get the folder anew"]
    found = []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        return [f"{start}: config.json is damaged (architectures is {kinds!r}); get the folder anew"]
    if not any(kind.endswith("ForCausalLM") for kind in kinds):
        found.append(
            f"{start} is {', '.join(kinds) or 'of no stated kind'} (architectures in its config.json); what can be "
            "trained here is a decoder with rotary positions and a plain output head, whose architecture ends in "
            "ForCausalLM, e.g. Qwen3ForCausalLM or LlamaForCausalLM"
        )
    if damage := weight_damage(path):
        found.append(f"{start}: {damage}; get the folder anew")
    elif not found:
        try:
            apart = model_shapes.faults(path)
        except ValueError as error:
            return [f"{start}: {error}; get the folder anew"]
        if apart:
            apart = "; ".join(apart)
            found.append(f"{start}: config.json and weights don't belong together: {apart}. Get the folder anew")
    if isinstance(longest, int) and context > longest:
        found.append(
            f"model.context = {context}, but {path} was made for {longest} positions; set it to {longest} or less"
        )
    found += _attention_faults(start, model_shapes.settings(path, shape), context)
    return found + _tokenizer_faults(path, shape.get("vocab_size"))


def _attention_faults(start: str, settings: dict, context: int) -> list[str]:
    """What the model does to attention scores or logits that the learner doesn't compute. Policy.check (rl/policy.py)
    sees none of it: its rows are shorter than any window, a cap hardly changes small logits, and SDPA, which computes
    the logits that it compares with, leaves out a cap of the scores too."""
    from rl import attention  # imports transformers

    found, window, layers = [], settings.get("sliding_window"), settings.get("layer_types")
    listed = "sliding_attention" in layers if isinstance(layers, list) else True  # without a list, all layers have it
    if isinstance(window, int) and window < context and listed and settings.get("use_sliding_window") is not False:
        found.append(attention.short_window(start, window, f"and model.context is {context}"))
    if caps := {key: value for key, value in sorted(settings.items()) if re.search("soft_?cap", key) and value}:
        found.append(attention.capped(start, caps))
    return found


def weight_damage(path: Path) -> str:
    """What is wrong with a model folder's weight files, by their names and headers alone; "" where nothing is."""
    files = sorted(path.glob("*.safetensors"))
    for index in path.glob("*.index.json"):
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            missing = sorted(name for name in names if not (path / name).is_file())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{index.name} is damaged ({type(error).__name__}: {error})"
        if missing:
            return f"lacks its weights: {', '.join(missing)}"
    if not files:
        known = next(path.glob("pytorch_model*.bin"), None)
        return "" if known else "lacks its weights: no .safetensors file"
    return next(filter(None, map(_safetensors_damage, files)), "")


def _safetensors_damage(file: Path) -> str:
    """Whether the header is one, and the file as long as it says."""
    try:
        whole, _ = model_shapes.header(file)
    except ValueError as error:
        return str(error)
    size = file.stat().st_size
    return f"{file.name} has {size} bytes instead of {whole}" if size != whole else ""


def _tokenizer_faults(path: Path, vocabulary: int | None) -> list[str]:
    from transformers import AutoTokenizer  # seconds to import: only for a model folder

    from rl.prompts import Chat

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # of any kind: files of the folder are read by code of the model's own
        reason = str(error).partition("\n")[0]
        return [f"model.path {str(path)!r} has no tokenizer that loads ({reason}); add the files of the model's own"]
    if isinstance(vocabulary, int) and len(tokenizer) > vocabulary:
        return [
            f"model.path {str(path)!r}: its tokenizer has {len(tokenizer)} tokens and the model {vocabulary}; they "
            "don't belong together"
        ]
    try:
        Chat(tokenizer)
    except ConfigError as error:
        return [f"model.path {str(path)!r}: {error}"]
    return []
