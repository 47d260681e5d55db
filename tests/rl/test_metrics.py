"""Metrics: no step twice after a resume, no unknown name, and the right numbers off trajectories."""

import json
import math
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from env.files import write_atomic
from env.records import Verdict
from eval.metrics import summarise
from rl import metric_names
from rl.metrics import DamagedFile, MetricsWriter, evaluation_metrics, gpu_memory, rollout_metrics
from rl.records import Trajectory, Turn, append_trajectories

pytestmark = pytest.mark.budget(20)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_and_tensorboard_hold_the_values(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"reward/mean": 1.5, "policy/entropy": math.nan, "policy/loss": None})
        writer.write_wall(0, {"seconds/rollout": 2.0, "tokens_per_s": 10.0})
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 0, "policy/entropy": None, "policy/loss": None, "reward/mean": 1.5}
    ]
    assert list(lines(tmp_path / "metrics.jsonl")[0]) == ["step", "policy/entropy", "policy/loss", "reward/mean"]
    assert lines(tmp_path / "wall.jsonl") == [{"step": 0, "seconds/rollout": 2.0, "tokens_per_s": 10.0}]
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["reward/mean", "seconds/rollout", "tokens_per_s"]
    assert events.Scalars("reward/mean")[0].value == 1.5


def test_what_is_written_is_there_to_be_read_while_the_run_goes_on(tmp_path):
    """By a TensorBoard beside the run; and no thread of it is left behind."""
    threads = threading.active_count()
    folder = tmp_path / "new" / "run"
    with MetricsWriter(folder) as writer:
        writer.write(1, {"reward/mean": 1.5})
        assert lines(folder / "metrics.jsonl") == [{"step": 1, "reward/mean": 1.5}]
        assert EventAccumulator(str(folder / "tb")).Reload().Scalars("reward/mean")[0].value == 1.5
        assert threading.active_count() > threads
    assert threading.active_count() == threads


def test_a_run_from_the_beginning_takes_no_line_over(tmp_path):
    for value in (1.0, 2.0):  # the second time after a kill before the first checkpoint
        with MetricsWriter(tmp_path) as writer:
            for step in (0, 1):
                writer.write(step, {"reward/mean": value + step})
    assert [line["reward/mean"] for line in lines(tmp_path / "metrics.jsonl")] == [2.0, 3.0]


def test_tensorboard_shows_a_step_once_too(tmp_path):
    """Steps that a kill took back are purged: their place is taken by what was written afterwards."""
    for steps, resume_step, value in ((range(1, 5), 0, 1.0), (range(3, 6), 3, 2.0)):
        if resume_step:
            time.sleep(1.1)  # files are named, and read in the order of, the second in which they are made
        with MetricsWriter(tmp_path, resume_step) as writer:
            for step in steps:
                writer.write(step, {"reward/mean": value})
    found = EventAccumulator(str(tmp_path / "tb")).Reload().Scalars("reward/mean")
    assert [(event.step, event.value) for event in found] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]


