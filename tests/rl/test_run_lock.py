"""One process a stage's folder: a second one is refused by name, a killed one doesn't block, ranks share one lock."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from ranks import run_ranks
from small_run import Judge, durable, ended, prepare, start

from rl import collect, distributed, run_lock, sft, train
from rl.run_lock import FolderInUse

pytestmark = pytest.mark.budget(30)


def holder(folder):
    """A process that holds a folder until it is killed; returns its id once it does."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with run_lock.held(folder):
            os.write(write, b"x")
            time.sleep(60)
    os.read(read, 1)
    return child


@pytest.mark.parametrize(("stage", "name"), [(train, "rl"), (sft, "sft"), (collect, "collect")])
def test_a_second_process_is_refused_and_a_killed_one_does_not_block(tmp_path, monkeypatch, stage, name):
    run = tmp_path / "run"
    prepare(run, "train.steps=1")
    (run / "collect").mkdir()
    (run / "collect" / "trajectories.jsonl").write_text("")
    begun = []
    monkeypatch.setattr(train, "make_pool", lambda config: begun.append("rl") or Judge())
    monkeypatch.setattr(sft, "collected", lambda source: [])
    monkeypatch.setattr(sft, "load_examples", lambda *_: begun.append("sft"))
    monkeypatch.setattr(sft, "train", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setattr(collect, "make_teacher", lambda *_: begun.append("collect"))
    monkeypatch.setattr(collect, "make_pool", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    child = holder(run / name)
    try:
        with pytest.raises(FolderInUse, match=rf"run/{name} is in use by process {child} on .* since .*same command"):
            stage.main(run)
        assert not begun
    finally:
        os.kill(child, signal.SIGKILL)
        ended(child)
    try:
        stage.main(run)
    except (KeyboardInterrupt, TypeError):
        assert stage is not train
    assert begun == [name]
    with run_lock.held(run / name):
        pass  # given back


def test_two_runs_at_once_end_as_one_does(tmp_path):
    prepare(tmp_path / "one")
    assert ended(start(tmp_path / "one")) == 0
    prepare(tmp_path / "both")
    lock = tmp_path / "both" / "rl" / ".lock"
    first = start(tmp_path / "both")
    while not lock.exists() or not lock.read_text():
        time.sleep(0.01)
    assert ended(start(tmp_path / "both")) == 1
    assert ended(first) == 0
    assert durable(tmp_path / "both") == durable(tmp_path / "one")


def in_ranks(folder):
    with run_lock.held(Path(folder)):
        held = Path(folder, ".lock").read_text()
    try:
        if distributed.first():
            descriptor = run_lock._take(Path(folder) / "taken")
        distributed.gather(None)
        with run_lock.held(Path(folder) / "taken"):
            return held, "nobody held it"
    except (FolderInUse, distributed.RankError) as error:
        if distributed.first():
            os.close(descriptor)
        return held, str(error)


def test_ranks_take_it_once_and_all_hear_of_a_refusal(tmp_path):
    (first, said), (second, heard) = run_ranks(2, in_ranks, str(tmp_path))
    assert first == second and first.startswith("process ")
    assert "is in use by process" in said and "is in use by process" in heard
