"""What the learner reaches on a GPU: `python -m scripts.bench_learner`. Prints one JSON; progress goes to stderr.

Measured, on random weights of a Qwen3-1.7B shape (--tiny: a toy shape, any device, to try the program itself):
  matmul      bf16 matrix products, TFLOP/s: what shares are shares of
  attention   packed causal attention, forward and backward, TFLOP/s, against SDPA of one row
  logprobs    peak memory of log-probs of one long row over a vocabulary of 152 k, above weights and hidden states
  learner     optimiser steps on rows of 8 192 tokens, all of them trained on: tokens a second, share of `matmul`
              counted as 6 N + 6 L d S operations a token (recomputation not counted), peak memory
  kernels     where the first variant's time on the GPU goes
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

VARIANTS = {
    "compiled": (False, True),
    "compiled, recomputed": (True, True),
    "plain": (False, False),
    "plain, recomputed": (True, False),
}
TARGETS = {"compiled": 0.45, "compiled, recomputed": 0.38}


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, and of what is measured on it."""

    width: int = 2048
    mlp: int = 6144
    layers: int = 28
    heads: int = 16
    kv_heads: int = 8
    head_size: int = 128
    vocabulary: int = 151_936
    row: int = 8192
    rows: int = 8
    long_row: int = 32_768
    matmul: int = 8192


TINY = Shape(64, 96, 2, 4, 2, 16, 500, row=96, rows=3, long_row=256, matmul=256)


def note(*words: object) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f} s]", *words, file=sys.stderr, flush=True)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], device: str, warm: int = 2, times: int = 5) -> float:
    """Mean seconds of `work`, after `warm` calls that don't count."""
    for _ in range(warm):
        work()
    wait(device)
    begun = time.perf_counter()
    for _ in range(times):
        work()
    wait(device)
    return (time.perf_counter() - begun) / times


def gib(device: str) -> float | None:
    return round(torch.cuda.max_memory_allocated() / 2**30, 3) if device == "cuda" else None


def measure_matmul(shape: Shape, device: str) -> float:
    """TFLOP/s of square bf16 products of random numbers (zeros would be faster: less power)."""
    a, b = (torch.randn(shape.matmul, shape.matmul, device=device).bfloat16() for _ in range(2))
    return 2 * shape.matmul**3 / seconds(lambda: a @ b, device, warm=3, times=10) / 1e12


