"""The engine of a model that lies in a folder, as `engine.name` wants it. Runs in the driver, for evaluation, and in
the rollout process, which is given the learner's weights."""

from __future__ import annotations

from pathlib import Path

from rl import checkpoint
from rl.config import Config
from rl.engines.base import Engine
from rl.prompts import Chat


def folder_engine(
    folder: Path, config: Config, bf16: bool, weights: Path | None = None, ranks: int = 1
) -> tuple[Engine, Chat]:
    """An engine with the weights of `folder`, or of the checkpoint `weights` trained from it, and its chat format.

    bf16: computed in bfloat16, else in float32. ranks: processes that each have an engine (vLLM). Raises
    EngineError where it can't be started, and CheckpointError or ConfigError for files that can't be used.
    """
    import torch

    from rl import modeling  # imports transformers, which takes seconds: not for a finished stage

    vllm = config.engine.name == "vllm"
    model, tokenizer = modeling.load(folder, "cpu") if weights or not vllm else (None, modeling.load_tokenizer(folder))
    if weights:
        checkpoint.load(weights, {f"model.{name}": p.detach() for name, p in model.named_parameters()})
    if vllm:
        from rl.engines.vllm import engine_for

        engine = engine_for(config, folder, bf16, ranks)
        if weights:
            engine.push(model)
        return engine, Chat(tokenizer)
    from rl.engines.hf import HFEngine

    if bf16:
        for parameter in model.parameters():  # not the buffers: rotary frequencies need their precision
            parameter.data = parameter.data.to(torch.bfloat16)
    return HFEngine(model.to(config.device), config.rollout.batch_size), Chat(tokenizer)
