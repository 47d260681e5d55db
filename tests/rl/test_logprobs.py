"""Log-probs of targets in chunks: a float64 loop agrees in values and gradients; memory is bounded."""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl import logprobs
from rl.logprobs import token_values

pytestmark = pytest.mark.budget(60)


def case(targets, vocabulary, width, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(targets, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64).to(dtype)
    ids = torch.randint(vocabulary, (targets,), generator=generator)
    pull = torch.randn(targets, generator=generator, dtype=torch.float64)
    return hidden, weight, ids, pull


def naive(hidden, weight, ids, temperature):
    """Target by target, logit by logit: (log-probs, entropies, whether it is the most likely)."""
    rows = []
    for h, target in zip(hidden.tolist(), ids.tolist()):
        logits = [sum(a * b for a, b in zip(h, w)) / temperature for w in weight.tolist()]
        normaliser = math.log(sum(math.exp(x) for x in logits))
        chances = [math.exp(x - normaliser) for x in logits]
        rows.append(
            (logits[target] - normaliser, -sum(p * math.log(p) for p in chances), logits[target] == max(logits))
        )
    return [list(column) for column in zip(*rows)] if rows else [[], [], []]


@given(
    targets=st.integers(0, 7), vocabulary=st.integers(2, 9), width=st.integers(1, 4), seed=st.integers(0, 99),
    temperature=st.sampled_from([1.0, 0.6]), chunk=st.sampled_from([1, 10, 1000]),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_values_are_those_of_the_loop(targets, vocabulary, width, seed, temperature, chunk):
    hidden, weight, ids, _ = case(targets, vocabulary, width, seed)
    got = token_values(hidden, weight, ids, temperature, chunk)
    expected = naive(hidden, weight, ids, temperature)
    assert got.logprobs.tolist() == pytest.approx(expected[0], abs=1e-4)
    assert got.entropies.tolist() == pytest.approx(expected[1], abs=1e-4)
    assert got.greedy.tolist() == expected[2]


@given(
    targets=st.integers(0, 7), vocabulary=st.integers(2, 9), seed=st.integers(0, 99),
    temperature=st.sampled_from([1.0, 0.6]), chunk=st.sampled_from([1, 10, 1000]),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_gradients_are_those_of_a_plain_log_softmax(targets, vocabulary, seed, temperature, chunk):
    hidden, weight, ids, pull = case(targets, vocabulary, 3, seed)
    plain = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    chunked = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    logits = (plain[0] @ plain[1].T / temperature).log_softmax(-1)
    (logits.gather(-1, ids[:, None]).squeeze(-1) * pull).sum().backward()
    (token_values(*chunked, ids, temperature, chunk).logprobs * pull).sum().backward()
    for wanted, got in zip(plain, chunked):
        assert torch.allclose(got.grad, wanted.grad, atol=1e-5)


def test_only_as_many_logits_exist_at_a_time_as_are_allowed(monkeypatch):
    """Forward through the tokens, backward through the vocabulary: the largest tensor of either is a chunk."""
    sizes = []
    plain, plain_gradient = logprobs._statistics, logprobs._logits_gradient_
    monkeypatch.setattr(logprobs, "_statistics", lambda x, *rest: (sizes.append(x.numel()), plain(x, *rest))[1])
    monkeypatch.setattr(
        logprobs, "_logits_gradient_", lambda x, *rest: (sizes.append(x.numel()), plain_gradient(x, *rest))[1]
    )
    hidden, weight, ids, _ = case(3000, 700, 2, 0, torch.float32)
    hidden.requires_grad_()
    token_values(hidden, weight.requires_grad_(), ids, 1.0, 2**18).logprobs.sum().backward()
    forward = [size // 700 for size in sizes[: -(-3000 // 256)]]
    assert forward == [256] * 11 + [184]  # 374 would fit; a GPU wants multiples of 128
    assert len(sizes) > 12 and max(sizes) <= 2**18 and sum(sizes) == 2 * 3000 * 700


# In a process of its own, so that the peak is this program's: the growth of its resident memory, in MiB.
GROWTH = """
import resource, torch
from rl.logprobs import token_values
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
torch.set_num_threads(1)
tokens, vocabulary, width = 16384, 8192, 8
hidden = torch.randn(tokens, width, requires_grad=True)
weight = torch.randn(vocabulary, width, requires_grad=True)
token_values(hidden[:64], weight, torch.zeros(64, dtype=torch.long), 1.0, 2**20).logprobs.sum().backward()
before = peak()
token_values(hidden, weight, torch.zeros(tokens, dtype=torch.long), 1.0, 2**20).logprobs.sum().backward()
print(peak() - before)
"""


def test_memory_does_not_grow_with_the_row():
    grown = float(subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True).stdout)
    # All logits would be 512 MiB, and as much again for their gradient; a chunk is 4 MiB.
    assert grown < 60


KERNELS = """
import torch
from rl import logprob_kernels as kernels
from rl.logprobs import _logits_gradient_, _statistics
kernels.COLUMNS = 64
torch.manual_seed(0)
for columns, temperature in ((7, 1.0), (64, 0.7), (200, 1.3)):
    logits, targets = torch.randn(5, columns) * 4, torch.randint(columns, (5,))
    logits[2, targets[2]] = 30.0
    logits[3] -= 300.0  # far from 0: the maximum must be taken out
    plain = _statistics(logits.clone(), targets, temperature)
    for got, wanted in zip(kernels.statistics(logits, targets, temperature), plain):
        assert torch.allclose(got.float(), wanted.float(), rtol=1e-5, atol=1e-4), (got, wanted)
    normaliser, gradient = (logits / temperature).logsumexp(-1), torch.randn(5)
    shifted = targets - 3  # as in a block that begins at column 3
    got, wanted = logits[:, 3:].clone(), logits[:, 3:].clone()
    kernels.logits_gradient_(got, shifted, normaliser, gradient, temperature)
    _logits_gradient_(wanted, shifted, normaliser, gradient, temperature)
    assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-6)
print("agree")
"""


def test_the_kernels_for_gpus_agree_with_the_plain_code():
    """Under Triton's interpreter, in a process of its own."""
    result = subprocess.run([sys.executable, "-c", KERNELS], capture_output=True, text=True, check=False)
    assert result.stdout == "agree\n", result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_it_agrees_with_the_cpu(dtype):
    """Compiled kernels only where TRITON_INTERPRET=0 was given from outside; else the plain code on the GPU."""
    hidden, weight, ids, pull = case(300, 5000, 64, 3, dtype)
    results = []
    for device in ("cpu", "cuda"):
        h, w = (t.to(device, dtype).detach().requires_grad_() for t in (hidden / 8, weight))
        values = token_values(h, w, ids.to(device), 0.8, 100_000)
        (values.logprobs * pull.to(device)).sum().backward()
        results.append([t.detach().cpu().float() for t in (values.logprobs, values.entropies, h.grad, w.grad)])
    for got, wanted in zip(*results):
        assert torch.allclose(got, wanted, rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-3)