def test_gpu_memory_is_in_gib_and_the_peak_since_the_last_call(monkeypatch):
    peak = [5 * 2**30]
    for name, function in (
        ("is_available", lambda: True),
        ("memory_allocated", lambda: 3 * 2**30),
        ("max_memory_allocated", lambda: peak[0]),
        ("reset_peak_memory_stats", lambda: peak.__setitem__(0, 3 * 2**30)),
    ):
        monkeypatch.setattr(torch.cuda, name, function)
    assert gpu_memory() == {"memory/allocated_gib": 3.0, "memory/peak_gib": 5.0}
    assert gpu_memory() == {"memory/allocated_gib": 3.0, "memory/peak_gib": 3.0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_memory() == {}


def test_a_resumed_run_writes_the_same_bytes_as_an_unbroken_one(tmp_path):
    def write(folder, steps, resume_step=0):
        with MetricsWriter(folder, resume_step) as writer:
            for step in steps:
                writer.write(step, {"policy/lr": step / 10, "reward/mean": float(step)})
                writer.write_wall(step, {"seconds/learn": 0.1})

    write(tmp_path / "whole", range(6))
    write(tmp_path / "broken", range(5))
    with open(tmp_path / "broken" / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "policy/l')  # killed while writing
    write(tmp_path / "broken", range(3, 6), resume_step=3)
    for name in ("metrics.jsonl", "wall.jsonl"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_last_line_without_its_newline_is_written_anew(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}')
    with MetricsWriter(tmp_path, 2):
        assert lines(tmp_path / "metrics.jsonl") == [{"step": 0}]


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\nrubbish\n{"step": 1}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2"):
        MetricsWriter(tmp_path, 2)


def test_a_broken_last_line_is_an_error_unless_a_kill_cut_it_short(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"st\n')
    with pytest.raises(DamagedFile, match=r"metrics\.jsonl:2"):
        MetricsWriter(tmp_path, 2)
    path.write_text('{"step": 0}\n{"st')
    with MetricsWriter(tmp_path, 2):
        assert lines(path) == [{"step": 0}]


@pytest.mark.parametrize("name", ["reward/maen", "status/splendid", "fast/1.2", "reward/mean_turn", "xreward/mean"])
def test_unknown_names_are_refused(tmp_path, name):
    with MetricsWriter(tmp_path) as writer, pytest.raises(ValueError, match="unknown metric"):
        writer.write(0, {name: 1.0})


def turn(status, reward, advantage=1.0, speedup=None, pr=None, masks=(), tokens=2):
    parts = {} if reward is None else {"correct": float(reward > 0), "speedup": 0.0, "profiling_ratio": 0.0}
    if reward:
        parts |= {"speedup": min(speedup, 3.0), "profiling_ratio": pr}
    verdict = Verdict(status, speedup=speedup, profiling_ratio=pr).to_json()
    return Turn(
        [1] * 3, [2] * tokens, [-1.0] * tokens, 0, "stop", "", "", verdict, reward, parts, advantage, list(masks)
    )


def test_what_trajectories_say(tmp_path):
    trajectories = [
        Trajectory("p", 0, [turn("correct", 3.5, speedup=2.0, pr=0.5), turn("incorrect", 0.0, masks=["mrs"])]),
        Trajectory("p", 1, [turn("hack", 0.0, speedup=9.0), turn("infra_error", None, None, masks=["infra_error"])]),
        Trajectory("p", 2, [turn("correct", 5.0, speedup=1.1, pr=1.0, masks=["prs"], tokens=4)]),
        Trajectory("q", 0, [turn("compile_error", 0.0)]),
    ]
    values = rollout_metrics(trajectories)
    expected = {
        "reward/mean": 8.5 / 5,
        "reward/mean_turn1": 8.5 / 4,
        "reward/mean_turn2": 0.0,
        "reward/correct": 2 / 5,
        "reward/speedup": 1.55,
        "reward/profiling_ratio": 0.75,
        "status/correct": 2 / 6,
        "status/infra_error": 1 / 6,
        "status/hack_turn1": 1 / 4,
        "status/infra_error_turn2": 1 / 2,
        "hack/ratio": 1 / 5,
        "fast/1.0_turn1": 2 / 4,
        "fast/1.2_turn1": 1 / 4,
        "fast/1.0_turn2": 0.0,
        "mask/mrs": 1 / 6,
        "mask/prs": 1 / 6,
        "mask/veto": 0.0,
        "mask/infra": 1 / 6,
        "group/size_mean": 5 / 3,
        "tokens/completion_mean": 14 / 6,
        "tokens/total": 6 * 3 + 14,
    }
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, values)


def test_rows_whose_return_is_not_known_are_counted_as_masked_though_they_were_rewarded():
    """The second verdict is nobody's fault: the first turn has a reward, but no return and so no advantage."""
    trajectories = [
        Trajectory(
            "p", 0, [turn("correct", 3.5, None, speedup=2.0, pr=0.5), turn("infra_error", None, None, masks=["infra"])]
        ),
        Trajectory(
            "p", 1, [turn("correct", 3.0, speedup=1.5, pr=0.5), turn("correct", 2.0, speedup=1, pr=0, masks=["mrs"])]
        ),
        Trajectory("q", 0, [turn("incorrect", 0.0), turn("problem_error", None, None, masks=["infra"])]),
    ]
    values = rollout_metrics(trajectories)
    expected = {
        "mask/infra": 3 / 6,
        "mask/trained": 2 / 6,
        "mask/mrs": 1 / 6,
        "group/size_mean": 1.0,
        "group/size_mean_turn1": 1.0,
        "group/single": 1.0,
        "reward/mean": 8.5 / 4,
        "reward/mean_turn1": 6.5 / 3,
        "reward/mean_turn2": 2.0,
        "reward/correct": 3 / 4,
    }
    assert {name: values[name] for name in expected} == pytest.approx(expected)


def test_a_step_in_which_nothing_was_judged_leaves_means_out():
    values = rollout_metrics([Trajectory("p", 0, [turn("infra_error", None, None)])])
    assert values["mask/infra"] == 1.0
    assert not {"reward/mean", "hack/ratio", "fast/1.0_turn1", "group/size_mean"} & set(values)


def test_an_evaluation_in_which_nothing_was_judged_leaves_means_out():
    values = evaluation_metrics([Trajectory("p", 0, [turn("infra_error", None, None)])])
    assert None not in values.values() and "eval/reward/mean" not in values and "eval/hack/ratio" not in values
    assert values["eval/status/infra_error"] == 1.0
    assert evaluation_metrics([]) == {} and rollout_metrics([]) == {"tokens/total": 0.0}


def test_training_and_evaluation_count_fast_samples_alike():
    trajectories = [
        Trajectory("p", 0, [turn("correct", 3.5, speedup=2.0, pr=0.5), turn("correct", 2.1, speedup=1.1, pr=0.5)]),
        Trajectory("p", 1, [turn("correct", 3.5, speedup=2.0, pr=0.5)], ended="context"),  # no answer: not fast
        Trajectory("p", 2, [turn("infra_error", None, None)], ended="infra"),  # nobody's fault: not counted
        Trajectory("q", 0, [turn("hack", 0.0, speedup=9.0), turn("correct", 4.0, speedup=2.0, pr=1.0)]),
    ]
    summary = summarise(trajectories, 3, 2)
    for values, prefix in ((rollout_metrics(trajectories), ""), (evaluation_metrics(trajectories), "eval/")):
        for p in (1.0, 1.2):
            for number in (1, 2):
                expected = summary["fast"][str(p)][f"turn{number}"]["value"]
                assert values[f"{prefix}fast/{p}_turn{number}"] == pytest.approx(expected)
    assert rollout_metrics(trajectories)["fast/1.0_turn2"] == pytest.approx(2 / 3)
    assert rollout_metrics(trajectories)["turns/ended_context"] == 1 / 4
    assert not [name for name in evaluation_metrics(trajectories) if "mask" in name or "group" in name]


def test_hacks_are_a_share_of_what_was_judged_turn_by_turn():
    trajectories = [
        Trajectory("p", 0, [turn("hack", 0.0), turn("infra_error", None, None)]),
        Trajectory("p", 1, [turn("problem_error", None, None)]),
        Trajectory("p", 2, [turn("incorrect", 0.0), turn("hack", 0.0)]),
        Trajectory("p", 3, [turn("incorrect", 0.0), turn("timeout", 0.0)]),
    ]
    values = evaluation_metrics(trajectories)
    expected = {"hack/ratio": 2 / 5, "hack/ratio_turn1": 1 / 3, "hack/ratio_turn2": 1 / 2, "status/hack": 2 / 7}
    assert {name: values[f"eval/{name}"] for name in expected} == pytest.approx(expected)


def test_group_sizes_by_turn():
    rows = [turn("correct", 2.0, speedup=1.0, pr=0.0) for _ in range(6)]
    trajectories = [Trajectory("p", 0, rows[:2]), Trajectory("p", 1, rows[2:3]), Trajectory("q", 0, rows[3:])]
    values = rollout_metrics(trajectories)
    sizes = [values[f"group/size_mean_turn{number}"] for number in (1, 2, 3)]
    assert sizes == [1.5, 1.0, 1.0] and values["group/single"] == 4 / 5


def test_answers_cut_off_are_counted_by_what_cut_them():
    cut, full = turn("incorrect", 0.0), turn("incorrect", 0.0)
    cut.finish_reason, full.finish_reason = "length", "context"
    values = rollout_metrics([Trajectory("p", 0, [cut, turn("incorrect", 0.0)]), Trajectory("p", 1, [full])])
    assert values["tokens/cut"] == values["tokens/context"] == pytest.approx(1 / 3)


def test_every_written_name_has_a_meaning():
    values = rollout_metrics([Trajectory("p", 0, [turn("correct", 3.5, speedup=2.0, pr=0.5)])])
    values |= evaluation_metrics([Trajectory("p", 0, [turn("hack", 0.0)])])
    assert all(metric_names.meaning(name) and metric_names.known(name) for name in values)
    assert metric_names.meaning("eval/fast/1.2_turn3").startswith("Fast@p")
    with pytest.raises(KeyError, match="metric_names"):
        metric_names.meaning("fast/1.2")


@pytest.mark.parametrize("line", [b"{}", b"[1]", b'{"step": "one"}', b"3", b"\xff\xfe", b"{"])
def test_a_file_of_metrics_that_was_damaged_is_said_by_name_and_left_alone(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + line + b'\n{"step": 2}\n')
    with pytest.raises(DamagedFile, match=r"metrics\.jsonl"):
        MetricsWriter(tmp_path, 2)
    assert path.read_bytes() == b'{"step": 0}\n' + line + b'\n{"step": 2}\n'


def test_a_full_disk_is_said_with_the_file_and_what_to_do(tmp_path, monkeypatch):
    full = Path("/dev/full")  # every write to it finds no space left
    with pytest.raises(OSError, match=r"No space left.*MiB are free.*same command again.*/dev/full"):
        append_trajectories(full, [Trajectory("p", 0, [])])
    with MetricsWriter(tmp_path) as writer:
        (tmp_path / "metrics.jsonl").symlink_to(full)
        with pytest.raises(OSError, match=r"No space left.*metrics\.jsonl"):
            writer.write(0, {"reward/mean": 1.0})
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match=r"MiB are free.*settings\.json"):
        write_atomic(tmp_path / "settings.json", "{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "tb"]  # nothing half-written
