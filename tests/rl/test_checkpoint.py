"""Checkpoints: whole or not there, newest good one wins, damage is seen, a full disk is said."""

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl import checkpoint, modeling

pytestmark = pytest.mark.budget(90)


def tensors(value):
    return {"model.w": torch.full((50,), float(value)), "model.b": torch.arange(3) + value, "step": torch.tensor(1.0)}


def save(folder, step, value=None, keep=2):
    value = step if value is None else value
    plain = {"step": value, "order": [3, 1, 2], "name": "x", "rng": [3, [1, 2], None], "bytes": torch.arange(4)}
    return checkpoint.save(folder, step, tensors(value), plain, keep)


def load(path):
    """(tensors, plain) of a checkpoint, loaded over other values."""
    loaded = tensors(-1)
    return loaded, checkpoint.load(path, loaded)


def test_what_is_saved_comes_back(tmp_path):
    assert checkpoint.newest(tmp_path) is None
    path = save(tmp_path, 12)
    assert path.name == "step_00012" and checkpoint.newest(tmp_path) == path and checkpoint.step_of(path) == 12
    loaded, plain = load(path)
    assert all(torch.equal(value, tensors(12)[name]) for name, value in loaded.items())
    assert torch.equal(plain.pop("bytes"), torch.arange(4))
    assert plain == {"step": 12, "order": [3, 1, 2], "name": "x", "rng": [3, [1, 2], None]}


def test_the_newest_few_are_kept(tmp_path):
    for step in (1, 2, 9, 10, 100000):
        save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00010", "step_100000"]
    assert checkpoint.newest(tmp_path).name == "step_100000"


def test_the_same_step_can_be_saved_again(tmp_path):
    save(tmp_path, 1, keep=1)
    save(tmp_path, 1, value=5, keep=1)
    assert load(checkpoint.newest(tmp_path))[1]["step"] == 5
    assert [path.name for path in tmp_path.iterdir()] == ["step_00001"]


def shard_of(path):
    (shard,) = path.glob("*.distcp")
    return shard


def cut_in_half(path):
    os.truncate(shard_of(path), shard_of(path).stat().st_size // 2)


def flip_a_byte(path):
    data = bytearray(shard_of(path).read_bytes())
    data[len(data) // 2] ^= 1
    shard_of(path).write_bytes(data)


def cut_metadata(path):
    os.truncate(path / ".metadata", 10)


def cut_manifest(path):
    os.truncate(path / "manifest.json", 20)


def lose_a_file(path):
    (path / "plain.pt").unlink()


def lose_manifest_entries(path):
    (path / "manifest.json").write_text(json.dumps({"step": 2}))


def entries_that_are_none(path):
    (path / "manifest.json").write_text(json.dumps({"step": 2, "files": {"plain.pt": {"bytes": "9", "sha256": ""}}}))


def empty_manifest(path):
    (path / "manifest.json").write_text(json.dumps({"step": 2, "files": {}}))


def of_another_step(path):
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"step": 7}))


DAMAGES = [
    cut_in_half, flip_a_byte, cut_metadata, cut_manifest, lose_a_file, lose_manifest_entries, empty_manifest,
    entries_that_are_none, of_another_step,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_a_message(tmp_path, caplog, damage):
    save(tmp_path, 1, keep=3)
    damage(save(tmp_path, 2, keep=3))
    with caplog.at_level(logging.WARNING):
        assert checkpoint.newest(tmp_path).name == "step_00001"
    assert "step_00002" in caplog.text


def test_starting_over_is_never_silent(tmp_path):
    """And the folder to remove is the stage's: without its checkpoints alone, rl.train refuses to go on."""
    folder = tmp_path / "rl" / "checkpoints"
    cut_in_half(save(folder, 1, keep=1))
    told = rf"all checkpoints in {folder} are damaged.*remove {tmp_path}/rl to start.*metrics go too.*trajectories"
    with pytest.raises(checkpoint.CheckpointError, match=told):
        checkpoint.newest(folder)


def test_a_half_written_folder_is_ignored_and_removed(tmp_path):
    save(tmp_path, 1)
    half = tmp_path / ".tmp-step_00002"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"PK")
    assert checkpoint.newest(tmp_path).name == "step_00001"
    assert not half.exists()


