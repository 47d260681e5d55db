"""Several ranks: the same gradients, metrics, weights and checkpoints as one process, beyond rounding."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

from ranks import run_ranks
from tiny import config, random_rows, tiny_model, weights_of

from rl import checkpoint, distributed, sft
from rl.learner import Learner

pytestmark = pytest.mark.budget(90)


def gradient(rows, old, tied, **settings):
    """The whole gradient, and what gradient() returns, on every rank."""
    learner = Learner(tiny_model(tied=tied), config(**settings))
    metrics = learner.gradient(rows, old)
    parts = [distributed.full(weight.grad).flatten() for weight in learner.weights]
    return torch.cat(parts), metrics


def ragged_rows():
    rows = random_rows(13, seed=2)
    rows[3].masks.append("mrs")
    rows[5].advantage = None
    rows[7].ids, rows[7].rollout_logprobs = rows[7].ids[: rows[7].start], []
    return rows


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("with_old", [False, True])
def test_the_gradient_depends_on_neither_ranks_nor_micro_batches_nor_order(tied, with_old):
    rows = ragged_rows()
    old = Learner(tiny_model(seed=9), config()).logprobs(rows) if with_old else None
    whole, metrics = gradient(rows, old, tied)
    assert whole.norm() > 0.1
    cases = [(2, False, {}), (4, True, {"train__micro_batch_tokens": 30}), (2, False, {"train__recompute": "true"})]
    for ranks, backwards, settings in cases:
        shown = (rows[::-1], old[::-1] if old else None) if backwards else (rows, old)
        for got, theirs in run_ranks(ranks, lambda s=shown, k=settings: gradient(*s, tied, **k)):
            assert torch.allclose(got, whole, rtol=0, atol=1e-5 * whole.norm().item())
            assert theirs == pytest.approx(metrics, rel=1e-5)


def steps(rows_of_step, **settings):
    learner = Learner(tiny_model(), config(optim__lr=1e-3, optim__weight_decay=0.1, **settings))
    reports = []
    for rows in rows_of_step:
        before = learner.evaluate(rows)
        joined = torch.cat([*before.logprobs, *before.entropies, torch.empty(0)])
        reports.append((joined, learner.update(rows, before.logprobs)))
    model = learner.plain_model()
    return reports, learner.version, None if model is None else weights_of(model)


@pytest.mark.parametrize("ranks", [2, 4])
def test_steps_report_and_end_as_in_one_process(ranks):
    """With one row for four ranks most of them have a dummy; and a step in which everything is masked changes nothing,
    also not by momentum."""
    masked = random_rows(5, seed=5)
    for row in masked:
        row.masks.append("mrs")
    batches = [random_rows(9, seed=3), random_rows(1, seed=4), masked, [], random_rows(6, seed=6)]
    expected, version, weights = steps(batches)
    assert version == 3 and [metrics["policy/skipped"] for _, metrics in expected] == [0, 0, 1, 1, 0]
    results = run_ranks(ranks, steps, batches)
    for rank, (reports, its_version, its_weights) in enumerate(results):
        assert its_version == version
        for (values, metrics), (wanted, wanted_metrics) in zip(reports, expected, strict=True):
            assert torch.allclose(values, wanted, atol=1e-4)
            assert metrics == pytest.approx(wanted_metrics, rel=1e-4)
        assert (its_weights is None) == (rank > 0)
        if its_weights is not None:
            assert torch.allclose(its_weights, weights, atol=1e-5)


def train_and_save(folder):
    learner = Learner(tiny_model(), config(optim__lr=1e-3))
    learner.update(random_rows(6, seed=1))
    checkpoint.save(folder, 1, learner.tensors(), {"learner": learner.state()}, keep=1)


def load_and_train(folder):
    learner = Learner(tiny_model(seed=1), config(optim__lr=1e-3))
    learner.restored(checkpoint.load(checkpoint.newest(folder), learner.tensors())["learner"])
    learner.update(random_rows(6, seed=2))
    model = learner.plain_model()
    return learner.version, weights_of(model) if model is not None else None


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, [4]), (4, [1, 2])])
def test_a_checkpoint_goes_on_with_another_number_of_ranks(tmp_path, saved_by, loaded_by):
    train_and_save(tmp_path / "plain")
    expected = load_and_train(tmp_path / "plain")
    if saved_by == 1:
        train_and_save(tmp_path / "saved")
    else:
        run_ranks(saved_by, train_and_save, tmp_path / "saved")
    assert len(list((tmp_path / "saved" / "step_00001").glob("*.distcp"))) == saved_by
    for ranks in loaded_by:
        version, weights = run_ranks(ranks, load_and_train, tmp_path / "saved")[0]
        assert version == expected[0] == 2
        assert torch.allclose(weights, expected[1], atol=1e-5)


def bf16_steps(folder):
    """As on a GPU with train.autocast, which recipes refuse on a CPU for its speed only."""
    settings = config(optim__lr=1e-3)
    learner = Learner(tiny_model(), replace(settings, train=replace(settings.train, autocast=True)))
    rows = random_rows(9, seed=3)
    reports = [learner.update(rows, learner.logprobs(rows)) for _ in range(3)]
    checkpoint.save(folder, 3, learner.tensors(), {}, keep=1)
    model = learner.plain_model()
    types = {weight.dtype for weight in learner.weights}, model and {p.dtype for p in model.parameters()}
    return reports, str(types), torch.cat([distributed.full(weight.detach()).flatten() for weight in learner.weights])


def test_bf16_computes_over_fp32_weights_in_one_process_and_in_two(tmp_path):
    fp32 = Learner(tiny_model(), config(optim__lr=1e-3))
    rows = random_rows(9, seed=3)
    expected = [fp32.update(rows, fp32.logprobs(rows)) for _ in range(3)]
    results = [bf16_steps(tmp_path / "one"), *run_ranks(2, bf16_steps, tmp_path / "two")]
    for rank, (reports, types, weights) in enumerate(results):
        assert types == f"({{torch.float32}}, {None if rank == 2 else '{torch.bfloat16}'})"
        assert [r["policy/skipped"] for r in reports] == [0, 0, 0]
        for report, wanted in zip(reports, expected):
            assert report["policy/grad_norm"] == pytest.approx(wanted["policy/grad_norm"], rel=0.05)
        moved, wanted = weights - weights_of(tiny_model()), weights_of(fp32.model) - weights_of(tiny_model())
        assert torch.nn.functional.cosine_similarity(moved, wanted, dim=0) > 0.9
    assert torch.equal(results[1][2], results[2][2])


class Tokenizer:
    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


def fine_tune(folder):
    examples = [sft.Example([i % 24, 1, 2, (i * 5) % 24, 4], [2, 4]) for i in range(10)]
    learner = sft.train(tiny_model(), examples, config(sft__epochs=2, sft__batch_tokens=20, sft__lr=1e-3), folder)
    learner.export(Tokenizer(), folder / "model")
    return learner.version


def test_supervised_training_and_the_exported_folder_are_those_of_one_process(tmp_path):
    assert fine_tune(tmp_path / "one") == 6
    assert run_ranks(2, fine_tune, tmp_path / "two") == [6, 6]
    models = [type(tiny_model()).from_pretrained(tmp_path / name / "model") for name in ("one", "two")]
    assert torch.allclose(*(weights_of(model) for model in models), atol=1e-5)
    assert not torch.allclose(weights_of(models[0]), weights_of(tiny_model()), atol=1e-3)
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("one", "two")]
    assert len(lines[0]) == len(lines[1]) == 6


def disagree():
    def action():
        raise OSError("no room")

    try:
        distributed.agree(action)
    except (OSError, distributed.RankError) as error:
        return type(error).__name__, str(error)


def test_what_fails_on_rank_0_fails_on_all():
    assert run_ranks(2, disagree) == [("OSError", "no room"), ("RankError", "rank 0 failed: OSError: no room")]
