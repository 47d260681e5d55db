"""Checkpoints: whole or not there, newest good one wins, damage is seen."""

import json
import logging
import os
import subprocess
import sys
import time

import pytest
import torch

from rl import checkpoint

pytestmark = pytest.mark.budget(40)


def state(value):
    return {
        "model": {"w": torch.full((50,), float(value)), "b": torch.arange(3)},
        "cursor": {"step": value, "order": [3, 1, 2], "name": "x", "rng": [3, [1, 2], None]},
    }


def test_what_is_saved_comes_back(tmp_path):
    assert checkpoint.load_newest(tmp_path) is None
    path = checkpoint.save(tmp_path, 12, state(12), keep=2)
    assert path.name == "step_00012"
    step, loaded = checkpoint.load_newest(tmp_path)
    assert step == 12
    assert torch.equal(loaded["model"]["w"], state(12)["model"]["w"])
    assert loaded["cursor"] == state(12)["cursor"]


def test_the_newest_few_are_kept(tmp_path):
    for step in (1, 2, 9, 10, 100000):
        checkpoint.save(tmp_path, step, state(step), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00010", "step_100000"]
    assert checkpoint.load_newest(tmp_path)[0] == 100000


def test_the_same_step_can_be_saved_again(tmp_path):
    checkpoint.save(tmp_path, 1, state(1), keep=1)
    checkpoint.save(tmp_path, 1, state(5), keep=1)
    assert checkpoint.load_newest(tmp_path)[1]["cursor"]["step"] == 5
    assert [path.name for path in tmp_path.iterdir()] == ["step_00001"]


def cut_in_half(path):
    file = path / "model.pt"
    os.truncate(file, file.stat().st_size // 2)


def flip_a_byte(path):
    file = path / "model.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut_manifest(path):
    os.truncate(path / "manifest.json", 20)


def lose_a_file(path):
    (path / "cursor.pt").unlink()


def lose_manifest_entries(path):
    (path / "manifest.json").write_text(json.dumps({"step": 2}))


@pytest.mark.parametrize("damage", [cut_in_half, flip_a_byte, cut_manifest, lose_a_file, lose_manifest_entries])
def test_a_damaged_checkpoint_is_skipped_with_a_message(tmp_path, caplog, damage):
    checkpoint.save(tmp_path, 1, state(1), keep=3)
    damage(checkpoint.save(tmp_path, 2, state(2), keep=3))
    with caplog.at_level(logging.WARNING):
        assert checkpoint.load_newest(tmp_path)[0] == 1
    assert "step_00002" in caplog.text


def test_starting_over_is_never_silent(tmp_path):
    cut_in_half(checkpoint.save(tmp_path, 1, state(1), keep=1))
    with pytest.raises(checkpoint.CheckpointError, match="delete that folder"):
        checkpoint.load_newest(tmp_path)


def test_a_half_written_folder_is_ignored_and_removed(tmp_path):
    checkpoint.save(tmp_path, 1, state(1), keep=2)
    half = tmp_path / ".tmp-step_00002"
    half.mkdir()
    (half / "model.pt").write_bytes(b"PK")
    assert checkpoint.load_newest(tmp_path)[0] == 1
    assert not half.exists()


def test_nothing_but_plain_data_is_read_back(tmp_path):
    checkpoint.save(tmp_path, 1, {"model": {"f": Evil()}}, keep=1)
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        checkpoint.load_newest(tmp_path)


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


KILLED = """
import sys, torch
from pathlib import Path
from rl import checkpoint
folder = Path(sys.argv[1])
step = checkpoint.load_newest(folder)
step = step[0] if step else 0
print("from", step, flush=True)
while True:
    step += 1
    checkpoint.save(folder, step, {"model": torch.full((200_000,), float(step)), "at": step}, keep=2)
"""


def test_kills_at_random_instants_leave_a_whole_checkpoint_and_progress(tmp_path):
    reached = 0
    for pause_s in (0.0, 0.037, 0.091):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout.readline() == f"from {reached}\n"
            while not any(int(path.name[5:]) > reached for path in tmp_path.glob("step_*")):
                time.sleep(0.001)
            time.sleep(pause_s)  # into the middle of some later save
        finally:
            process.kill()
            process.communicate()
        step, loaded = checkpoint.load_newest(tmp_path)
        assert step > reached
        assert loaded["at"] == step
        assert torch.equal(loaded["model"], torch.full((200_000,), float(step)))
        reached = step


def test_done_marks(tmp_path):
    checkpoint.mark_done(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["DONE"]
