"""When two outputs count as equal: too tight for tricks that hide in a tolerance, loose enough for honest rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from env import compare as module
from env.compare import Comparison, compare
from env.tensors import pack, plan

pytestmark = pytest.mark.budget(15)


def laid_out(tree):
    layout, tensors, nbytes = plan(tree, keep_strides=False)
    buffer = torch.zeros(nbytes, dtype=torch.uint8)
    pack(layout, tensors, buffer)
    return layout, buffer


def judged(expected, got) -> Comparison:
    return compare(*laid_out(expected), *laid_out(got))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# What must pass ------------------------------------------------------------------------------------------------------


def test_equal_outputs_match_without_error():
    x = torch.randn(7, 5, generator=generator())
    assert judged(x, x.clone()) == Comparison(True, error=0.0)


def test_another_order_of_summation_matches():
    x = torch.randn(8, 1 << 15, generator=generator())
    expected = x.sum(-1)
    got = x.reshape(8, 64, -1).flip(-1).sum(1).sum(-1)
    assert not torch.equal(expected, got)
    result = judged(expected, got)
    assert result.match and 0 < result.error < 0.5


def test_fp32_product_in_another_order_matches():
    a, b = torch.randn(64, 512, generator=generator()), torch.randn(512, 48, generator=generator(1))
    blocked = sum(a[:, k : k + 32] @ b[k : k + 32] for k in range(0, 512, 32))
    assert judged(a @ b, blocked).match
    assert judged((a.double() @ b.double()).float(), blocked).match


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_may_be_off_by_its_own_rounding(dtype):
    x = torch.randn(1000, generator=generator())
    assert judged(x.to(dtype), (x * (1 + torch.finfo(dtype).eps / 2)).to(dtype)).match


# What must not -------------------------------------------------------------------------------------------------------


def test_mean_of_a_sample_does_not_pass_for_the_mean():
    x = torch.randn(16, 1 << 14, generator=generator()) + 1.0
    assert not judged(x.mean(-1), x[:, ::2].mean(-1)).match
    assert torch.allclose(x.mean(-1), x[:, ::2].mean(-1), atol=3e-2)


def test_zero_does_not_pass_for_a_tiny_mean():
    x = torch.randn(16, 1 << 14, generator=generator())
    assert not judged(x.mean(-1), torch.zeros(16)).match
    assert torch.allclose(x.mean(-1), torch.zeros(16), atol=5e-2)


def test_small_probabilities_flushed_to_zero_are_seen():
    expected = torch.softmax(torch.randn(4, 4096, generator=generator()) * 4, -1)
    flushed = torch.where(expected < expected.median(), 0.0, expected)
    assert torch.allclose(expected, flushed, atol=1e-4)
    assert not judged(expected, flushed).match


def test_constant_does_not_pass_for_uniform_probabilities():
    expected = torch.softmax(torch.randn(4, 8192, generator=generator()) * 0.1, -1)
    assert torch.allclose(expected, torch.full_like(expected, 1 / 8192), atol=1e-4)
    assert not judged(expected, torch.full_like(expected, 1 / 8192)).match


def test_fp16_and_tf32_products_do_not_pass_for_fp32():
    a, b = torch.randn(64, 256, generator=generator()), torch.randn(256, 64, generator=generator(1))
    assert not judged(a @ b, (a.half() @ b.half()).float()).match

    def tf32(x):
        return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)

    assert not judged(a @ b, tf32(a) @ tf32(b)).match


def test_one_wrong_element_among_many_is_enough():
    x = torch.randn(300, 300, generator=generator())
    wrong = x.clone()
    wrong[299, 299] += 0.01
    assert not judged(x, wrong).match


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_tolerance_follows_the_magnitude(scale):
    x = torch.randn(1000, generator=generator()) * scale
    assert judged(x, x * (1 + 1e-6)).match
    assert not judged(x, x * 1.001).match
    assert not judged(x, x + 0.001 * scale).match


def test_float64_is_held_to_more_than_float32():
    x = torch.randn(100, generator=generator(), dtype=torch.float64)
    assert judged(x, x * (1 + 1e-12)).match
    assert not judged(x, x.float().double() * (1 + 1e-6)).match


def test_all_zero_reference():
    assert judged(torch.zeros(10), torch.zeros(10)).match
    assert judged(torch.zeros(10), -torch.zeros(10)).match
    assert not judged(torch.zeros(10), torch.full((10,), 1e-20)).match


def test_complex_outputs():
    x = torch.randn(50, generator=generator(), dtype=torch.complex64)
    assert judged(x, x * (1 + 1e-6)).match
    assert not judged(x, x.conj()).match


# NaN and infinity ----------------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("values", [[NAN, 1.0], [INF, 1.0], [-INF, 1.0], [NAN, NAN], [INF, -INF]])
def test_special_values_in_the_same_places_match(values):
    assert judged(torch.tensor(values), torch.tensor(values)).match


PAIRS_THAT_DIFFER = [
    ([1.0, 1.0], [NAN, 1.0]), ([NAN, 1.0], [1.0, 1.0]), ([NAN, 1.0], [1.0, NAN]), ([INF, 1.0], [-INF, 1.0]),
    ([1.0, 1.0], [INF, 1.0]), ([INF, 1.0], [3e38, 1.0]), ([INF, 1.0], [NAN, 1.0]), ([NAN, 1.0], [INF, 1.0]),
    ([NAN, NAN], [0.0, 0.0]), ([1.0, 1.0], [NAN, NAN]),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "got"), PAIRS_THAT_DIFFER)
def test_special_values_elsewhere_do_not(expected, got):
    result = judged(torch.tensor(expected), torch.tensor(got))
    assert not result.match and result.error == INF


def test_infinity_does_not_widen_the_tolerance_of_the_rest():
    expected = torch.tensor([INF, 1.0, 2.0])
    assert not judged(expected, torch.tensor([INF, 1.01, 2.0])).match
    assert judged(expected, torch.tensor([INF, 1.0 + 1e-6, 2.0])).match


# Structure -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "got", "words"),
    [
        (torch.ones(2, 3), torch.ones(3, 2), "shape [3, 2], the reference has [2, 3]"),
        (torch.ones(6), torch.ones(6, 1), "shape"),
        (torch.ones(1), torch.ones(()), "shape"),
        (torch.ones(2), torch.ones(2, dtype=torch.float16), "dtype float16, the reference has float32"),
        (torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int32), "dtype"),
        (torch.ones(2), [torch.ones(2)], "is a list where the reference returns a tensor"),
        ((torch.ones(2),), [torch.ones(2)], "is a list where the reference returns a tuple"),
        ((torch.ones(2), torch.ones(1)), (torch.ones(2),), "has 1 items, the reference has 2"),
        ({"a": torch.ones(2)}, {"b": torch.ones(2)}, "items"),
        (torch.ones(2), None, "is None"),
        ((torch.ones(2), None), (torch.ones(2), torch.ones(2)), "the output[1] is a tensor"),
        ((torch.ones(2), 3), (torch.ones(2), 4), "the output[1] is the int 4"),
        (True, 1, "int"),
        (1.0, "1.0", "str"),
    ],
)
def test_structure(expected, got, words):
    result = judged(expected, got)
    assert not result.match and words in result.message, result.message


def test_plain_values_and_nested_trees_match():
    tree = {"a": [torch.ones(3), None, 2, 1.5, "x"], "b": (torch.zeros(0), torch.ones((), dtype=torch.bool))}
    assert judged(tree, tree).match
    assert judged(NAN, NAN).match


def test_a_tensor_on_another_device_is_named():
    expected, buffer = laid_out(torch.ones(2))
    got = {**expected, "device": "cpu"}
    result = compare({**expected, "device": "cuda"}, buffer, got, buffer)
    assert not result.match and "is on cpu, the reference is on cuda" in result.message


def test_a_huge_plain_value_does_not_fill_the_message():
    assert len(judged("a", "x" * 1_000_000).message) < 500


def test_wrong_tensor_of_several_is_named():
    result = judged((torch.ones(2), torch.ones(3)), (torch.ones(2), torch.zeros(3)))
    assert "output tensor 1" in result.message


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers_must_be_equal(dtype):
    expected = torch.tensor([[0, 1, 0], [1, 1, 0]], dtype=dtype)
    assert judged(expected, expected.clone()).match
    got = expected.clone()
    got[1, 2] = 1
    result = judged(expected, got)
    assert not result.match and "differs in 1 of 6 elements, first at [1, 2]" in result.message


def test_large_integers_are_not_compared_as_floats():
    assert not judged(torch.tensor([2**53]), torch.tensor([2**53 + 1])).match


def test_empty_tensors_match():
    assert judged(torch.empty(0, 3), torch.empty(0, 3)).match
    assert judged(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)).match


# Where, and in pieces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (17,), (5, 7), (3, 4, 5), (2, 1, 3, 4)])
@pytest.mark.parametrize("chunk", [3, 1 << 26])
def test_first_failing_index(shape, chunk, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", chunk)
    size = int(np.prod(shape))
    for flat in {0, size // 2, size - 1}:
        expected = torch.ones(shape)
        got = expected.clone().reshape(-1)
        got[flat:] = 2.0
        index = [int(i) for i in np.unravel_index(flat, shape)] if shape else []
        message = judged(expected, got.reshape(shape)).message
        assert f"first at {index}: 2 where the reference has 1" in message
        assert f"{size - flat} of {size} elements" in message


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_comparing_in_chunks_says_the_same(chunk, monkeypatch):
    expected = torch.randn(9, 50, generator=generator()) * torch.logspace(-3, 3, 50)
    expected[3, 7], expected[8, 49] = NAN, INF
    noise = torch.randn(9, 50, generator=generator(1))
    cases = [expected.clone(), expected * (1 + 1e-5 * noise), expected * (1 + 1e-2 * noise), torch.zeros(9, 50)]
    whole = [judged(expected, got) for got in cases]
    monkeypatch.setattr(module, "CHUNK", chunk)
    for got, before in zip(cases, whole):
        after = judged(expected, got)
        assert (after.match, after.message) == (before.match, before.message)
        assert after.error == pytest.approx(before.error, rel=1e-9)
    assert [result.match for result in whole] == [True, True, False, False]
