"""Trees of tensors survive the trip through one byte buffer; a layout that names other bytes is refused."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from env.tensors import (
    ALIGN,
    DTYPES,
    MAX_DEPTH,
    MAX_NODES,
    LayoutError,
    check_layout,
    pack,
    plan,
    tensor_nodes,
    unpack,
    view,
)

pytestmark = pytest.mark.budget(15)


def round_trip(tree, keep_strides):
    """Through JSON as well, as between processes."""
    layout, tensors, nbytes = plan(tree, keep_strides)
    layout = json.loads(json.dumps(layout))
    buffer = torch.full((nbytes,), 0xFF, dtype=torch.uint8)
    assert check_layout(layout, nbytes) >= 1
    pack(layout, tensors, buffer)
    return unpack(layout, buffer)


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and bits_equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return a == b


def bits_equal(a, b) -> bool:
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def example(name: str) -> torch.Tensor:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6) - 7.5
    special = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45])
    return {
        "plain": base,
        "transposed": base.t(),
        "sliced": base[::2, 1::2],
        "expanded": torch.arange(5.0)[:, None].expand(5, 7),
        "expanded first": torch.arange(5.0).expand(3, 5),
        "expanded scalar": torch.tensor(3.5).expand(2, 3, 4),
        "0-d": torch.tensor(2.5),
        "empty": torch.empty(0),
        "empty in one dimension": torch.empty(3, 0, 2),
        "one element": torch.ones(1, 1, 1),
        "special values": special,
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "needs grad": base.clone().requires_grad_(),
        "reordered": base.as_strided((2, 3), (1, 7), 2),
    }[name]


NAMES = [
    "plain", "transposed", "sliced", "expanded", "expanded first", "expanded scalar", "0-d", "empty",
    "empty in one dimension", "one element", "special values", "channels last", "needs grad", "reordered",
]  # fmt: skip


@pytest.mark.parametrize("keep_strides", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_shapes_and_strides(name, keep_strides):
    value = example(name)
    back = round_trip(value, keep_strides)
    assert same(value.detach(), back)
    if keep_strides and value.numel():
        assert back.stride() == value.stride()
    else:
        assert back.is_contiguous()


@pytest.mark.parametrize("keep_strides", [True, False])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_dtypes(dtype, keep_strides):
    value = (torch.randn(5, 3) * 50).to(dtype)
    assert same(value, round_trip(value, keep_strides))
    assert same(value.t(), round_trip(value.t(), keep_strides))


def test_every_tensor_starts_aligned_and_apart():
    tree = [torch.full((n,), float(n)) for n in (1, 63, 64, 65, 0, 3)]
    layout, _, nbytes = plan(tree, keep_strides=True)
    nodes = tensor_nodes(layout)
    assert all(node["offset"] % ALIGN == 0 for node in nodes)
    ends = [node["offset"] + node["nbytes"] for node in nodes]
    assert all(end <= node["offset"] for end, node in zip(ends, nodes[1:])) and ends[-1] <= nbytes
    assert same(tree, round_trip(tree, True))


def test_expanded_tensor_takes_the_memory_of_its_base():
    layout, _, _ = plan(torch.ones(1, 4).expand(1000, 4), keep_strides=True)
    assert layout["nbytes"] == 16
    layout, _, _ = plan(torch.ones(1, 4).expand(1000, 4), keep_strides=False)
    assert layout["nbytes"] == 16_000


def test_nested_tree_of_everything():
    tree = {
        "a": [torch.ones(2), None, (True, 1, -2.5, "é \ud800", float("nan"), float("inf"), -float("inf"), -0.0)],
        "b": {"": torch.zeros(0, dtype=torch.int8), "c": {}},
        "d": (),
        "e": [[[[]]]],
        "f": 2**70,
    }
    assert same(tree, round_trip(tree, True))
    assert same(tree, round_trip(tree, False))


SHAPES = st.lists(st.integers(0, 3), max_size=4)
STRIDED = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(
    lambda shape: torch.randint(0, 9, shape).transpose(0, -1)
)
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
LEAVES = st.one_of(PLAIN, SHAPES.map(torch.randn), STRIDED)
TREES = st.recursive(
    LEAVES,
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=3), children, max_size=3),
    ),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(TREES, st.booleans())
def test_any_tree(tree, keep_strides):
    assert same(tree, round_trip(tree, keep_strides))


@pytest.mark.parametrize(
    "value",
    [object(), {1: torch.ones(1)}, {"a": {2, 3}}, torch.ones(2).to_sparse(), b"bytes", 1j, [torch.nn.Linear(1, 1)]],
)
def test_what_cannot_be_passed_says_so(value):
    with pytest.raises(LayoutError):
        plan(value, keep_strides=True)


def test_trees_without_end_are_refused():
    endless: list = []
    endless.append(endless)
    with pytest.raises(LayoutError, match="nesting"):
        plan(endless, keep_strides=True)
    with pytest.raises(LayoutError):
        plan([0] * (MAX_NODES + 1), keep_strides=True)


def test_subclass_of_tensor_is_passed_by_value():
    class Lazy(torch.Tensor):
        pass

    back = round_trip(torch.ones(3).as_subclass(Lazy), False)
    assert type(back) is torch.Tensor and torch.equal(back, torch.ones(3))


def honest() -> dict:
    return plan([torch.ones(4, 6), torch.zeros(3)], keep_strides=True)[0]


CAPACITY = 2 * ALIGN


def test_honest_layout_passes():
    assert check_layout(honest(), CAPACITY) == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("offset", CAPACITY),
        ("offset", 2**62),
        ("offset", 10**30),
        ("offset", -ALIGN),
        ("offset", 4),
        ("offset", True),
        ("offset", False),
        ("offset", 0.0),
        ("offset", "0"),
        ("offset", None),
        ("nbytes", 95),
        ("nbytes", 97),
        ("nbytes", 0),
        ("nbytes", -96),
        ("nbytes", 96.0),
        ("shape", [4, 600]),
        ("shape", [4]),
        ("shape", [-4, -6]),
        ("shape", [True, 6]),
        ("shape", [4.0, 6]),
        ("shape", [2**40, 2**40]),
        ("shape", [0, 2**64]),
        ("stride", [0, 2**64]),
        ("shape", "46"),
        ("shape", None),
        ("shape", {"0": 4}),
        ("shape", [[4], 6]),
        ("shape", [1] * 33),
        ("stride", [6, 100]),
        ("stride", [-6, 1]),
        ("stride", [2**61, 2**61]),
        ("stride", [6]),
        ("stride", None),
        ("stride", 5),
        ("dtype", "float128"),
        ("dtype", None),
        ("dtype", ["float32"]),
        ("dtype", "float64"),
        ("kind", "tensors"),
        ("kind", None),
        ("kind", ["list"]),
    ],
)
def test_layout_that_lies_is_refused(field, value):
    layout = honest()
    layout["items"][0][field] = value
    with pytest.raises(LayoutError):
        check_layout(layout, CAPACITY)


@pytest.mark.parametrize(
    "layout",
    [
        None, [], 5, "tensor", {}, {"kind": "list"}, {"kind": "list", "items": {}}, {"kind": "list", "items": [None]},
        {"kind": "dict", "items": [{"kind": "value", "value": 1, "type": "int"}]},
        {"kind": "dict", "keys": ["a", "b"], "items": [{"kind": "value", "value": 1, "type": "int"}]},
        {"kind": "dict", "keys": None, "items": []},
        {"kind": "dict", "keys": 5, "items": []},
        {"kind": "dict", "keys": [["a"]], "items": [{"kind": "value", "value": 1, "type": "int"}]},
        {"kind": "value", "value": [1]}, {"kind": "value", "value": {"a": 1}}, {"kind": "value"},
        {"kind": "value", "value": "never a number", "type": "float"},
        {"kind": "value", "value": 1},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_layout_is_refused(layout):
    with pytest.raises(LayoutError):
        check_layout(layout, CAPACITY)


def test_deep_and_wide_layouts_are_refused():
    deep: dict = {"kind": "list", "items": []}
    for _ in range(MAX_DEPTH + 1):
        deep = {"kind": "list", "items": [deep]}
    with pytest.raises(LayoutError):
        check_layout(deep, CAPACITY)
    with pytest.raises(LayoutError):
        check_layout(
            {"kind": "list", "items": [{"kind": "value", "value": 0, "type": "int"}] * (MAX_NODES + 1)}, CAPACITY
        )


def test_overlapping_tensors_are_allowed_since_both_lie_inside():
    layout = honest()
    layout["items"][1] = copy.deepcopy(layout["items"][0])
    check_layout(layout, CAPACITY)
    a, b = unpack(layout, torch.zeros(CAPACITY, dtype=torch.uint8))
    a.fill_(3.0)
    assert torch.equal(a, b)


NUMBER = st.one_of(
    st.integers(-2, 600), st.sampled_from([0, ALIGN, 2 * ALIGN, 2**31, 2**63, 2**64, True, 1.0, None, "1"])
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.fixed_dictionaries(
        {
            "kind": st.just("tensor"),
            "dtype": st.sampled_from([*DTYPES, "object"]),
            "shape": st.lists(NUMBER, max_size=3),
            "stride": st.lists(NUMBER, max_size=3),
            "offset": NUMBER,
            "nbytes": NUMBER,
        }
    ),
    st.booleans(),
)
def test_a_layout_either_fits_or_is_refused(node, repair):
    """What passes can be viewed inside the buffer; what doesn't is a LayoutError and nothing else."""
    if repair and node["dtype"] in DTYPES and len(node["shape"]) == len(node["stride"]):
        numbers = [n if type(n) is int and 0 <= n < 40 else 1 for n in node["shape"] + node["stride"]]
        node["shape"], node["stride"] = numbers[: len(node["shape"])], numbers[len(node["shape"]) :]
        extent = 0 if 0 in node["shape"] else 1 + sum((a - 1) * b for a, b in zip(node["shape"], node["stride"]))
        node["nbytes"], node["offset"] = extent * DTYPES[node["dtype"]].itemsize, ALIGN
    buffer = torch.zeros(4 * ALIGN, dtype=torch.uint8)
    try:
        check_layout(node, 4 * ALIGN)
    except LayoutError:
        return
    assert view(node, buffer).clone().numel() == math.prod(node["shape"])
