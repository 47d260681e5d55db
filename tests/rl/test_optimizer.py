"""Learning rates, weight decay, and fp32 weights behind a bf16 model."""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

from tiny import tiny_model, weights_of

from rl.config import Optim
from rl.optimizer import Masters, learning_rate, make_optimizer

pytestmark = pytest.mark.budget(20)


def test_rates_rise_linearly_and_stay_or_fall():
    for schedule in ("constant", "linear", "cosine"):
        rates = [learning_rate(step, 100, 2.0, 10, schedule) for step in range(100)]
        assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)]) and rates[10] == 2.0
        assert rates[10:] == sorted(rates[10:], reverse=True)
        middle, last = {"constant": (2.0, 2.0), "linear": (1.0, 2 / 90), "cosine": (1.0, 6.1e-4)}[schedule]
        assert rates[55] == pytest.approx(middle) and rates[99] == pytest.approx(last, rel=0.01)
    assert learning_rate(0, 1, 2.0) == 2.0


def test_rates_end_at_their_final_share_and_never_rise_again():
    for schedule in ("linear", "cosine"):
        assert learning_rate(50, 50, 2.0, 0, schedule, 0.1) == pytest.approx(0.2)
        assert learning_rate(80, 50, 2.0, 0, schedule, 0.1) == pytest.approx(0.2)
        assert learning_rate(25, 50, 2.0, 0, schedule, 0.1) == pytest.approx(1.1)


def test_without_a_warm_up_the_fall_begins_at_once_and_ends_behind_the_last_step():
    assert [learning_rate(step, 4, 2.0, schedule="linear") for step in range(5)] == [2.0, 1.5, 1.0, 0.5, 0.0]
    assert [learning_rate(step, 3, 2.0, 2, "linear") for step in range(4)] == [1.0, 2.0, 2.0, 0.0]
    assert [learning_rate(step, 2, 2.0, 2, "linear") for step in range(3)] == [1.0, 2.0, 2.0]  # nothing but warm-up


def test_only_matrices_decay():
    matrix, gain = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = make_optimizer([matrix, gain], Optim(lr=0.1, weight_decay=0.5), 0.1)
    matrix.grad, gain.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    assert matrix.flatten().tolist() == pytest.approx([0.95] * 4) and gain.tolist() == [1.0, 1.0]


def test_steps_are_those_of_adamw_with_the_betas_and_the_decay_of_the_settings():
    """AdamW spelled out in Python's floats (arXiv 1711.05101), for a matrix that decays and a gain that doesn't."""
    settings = Optim(lr=0.03, weight_decay=0.2, beta1=0.7, beta2=0.8)
    weights = {True: torch.nn.Parameter(torch.tensor([[1.5, -2.0]])), False: torch.nn.Parameter(torch.tensor([0.5]))}
    optimizer = make_optimizer(list(weights.values()), settings, 0.03)
    expected = {decays: weight.flatten().tolist() for decays, weight in weights.items()}
    first, second = ({decays: [0.0] * weight.numel() for decays, weight in weights.items()} for _ in range(2))
    for step, gradient in enumerate((1.0, -3.0, 0.5, 20.0), 1):
        for decays, weight in weights.items():
            weight.grad = torch.full_like(weight, gradient)
            for i, value in enumerate(expected[decays]):
                first[decays][i] = 0.7 * first[decays][i] + 0.3 * gradient
                second[decays][i] = 0.8 * second[decays][i] + 0.2 * gradient**2
                move = first[decays][i] / (1 - 0.7**step) / (math.sqrt(second[decays][i] / (1 - 0.8**step)) + 1e-8)
                expected[decays][i] = value * (1 - 0.03 * 0.2 * decays) - 0.03 * move
        optimizer.step()
        for decays, weight in weights.items():
            assert weight.flatten().tolist() == pytest.approx(expected[decays], rel=1e-5), (step, decays)


def test_small_steps_reach_a_bf16_model_through_its_fp32_weights():
    """A step of 1e-4 on weights near 1 is lost in bf16 (spacing 1/128): 100 of them aren't."""
    weight = torch.nn.Parameter(torch.ones(4, 4))
    masters = Masters([weight])
    optimizer = make_optimizer(masters.weights, Optim(lr=1e-4, weight_decay=0.0), 1e-4)
    for _ in range(100):
        (weight.float() * 3).sum().backward()
        assert weight.grad is None and masters.weights[0].grad.dtype == torch.float32
        optimizer.step()
        optimizer.zero_grad()
        masters.refresh()
    assert weight.dtype == torch.bfloat16
    assert masters.weights[0].flatten().tolist() == pytest.approx([0.99] * 16, abs=1e-4)
    assert weight.flatten().tolist() == [0.98828125] * 16  # the nearest there is to 0.99


def test_gradients_of_micro_batches_add_up_in_fp32():
    weight = torch.nn.Parameter(torch.ones(1))
    masters = Masters([weight])
    for part in [256.0] + [1.0] * 100:  # in bf16, 256 + 1 is 256
        (weight * part).sum().backward()
    assert masters.weights[0].grad.item() == 356.0


def test_only_parameters_become_bf16_and_none_of_their_values_is_lost():
    model = tiny_model()
    before, buffers = weights_of(model).clone(), [buffer.clone() for buffer in model.buffers()]
    masters = Masters(list(model.parameters()))
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(model.buffers(), buffers)) and buffers
    assert torch.equal(torch.cat([w.flatten() for w in masters.weights]), before)
