"""scripts/: what they refuse, what they leave, and that stopping stops; a fake Python stands in for the stages."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from env.records import Problem
from rl.config import load_recipe
from scripts import machine, plan, prepare, ranks

pytestmark = pytest.mark.budget(90)
ROOT = Path(__file__).resolve().parent.parent


def problem(name: str) -> Problem:
    return Problem(id=name, source=f"# {name}\n")


@pytest.fixture
def config():
    return load_recipe("mini-cpu", ["problems.train=5", "problems.heldout=2"])


@pytest.fixture
def two_lists(monkeypatch):
    lists = [problem("a"), problem("b"), problem("c")], [problem("d"), problem("e")]
    monkeypatch.setattr(prepare, "make_problems", lambda config: lists)
    return lists


def test_prepare_writes_what_the_stages_read_and_repeats_to_the_same_bytes(tmp_path, config, two_lists):
    prepare.prepare(config, tmp_path)
    first = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert json.loads((tmp_path / "config.json").read_text()) == config.to_json()
    train = (tmp_path / "problems/train.jsonl").read_text().splitlines()
    assert [Problem.from_json(json.loads(line)) for line in train] == two_lists[0]
    noted = json.loads((tmp_path / "versions.json").read_text())
    assert {"python", "torch", "triton", "numpy", "commit", "device"} <= noted.keys()
    prepare.prepare(config, tmp_path)
    assert first == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_prepare_goes_on_after_a_kill_between_its_files(tmp_path, config, two_lists):
    prepare.prepare(config, tmp_path)
    whole = (tmp_path / "problems/heldout.jsonl").read_bytes()
    (tmp_path / "problems/heldout.jsonl").unlink()
    assert prepare.check(config, tmp_path) == []
    prepare.prepare(config, tmp_path)
    assert (tmp_path / "problems/heldout.jsonl").read_bytes() == whole


def test_another_runs_folder_is_refused_and_the_keys_are_named(tmp_path, config, two_lists):
    prepare.prepare(config, tmp_path)
    other = load_recipe("mini-cpu", ["problems.train=5", "problems.heldout=2", "loss.scale=7", "optim.lr=0.5"])
    (fault,) = prepare.check(other, tmp_path)
    assert f"loss.scale: {config.loss.scale} -> 7.0" in fault and "optim.lr" in fault and "--run NAME" in fault
    assert "sft" not in fault


def test_a_damaged_config_missing_folder_or_full_disk_is_said(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"name": ')
    config = load_recipe(
        "mini-cpu", ["problems.source=folder", f"problems.path={tmp_path}/none", f"model.path={tmp_path}/model"]
    )
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(prepare.shutil, "disk_usage", lambda path: usage)
    text = "\n".join(prepare.check(config, tmp_path))
    for part in ("damaged", "problems.path", "model.path", "GiB free"):
        assert part in text


@pytest.mark.parametrize("left", ["versions.json", "rl", "eval"])
def test_a_folder_that_lost_its_settings_is_refused(tmp_path, config, left):
    (tmp_path / left).touch()
    (fault,) = prepare.check(config, tmp_path)
    assert "no config.json" in fault and left in fault and "Put its config.json back" in fault and "--run NAME" in fault


def test_deleted_settings_of_a_prepared_run_are_missed(tmp_path, config, two_lists, capsys):
    arguments = ["--recipe", "mini-cpu", "--run", str(tmp_path), "--set", "problems.train=5"]
    arguments += ["--set", "problems.heldout=2"]
    assert prepare.main(arguments) == 0
    (tmp_path / "config.json").unlink()
    assert prepare.main([*arguments, "--set", "optim.lr=0.5"]) == 2
    assert "no config.json, but versions.json of an earlier run" in capsys.readouterr().err
    assert not (tmp_path / "config.json").exists()


def test_what_is_brought_from_another_run_is_no_run(tmp_path, config):
    for name in ("problems", "collect", "sft"):
        (tmp_path / name).mkdir()
    assert prepare.check(config, tmp_path) == []


def test_a_limit_on_files_is_told_before_one_is_cut(tmp_path, config, monkeypatch):
    for limit, right in ((2**20, False), (70 * 2**20, False), (2**40, True), (None, True)):
        monkeypatch.setattr(prepare, "file_limit", lambda limit=limit: limit)
        faults = prepare.check(config, tmp_path)
        assert (faults == []) == right and ("ulimit -f unlimited" in "".join(faults)) != right


def test_a_disk_that_is_full_is_no_traceback(tmp_path, monkeypatch, two_lists, capsys):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert prepare.main(["--recipe", "mini-cpu", "--run", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "No space left on device" in said and "run/config.json" in said and "MiB are free there" in said


def test_a_missing_gpu_is_said_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "visible_gpus", list)
    (fault,) = prepare.check(load_recipe("mini-gpu"), tmp_path / "new")
    assert "mini-cpu" in fault and not (tmp_path / "new").exists()


SMI = """\
#!{python}
import sys
what = sys.argv[1]
if what == "-L":
    print("GPU 0: NVIDIA H200 (UUID: GPU-a)")
