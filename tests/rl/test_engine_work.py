"""What the plain engine computes, and when it can be used again; and what is refused of other engines at the seam."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from rl.engines import static
from rl.engines.base import Batch, Completion, EngineError, Request, Sampling, checked, generate
from rl.engines.hf import HFEngine
from rl.engines.sampling import sample

pytestmark = pytest.mark.budget(30)

VOCABULARY = 40


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    shape = dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.2,
    )  # fmt: skip
    return Qwen3ForCausalLM(Qwen3Config(**shape)).eval()


@pytest.fixture
def shapes(model):
    """[rows, columns] of the ids of every forward pass."""
    seen = []
    handle = model.register_forward_pre_hook(
        lambda module, args, given: seen.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    yield seen
    handle.remove()


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13]]
SEEDS = [11, 12, 13, 14]


def test_batches_hold_prompts_of_like_length_and_no_more_than_are_allowed(model, shapes):
    prompts = [[1] * length for length in (9, 1, 9, 1, 2)]
    generate(HFEngine(model, 2, static=False), prompts, Sampling(1), range(5))
    assert shapes == [(2, 1), (2, 9), (1, 9)]


def test_rows_that_are_finished_are_taken_out(model, shapes):
    """Eight rows, of which all but one have room for so many tokens as their number says."""
    prompts = [[1] * (20 - room) for room in range(1, 9)]
    generate(HFEngine(model, 8, static=False), prompts, Sampling(20, context=20), range(8))
    assert [rows for rows, _ in shapes] == [8, 7, 6, 5, 4, 3, 2, 1]


def test_positions_are_those_of_the_prompt_not_of_its_padding():
    """A model of absolute positions beside longer prompts: the log-probs of a forward pass of its own."""
    torch.manual_seed(0)
    shape = dict(vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=1, n_head=2, initializer_range=0.5)
    absolute = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).eval()
    for prompt, got in zip(PROMPTS, generate(HFEngine(absolute, 4, static=False), PROMPTS, Sampling(6), SEEDS)):
        with torch.no_grad():
            logits = absolute(torch.tensor([[*prompt, *got.ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert got.logprobs == pytest.approx(logits.gather(-1, torch.tensor(got.ids)[:, None])[:, 0].tolist(), abs=1e-5)


def test_it_computes_on_one_core_and_leaves_the_others_as_they_were(model):
    threads, during = torch.get_num_threads(), []
    handle = model.register_forward_pre_hook(lambda *_: during.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    try:
        generate(HFEngine(model, 2, static=False), PROMPTS, Sampling(2), SEEDS)
        assert set(during) == {1} and torch.get_num_threads() == 2
        with pytest.raises(ValueError, match="empty"):
            generate(HFEngine(model, 2, static=False), [[]], Sampling(2), [1])
        assert torch.get_num_threads() == 2
    finally:
        handle.remove()
        torch.set_num_threads(threads)


@pytest.mark.parametrize("way", [False, True], ids=["growing", "static"])
def test_an_engine_whose_last_stream_was_broken_off_begins_anew(model, way):
    engine, sampling = HFEngine(model, 4, static=way), Sampling(60, context=30)
    expected = generate(HFEngine(model, 4, static=way), PROMPTS[:2], sampling, SEEDS[:2])
    stream = engine.stream(Batch([Request(90, [1] * 28, 1), Request(91, [2], 2), Request(92, [3], 3)]), sampling)
    assert next(stream)[0].key == 90  # it has room for two tokens, the others for 29
    stream.close()
    assert not way or not engine.decoder.idle
    assert [c.ids for c in generate(engine, PROMPTS[:2], sampling, SEEDS[:2])] == [c.ids for c in expected]


@pytest.mark.parametrize("way", [False, True], ids=["growing", "static"])
def test_every_stream_is_sampled_as_it_asks(model, way):
    """The same engine under other settings and other numbers of prompts, against one that has done nothing else."""
    engine = HFEngine(model, 4, static=way)
    for sampling, count in ((Sampling(5), 4), (Sampling(5, 0.5), 4), (Sampling(8, stop_ids=(7,)), 1), (Sampling(5), 4)):
        again = generate(engine, PROMPTS[:count], sampling, SEEDS[:count])
        expected = generate(HFEngine(model, 4, static=way), PROMPTS[:count], sampling, SEEDS[:count])
        assert [c.ids for c in again] == [c.ids for c in expected]


def test_a_decoder_serves_again_where_it_is_neither_too_small_nor_more_than_twice_too_large(model):
    decoder = static.StaticDecoder(model, 4, Sampling(5))
    assert [slots for slots in range(1, 7) if decoder.serves(slots, Sampling(5))] == [2, 3, 4]
    assert not decoder.serves(4, Sampling(5, 0.5)) and not decoder.serves(4, Sampling(6))
    engine = HFEngine(model, 4, static=True)
    generate(engine, PROMPTS, Sampling(5), SEEDS)
    kept = engine.decoder
    generate(engine, PROMPTS[:2], Sampling(5), SEEDS[:2])
    assert kept is not None and engine.decoder is kept
    generate(engine, PROMPTS[:1], Sampling(5), SEEDS[:1])
    assert engine.decoder is not kept


def test_a_large_cache_is_given_back_when_nothing_is_left_to_do(model, monkeypatch):
    engine = HFEngine(model, 4, static=True)
    generate(engine, PROMPTS, Sampling(3), SEEDS)
    held = sum(t.numel() * t.element_size() for pair in engine.decoder.cache.pairs for t in pair)
    assert held == 2 * 2 * 4 * 2 * static.CAPACITY_STEP * 8 * 4  # layers, keys and values, slots, heads, tokens, size
    for most, kept in ((held, True), (held - 1, False)):
        monkeypatch.setattr(static, "LARGE_BYTES", most)
        generate(engine, PROMPTS, Sampling(3), SEEDS)
        assert (engine.decoder is not None) == kept


def test_an_answer_beyond_the_first_size_of_the_cache_goes_on_as_it_began(model):
    """256 columns, and then as many again; and none too few where the last one is just filled."""
    for limit in (static.CAPACITY_STEP - 2, static.CAPACITY_STEP + 14):
        ways = [generate(HFEngine(model, 2, static=way), [[4], [12, 13]], Sampling(limit), (1, 2)) for way in (0, 1)]
        assert [c.ids for c in ways[0]] == [c.ids for c in ways[1]] and {len(c.ids) for c in ways[0]} == {limit}


def test_the_largest_draw_there_is_takes_the_last_token_that_can_be():
    """Rounded, the draw times the sum of all chances may be that sum, behind which no token is left."""
    logits = torch.randn(3000, 8, generator=torch.Generator().manual_seed(0)) * 3
    logits[:, 6:] = -torch.inf
    tokens, logprobs = sample(logits, torch.full((3000,), 1 - 2**-53, dtype=torch.float64), 1.0, 1.0)
    assert set(tokens.tolist()) == {5} and logprobs.isfinite().all()
    tokens, _ = sample(logits, torch.zeros(3000, dtype=torch.float64), 1.0, 1.0)
    assert set(tokens.tolist()) == {0}


def test_a_nucleus_is_the_smallest_set_that_holds_top_p():
    """Two tokens of one half each: the first alone holds what it has, and not a bit more."""
    logits, draw = torch.zeros(1, 2), torch.tensor([0.9], dtype=torch.float64)
    half = logits.log_softmax(-1)[0, 0].double().exp().item()
    for top_p, token, logprob in ((half, 0, 0.0), (half * (1 + 1e-12), 1, math.log(0.5)), (half / 2, 0, 0.0)):
        tokens, logprobs = sample(logits, draw, 1.0, top_p)
        assert (tokens.item(), logprobs.item()) == (token, pytest.approx(logprob, abs=1e-6))


def test_prompts_are_computed_so_many_tokens_at_a_time(model, shapes, monkeypatch):
    prompts, seeds = [[i + 1] * length for i, length in enumerate((3, 3, 3, 3, 12))], range(5)
    expected = generate(HFEngine(model, 5, static=True), prompts, Sampling(4), seeds)
    monkeypatch.setattr(static, "PREFILL_TOKENS", 10)
    shapes.clear()
    assert [c.ids for c in generate(HFEngine(model, 5, static=True), prompts, Sampling(4), seeds)] == [
        c.ids for c in expected
    ]
    assert [shape for shape in shapes if shape[1] > 1] == [(3, 2), (1, 2), (1, 11)]  # all but the last token


class Says:
    """An engine with one answer to everything; it leaves out the requests whose keys are in `mute`."""

    takes = "ids"

    def __init__(self, ids=(5, 0), logprobs=(-1.0, -0.5), reason="stop", mute=()):
        self.answer, self.mute = (list(ids), list(logprobs), reason), mute

    def stream(self, source, sampling):
        for request in source.take(source.most, wait=True):
            if request.key not in self.mute:
                yield request, Completion(*self.answer, request.prompt)


def asked(engine, count=1, sampling=Sampling(8, stop_ids=(0,))):  # noqa: B008 it is frozen
    return [c for _, c in checked(engine, Batch([Request(i, [1, 2], i) for i in range(count)]), sampling)]


def test_what_rounding_leaves_above_zero_is_a_logprob_and_more_is_none():
    assert asked(Says(logprobs=(5e-4, -0.5)))[0].logprobs == [5e-4, -0.5]
    with pytest.raises(EngineError, match=r"0\.002 is no log-prob"):
        asked(Says(logprobs=(0.002, -0.5)))


def test_five_requests_without_an_answer_are_named_and_the_others_counted():
    with pytest.raises(EngineError, match=r"answered 1 of 8 .*: request 1; .*; request 5 and 2 more$"):
        asked(Says(mute=range(1, 8)), 8)
    with pytest.raises(EngineError, match=r"answered 3 of 8 .*: request 3; .*; request 7$"):
        asked(Says(mute=range(3, 8)), 8)


def test_an_end_of_no_known_kind_is_refused_of_any_last_token():
    for ids in ((5, 0), (5, 4)):
        with pytest.raises(EngineError, match="finish reason 'abort'"):
            asked(Says(ids, reason="abort"))
    assert asked(Says((5, 4), reason="length"))[0].finish_reason == "length"


def test_an_answer_as_long_as_is_allowed_is_taken_and_a_token_more_is_not():
    fine = Says((5,) * 8, (-1.0,) * 8, "length")
    assert len(asked(fine)[0].ids) == 8
    with pytest.raises(EngineError, match="8 tokens where 7 were asked for"):
        asked(fine, sampling=Sampling(7, stop_ids=(0,)))
    with pytest.raises(EngineError, match="8 tokens where 6 were asked for"):
        asked(fine, sampling=Sampling(8, stop_ids=(0,), context=8))


def test_ids_go_up_to_the_vocabulary():
    sampling = Sampling(8, stop_ids=(0,), vocabulary=6)
    assert asked(Says((5, 0)), sampling=sampling)[0].ids == [5, 0]
    with pytest.raises(EngineError, match="6 is no token"):
        asked(Says((6, 0)), sampling=sampling)


def test_lengths_of_no_answer_are_refused():
    with pytest.raises(ValueError, match="max_new_tokens = 0"):
        Sampling(0)
    assert Sampling(1).limit(10**6) == 1 and Sampling(5, context=12).limit(11) == 1
    with pytest.raises(ValueError, match="12 tokens leaves no room in a context of 12"):
        Sampling(5, context=12).limit(12)
    with pytest.raises(ValueError, match="batch_size = 0"):
        HFEngine(None, 0)


def test_a_batch_hands_out_each_request_once_in_order():
    requests = [Request(i, [1], i) for i in range(5)]
    source = Batch(requests)
    taken = [source.take(2, wait=True) for _ in range(4)]
    assert source.most == 5 and taken == [requests[:2], requests[2:4], requests[4:], []]
