"""What any program must move: against needs worked out by hand and against changing every element one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from env.needed import needed_bytes

pytestmark = pytest.mark.budget(30)


class Program(nn.Module):
    def __init__(self, forward, **weights: torch.Tensor):
        super().__init__()
        self.made_of = forward
        for name, value in weights.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, *inputs):
        return self.made_of(self, *inputs)


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1)) + 0.5


def signed(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


X = positive(8, 16)
MASK = torch.arange(16) % 4 == 0


@pytest.mark.parametrize(
    ("forward", "inputs", "read", "written"),
    [
        (lambda m, x: x * 2, [X], 8 * 16 * 4, [8 * 16 * 4]),
        (lambda m, x: x.sum(-1), [X], 8 * 16 * 4, [8 * 4]),
        (lambda m, x: torch.softmax(x, -1), [X], 8 * 16 * 4, [8 * 16 * 4]),
        (lambda m, x: x[:, ::2] + 1, [X], 8 * 8 * 4, [8 * 8 * 4]),
        (lambda m, x: torch.where(MASK, x, 0.0), [X], 8 * 4 * 4, [8 * 16 * 4]),
        (lambda m, x, i: x[i] + 1, [X, torch.tensor([1, 3])], 2 * 16 * 4, [2 * 16 * 4]),
        (lambda m, x: x * m.w, [X], (8 * 16 + 16) * 4, [8 * 16 * 4]),
        (lambda m, x: (x * 2, x + 1), [X], 8 * 16 * 4, [8 * 16 * 4] * 2),
        (lambda m, x: {"a": [x.exp()], "n": 3}, [X], 8 * 16 * 4, [8 * 16 * 4]),
        # nothing has to be written for a view, nor for what an expanded tensor repeats
        (lambda m, x: (x.exp(), x.t()), [X], 8 * 16 * 4, [8 * 16 * 4, 0]),
        (lambda m, x: x.mean(-1, keepdim=True).expand(8, 16), [X], 8 * 16 * 4, [8 * 4]),
        # zeros may be known to be zeros; what relu cuts off can't be told from what nobody needs
        (lambda m, x: x * 2, [torch.tril(X)], int((torch.tril(X) != 0).sum()) * 4, [8 * 16 * 4]),
        (lambda m, x: x.relu(), [signed(8, 16)], int((signed(8, 16) > 0).sum()) * 4, [8 * 16 * 4]),
        # an expanded input holds one row
        (lambda m, x: x * 2, [positive(1, 16).expand(8, 16)], 16 * 4, [8 * 16 * 4]),
        # no gradient to be had, or none that counts
        (lambda m, x: x.round(), [X], 0, [8 * 16 * 4]),
        (lambda m, x: x * 2, [torch.arange(6)], 0, [6 * 8]),
        (lambda m, x: x.detach() * 2, [X], 0, [8 * 16 * 4]),
        (lambda m, x: x.mul_(1.5), [X], 8 * 16 * 4, [0]),
    ],
)
def test_by_hand(forward, inputs, read, written):
    before = [value.clone() for value in inputs]
    with torch.no_grad():
        assert needed_bytes(Program(forward, w=positive(16)), inputs) == (read, written)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs)), "inputs are the judge's"


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: torch.softmax(x[:, :5], -1) @ m.w,
        lambda m, x: nn.functional.layer_norm(x, (6,))[::2],
        lambda m, x: torch.cumsum(x, 0)[1] * m.w[0, 0],
        lambda m, x: x.relu().sum(0),
        lambda m, x: torch.maximum(x, m.w[:4, :1]),
    ],
)
def test_never_more_than_the_elements_that_change_something(forward):
    """Change every element of inputs and weights one by one, by much and by little: those that matter are needed."""
    model, x = Program(forward, w=signed(5, 3)), signed(4, 6)
    matter = 0
    with torch.no_grad():
        right = model(x)
        for tensor in (x, model.w):
            flat = tensor.view(-1)
            for i in range(flat.numel()):
                old = flat[i].item()
                changed = []
                for step in (1e-2, -1e-2, 3.0, -3.0):
                    flat[i] = old + step
                    changed.append(not torch.equal(model(x), right))
                flat[i] = old
                matter += any(changed)
        read, _ = needed_bytes(model, [x])
    assert 0 < read <= 4 * matter
