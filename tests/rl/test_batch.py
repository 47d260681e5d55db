"""Packing: every row once, within the limit, even over ranks; and attention that keeps rows apart."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent))

from tiny import tiny_model

from rl.attention import arguments, packed_attention
from rl.batch import deal, make_pack
from rl.policy import Policy

pytestmark = pytest.mark.budget(40)

LENGTHS = st.lists(st.integers(1, 40), max_size=30)


@given(lengths=LENGTHS, limit=st.integers(1, 100), ranks=st.integers(1, 5))
def test_every_row_is_dealt_once_within_the_limit_and_every_rank_has_as_many_batches(lengths, limit, ranks):
    shares = deal(lengths, range(len(lengths)), limit, ranks)
    assert len(shares) == ranks and len({len(share) for share in shares}) == 1
    batches = [batch for share in shares for batch in share]
    assert sorted(m for batch in batches for m in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or sum(lengths[m] for m in batch) <= limit for batch in batches if batch)


@given(lengths=st.lists(st.integers(1, 20), min_size=16, max_size=40), ranks=st.integers(1, 4))
def test_ranks_have_nearly_equal_work(lengths, ranks):
    shares = deal(lengths, range(len(lengths)), 10_000, ranks)
    tokens = [sum(lengths[m] for batch in share for m in batch) for share in shares]
    assert max(tokens) - min(tokens) <= max(lengths)


def test_there_are_as_few_micro_batches_as_hold_the_rows():
    """Each costs a pass over the weights, and with several ranks a round of communication."""
    assert [len(share) for share in deal([10] * 8, range(8), 40, ranks=2)] == [1, 1]
    assert [len(share) for share in deal([10] * 8, range(8), 39, ranks=2)] == [2, 2]
    assert [len(share) for share in deal([10] * 8, range(8), 80)] == [1]
    assert [len(share) for share in deal([10] * 8, range(8), 79)] == [2]


def test_micro_batches_of_one_round_are_alike_on_all_ranks():
    """Ranks wait for each other round by round: the two longest rows go together."""
    assert deal([10, 9, 8, 1], range(4), 10, ranks=2) == [[[0], [2]], [[1], [3]]]


def test_only_members_are_dealt():
    assert deal([5, 6, 7], [2, 0], 100) == [[[2, 0]]]
    assert deal([5, 6, 7], [], 100, ranks=2) == [[], []]


def test_a_pack_lays_rows_end_to_end():
    pack = make_pack([[1, 2, 3], [9], [4, 5]], [[1, 2], [], [1]], [2, 0], "cpu")
    assert pack.input_ids.tolist() == [[4, 5, 1, 2, 3]]
    assert pack.position_ids.tolist() == [[0, 1, 0, 1, 2]]
    assert pack.starts.tolist() == [0, 2, 5] and pack.longest == 3
    assert pack.where.tolist() == [0, 2, 3]
    assert pack.targets.tolist() == [5, 2, 3]
    assert (pack.members, pack.target_counts) == ([2, 0], [1, 2])


ROW = st.lists(st.integers(0, 23), min_size=2, max_size=12)
POLICIES = {recompute: Policy(tiny_model().double(), recompute=recompute) for recompute in (False, True)}


@given(rows=st.lists(ROW, min_size=1, max_size=6), recompute=st.booleans())
@settings(deadline=None, max_examples=40)
def test_a_packed_row_is_what_it_is_alone(rows, recompute):
    """Hidden states, log-probs and the gradient: the sum of what the model gives for each row by itself."""
    policy, model = POLICIES[recompute], POLICIES[recompute].model
    positions = [range(1, len(row)) for row in rows]
    pack = make_pack(rows, positions, range(len(rows)), "cpu")
    model.zero_grad()
    got = policy(pack).logprobs
    got.sum().backward()
    packed_gradient = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    total = 0.0
    for row, piece in zip(rows, got.split(pack.target_counts)):
        logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0].log_softmax(-1)
        own = logits[:-1].gather(-1, torch.tensor(row[1:])[:, None]).squeeze(-1)
        assert torch.allclose(piece.double(), own, atol=1e-6)
        total = total + own.sum()
    total.backward()
    for p, packed in zip(model.parameters(), packed_gradient):
        assert torch.allclose(packed, p.grad, atol=1e-5)


def test_no_mask_of_tokens_by_tokens_is_made(monkeypatch):
    from transformers import masking_utils

    policy = Policy(tiny_model())
    made = []
    for name in ("sdpa_mask", "eager_mask"):
        monkeypatch.setattr(masking_utils, name, lambda *args, **kwargs: made.append(1))
    pack = make_pack([[1, 2, 3], [4, 5]], [[1], [1]], [0, 1], "cpu")
    policy(pack)
    assert arguments(pack)["attention_mask"].numel() == 1 and not made


def test_sampling_with_a_cache_and_padding_is_left_as_it_was():
    plain, model = tiny_model(), tiny_model()
    Policy(model, recompute=True)
    prompt = {
        "input_ids": torch.tensor([[0, 0, 5, 6], [1, 2, 3, 4]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1], [1] * 4]),
    }
    for settings_ in ({}, {"cache_implementation": "static", "disable_compile": True}):
        outputs = [m.generate(**prompt, max_new_tokens=6, do_sample=False, **settings_) for m in (plain, model)]
        assert torch.equal(*outputs)


def test_a_saved_model_asks_for_nothing_of_ours(tmp_path):
    model = tiny_model()
    Policy(model)
    model.save_pretrained(tmp_path)
    assert "packed" not in (tmp_path / "config.json").read_text()


def test_a_window_shorter_than_a_row_is_refused():
    states = torch.zeros(1, 2, 5, 8)
    starts = torch.tensor([0, 5], dtype=torch.int32)
    for window, fine in ((5, True), (4, False)):
        call = dict(cu_seq_lens_q=starts, max_length_q=5, sliding_window=window)
        if fine:
            assert packed_attention(None, states, states, states, None, **call)[0].shape == (1, 5, 2, 8)
        else:
            with pytest.raises(ValueError, match=r"lower model\.context to 4"):
                packed_attention(None, states, states, states, None, **call)


@pytest.mark.gpu
def test_on_a_gpu_flash_attention_keeps_rows_apart():
    torch.manual_seed(0)
    lengths = [300, 1, 77, 129]
    starts = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    query = torch.randn(1, 4, sum(lengths), 32, device="cuda").bfloat16().requires_grad_()
    key, value = (torch.randn(1, 2, sum(lengths), 32, device="cuda").bfloat16().requires_grad_() for _ in range(2))
    outputs = []
    for dtype in (torch.bfloat16, torch.float32):
        states = [t.detach().to(dtype).requires_grad_() for t in (query, key, value)]
        output = packed_attention(None, *states, None, cu_seq_lens_q=starts, max_length_q=300)[0]
        output.square().sum().backward()
        outputs.append([output.detach().float(), *(t.grad.float() for t in states)])
    for got, wanted in zip(*outputs):
        assert (got - wanted).norm() < 0.02 * wanted.norm()
