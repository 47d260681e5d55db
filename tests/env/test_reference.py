"""What candidates are held against: inputs by kind, weights that were moved, and one reference for all who need it."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from env.gate import DeviceGate
from env.judge import Judge
from env.records import Problem
from env.reference import Rejected, TrialKind, _moved, _nearly
from env.rules import Rules
from env.spares import Spares
from env.tensors import pack, plan, tensor_nodes, view

pytestmark = pytest.mark.budget(60)

LINEAR = """import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.gain = nn.Parameter(torch.zeros(4))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x):
        return self.linear(x) + self.gain


def get_inputs():
    return [torch.rand(16, 8)]


def get_init_inputs():
    return []
"""


@pytest.fixture
def judge(fork_server):
    rules, gate = Rules(trials=1, run_timeout_s=10), DeviceGate()
    spares = Spares(fork_server, rules, gate)
    made = Judge(rules, secret=5, gate=gate, spares=spares)
    yield made
    made.close()
    spares.close()


def inputs_of(trial) -> torch.Tensor:
    (node,) = tensor_nodes(trial.layout)
    return view(node, trial.inputs)


def laid_out(**tensors: torch.Tensor):
    layout, held, nbytes = plan(tensors, keep_strides=False)
    data = torch.zeros(nbytes, dtype=torch.uint8)
    pack(layout, held, data)
    return layout, data


def test_trials_differ_and_stay_what_they_were(judge):
    with judge.references.use(Problem("p", LINEAR)) as reference:
        first, second = (reference.trial(TrialKind(name)) for name in ("trial0", "trial1"))
        assert not torch.equal(first.inputs, second.inputs)
        assert reference.trial(TrialKind("trial0")) is first
        assert inputs_of(first).min() >= 0 and inputs_of(first).max() < 1


def test_wide_inputs_have_both_signs(judge):
    with judge.references.use(Problem("p", LINEAR)) as reference:
        trial = reference.wide_trial(TrialKind("wide", grad=True, distribution="wide"))
        assert inputs_of(trial).min() < -0.5 and inputs_of(trial).max() > 0.5


@pytest.mark.parametrize("forward", ["torch.log(x)", "torch.sqrt(x)", "1 / (x - x.mean())"])
def test_wide_inputs_are_dropped_where_nobody_can_say_what_is_right(judge, forward):
    """NaN for negative inputs, or a result that float32 and float64 don't agree on."""
    source = LINEAR.replace("self.linear(x) + self.gain", f"{forward} * torch.ones(8)")
    source = source.replace("1 / (x - x.mean())", "1 / (x - x.float().mean())")
    with judge.references.use(Problem("p", source)) as reference:
        kind = TrialKind("wide", grad=True, distribution="wide")
        trial = reference.wide_trial(kind)
        assert trial is None or torch.isfinite(view(tensor_nodes(trial.outputs.layout)[0], trial.outputs.data)).all()
        if "1 /" not in forward:
            assert trial is None and reference.wide_trial(kind) is None


def test_moved_weights_leave_none_at_zero_and_change_the_output_back_and_forth(judge):
    with judge.references.use(Problem("p", LINEAR)) as reference:
        before = reference.trial(TrialKind("trial0"))
        moved = reference.trial(TrialKind("moved", moved=True))
        gain = dict(zip(reference.state[0]["keys"], tensor_nodes(reference.state[0])))["gain"]
        assert (view(gain, reference.state[1]) == 0).all() and (view(gain, reference.moved_state[1]) > 0).all()
        assert not torch.equal(before.outputs.data, moved.outputs.data)
        del reference.trials[TrialKind("trial0")]
        assert torch.equal(reference.trial(TrialKind("trial0")).outputs.data, before.outputs.data)
        assert reference.constant_weights() == ["gain"] and reference.floats == 8 * 4 + 4 + 4


def test_moving_keeps_signs_and_leaves_integers_alone():
    weights = torch.randn(1000)
    layout, data = laid_out(weights=weights, variance=torch.zeros(50), steps=torch.arange(5))
    moved = [view(node, _moved(layout, data, 1)) for node in tensor_nodes(layout)]
    assert (moved[0] != weights).all() and (moved[1] > 0).all() and torch.equal(moved[2], torch.arange(5))
    large = weights > 0.2  # the additions are positive: what is far enough above zero stays there
    assert (moved[0][large] > 0).all()


def test_near_inputs_differ_in_a_few_elements_and_keep_signs_and_zeros():
    values = torch.randn(100, 100).tril()
    layout, data = laid_out(values=values, index=torch.arange(50))
    near = [view(node, _nearly(layout, data, 1)) for node in tensor_nodes(layout)]
    changed = (near[0] != values).float().mean()
    assert 0.002 < changed < 0.05
    assert torch.equal(near[0].sign(), values.sign()) and torch.equal(near[1], torch.arange(50))


def test_a_reference_of_nan_alone_is_the_problems_fault(judge):
    source = LINEAR.replace("self.linear(x) + self.gain", "self.linear(x) * float('nan')")
    with (
        judge.references.use(Problem("p", source)) as reference,
        pytest.raises(Rejected, match="NaN everywhere") as error,
    ):
        reference.trial(TrialKind("trial0"))
    assert error.value.status == "problem_error"


def test_a_reference_without_elements_is_the_problems_fault(judge):
    source = LINEAR.replace("torch.rand(16, 8)", "torch.rand(0, 8)")
    with judge.references.use(Problem("p", source)) as reference, pytest.raises(Rejected, match="no elements") as error:
        reference.trial(TrialKind("trial0"))
    assert error.value.status == "problem_error"


def test_inputs_that_never_change_are_changed_where_it_is_timed(judge):
    source = LINEAR.replace("torch.rand(16, 8)", "torch.ones(16, 8)")
    with judge.references.use(Problem("p", source)) as reference:
        assert torch.equal(reference.trial(TrialKind("trial0")).inputs, reference.trial(TrialKind("trial1")).inputs)
        timed = [reference.trial(TrialKind(f"timed{i}")) for i in range(2)]
        assert not torch.equal(timed[0].inputs, timed[1].inputs)


def test_lanes_share_a_reference_and_start_it_once(judge):
    problem, taken = Problem("p", LINEAR), []

    def take():
        with judge.references.use(problem) as reference:
            taken.append(reference)

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(taken) == 3 and len({id(reference) for reference in taken}) == 1


def test_a_reference_that_was_lost_while_idle_is_started_anew(judge):
    problem = Problem("p", LINEAR)
    with judge.references.use(problem) as reference:
        before = reference.trial(TrialKind("trial0")).outputs.data
        pid = reference.session.worker.pid
    os.kill(pid, signal.SIGKILL)
    while reference.session.worker.alive():
        time.sleep(0.01)
    with judge.references.use(problem) as reference:
        assert reference.session.worker.pid != pid
        assert torch.equal(reference.trial(TrialKind("trial0")).outputs.data, before)


def test_a_broken_reference_is_not_kept(judge):
    problem = Problem("p", LINEAR.replace("nn.Linear(8, 4)", "nn.Linear(8, nothing)"))
    for _ in range(2):
        with pytest.raises(Rejected, match="nothing") as error, judge.references.use(problem):
            raise AssertionError("never gets here")
        assert error.value.status == "problem_error"
    assert not judge.references.kept
