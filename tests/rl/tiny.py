"""A tiny Qwen3, its settings, and random rows for it, for tests of the learner."""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl import seeding
from rl.batch import Row
from rl.config import load_recipe

VOCABULARY = 24


def tiny_model(seed=0, layers=2, vocabulary=VOCABULARY, tied=True, spread=0.2):
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            initializer_range=spread,
        )
    )


def config(**overrides):
    pairs = [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
    return load_recipe("mini-cpu", ["loss.scale=1.0", *pairs])


def random_rows(count, seed, advantage=True):
    rng = seeding.rng(seed, "rows")
    rows = []
    for i in range(count):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))]
        completion = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 9))]
        logprobs = [-rng.random() for _ in completion]
        value = rng.gauss(0, 1) if advantage else None
        rows.append(Row(prompt + completion, len(prompt), logprobs, value, problem_id="p", sample_index=i))
    return rows


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])
