"""Adam's moments in the host's memory: the very same steps, in one process and in two, over a checkpoint too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

from ranks import run_ranks
from tiny import config, random_rows, tiny_model

from rl import checkpoint, distributed
from rl.config import Optim
from rl.learner import Learner
from rl.offload import OffloadedAdamW, host_zeros_like
from rl.optimizer import make_optimizer

pytestmark = pytest.mark.budget(40)

BATCHES = [random_rows(7, seed=seed) for seed in (1, 2, 3)]


def learner(offload, seed=0):
    settings = {"optim__lr": 1e-3, "optim__weight_decay": 0.1, "train__offload_optimizer": str(offload).lower()}
    return Learner(tiny_model(seed=seed), config(**settings))


def train(offload, batches=BATCHES, folder=None, loaded=None):
    """Metrics of every step, and all weights; a checkpoint at the end (folder), or gone on from one (loaded)."""
    own = learner(offload, seed=0 if loaded is None else 5)
    if loaded is not None:
        own.restored(checkpoint.load(checkpoint.newest(loaded), own.tensors())["learner"])
    reports = [own.update(rows) for rows in batches]
    if folder is not None:
        checkpoint.save(folder, len(batches), own.tensors(), {"learner": own.state()}, keep=1)
    return reports, torch.cat([distributed.full(weight.detach()).flatten() for weight in own.weights])


def test_losses_and_weights_are_those_of_the_plain_optimiser_to_the_bit():
    plain, weights = train(False)
    offloaded, its_weights = train(True)
    assert isinstance(learner(True).optimizer, OffloadedAdamW)
    assert offloaded == plain and torch.equal(its_weights, weights)
    assert not torch.equal(weights, train(False, [])[1])


def test_two_ranks_keep_a_shard_each_and_step_the_same():
    plain, offloaded = (run_ranks(2, train, offload) for offload in (False, True))
    for (reports, weights), (its_reports, its_weights) in zip(plain, offloaded, strict=True):
        assert its_reports == reports and torch.equal(its_weights, weights)


@pytest.mark.parametrize(("saves", "loads"), [(True, True), (True, False), (False, True)])
def test_a_checkpoint_of_two_ranks_goes_on_in_one_with_or_without(tmp_path, saves, loads):
    run_ranks(2, train, saves, BATCHES[:2], tmp_path)
    reports, weights = train(loads, BATCHES[2:], loaded=tmp_path)
    expected, wanted = train(False)
    assert reports[0]["policy/loss"] == pytest.approx(expected[2]["policy/loss"], rel=1e-4)
    assert torch.allclose(weights, wanted, atol=1e-5)


def test_a_weight_without_a_gradient_stays_and_a_closure_is_refused():
    weights = [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(2))]
    optimizer = make_optimizer(weights, Optim(), 0.1, offload=True)
    weights[1].grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(weights[0], torch.ones(3, 2)) and (weights[1] < 1).all()
    assert optimizer.state[weights[0]]["step"] == 0 and optimizer.state[weights[1]]["step"] == 1
    with pytest.raises(ValueError, match="no closure"):
        optimizer.step(lambda: 1.0)


def test_moments_are_on_the_host_wherever_the_weight_is():
    assert host_zeros_like(torch.empty(4, 3, device="meta")).device.type == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu_only_weights_and_gradients_stay_there():
    weight = torch.nn.Parameter(torch.randn(1024, 1024, device="cuda"))
    twin = torch.nn.Parameter(weight.detach().clone())
    before = torch.cuda.memory_allocated()
    offloaded = make_optimizer([weight], Optim(), 0.1, offload=True)
    assert torch.cuda.memory_allocated() == before and offloaded.state[weight]["exp_avg"].is_pinned()
    plain = make_optimizer([twin], Optim(), 0.1)
    for _ in range(3):
        weight.grad = twin.grad = torch.randn_like(weight)
        offloaded.step()
        plain.step()
    assert torch.equal(weight, twin)