def measure_attention(shape: Shape, device: str) -> dict[str, float]:
    """TFLOP/s, forward and backward, of one row: as packed_attention computes it, and as SDPA's own choice does."""
    from rl.attention import packed_attention

    sizes = (1, shape.heads, shape.row, shape.head_size), (1, shape.kv_heads, shape.row, shape.head_size)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    query = torch.randn(sizes[0], device=device, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(sizes[1], device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    starts = torch.tensor([0, shape.row], dtype=torch.int32, device=device)

    def packed() -> None:
        packed_attention(torch.nn.Identity(), query, key, value, None, cu_seq_lens_q=starts, max_length_q=shape.row)[
            0
        ].sum().backward()

    def plain() -> None:
        repeat = shape.heads // shape.kv_heads
        wide = (tensor.repeat_interleave(repeat, dim=1) for tensor in (key, value))
        torch.nn.functional.scaled_dot_product_attention(query, *wide, is_causal=True).sum().backward()

    # Half of the products are masked; two forward, five backward (two of them the forward's again).
    operations = 7 * shape.row**2 * shape.heads * shape.head_size
    return {name: operations / seconds(work, device) / 1e12 for name, work in (("packed", packed), ("sdpa", plain))}


def measure_logprobs(shape: Shape, device: str) -> dict[str, float | None]:
    """Peak GiB above what was there before: of the forward pass alone, and with the backward pass (its results, the
    gradients of hidden states and head, included; their size is given apart)."""
    from rl.logprobs import token_values

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(shape.long_row, shape.width, device=device, dtype=dtype, requires_grad=True)
    head = (torch.randn(shape.vocabulary, shape.width, device=device, dtype=dtype) * 0.02).requires_grad_()
    targets = torch.randint(shape.vocabulary, (shape.long_row,), device=device)

    def peak(work: Callable[[], object]) -> float | None:
        if device != "cuda":
            work()
            return None
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)

    def forward() -> None:
        with torch.no_grad():
            token_values(hidden, head, targets)

    def both() -> None:
        token_values(hidden, head, targets).logprobs.sum().backward()

    results = {"tokens": shape.long_row, "forward_gib": peak(forward), "with_backward_gib": peak(both)}
    gradients = hidden.numel() * hidden.element_size() + head.numel() * head.element_size()
    results["of_which_gradients_gib"] = round(gradients / 2**30, 3)
    hidden.grad = head.grad = None
    results["forward_s"] = seconds(forward, device, 1, 2)
    results["with_backward_s"] = seconds(both, device, 1, 2)
    return results


def measure_learner(shape: Shape, device: str, recompute: bool, compiled: bool, peak: float, profile: bool) -> dict:
    """Steps of a fresh Learner: the first apart (it compiles), then the mean of two."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rl.batch import Row
    from rl.config import load_recipe
    from rl.learner import Learner

    cuda = device == "cuda"
    overrides = {
        "device": device, "train.autocast": cuda, "train.recompute": recompute, "train.compile": compiled and cuda,
        "train.micro_batch_tokens": shape.row,
    }  # fmt: skip
    config = load_recipe("mini-cpu", [f"{key}={json.dumps(value)}" for key, value in overrides.items()])
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=shape.vocabulary,
                hidden_size=shape.width,
                intermediate_size=shape.mlp,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads,
                num_key_value_heads=shape.kv_heads,
                head_dim=shape.head_size,
                max_position_embeddings=shape.long_row,
                tie_word_embeddings=True,
            )
        )
    learner = Learner(model, config)
    parameters = sum(p.numel() for p in model.parameters())
    generator = torch.Generator().manual_seed(0)
    rows = [
        Row(torch.randint(shape.vocabulary, (shape.row,), generator=generator).tolist(), 1, [-1.0] * (shape.row - 1))
        for _ in range(shape.rows)
    ]
    for index, row in enumerate(rows):
        row.advantage = 1.0 if index % 2 else -1.0
    tokens = shape.row * shape.rows
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    first = seconds(lambda: learner.update(rows), device, 0, 1)
    note(f"first step {first:.1f} s")
    step = seconds(lambda: learner.update(rows), device, 1, 2)
    operations = 6 * parameters + 6 * shape.layers * shape.heads * shape.head_size * shape.row
    result = {
        "parameters": parameters,
        "tokens_per_s": round(tokens / step),
        "share_of_matmul": round(tokens / step * operations / 1e12 / peak, 4),
        "step_s": round(step, 4),
        "first_step_s": round(first, 2),
        "peak_gib": gib(device),
        "evaluate_tokens_per_s": round(tokens / seconds(lambda: learner.evaluate(rows), device, 1, 1)),
    }
    if profile:
        result["kernels"] = kernels(lambda: learner.update(rows[:2]), device)
    return result


def kernels(work: Callable[[], object], device: str, shown: int = 16) -> list[dict]:
    """The kernels that take longest: name, milliseconds, calls."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA][: 1 + (device == "cuda")]
    with torch.profiler.profile(activities=kinds) as profiler:
        work()
        wait(device)
    name = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    events = [e for e in profiler.key_averages() if device == "cpu" or e.device_type == torch.profiler.DeviceType.CUDA]
    events.sort(key=lambda event: -getattr(event, name))
    return [{"name": e.key[:90], "ms": round(getattr(e, name) / 1000, 2), "calls": e.count} for e in events[:shown]]


def main(device: str, tiny: bool, limit_s: float, chosen: list[str]) -> dict:
    shape = TINY if tiny else Shape()
    cuda = device == "cuda"
    name = torch.cuda.get_device_name() if cuda else "cpu"
    results: dict = {"device": name, "torch": torch.__version__, "tiny": tiny}
    results["matmul_tflops"] = peak = measure_matmul(shape, device)
    note(f"matmul {peak:.1f} TFLOP/s")
    results["attention_tflops"] = measure_attention(shape, device)
    note("attention", results["attention_tflops"])
    results["logprobs"] = measure_logprobs(shape, device)
    note("logprobs", results["logprobs"])
    results["learner"] = {}
    for index, variant in enumerate(chosen):
        if time.perf_counter() - STARTED > limit_s:
            results["learner"][variant] = "skipped: out of time"
            continue
        recompute, compiled = VARIANTS[variant]
        if cuda:
            gc.collect()  # the last variant's learner
            torch.cuda.empty_cache()
            torch._dynamo.reset()
        try:
            result = measure_learner(shape, device, recompute, compiled, peak, profile=index == 0)
        except torch.OutOfMemoryError as error:
            result = {"error": str(error).partition("\n")[0]}
        if variant in TARGETS and "share_of_matmul" in result:
            result["target"] = TARGETS[variant]
        results["learner"][variant] = result
        note(variant, {key: value for key, value in result.items() if key != "kernels"})
    results["seconds"] = round(time.perf_counter() - STARTED, 1)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a toy shape: tries the program, measures nothing of use")
    parser.add_argument("--limit", type=float, default=130.0, help="no variant is begun after so many seconds")
    parser.add_argument("--variants", default=";".join(VARIANTS), help=f"';'-separated, of: {'; '.join(VARIANTS)}")
    arguments = parser.parse_args()
    wanted = [word.strip() for word in arguments.variants.split(";")]
    if unknown := [word for word in wanted if word not in VARIANTS]:
        parser.error(f"no variant {unknown[0]!r}; known: {'; '.join(VARIANTS)}")
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("the full shape needs a GPU: give --tiny to try the program here")
    STARTED = time.perf_counter()
    print(json.dumps(main(arguments.device, arguments.tiny, arguments.limit, wanted), indent=1))
