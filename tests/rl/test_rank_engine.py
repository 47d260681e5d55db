"""Engines of several ranks as one: every request answered as by one engine, and a failure is everybody's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

from ranks import run_ranks
from tiny import tiny_model

from rl import distributed
from rl.engines.base import Batch, EngineError, Request, Sampling, checked, generate
from rl.engines.hf import HFEngine
from rl.engines.ranks import RankEngine, together

pytestmark = pytest.mark.budget(40)

PROMPTS = [[1 + i % 5] * (1 + i % 4) for i in range(7)]
SEEDS = list(range(7))
SAMPLING = Sampling(6, stop_ids=(3,))


class Own(HFEngine):
    """A plain engine that counts what it is asked, and fails at a request."""

    dtype = torch.float32

    def __init__(self, fail_at=None):
        super().__init__(tiny_model(), 4)
        self.asked, self.fail_at = 0, fail_at

    def stream(self, source, sampling):
        for request, completion in super().stream(source, sampling):
            self.asked += 1
            if request.key == self.fail_at:
                raise EngineError("lost its GPU")
            yield request, completion


def answers():
    own = Own()
    engine = RankEngine(own)
    first = together(engine, lambda: generate(engine, PROMPTS, SAMPLING, SEEDS))
    second = together(engine, lambda: generate(engine, PROMPTS[:1], SAMPLING, SEEDS[:1]))
    return [(c.ids, c.logprobs, c.finish_reason) for c in [*first, *second]], own.asked


@pytest.mark.parametrize("ranks", [2, 4])
def test_answers_are_those_of_one_engine_and_every_rank_does_its_share(ranks):
    wanted, _ = answers()
    results = run_ranks(ranks, answers)
    for got, _ in results:
        assert [ids for ids, _, _ in got] == [ids for ids, _, _ in wanted]
        for (_, logprobs, reason), (_, own, its_reason) in zip(got, wanted):
            assert logprobs == pytest.approx(own, abs=1e-5) and reason == its_reason
    assert [asked for _, asked in results] == {2: [5, 3], 4: [3, 2, 2, 1]}[ranks]


def failing():
    """Request 3 is rank 1's of two; and an error in the action itself, which is rank 0's alone."""
    engine, messages = RankEngine(Own(fail_at=3)), []

    def judge_fails():
        for _ in checked(engine, Batch([Request(0, [1], 1), Request(1, [2], 2)]), SAMPLING):
            raise ValueError("no judge")

    for action in (lambda: generate(engine, PROMPTS, SAMPLING, SEEDS), judge_fails):
        try:
            together(engine, action)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages, distributed.gather(distributed.rank())


def test_a_failure_anywhere_is_everybody_s_and_nobody_waits():
    first, second = run_ranks(2, failing)
    cause = "EngineError: the engine of rank 1: EngineError: lost its GPU"
    assert first[0] == [cause, "ValueError: no judge"]
    assert second[0] == [f"RankError: rank 0 failed: {cause}", "RankError: rank 0 failed: ValueError: no judge"]
    assert first[1] == second[1] == [0, 1]  # still in step
