"""The plain engine: its log-probs are the learner's, its draws belong to the sequence, its ids are left alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl.engines.base import Sampling
from rl.engines.hf import HFEngine, sample, uniform_table

pytestmark = pytest.mark.budget(40)

VOCABULARY = 40


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    return Qwen3ForCausalLM(shape).eval()


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13]]
SEEDS = [11, 12, 13, 14]


def full_forward(model, prompt, completion, temperature, top_p):
    """Log-probs of the completion from one pass over the whole sequence, naively, in float64."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1].double() / temperature
    values = []
    for row, token in zip(logits.softmax(-1).tolist(), completion):
        total = 0.0
        for _, probability in sorted(enumerate(row), key=lambda pair: -pair[1]):
            total += probability
            if total >= top_p:
                break
        values.append(math.log(row[token] / (total if top_p < 1 else 1.0)))
    return values


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.6)])
def test_logprobs_are_those_of_a_full_forward_pass(model, temperature, top_p):
    prompts, seeds = PROMPTS * 4, list(range(16))
    completions = HFEngine(model, 6).generate(prompts, Sampling(12, temperature, top_p, (0, 1, 2)), seeds)
    assert {c.finish_reason for c in completions} == {"stop", "length"}  # rows of all kinds, compaction included
    for prompt, completion in zip(prompts, completions):
        expected = full_forward(model, prompt, completion.ids, temperature, top_p)
        assert completion.logprobs == pytest.approx(expected, abs=1e-5)


def test_a_sequence_is_the_same_in_any_company(model):
    sampling = Sampling(10, stop_ids=(0, 1))
    together = HFEngine(model, 4).generate(PROMPTS, sampling, SEEDS)
    for index in range(len(PROMPTS)):
        alone = HFEngine(model, 1).generate([PROMPTS[index]], sampling, [SEEDS[index]])[0]
        assert alone.ids == together[index].ids
        assert alone.logprobs == pytest.approx(together[index].logprobs, abs=1e-5)


def test_equal_seeds_equal_bytes_and_other_seeds_other_tokens(model):
    engine, sampling = HFEngine(model, 2), Sampling(10)
    first = engine.generate(PROMPTS, sampling, SEEDS)
    torch.rand(7)  # the global generator has no say
    assert engine.generate(PROMPTS, sampling, SEEDS) == first
    assert engine.generate(PROMPTS, sampling, [s + 1 for s in SEEDS]) != first


def test_the_stop_token_ends_an_answer_and_is_part_of_it(model):
    everything = tuple(range(VOCABULARY))
    for completion in HFEngine(model, 4).generate(PROMPTS, Sampling(10, stop_ids=everything), SEEDS):
        assert len(completion.ids) == len(completion.logprobs) == 1 and completion.finish_reason == "stop"
    for completion in HFEngine(model, 4).generate(PROMPTS, Sampling(10), SEEDS):
        assert len(completion.ids) == len(completion.logprobs) == 10 and completion.finish_reason == "length"


def test_nearly_greedy_takes_the_most_likely_token(model):
    completion = HFEngine(model, 1).generate([[1, 2]], Sampling(5, temperature=1e-4), [3])[0]
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, *completion.ids]])).logits[0, 1:-1]
    assert completion.ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize("bad", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"temperature": math.nan}])
def test_no_distribution_is_refused(bad):
    with pytest.raises(ValueError, match="must be"):
        Sampling(5, **bad)


def test_a_prompt_without_tokens_or_seed_is_refused(model):
    with pytest.raises(ValueError, match="empty"):
        HFEngine(model, 2).generate([[1], []], Sampling(2), [1, 2])
    with pytest.raises(ValueError, match="seed"):
        HFEngine(model, 2).generate([[1], [2]], Sampling(2), [1])


def test_push_changes_what_is_sampled_from(model):
    engine = HFEngine(model, 4)
    before = engine.generate(PROMPTS, Sampling(6), SEEDS)
    torch.manual_seed(1)
    engine.push(Qwen3ForCausalLM(model.config).eval())
    assert engine.generate(PROMPTS, Sampling(6), SEEDS) != before


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_frequencies_follow_the_distribution(top_p):
    logits = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log().expand(20000, -1)
    draws = uniform_table([7], 20000)[0]
    tokens, logprobs = sample(logits, draws, 1.0, top_p)
    kept = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05] if top_p == 1 else [0.5, 0.2, 0.15, 0.0, 0.0])
    kept = kept / kept.sum()
    shares = torch.bincount(tokens, minlength=5) / 20000
    assert torch.allclose(shares, kept, atol=4 * 0.5 / math.sqrt(20000))  # four standard errors
    assert torch.allclose(logprobs, kept[tokens].log(), atol=1e-5)


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=12), st.floats(0, 1, exclude_max=True), st.floats(0.05, 1))
@settings(max_examples=200, deadline=None)
def test_a_token_of_probability_zero_is_never_drawn(values, draw, top_p):
    logits = torch.tensor([[-torch.inf, *values, -torch.inf]])
    token, logprob = sample(logits, torch.tensor([draw], dtype=torch.float64), 0.5, top_p)
    assert 0 < token.item() < len(values) + 1 and math.isfinite(logprob.item())
