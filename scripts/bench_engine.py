"""Tokens a second of the plain engine: `python -m scripts.bench_engine`. Prints one JSON; progress goes to stderr.

A Qwen3-shaped model with random weights answers prompts of `--prompt` tokens with `--new` tokens each, none stops
early. On a GPU in bf16 with the static cache and a CUDA graph (under a minute); with `--device cpu` in fp32, a smaller
batch. Reported: the first call (which captures the graph) and the best of three more, the time of a decode step, GPU
memory, and how far log-probs are from those of a forward pass over the whole sequences.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

VOCABULARY = 4096
REPEATS = 3
CHECKED = 8


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def build(layers: int, width: int, device: str) -> torch.nn.Module:
    """A Qwen3-shaped model, bf16 on a GPU; buffers stay in fp32, as in training."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=max(1, width // 32), num_key_value_heads=max(1, width // 64), head_dim=32,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(shape).to(device).eval()
    if device == "cuda":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


def logprob_gaps(model: torch.nn.Module, prompts: list, completions: list) -> dict[str, float]:
    """Mean, standard deviation and largest size of (forward pass - engine) over the tokens of some answers."""
    gaps = []
    for prompt, completion in list(zip(prompts, completions))[:CHECKED]:
        ids = torch.tensor([[*prompt, *completion.ids]], device=next(model.parameters()).device)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None]).squeeze(-1).cpu()
        gaps.append(chosen - torch.tensor(completion.logprobs))
    joined = torch.cat(gaps).double()
    return {"mean": joined.mean().item(), "std": joined.std().item(), "largest": joined.abs().max().item()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    from rl.engines.base import Sampling, generate
    from rl.engines.hf import HFEngine

    device, batch = options.device, options.batch
    model = build(options.layers, options.width, device)
    note(f"{options.layers} layers, {options.width} wide, batch {batch}, {options.prompt} + {options.new} tokens")
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(VOCABULARY, (batch, options.prompt), generator=generator).tolist()
    sampling, seeds = Sampling(options.new), list(range(batch))
    static = None if device == "cuda" else options.static
    begun = time.perf_counter()
    engine = HFEngine(model, batch, static=static)
    seconds = []
    for number in range(1 + REPEATS):
        if number:
            begun = time.perf_counter()
        completions = generate(engine, prompts, sampling, [seed + number * batch for seed in seeds])
        seconds.append(time.perf_counter() - begun)  # ids have come to the host: the GPU is done
        note(f"call {number + 1}: {seconds[-1]:.2f} s, {batch * options.new / seconds[-1]:,.0f} tokens/s")
    best = min(seconds[1:])
    decoder = engine.decoder
    result = {
        "tokens_per_s": round(batch * options.new / best),
        "step_ms": round(1000 * best / options.new, 3),
        "first_call_s": round(seconds[0], 2),
        "calls_s": [round(value, 3) for value in seconds[1:]],
        "cuda_graph": decoder is not None and decoder.captured,
        "static_cache": decoder is not None,
        "logprob_gap": logprob_gaps(model, prompts, completions),
        "shape": {name: getattr(options, name) for name in ("layers", "width", "batch", "prompt", "new")},
        "device": torch.cuda.get_device_name(0) if device == "cuda" else platform.machine(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    if device == "cuda":
        result["memory_peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens a second of the plain engine; prints one JSON.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--batch", type=int, help="sequences at once; default 256, on a CPU 16")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of each prompt")
    parser.add_argument("--new", type=int, help="tokens of each answer; default 256, on a CPU 64")
    parser.add_argument("--static", action="store_true", help="the static cache on a CPU too (no graph there)")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    options = parser.parse_args()
    options.batch = options.batch or (256 if options.device == "cuda" else 16)
    options.new = options.new or (256 if options.device == "cuda" else 64)
    text = json.dumps(measure(options), indent=1)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