elif "query-gpu" in what:
    print("0, GPU-a, NVIDIA H200, 143771, {used}")
elif {running}:
    print("GPU-a, 4711, /usr/bin/other")
"""


@pytest.fixture
def one_gpu(tmp_path, monkeypatch):
    """A machine with one GPU, as nvidia-smi and torch tell of it: call it with MiB in use and whether by a process."""

    def make(used: int, running: bool) -> None:
        path = tmp_path / "bin" / "nvidia-smi"
        path.parent.mkdir(exist_ok=True)
        path.write_text(SMI.format(python=sys.executable, used=used, running=running))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(prepare, "gpu_name", lambda: "NVIDIA H200")
        header = tmp_path / "Python.h"
        header.touch()
        monkeypatch.setattr(machine.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})

    return make


def test_a_gpu_in_use_is_refused_unless_that_is_allowed(tmp_path, one_gpu, monkeypatch):
    config = load_recipe("mini-gpu")
    one_gpu(600, False)
    assert prepare.check(config, tmp_path / "new") == []
    for used, running, who in ((700, True, "/usr/bin/other (pid 4711)"), (90000, False, "a process that isn't shown")):
        one_gpu(used, running)
        (fault,) = prepare.check(config, tmp_path / "new")
        assert who in fault and "GPU 0 is in use" in fault and "CUDA_VISIBLE_DEVICES" in fault
    monkeypatch.setenv("ALLOW_BUSY_GPU", "1")
    assert prepare.check(config, tmp_path / "new") == []


def test_a_missing_compiler_header_or_gpu_build_is_said(tmp_path, one_gpu, monkeypatch):
    config = load_recipe("mini-gpu")
    one_gpu(600, False)
    monkeypatch.setenv("CC", "no-such-compiler")
    (tmp_path / "Python.h").unlink()
    compiler, header = prepare.check(config, tmp_path / "new")
    assert "CC=no-such-compiler" in compiler and "Python.h" in header
    monkeypatch.setattr(prepare, "gpu_name", lambda: None)
    (fault,) = prepare.check(config, tmp_path / "new")
    assert "nvidia-smi lists 1, but torch" in fault
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (fault,) = prepare.check(config, tmp_path / "new")
    assert "CUDA_VISIBLE_DEVICES is empty" in fault


def test_the_plan_names_amounts_places_and_memory(tmp_path, one_gpu):
    one_gpu(600, False)
    found = machine.gpus(["0"])
    lines = plan.describe(load_recipe("mini-gpu"), found)
    text = "\n".join(lines)
    assert "40 steps of 128 answers" in text and "GPU 0 (NVIDIA H200): the policy, then the judge" in text
    assert "of 140  together" in lines[-1]
    # Measured on an H200 (rows of 8 192 tokens, a Qwen3-1.7B shape): 56 GiB, and 29 with recomputation.
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    sizes |= {"num_hidden_layers": 28, "intermediate_size": 6144, "vocab_size": 151936, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(sizes))
    for recompute, measured in (("false", 56), ("true", 29)):
        settings = ["train.micro_batch_tokens=8192", "train.autocast=true", f"train.recompute={recompute}"]
        config = load_recipe("mini-gpu", [f"model.path={folder}", *settings])
        shape = plan.shape_of(config)
        assert abs(shape.parameters / 1.72e9 - 1) < 0.01
        parts = plan.memory(config, shape)
        learner = sum(size for what, size in parts.items() if "engine" not in what) / 2**30
        assert measured - 1 < learner < measured + 8
    assert plan.faults(config, found) == []
    (fault,) = plan.faults(config, [replace(found[0], total=20 * 2**30)])
    assert "torchrun with at least 2 ranks" in fault


def test_training_on_what_is_evaluated_is_refused():
    relu = "import torch\nimport torch.nn as nn\nclass Model(nn.Module):\n    def __init__(self):\n        {init}\n"
    relu += "    def forward(self, a):\n        return torch.relu(a)\n"
    relu = relu.format(init="super(Model, self).__init__()")
    with pytest.raises(prepare.PrepareError, match=r"mine is level1/19_ReLU.*allow_kernelbench"):
        prepare.check_training([Problem("mine", relu)], [], False)
    prepare.check_training([Problem("mine", relu)], [], True)
    with pytest.raises(prepare.PrepareError, match="mine is other"):
        prepare.check_training([Problem("mine", relu)], [Problem("other", relu.replace("a)", "b)"))], True)


def test_other_versions_at_a_resume_are_kept_beside_the_first(tmp_path):
    path = tmp_path / "versions.json"
    prepare.note_versions(path, {"torch": "1", "python": "3"})
    prepare.note_versions(path, {"torch": "2", "python": "3"})
    prepare.note_versions(path, {"torch": "2", "python": "3"})
    assert json.loads(path.read_text()) == {"torch": "1", "python": "3", "resumed_with": [{"torch": "2"}]}


@pytest.mark.parametrize("text", ['{"torch": "1', "[]", ""])
def test_damaged_versions_are_told(tmp_path, text):
    path = tmp_path / "versions.json"
    path.write_text(text)
    with pytest.raises(prepare.PrepareError, match=r"versions\.json is damaged .* delete it to go on"):
        prepare.note_versions(path, {"torch": "1"})
    assert path.read_text() == text


def folder_of(tmp_path: Path, count: int) -> Path:
    text = """
    import torch
    class Model(torch.nn.Module):
        def forward(self, x):
            return x + {n}
    def get_inputs():
        return [torch.rand(4)]
    def get_init_inputs():
        return []
    """
    for n in range(count):
        (tmp_path / f"{n}_add.py").write_text(textwrap.dedent(text.replace("{n}", str(n))))
    return tmp_path


def test_a_folder_is_split_without_overlap_and_heldout_stays_when_training_grows(tmp_path):
    pytest.importorskip("env.problems")
    folder = folder_of(tmp_path, 8)

    def lists(train: int):
        settings = ["problems.source=folder", f"problems.path={folder}", "problems.heldout=3"]
        numbers = [f"problems.train={train}", "rollout.prompts_per_step=1"]
        return prepare.make_problems(load_recipe("mini-cpu", [*settings, *numbers]))

    train, heldout = lists(2)
    longer, same = lists(5)
    assert heldout == same and longer[:2] == train
    assert not {item.sha256 for item in longer} & {item.sha256 for item in heldout}
    with pytest.raises(prepare.PrepareError, match="8 different problems"):
        lists(6)


# ---- the shell scripts, with a stand-in for Python that notes its calls

FAKE = """\
#!{python}
import os, pathlib, sys, time
args = sys.argv[1:]
if args[:1] in (["-c"], ["-"]) or args[1] == "scripts.ranks":  # set-up's check, the default recipe
    os.execv({python!r}, [{python!r}, *args])