@pytest.mark.parametrize("other", ["another shape", "a name more"])
def test_a_checkpoint_of_another_model_is_refused(tmp_path, other):
    path = save(tmp_path, 1)
    wanted = tensors(0)
    if other == "a name more":
        wanted["model.extra"] = torch.zeros(2)
    else:
        wanted["model.w"] = torch.zeros(51)
    with pytest.raises(
        checkpoint.CheckpointError, match=rf"not of this model.*or remove {tmp_path.parent} to"
    ) as raised:
        checkpoint.load(path, wanted)
    assert ("model.extra" if other == "a name more" else "model.w") in str(raised.value)


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


def test_the_plain_part_runs_no_code(tmp_path):
    path = checkpoint.save(tmp_path, 1, tensors(1), {"f": Evil()}, keep=1)
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        load(path)


def test_a_full_disk_is_known_before_anything_is_written(tmp_path, monkeypatch):
    save(tmp_path, 1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(checkpoint.CheckpointError, match="too full for a checkpoint"):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00001"]


LIMITED = """
import resource, signal, sys, torch
from pathlib import Path
from rl import checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))  # as if the disk ran full while writing
try:
    checkpoint.save(Path(sys.argv[1]), 2, {"w": torch.zeros(1_000_000)}, {}, keep=2)
except checkpoint.CheckpointError as error:
    print(error)
"""


def test_a_disk_that_runs_full_while_writing_leaves_the_checkpoint_before(tmp_path):
    save(tmp_path, 1)
    output = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "step_00002 could not be written" in output.stdout
    assert "no file may have more than 0.1 MiB: raise that limit (ulimit -f), or make room" in output.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["step_00001"]
    assert checkpoint.newest(tmp_path).name == "step_00001"


KILLED = """
import sys, torch
from pathlib import Path
from rl import checkpoint
folder = Path(sys.argv[1])
newest = checkpoint.newest(folder)
step = checkpoint.step_of(newest) if newest else 0
print("from", step, flush=True)
while True:
    step += 1
    checkpoint.save(folder, step, {"model": torch.full((200_000,), float(step))}, {"at": step}, keep=2)
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
        path = checkpoint.newest(tmp_path)
        loaded = {"model": torch.zeros(200_000)}
        assert checkpoint.load(path, loaded)["at"] == checkpoint.step_of(path) > reached
        reached = checkpoint.step_of(path)
        assert torch.equal(loaded["model"], torch.full((200_000,), float(reached)))


def test_changed_settings_are_named():
    saved = {"seed": 1, "optim": {"lr": 0.1, "beta1": 0.9}, "gone": 2}
    present = {"seed": 1, "optim": {"lr": 0.2, "beta1": 0.9}, "new": {"x": 1}}
    assert checkpoint.changed_settings(saved, present) == [
        "gone: 2 -> None",
        "new: None -> {'x': 1}",
        "optim.lr: 0.1 -> 0.2",
    ]
    assert checkpoint.changed_settings(saved, saved) == []
    # A name that is new means what it stood for before it was one.
    now = {"seed": 1, "optim": {"lr": 0.2, "beta1": 0.9, "late": 5}, "new": {"x": 1}, "other": 3}
    usual = {"seed": 7, "new": {"x": 1}, "optim": {"lr": 0.3, "late": 5}, "other": 4}
    assert checkpoint.changed_settings(saved, now, usual) == [
        "gone: 2 -> None",
        "optim.lr: 0.1 -> 0.2",
        "other: 4 -> 3",
    ]


def test_done_marks(tmp_path):
    checkpoint.mark_done(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["DONE"]


def test_what_a_person_put_beside_checkpoints_is_none(tmp_path):
    save(tmp_path, 1, keep=1)
    for name in ("step_foo", "step_00005.bak", "step_", "step_-0003"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00009").write_text("a file")
    assert checkpoint.newest(tmp_path).name == "step_00001"
    save(tmp_path, 2, keep=1)
    assert checkpoint.newest(tmp_path).name == "step_00002" and (tmp_path / "step_00005.bak").is_dir()


def test_a_damaged_later_checkpoint_pushes_out_no_good_one(tmp_path):
    for step in (2, 4, 6):
        save(tmp_path, step, keep=2)
    cut_in_half(tmp_path / "step_00006")
    assert checkpoint.newest(tmp_path).name == "step_00004"
    save(tmp_path, 5, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00005"]
    assert checkpoint.newest(tmp_path).name == "step_00005"


# Model folders -------------------------------------------------------------------------------------------------------


class Tokenizer:
    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


def small_model(seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=300, head_dim=8, num_key_value_heads=1, **sizes))


@pytest.fixture
def folder(tmp_path):
    tokenizer = modeling.train_tokenizer(["import torch\n"], 300)
    checkpoint.save_folder(small_model(), tokenizer, tmp_path / "sft" / "model")
    return tmp_path / "sft" / "model"


def other_weights(folder):
    small_model(seed=1).save_pretrained(folder)


def other_dtype(folder):
    small_model().bfloat16().save_pretrained(folder)


def other_tokenizer(folder):
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace("<|user|>", "<|yous|>"))


def cut_folder_manifest(folder):
    os.truncate(folder / "manifest.json", 20)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (other_weights, r"model\.safetensors has other content"),
        (other_dtype, r"(config\.json|model\.safetensors) has \d+ bytes instead of"),
        (other_tokenizer, r"tokenizer\.json has other content"),
        (lambda folder: (folder / "generation_config.json").unlink(), r"generation_config\.json is missing"),
        (cut_folder_manifest, r"no usable manifest\.json"),
    ],
)
def test_a_model_folder_that_was_changed_is_refused_by_name(folder, damage, words):
    assert modeling.load(folder, "cpu")
    damage(folder)
    with pytest.raises(modeling.ModelError, match=rf"{folder} is damaged: {words}.*DONE beside it.*on purpose"):
        modeling.load(folder, "cpu")


def test_a_model_folder_from_elsewhere_has_no_manifest_and_is_loaded(folder):
    (folder / "manifest.json").unlink()
    other_weights(folder)
    assert modeling.load(folder, "cpu")


def test_weights_of_more_layers_than_the_configuration_has_are_refused(folder):
    (folder / "manifest.json").unlink()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8}
    deep = Qwen3ForCausalLM(Qwen3Config(vocab_size=300, num_key_value_heads=1, num_hidden_layers=2, **sizes))
    config = (folder / "config.json").read_bytes()
    deep.save_pretrained(folder)
    (folder / "config.json").write_bytes(config)
    with pytest.raises(
        modeling.ModelError, match=r"layers that its config\.json doesn't have, e\.g\. model\.layers\.1"
    ):
        modeling.load(folder, "cpu")


def test_a_stage_that_says_it_is_done_must_have_its_model(folder):
    stage = folder.parent
    assert not checkpoint.is_done(stage, "model")
    checkpoint.mark_done(stage)
    assert checkpoint.is_done(stage, "model")
    os.truncate(folder / "model.safetensors", 100)
    with pytest.raises(checkpoint.CheckpointError, match=r"model is damaged \(model\.safetensors has 100 bytes"):
        checkpoint.is_done(stage, "model")
    shutil.rmtree(folder)
    with pytest.raises(checkpoint.CheckpointError, match="DONE is there, but model isn't: remove DONE"):
        checkpoint.is_done(stage, "model")


FULL = """
import resource, sys
from pathlib import Path
from rl import checkpoint, modeling
from rl.config import load_recipe
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    modeling.build_initial(load_recipe("mini-cpu", ["model.layers=1"]), ["import torch\\n"], Path(sys.argv[1]))
except checkpoint.CheckpointError as error:
    print(error)
"""


@pytest.mark.parametrize("limit", [100, 100_000])  # the configuration, the weights
def test_a_model_that_can_not_be_written_leaves_nothing_behind(tmp_path, limit):
    out = tmp_path / "sft" / "init"
    command = [sys.executable, "-c", FULL, str(out), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"the model folder {out} could not be written" in done.stdout and "File too large" in done.stdout
    assert "raise that limit (ulimit -f)" in done.stdout and "it goes on from the newest checkpoint" in done.stdout
    assert list(out.parent.iterdir()) == []


def test_a_full_disk_keeps_the_model_that_was_there(folder, monkeypatch):
    before = (folder / "model.safetensors").read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(checkpoint.CheckpointError, match=r"No space left.*MiB are free there: make room"):
        checkpoint.save_folder(small_model(1), Tokenizer(), folder)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert (folder / "model.safetensors").read_bytes() == before


class FullTokenizer:
    """Fails as the tokenizers library does: with an exception of no kind of its own."""

    def save_pretrained(self, folder):
        raise Exception("No space left on device (os error 28)")


def test_a_disk_that_runs_full_behind_the_weights_leaves_nothing(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match=r"model could not be written \(No space left"):
        checkpoint.save_folder(small_model(), FullTokenizer(), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_of_the_program_is_no_full_disk(tmp_path):
    with pytest.raises(AttributeError):
        checkpoint.save_folder(small_model(), None, tmp_path / "model")


# Order on disk -------------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """What was forced to disk and renamed, in order: ("fsync", path), ("rename", from, to)."""
    made, fsync, rename, replace = [], os.fsync, os.rename, os.replace

    def noted_fsync(descriptor):
        made.append(("fsync", str(Path(f"/proc/self/fd/{descriptor}").readlink())))
        fsync(descriptor)

    def noted(plain):
        def move(source, target, **more):
            made.append(("rename", str(source), str(target)))
            plain(source, target, **more)

        return move

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted(rename))
    monkeypatch.setattr(os, "replace", noted(replace))
    return made


def files_are_forced_before_the_rename_and_the_folder_after(calls, final, temporary):
    """Every file of a folder and the folder itself, then its name, then the folder above it. A crash of the machine
    in between leaves either no folder of that name, or a whole one."""
    at = calls.index(("rename", str(temporary), str(final)))
    before = {path for kind, path, *_ in calls[:at] if kind == "fsync"}
    names = {str(temporary / path.relative_to(final)) for path in final.rglob("*")}
    assert len(names) >= 3 and names | {str(temporary)} <= before
    assert ("fsync", str(final.parent)) in calls[at + 1 :]


def test_a_checkpoint_is_on_disk_before_it_has_its_name(tmp_path, calls):
    final = save(tmp_path, 3)
    files_are_forced_before_the_rename_and_the_folder_after(calls, final, tmp_path / ".tmp-step_00003")


def test_a_model_folder_is_on_disk_before_it_has_its_name(tmp_path, calls):
    checkpoint.save_folder(small_model(), Tokenizer(), tmp_path / "model")
    files_are_forced_before_the_rename_and_the_folder_after(calls, tmp_path / "model", tmp_path / ".tmp-model")


def test_a_done_mark_is_on_disk_before_it_has_its_name(tmp_path, calls):
    checkpoint.mark_done(tmp_path)
    (_, temporary), renamed, forced = calls
    assert renamed == ("rename", temporary, str(tmp_path / "DONE")) and forced == ("fsync", str(tmp_path))
