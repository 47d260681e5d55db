"""A model's state without running its own code: whatever it overrides, nothing of it is called."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from env.state import copy_of, counterparts, modules_of, put, restore, set_training, tensors_of

pytestmark = pytest.mark.budget(30)

CALLED: list[str] = []


def spy(name):
    def method(self, *args, **kwargs):
        CALLED.append(name)
        raise AssertionError(name)

    return method


class SlyDict(dict):
    items = keys = values = __iter__ = __getitem__ = get = spy("dict")


class SlyParameter(nn.Parameter):
    __ne__ = __eq__ = copy_ = clone = detach = spy("parameter")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        CALLED.append("torch_function")
        raise AssertionError


class Sly(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        state = object.__getattribute__(self, "__dict__")
        dict.__setitem__(state["_parameters"], "odd", SlyParameter(torch.ones(2)))
        for name in ("_parameters", "_buffers", "_modules"):
            dict.__setitem__(state, name, SlyDict(dict.items(state[name])))

    named_modules = modules = named_parameters = children = train = state_dict = spy("module")


class Slyer(Sly):
    __dict__ = property(spy("__dict__"))


def plain() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False)))
    model.tied = model[0]
    return model


def test_the_same_names_in_the_same_order_as_torch():
    model = plain()
    assert [name for name, _ in modules_of(model)] == [f"{name}." if name else "" for name, _ in model.named_modules()]
    expected = {name: value for name, value in model.state_dict(keep_vars=True).items() if "tied" not in name}
    found = tensors_of(model)
    assert list(found) == list(expected) and all(found[name] is expected[name] for name in found)


def test_tied_weights_have_one_name():
    model = nn.Module()
    model.a, model.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    model.b.weight = model.a.weight
    assert list(tensors_of(model)) == ["a.weight"]


def test_nothing_of_the_models_own_is_called():
    model = Sly()
    inner = dict.__getitem__(model._modules, "inner")
    model.__class__ = Slyer
    CALLED.clear()
    found = tensors_of(model)
    assert list(found) == ["weight", "odd", "seen", "inner.weight", "inner.bias"]
    first = {name: copy_of(value) for name, value in found.items()}
    for name, value in found.items():
        put(value, first[name] + 7.0)
    restore(found, first)
    for _, module in modules_of(model):
        set_training(module, False)
    assert CALLED == []
    assert copy_of(found["odd"]).tolist() == [1.0, 1.0] and not inner.training


def test_only_what_differs_is_written():
    model = plain()
    found = tensors_of(model)
    first = {name: copy_of(value) for name, value in found.items()}
    versions = {name: value._version for name, value in found.items()}
    put(found["0.weight"], torch.zeros(2, 3))
    restore(found, first)
    assert torch.equal(found["0.weight"], first["0.weight"])
    changed = {name for name, value in found.items() if value._version != versions[name]}
    assert changed == {"0.weight"}


W, B = torch.zeros(2, 3), torch.zeros(2)


@pytest.mark.parametrize(
    ("own", "theirs", "expected"),
    [
        ({"w": W, "b": B}, {"w": W, "b": B}, ("by name", {"w": "w", "b": "b"})),
        ({"w": W, "extra": B, "b": B}, {"w": W, "b": B}, ("by name", {"w": "w", "b": "b"})),
        ({"x": B, "y": W}, {"w": W, "b": B}, ("in order", {"x": "b", "y": "w"})),
        ({"x": W, "y": W, "pad": torch.zeros(7)}, {"a": W, "b": W}, ("in order", {"x": "a", "y": "b"})),
        ({"x": W, "y": W, "z": W}, {"a": W, "b": W}, ("", {})),
        ({"w": torch.zeros(3, 2)}, {"w": W}, ("", {})),
        ({"w": W.double()}, {"w": W}, ("", {})),
        ({}, {"w": W}, ("", {})),
        ({"w": W}, {}, ("by name", {})),
    ],
)
def test_which_tensor_stands_for_which(own, theirs, expected):
    assert counterparts(own, theirs) == expected