run = pathlib.Path(args[args.index("--run") + 1])
module = args[args.index("--") + 1] if "--" in args else args[1]
with open({log!r}, "a") as log:
    log.write(" ".join(args) + "\\n")
if args[1] == "scripts.prepare" and "--dry-run" not in args and "FAKE_LOSES" not in os.environ:
    (run / "config.json").write_text("{{}}")
if args[1] == os.environ.get("FAKE_FAILS"):
    sys.exit(7)
if args[1] == os.environ.get("FAKE_HANGS"):
    import signal, subprocess
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # one that is in the middle of something
    held = subprocess.Popen(["sleep", "100"], start_new_session=True)  # as the judge's processes are
    pathlib.Path({log!r} + ".pids").write_text(f"{{os.getpid()}} {{held.pid}}")
    time.sleep(100)
done = {{"rl.collect": "collect", "rl.sft": "sft", "rl.train": "rl"}}.get(module)
if args[1] == "eval.heldout":
    done = "eval/" + args[args.index("--which") + 1]
if done:
    (run / done).mkdir(parents=True, exist_ok=True)
    (run / done / "DONE").touch()
"""


class Train:
    """Starts scripts/train.sh on a run folder under tmp_path with the stand-in."""

    def __init__(self, tmp_path: Path):
        self.log = tmp_path / "calls"
        self.run = tmp_path / "run"
        self.python = tmp_path / "python"
        self.python.write_text(FAKE.format(python=sys.executable, log=str(self.log)))
        self.python.chmod(0o755)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", str(ROOT / "scripts/train.sh"), "mini-cpu", "--run", str(self.run), *arguments],
            env={**os.environ, "PYTHON": str(self.python), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def __call__(self, *arguments: str, **environment: str) -> tuple[int, str]:
        process = self.start(*arguments, **environment)
        output = process.communicate(timeout=30)[0]
        return process.returncode, output

    def calls(self) -> list[str]:
        return [line.split()[1] for line in self.log.read_text().splitlines()] if self.log.exists() else []


STAGES = ["scripts.prepare", "rl.collect", "rl.sft", "rl.train", "eval.heldout", "eval.heldout", "analysis.report"]


@pytest.fixture
def train(tmp_path) -> Train:
    return Train(tmp_path)


def test_stages_run_in_order_and_finished_ones_are_not_noted_again(train):
    code, output = train()
    assert code == 0, output
    assert train.calls() == STAGES
    code, output = train()
    assert code == 0 and train.calls() == [*STAGES, *STAGES]  # each says for itself that it is complete
    stages = [json.loads(line)["stage"] for line in (train.run / "stages.jsonl").read_text().splitlines()]
    assert stages[0] == "Set-up" and stages.count("RL") == 1


def test_several_ranks_train_under_torchrun(train, tmp_path):
    code, output = train(RANKS="2")
    assert code == 0, output
    lines = train.log.read_text().splitlines()
    start = "-m torch.distributed.run --standalone --nproc-per-node 2 -m -- "
    assert lines[2:4] == [f"{start}rl.sft --run {train.run}", f"{start}rl.train --run {train.run}"]
    assert [line.split()[1] for line in lines] == [*STAGES[:2], *["torch.distributed.run"] * 2, *STAGES[4:]]
    for wrong in ("0", "two", "-1"):
        code, output = train(RANKS=wrong)
        assert code == 2 and f"RANKS={wrong}: a number of processes, 1 or more" in output


VLLM = ("engine.name=vllm", "device=cuda", "problems.size=gpu")


@pytest.mark.parametrize("settings, expected", [((), 1), (VLLM, 3), ((*VLLM, "placement.kind=split"), 2)])
def test_a_recipe_that_samples_with_vllm_takes_all_gpus(train, tmp_path, settings, expected):
    (tmp_path / "bin").mkdir()
    listing = tmp_path / "bin" / "nvidia-smi"
    listing.write_text("#!/bin/sh\nfor i in 0 1 2; do echo GPU $i: made up; done\n")
    listing.chmod(0o755)
    sets = [word for setting in settings for word in ("--set", setting)]
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    code, output = train("--until", "sft", *sets, **environment)
    assert code == 0, output
    assert (f"--nproc-per-node {expected} " in train.log.read_text()) == (expected > 1)


def test_ranks_leave_the_judge_its_gpus():
    vllm = ["device=cuda", "problems.size=gpu", "engine.name=vllm"]
    shared, apart = (load_recipe("mini-cpu", [*vllm, f"env.placement={place}"]) for place in ("shared", "apart"))
    assert [ranks.ranks(shared, gpus) for gpus in (1, 2, 8)] == [1, 2, 8]
    assert [ranks.ranks(apart, gpus) for gpus in (2, 3, 8)] == [1, 1, 4]
    assert ranks.ranks(load_recipe("mini-gpu"), 8) == 1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], [1, 1, 7]),
        (["placement.rollout_gpus=3"], [1, 1, 5]),
        (["placement.rollout_gpus=3", "env.placement=apart"], [1, 1, 4]),
        (["placement.rollout_gpus=3", "env.placement=apart", "placement.judge_gpus=2"], [1, 1, 3]),
    ],
)
def test_with_split_the_learner_has_what_neither_samples_nor_judges(settings, expected):
    split = load_recipe("drkernel-14b", ["placement.kind=split", *settings])
    assert [ranks.ranks(split, gpus) for gpus in (1, 2, 8)] == expected
    assert ranks.ranks(load_recipe("mini-gpu", ["placement.kind=split"]), 8) == 1


@pytest.mark.parametrize(
    ("settings", "roles"),
    [
        ([], ["the learner"] * 3 + ["sampling, then the judge"]),
        (["env.placement=apart"], ["the learner"] * 2 + ["sampling", "the judge"]),
        (["env.placement=apart", "placement.rollout_gpus=2"], ["the learner", "sampling", "sampling", "the judge"]),
    ],
)
def test_a_split_plan_says_who_works_where(settings, roles):
    gpus = [machine.Gpu(str(i), f"GPU-{i}", "H200", 140 << 30, 0) for i in range(4)]
    split = load_recipe("drkernel-8b", ["placement.kind=split", *settings])
    ranks_of = roles.count("the learner")
    assert [line.split(": ")[1] for line in plan.placement(split, gpus, ranks_of)] == roles


@pytest.mark.parametrize(
    ("settings", "gpus", "host", "words"),
    [
        ([], 8, 512, []),
        ([], 8, 256, ["up to 440 GiB of the host's .* .440 at the start: .* it has 256: start fewer ranks"]),
        (["placement.kind=split"], 8, 256, ["440 GiB .* .385 at the start: .*, 55 weights on their way"]),
        (["train.recompute=false"], 8, 512, ["learning needs .* GiB a GPU more than there are: train.recompute=true"]),
        (["placement.kind=split"], 1, 512, ["no GPU of 1 is left to learn"]),
        (["engine.memory_share=0.9"], 0, 1, []),
    ],
)
def test_what_does_not_fit_here_by_the_plan_is_said(settings, gpus, host, words):
    found = [machine.Gpu(str(i), f"GPU-{i}", "H100", int(79.1 * 2**30), 0) for i in range(gpus)]
    said = plan.doubts(load_recipe("drkernel-14b", settings), found, host << 30)
    assert len(said) == len(words) and all(re.search(word, line) for word, line in zip(words, said)), said
    assert plan.doubts(load_recipe("mini-gpu"), found, 1) == []


def test_gpus_of_different_kinds_are_refused_with_a_choice():
    gpus = [machine.Gpu(str(i), f"GPU-{i}", "H100" if i < 3 else "A100", 80 << 30, 0) for i in range(4)]
    (fault,) = prepare.mixed(gpus)
    assert "H100: 0, 1, 2; A100: 3" in fault and fault.endswith("CUDA_VISIBLE_DEVICES=0,1,2")
    assert prepare.mixed(gpus[:3]) == prepare.mixed([]) == []


def test_a_finished_stage_that_lost_its_result_stops_the_run(train):
    assert train()[0] == 0
    code, output = train(FAKE_FAILS="rl.sft")  # as rl.sft does where DONE is there and its model isn't
    assert code == 7 and "'SFT' failed" in output
    assert train.calls()[len(STAGES) :] == STAGES[:3]


def test_a_run_without_its_settings_keeps_what_it_has(train):
    assert train()[0] == 0
    (train.run / "config.json").unlink()
    before = {path for path in train.run.rglob("*")}
    assert train(FAKE_FAILS="scripts.prepare", FAKE_LOSES="1")[0] == 7
    assert {path for path in train.run.rglob("*")} == before


def test_a_failing_stage_ends_the_run_with_its_status_and_the_next_run_goes_on_there(train):
    code, output = train(FAKE_FAILS="rl.sft")
    assert code == 7 and "'SFT' failed" in output
    assert train.calls() == STAGES[:3]
    assert train()[0] == 0
    assert train.calls()[3:] == STAGES
    stages = [json.loads(line)["stage"] for line in (train.run / "stages.jsonl").read_text().splitlines()]
    assert stages.count("Cold start") == stages.count("SFT") == 1


def test_dry_run_prints_the_plan_and_writes_nothing(train):
    code, output = train("--dry-run", "--set", "train.steps=3")
    assert code == 0 and "== RL: python -m rl.train" in output
    assert train.calls() == ["scripts.prepare"] and "--set train.steps=3 --dry-run" in train.log.read_text()
    assert not train.run.exists()


def test_bad_arguments_are_refused_before_anything_starts(train):
    for arguments in (["--stes", "a=b"], ["--set"], ["another"]):
        code, output = train(*arguments)
        assert code == 2 and output.startswith("train: "), output
    assert train.calls() == [] and not train.run.exists()


def wait_for(condition, seconds: float = 15.0):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return value


def gone(pid: int) -> bool:
    """True if the process has ended (a zombie that its reaper has not met yet has)."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_run_is_refused_and_a_signal_stops_the_whole_stage(train, number):
    process = train.start(FAKE_HANGS="rl.sft")
    pids_file = Path(f"{train.log}.pids")
    pids = [int(pid) for pid in wait_for(lambda: pids_file.exists() and pids_file.read_text().split())]
    code, output = train()
    assert code == 2 and "in use" in output
    begun = time.monotonic()
    process.send_signal(number)
    output = process.communicate(timeout=20)[0]
    assert process.returncode == 130 and "stopping" in output
    for pid in pids:
        wait_for(lambda pid=pid: gone(pid))
    assert time.monotonic() - begun < 5
    assert train()[0] == 0  # the lock went with the processes


