"""The plain engine, both its ways: its log-probs are a forward pass's, draws belong to the sequence, ids stay."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rl.engines import slots, static
from rl.engines.base import Batch, Completion, EngineError, Request, Sampling, checked, generate
from rl.engines.hf import HFEngine
from rl.engines.sampling import sample, uniform_table

pytestmark = pytest.mark.budget(60)

VOCABULARY = 40


SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2,
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)).eval()


@pytest.fixture(params=[False, True], ids=["growing", "static"])
def make(request, model):
    """An engine of `model`, decoding either way."""
    return lambda batch_size: HFEngine(model, batch_size, static=request.param)


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
def test_logprobs_are_those_of_a_full_forward_pass(make, model, temperature, top_p):
    prompts, seeds = PROMPTS * 4, list(range(16))
    completions = generate(make(6), prompts, Sampling(12, temperature, top_p, (0, 1, 2)), seeds)
    assert {c.finish_reason for c in completions} == {"stop", "length"}  # rows of all kinds, compaction included
    for prompt, completion in zip(prompts, completions):
        expected = full_forward(model, prompt, completion.ids, temperature, top_p)
        assert completion.logprobs == pytest.approx(expected, abs=1e-5)


def test_both_ways_sample_the_same(model):
    sampling, prompts, seeds = Sampling(300, stop_ids=(0, 1)), PROMPTS * 3, list(range(12))
    growing, static_ones = (generate(HFEngine(model, 5, static=way), prompts, sampling, seeds) for way in (False, True))
    assert [c.ids for c in growing] == [c.ids for c in static_ones] and max(len(c.ids) for c in growing) > 20
    for one, other in zip(growing, static_ones):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_a_sequence_is_the_same_in_any_company(make):
    sampling = Sampling(10, stop_ids=(0, 1))
    together = generate(make(4), PROMPTS, sampling, SEEDS)
    for index in range(len(PROMPTS)):
        alone = generate(make(1), [PROMPTS[index]], sampling, [SEEDS[index]])[0]
        assert alone.ids == together[index].ids
        assert alone.logprobs == pytest.approx(together[index].logprobs, abs=1e-5)


def test_equal_seeds_equal_bytes_and_other_seeds_other_tokens(make):
    engine, sampling = make(2), Sampling(10)
    first = generate(engine, PROMPTS, sampling, SEEDS)
    torch.rand(7)  # the global generator has no say
    assert generate(engine, PROMPTS, sampling, SEEDS) == first
    assert generate(engine, PROMPTS, sampling, [s + 1 for s in SEEDS]) != first


def test_the_stop_token_ends_an_answer_and_is_part_of_it(make):
    everything = tuple(range(VOCABULARY))
    for completion in generate(make(4), PROMPTS, Sampling(10, stop_ids=everything), SEEDS):
        assert len(completion.ids) == len(completion.logprobs) == 1 and completion.finish_reason == "stop"
    for completion in generate(make(4), PROMPTS, Sampling(10), SEEDS):
        assert len(completion.ids) == len(completion.logprobs) == 10 and completion.finish_reason == "length"


def test_the_context_cuts_an_answer_and_the_record_says_so(make):
    lengths = [len(c.ids) for c in generate(make(4), PROMPTS, Sampling(10, context=9), SEEDS)]
    reasons = [c.finish_reason for c in generate(make(4), PROMPTS, Sampling(10, context=9), SEEDS)]
    assert lengths == [6, 8, 2, 7] and set(reasons) == {"context"}
    with pytest.raises(ValueError, match="no room"):
        generate(make(4), PROMPTS, Sampling(10, context=7), SEEDS)


def test_nearly_greedy_takes_the_most_likely_token(make, model):
    completion = generate(make(1), [[1, 2]], Sampling(5, temperature=1e-3), [3])[0]
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, *completion.ids]])).logits[0, 1:-1]
    assert completion.ids == logits.argmax(-1).tolist()


class Dripping:
    """A Source that has its requests one after the other, each only once the one before is answered."""

    most = 3

    def __init__(self, requests):
        self.left, self.open = list(requests), 0

    def take(self, limit, wait):
        if not self.left or self.open:
            return []
        self.open += 1
        return [self.left.pop(0)][:limit]


def test_requests_may_join_while_others_are_answered(make):
    expected = generate(make(4), PROMPTS, Sampling(7, stop_ids=(0,)), SEEDS)
    source = Dripping([Request(i, p, s) for i, (p, s) in enumerate(zip(PROMPTS, SEEDS))])
    for request, completion in make(4).stream(source, Sampling(7, stop_ids=(0,))):
        source.open -= 1
        assert completion.ids == expected[request.key].ids
    assert not source.left


def test_a_slot_is_given_the_next_request_at_once(model):
    """3 slots, 12 requests, one of them long: the others pass through the two slots beside it."""
    sampling = Sampling(200, stop_ids=tuple(range(2, VOCABULARY)))
    decoder = static.StaticDecoder(model, 3, sampling)
    waiting = [Request(i, [5], i) for i in range(40)]
    decoder.load([Request(99, [1], 5), waiting.pop(), waiting.pop()])
    steps = 0
    while not decoder.idle:
        steps += static.LOOK_EVERY
        decoder.advance()
        free, waiting = waiting[: decoder.free], waiting[decoder.free :]
        decoder.load(free)
    assert steps <= (40 // 2 + 2) * static.LOOK_EVERY


@pytest.mark.parametrize("family", [(Qwen3Config, Qwen3ForCausalLM), (LlamaConfig, LlamaForCausalLM)])
def test_ordinary_models_fit_the_static_cache(family, capsys):
    config, cls = family
    torch.manual_seed(2)
    assert static.fits(cls(config(**SHAPE)).eval()) and not capsys.readouterr().out


def test_a_model_with_windows_goes_the_other_way(capsys):
    assert not static.fits(Gemma2ForCausalLM(Gemma2Config(**SHAPE)).eval())
    assert "can't use the static cache" in capsys.readouterr().out


def test_a_cache_that_is_not_the_models_own_is_found_out(model, monkeypatch):
    right = slots.SlotCache.fill
    monkeypatch.setattr(slots.SlotCache, "fill", lambda self, slots, layers: right(self, slots.flip(0), layers))
    assert not static.fits(model)


def test_sampling_leaves_a_shared_models_attention_as_it_was(model):
    before = model.config._attn_implementation
    generate(HFEngine(model, 4, static=True), PROMPTS, Sampling(3), SEEDS)
    assert model.config._attn_implementation == before != slots.ATTENTION


class Wrong:
    """An engine that answers [5, 0] and whatever `change` makes of it."""

    takes = "ids"

    def __init__(self, **change):
        self.change = change

    def stream(self, source, sampling):
        for request in source.take(source.most, wait=True):
            answer = {"ids": [5, 0], "logprobs": [-1.0, -0.5], "finish_reason": "stop", "prompt_ids": request.prompt}
            yield request, Completion(**answer | self.change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logprobs": []}, "2 tokens but 0 log-probs"),
        ({"logprobs": None}, "no log-probs"),
        ({"logprobs": [-1.0, None]}, "None is no log-prob"),
        ({"logprobs": ["-1", -0.5]}, "'-1' is no log-prob"),
        ({"logprobs": [-math.inf, -0.5]}, "-inf is no log-prob"),
        ({"ids": [VOCABULARY, 0]}, "40 is no token of the model's; an id is an integer from 0 below 40"),
        ({"ids": [-1, 0]}, "-1 is no token"),
        ({"ids": [5.0, 0]}, "5.0 is no token"),
        ({"ids": [True, 0]}, "True is no token"),
        ({"ids": None}, "without a token"),
        ({"prompt_ids": None}, "given 3 prompt tokens"),
        ({"logprobs": [-1.0, math.nan]}, "no log-prob"),
        ({"logprobs": [-1.0, 0.5]}, "no log-prob"),
        ({"prompt_ids": [1, 2]}, "given 3 prompt tokens"),
        ({"prompt_ids": ()}, "given 3 prompt tokens"),
        ({"ids": [], "logprobs": []}, "without a token"),
        ({"ids": [5] * 9, "logprobs": [-1.0] * 9, "finish_reason": "length"}, "9 tokens where 8"),
        ({"ids": [5, 4]}, "finish reason 'stop'"),
        ({"finish_reason": "length"}, "finish reason 'length'"),
        ({"finish_reason": "abort"}, "finish reason 'abort'"),
        ({"ids": [0, 0]}, "behind a stop token"),
    ],
)
def test_an_engine_that_answers_something_else_is_refused_at_once(change, words):
    request = Batch([Request(7, [1, 2, 3], 0)])
    with pytest.raises(EngineError, match=f"Wrong, request 7: .*{words}"):
        list(checked(Wrong(**change), request, Sampling(8, stop_ids=(0,), vocabulary=VOCABULARY)))


def test_an_engine_that_leaves_prompts_out_or_answers_others_is_refused():
    assert generate(Wrong(), [[1], [2]], Sampling(8, stop_ids=(0,)), [1, 2])[1].ids == [5, 0]

    class Unlike(Wrong):
        """Does `change` to what it would yield."""

        def __init__(self, change, takes="ids"):
            super().__init__()
            self.change_all, self.takes = change, takes

        def stream(self, source, sampling):
            yield from self.change_all(list(super().stream(source, sampling)))

    def other_key(pairs):
        return [(Request(request.key + 5, request.prompt, request.seed), answer) for request, answer in pairs]

    class Lazy(Wrong):
        def stream(self, source, sampling):
            source.most = 1
            yield from super().stream(source, sampling)

    for change, words in (
        (lambda pairs: pairs[:1], "answered 1 of 2 requests; without an answer: request 1"),
        (lambda pairs: [], "answered 0 of 2 requests; without an answer: request 0; request 1"),
        (lambda pairs: pairs[:1] * 2, "request 0: answered twice"),
        (other_key, "answered request 5, which it was never asked"),
    ):
        for takes in ("ids", "messages"):
            with pytest.raises(EngineError, match=words):
                generate(Unlike(change, takes), [[1], [2]], Sampling(8, stop_ids=(0,)), [1, 2])
    with pytest.raises(EngineError, match="answered 1 of 2 requests; without an answer: request 1"):
        generate(Lazy(), [[1], [2]], Sampling(8, stop_ids=(0,)), [1, 2])  # never took the second


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": 0.0},
        {"temperature": 1e-30},
        {"temperature": 1e308},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"temperature": math.nan},
    ],
)
def test_no_distribution_is_refused(bad):
    with pytest.raises(ValueError, match="must be"):
        Sampling(5, **bad)


def test_a_prompt_without_tokens_or_seed_is_refused(make):
    with pytest.raises(ValueError, match="empty"):
        generate(make(2), [[1], []], Sampling(2), [1, 2])
    with pytest.raises(ValueError, match="seed"):
        generate(make(2), [[1], [2]], Sampling(2), [1])
    assert generate(make(2), [], Sampling(2), []) == []


def test_push_changes_what_is_sampled_from(make, model):
    engine = make(4)
    before = generate(engine, PROMPTS, Sampling(6), SEEDS)
    torch.manual_seed(1)
    engine.push(Qwen3ForCausalLM(model.config).eval())
    assert generate(engine, PROMPTS, Sampling(6), SEEDS) != before


def test_weights_that_are_trained_in_place_are_sampled_from(make, model):
    """The static decoder keeps its buffers (and on a GPU its graph) from call to call, but nothing of the weights."""
    engine = make(4)
    before = generate(engine, PROMPTS, Sampling(6), SEEDS)
    weight = model.get_input_embeddings().weight
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
        after = generate(engine, PROMPTS, Sampling(6), SEEDS)
        assert after != before and after == generate(make(4), PROMPTS, Sampling(6), SEEDS)
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    assert generate(engine, PROMPTS, Sampling(6), SEEDS) == before


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
