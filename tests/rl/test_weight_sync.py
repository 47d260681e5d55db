"""Weights from the learner's shards to an engine: the same as one process's, one at a time, nobody left waiting."""

from __future__ import annotations

import sys
import time
import weakref
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

from ranks import run_ranks
from tiny import config, random_rows, tiny_model

from rl import distributed, weight_sync
from rl.engines.base import EngineError
from rl.learner import Learner

pytestmark = pytest.mark.budget(60)


class Engine:
    """Takes weights as vLLM does, and remembers what came and how many tensors there were at once."""

    def __init__(self, dtype=torch.float32, fail_after=None):
        self.dtype, self.fail_after = dtype, fail_after
        self.held, self.expected, self.most = {}, None, 0

    def probe(self):
        return [1, 5, 2, 7, 3]

    def push_named(self, weights, expected):
        self.held, self.expected, alive = {}, expected, []
        for name, weight in weights:
            alive.append(weakref.ref(weight))
            self.held[name] = weight.clone()
            del weight
            self.most = max(self.most, sum(ref() is not None for ref in alive))
            if len(self.held) == self.fail_after:
                raise EngineError("no memory for more")


def make_learner(tied=True, **settings):
    return Learner(tiny_model(tied=tied), config(engine__name="vllm", optim__lr=1e-2, **settings))


def pushed(tied, dtype, with_engine=(0, 1, 2, 3)):
    """After a step: what arrived, what log-probs were announced, how many tensors were there at once."""
    learner = make_learner(tied, rollout__temperature=0.7)
    learner.update(random_rows(6, seed=1))
    engine = Engine(dtype) if distributed.rank() in with_engine else None
    seconds = weight_sync.push(learner, engine)
    assert 0 < seconds < 60 and learner.policy.temperature == 0.7
    return None if engine is None else (engine.held, engine.expected, engine.most)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_s_engine_gets_what_one_process_has(tied, dtype):
    learner = make_learner(tied, rollout__temperature=0.7)
    learner.update(random_rows(6, seed=1))
    wanted = {name: value.to(dtype) for name, value in learner.model.state_dict().items()}
    if tied:
        del wanted["lm_head.weight"]
    ids = torch.tensor([Engine().probe()])
    with torch.no_grad():
        logprobs = learner.model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
    for held, expected, _ in [pushed(tied, dtype), *run_ranks(2, pushed, tied, dtype)]:
        assert held.keys() == wanted.keys()
        for name, value in held.items():
            assert value.dtype == dtype and value.shape == wanted[name].shape
            # Two ranks' gradients add up in another order: equal but for rounding, which bf16 may magnify.
            assert torch.allclose(value.float(), wanted[name].float(), rtol=1e-2 if dtype != torch.float32 else 1e-4)
        assert expected == pytest.approx(logprobs.tolist(), abs=1e-4)


def shards_put_together(shapes):
    """Whole tensors by weight_sync and by DTensor itself, for sizes that ranks don't divide."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, results = init_device_mesh("cpu", (distributed.world(),)), []
    for shape in shapes:
        torch.manual_seed(0)
        sharded = distribute_tensor(torch.randn(shape), mesh, [Shard(0)])
        results.append((weight_sync.whole(sharded, torch.float32, None), sharded.full_tensor()))
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_sizes_that_ranks_do_not_divide(ranks):
    for results in run_ranks(ranks, shards_put_together, [(1,), (2, 3), (3,), (5, 2), (6, 2), (9, 1, 2), (8,)]):
        for got, own in results:
            assert torch.equal(got, own)


def test_one_tensor_is_there_at_a_time():
    """The one handed over, and the one being put together: never the model."""
    for held, _, most in run_ranks(2, pushed, True, torch.float32):
        assert len(held) > 20 and most <= 2


def test_a_rank_without_an_engine_takes_part():
    first, second = run_ranks(2, pushed, True, torch.float32, (1,))
    assert first is None and len(second[0]) > 20


def failing(rank):
    learner = make_learner()
    engine = Engine(fail_after=3 if distributed.rank() == rank else None)
    begun = time.perf_counter()
    try:
        weight_sync.push(learner, engine)
    except (EngineError, distributed.RankError) as error:
        return f"{type(error).__name__}: {error}", time.perf_counter() - begun
    return "", 0.0


def test_one_engine_s_failure_is_every_rank_s_end_at_once_with_the_cause():
    (first, waited), (second, _) = run_ranks(2, failing, 1)
    assert first == "RankError: the engine of rank 1 failed: no memory for more" and waited < 10
    assert second == "EngineError: no memory for more"


def absent():
    """Rank 1 doesn't come; rank 0 doesn't wait for ever."""
    learner = make_learner(engine__push_timeout_s=2.0)
    group = weight_sync._group(2.0)
    begun, message = time.perf_counter(), ""
    if distributed.rank() == 0:
        try:
            for _ in weight_sync.named_weights(learner, torch.float32, group):
                pass
        except distributed.RankError as error:
            message = str(error)
    waited = time.perf_counter() - begun
    time.sleep(0 if distributed.rank() == 0 else 4)
    return message, waited


def test_a_rank_that_does_not_come_is_not_waited_for():
    (message, waited), _ = run_ranks(2, absent)
    assert message.startswith("handing over weights stopped at model.embed_tokens.weight: another rank is gone")
    assert "engine.push_timeout_s" in message and 1.5 < waited < 6


def test_the_plain_engine_is_given_the_model():
    learner, given = Learner(tiny_model(), config()), []

    class Plain:
        def push(self, model):
            given.append(model)

    weight_sync.push(learner, Plain())
    weight_sync.push(learner, None)
    assert given == [learner.model]