def test_a_signal_during_set_up_stops_it(train, tmp_path):
    slow = tmp_path / "slow"
    slow.write_text(f"#!/bin/sh\necho $$ >{tmp_path}/pid\nsleep 100\n")
    slow.chmod(0o755)
    process = train.start(PYTHON=str(slow))
    pid = int(wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    wait_for(lambda: gone(pid))
    assert time.monotonic() - begun < 5 and not train.run.exists()


def test_until_ends_behind_a_stage(train):
    code, output = train("--until", "sft")
    assert code == 0 and train.calls() == STAGES[:3] and "done up to sft" in output
    code, output = train("--until", "lunch")
    assert code == 2 and "prepare, collect, sft" in output


def collect(train, *arguments):
    result = subprocess.run(
        ["bash", str(ROOT / "scripts/collect.sh"), "mini-cpu", "--run", str(train.run), *arguments],
        env={**os.environ, "PYTHON": str(train.python)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    return result.returncode, result.stdout + result.stderr


def test_collecting_is_the_first_stages_alone_whoever_the_teacher_is(train):
    assert collect(train)[0] == 0 and train.calls() == STAGES[:2]
    code, output = collect(train, "--teacher", "http://host:1/v1", "--model", "strong", "--set", "seed=3")
    assert code == 0, output
    given = train.log.read_text().splitlines()[2]
    for part in ("collect.teacher=server", "server.url=http://host:1/v1", "server.model=strong", "seed=3"):
        assert f"--set {part}" in given
    for wrong in (["--teacher", "gpt"], ["--teacher", "http://h/v1"], ["--model", "m"], ["--teacher"]):
        code, output = collect(train, *wrong)
        assert code == 2 and output.startswith("collect: "), output


def test_a_refused_start_leaves_no_folder(tmp_path):
    arguments = ["mini-cpu", "--run", str(tmp_path / "new"), "--set", "train.stepz=3"]
    result = subprocess.run(
        ["bash", str(ROOT / "scripts/train.sh"), *arguments],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 2 and "train.stepz" in result.stderr
    assert not (tmp_path / "new").exists()


# ---- set-up, in a copy with a stand-in for pip and venv: no network, no minutes

FAKE_BASE = """\
#!/usr/bin/env bash
# python3 stand-in: `-m venv DIR` makes DIR/bin/python of itself, `-m pip` notes the call.
case "$*" in
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    "-m pip "*) echo install >>"{log}"; sleep 0.3; [[ -z "${{FAKE_PIP_FAILS:-}}" ]] || exit 1 ;;
esac
"""


@pytest.fixture
def setup_copy(tmp_path):
    root = tmp_path / "copy"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/setup.sh", root / "scripts")
    shutil.copy(ROOT / "requirements.txt", root)
    (tmp_path / "bin").mkdir()
    base = tmp_path / "bin/python3"
    base.write_text(FAKE_BASE.format(log=tmp_path / "installs"))
    base.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHON", "ROOT")}
    environment["PATH"] = f"{base.parent}:{environment['PATH']}"

    def start(**extra: str) -> subprocess.Popen:
        command = ["bash", "-c", f"source {root}/scripts/setup.sh && echo $PYTHON"]
        return subprocess.Popen(
            command, env={**environment, **extra}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def installs() -> int:
        path = tmp_path / "installs"
        return len(path.read_text().splitlines()) if path.exists() else 0

    return root, start, installs


def finish(process: subprocess.Popen) -> tuple[int, str]:
    output = process.communicate(timeout=30)[0]
    return process.returncode, output


def test_setup_installs_once_and_again_when_the_requirements_change(setup_copy):
    root, start, installs = setup_copy
    for _ in range(2):
        code, output = finish(start())
        assert code == 0 and output.strip().endswith(".venv/bin/python"), output
    assert installs() == 1
    with open(root / "requirements.txt", "a") as file:
        file.write("# changed\n")
    assert finish(start())[0] == 0 and installs() == 2


def test_setup_started_twice_at_once_installs_once(setup_copy):
    _, start, installs = setup_copy
    both = [start(), start()]
    assert [finish(process)[0] for process in both] == [0, 0]
    assert installs() == 1


def test_a_failed_install_is_said_and_done_again_from_scratch(setup_copy):
    root, start, installs = setup_copy
    code, output = finish(start(FAKE_PIP_FAILS="1"))
    assert code == 1 and "install failed" in output
    (root / ".venv/half").write_text("")
    assert finish(start())[0] == 0 and installs() == 2
    assert not (root / ".venv/half").exists()


def test_a_given_python_without_the_packages_is_refused_with_their_names(tmp_path):
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys._base_executable} -I -S "$@"\n')
    bare.chmod(0o755)
    result = subprocess.run(
        ["bash", str(ROOT / "scripts/setup.sh")],
        env={**os.environ, "PYTHON": str(bare)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1 and "torch" in result.stderr and "unset PYTHON" in result.stderr


def test_what_the_cold_start_has_not_read_may_change_until_it_is_complete(tmp_path, two_lists):
    base = ["problems.train=5", "problems.heldout=2"]
    prepare.prepare(load_recipe("mini-cpu", base), tmp_path)
    (tmp_path / "collect").mkdir()
    later = load_recipe("mini-cpu", [*base, "collect.keep.hack=0", "sft.lr=0.01", "server.timeout_s=7"])
    assert prepare.check(later, tmp_path) == []
    (fault,) = prepare.check(load_recipe("mini-cpu", [*base, "collect.keep.hack=0", "collect.turns=3"]), tmp_path)
    assert "collect.turns: 2 -> 3" in fault and "keep.hack" not in fault
    (tmp_path / "collect" / "DONE").touch()
    (fault,) = prepare.check(later, tmp_path)
    assert "collect.keep.hack" in fault and "sft.lr" in fault and "server.timeout_s" in fault
