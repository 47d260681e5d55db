"""A kernel that copies or changes nothing is told from one that computes, whatever the shapes and special values."""

from __future__ import annotations

import pytest
import torch

from env.copies import Copies, computes

pytestmark = pytest.mark.budget(10)

X = torch.randn(6, 8)
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "after",
    [X.clone(), X * (1 + 1e-6), X + 0.0, X * 1.0],
    ids=["copy", "copy with a little noise", "plus nothing", "times one"],
)
def test_copies_compute_nothing(after):
    assert not computes([X, torch.full_like(X, NAN)], [X, after])
    assert not computes([X, torch.full((8, 6), NAN)], [X, after.reshape(8, 6)])


@pytest.mark.parametrize(
    "after",
    [X.relu(), -X, X * 2, X.t().contiguous(), X.tril(), X.masked_fill(X < 0, -INF), torch.zeros_like(X), X.flip(0)],
    ids=["relu", "negative", "double", "transposed", "triangle", "masked with inf", "zeros", "reversed"],
)
def test_what_computes(after):
    before = [X, torch.full(after.shape, NAN)]
    assert computes(before, [X, after])


def test_a_launch_that_changes_nothing():
    assert not computes([X, X * 2], [X, X * 2])
    assert not computes([torch.full((3,), NAN)], [torch.full((3,), NAN)])


def test_in_place_work_counts_and_in_place_nothing_does_not():
    assert computes([X], [X.relu()]) and not computes([X], [X + 0.0])


def test_integers_are_compared_exactly():
    index = torch.arange(10)
    assert not computes([index, torch.zeros(10, dtype=torch.int64)], [index, index.clone()])
    assert computes([index, torch.zeros(10, dtype=torch.int64)], [index, index + 1])


def launch(copies: Copies, name: str, kernel, x: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(x, NAN)
    copies.launch(name, lambda args, kwargs: kernel(*args, **kwargs), (x,), {"out": out})
    return out


def copy(x, out):
    out.copy_(x)


def triple(x, out):
    out.copy_(x * 3)


def relu(x, out):
    out.copy_(x.relu())


def test_one_useful_launch_is_enough():
    copies = Copies()
    assert torch.equal(launch(copies, "k", copy, X), X) and copies.useful == {"k": False}
    launch(copies, "k", triple, X)
    launch(copies, "k", copy, X)
    assert copies.useful == {"k": True}


def test_what_copies_these_values_only_is_no_copy():
    """relu of positive numbers: an honest answer to a chain like exp, relu. Its arguments stay as they were."""
    copies, positive = Copies(), X.exp()
    assert torch.equal(launch(copies, "relu", relu, positive), positive)
    assert copies.useful == {"relu": True} and torch.equal(positive, X.exp())


def test_strided_arguments():
    copies = Copies()
    launch(copies, "copy", copy, X.t())
    launch(copies, "relu", relu, X.exp()[:, ::2])
    assert copies.useful == {"copy": False, "relu": True}


def test_a_kernel_is_given_its_tensors_by_descriptors_and_tuples():
    """What lies in a descriptor or a tuple is looked at and replaced as what is handed over plainly."""

    class Descriptor:
        def __init__(self, base: torch.Tensor) -> None:
            self.base = base

    def copying(given, pair):
        pair[0].base.copy_(given.base)

    def doubling(given, pair):
        pair[0].base.copy_(2 * given.base)

    for kernel, computes_something in ((copying, False), (doubling, True)):
        copies, x, out = Copies(), torch.randn(8), torch.empty(8)
        args = (Descriptor(x), (Descriptor(out), 3))
        copies.launch("k", lambda args, kwargs, kernel=kernel: kernel(*args, **kwargs), args, {})
        assert copies.useful == {"k": computes_something}
        assert args[0].base is x and args[1][0].base is out
    copies = Copies()
    copies.launch("k", lambda args, kwargs: None, (3,), {})
    assert copies.useful == {"k": True}  # nothing to look at says nothing
