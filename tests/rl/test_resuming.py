"""A run whose checkpoints, problems or tokenizer aren't what they were is refused, and nothing of it is removed."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

from small_run import PROBLEMS, ended, in_child, prepare, start

from env.problems import write_jsonl
from env.records import Problem
from rl import checkpoint, modeling, resuming, train
from rl.checkpoint import CheckpointError

pytestmark = pytest.mark.budget(60)

A_STEP = 2 * 4 * 2  # answers, at most: a kill at one more falls into the next step or a later one


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run with checkpoints of steps 2 and 4, killed in its last step."""
    run = tmp_path_factory.mktemp("runs") / "killed"
    prepare(run)
    assert in_child(run, 4 * A_STEP + 1) == -signal.SIGKILL
    return run


@pytest.fixture
def run(killed, tmp_path):
    shutil.copytree(killed, tmp_path / "run")
    return tmp_path / "run"


def files(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def refused(run, words):
    """Refused with `words`; what the stage had made is still there."""
    before = files(run)
    with pytest.raises(CheckpointError, match=words):
        train.main(run)
    assert files(run) == before


def remove(folder):
    shutil.rmtree(folder)


def empty(folder):
    remove(folder)
    folder.mkdir()


@pytest.mark.parametrize("lose", [remove, empty])
@pytest.mark.parametrize("left", ["all", "no mark", "metrics", "trajectories"])
def test_a_run_without_its_checkpoints_does_not_start_over(run, lose, left):
    """Whatever else tells that there were some: the mark, more steps than go without one, in either file."""
    lose(run / "rl" / "checkpoints")
    if left != "all":
        (run / "rl" / resuming.MARK).unlink()
    if left == "metrics":
        remove(run / "rl" / "trajectories")
    if left == "trajectories":
        (run / "rl" / "metrics.jsonl").unlink()
    told = rf"{run}/rl/checkpoints holds no checkpoint, though [45] steps.*remove {run}/rl to start.*trajectories and"
    refused(run, told)


def test_removing_the_folder_that_is_named_starts_the_stage_over(run):
    for path in (run / "rl" / "checkpoints").iterdir():
        (path / "plain.pt").unlink()
    refused(run, f"are damaged.*remove {run}/rl to start this stage over")
    remove(run / "rl")
    assert in_child(run, None) == 0 and (run / "rl" / "DONE").is_file()


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("every", [2, 3])
def test_killed_between_a_step_and_the_first_checkpoint_goes_on(tmp_path, every, marked):
    """Also where the metrics of the step were written and its checkpoint was not."""
    run = tmp_path / "run"
    prepare(run, "train.steps=3", f"train.checkpoint_every={every}")

    def killing():
        train.save = lambda *given: (_ for _ in ()).throw(KeyboardInterrupt)

    assert ended(start(run, first=killing)) != 0
    assert resuming.last_step(run / "rl") == every and not list((run / "rl").glob("checkpoints/step_*"))
    if not marked:  # left by a version that didn't write it
        (run / "rl" / resuming.MARK).unlink()
    if marked:  # a checkpoint more often, which may be asked for at any time, doesn't mean that there was one
        settings = json.loads((run / "config.json").read_text())
        settings["train"]["checkpoint_every"] = 1
        (run / "config.json").write_text(json.dumps(settings))
    assert in_child(run, None) == 0
    lines = (run / "rl" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_the_mark_tells_of_a_checkpoint_of_the_very_step(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"step": 3, "cut')
    resuming.refuse_lost_checkpoints(tmp_path, 3)
    resuming.mark(tmp_path, False)
    resuming.refuse_lost_checkpoints(tmp_path, 1)
    resuming.mark(tmp_path, True)
    with pytest.raises(CheckpointError, match="3 steps"):
        resuming.refuse_lost_checkpoints(tmp_path, 3)
    (tmp_path / resuming.MARK).unlink()
    (tmp_path / "model").mkdir()  # made after the last checkpoint
    with pytest.raises(CheckpointError, match="3 steps"):
        resuming.refuse_lost_checkpoints(tmp_path, 3)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')  # an evaluation before training is no step
    resuming.refuse_lost_checkpoints(tmp_path, 3)


OTHER = Problem("other", "class Model:\n    n = 9\n")


@pytest.mark.parametrize(
    "problems",
    [PROBLEMS[:-1], [*PROBLEMS, OTHER], PROBLEMS[::-1], [Problem("p0", OTHER.source), *PROBLEMS[1:]]],
    ids=["shorter", "longer", "another order", "another source"],
)
def test_other_problems_are_refused(run, problems):
    write_jsonl(problems, run / "problems" / "train.jsonl")
    refused(run, rf"{run}/problems/train.jsonl holds other problems, .*put back.*remove {run}/rl .*metrics go too")


def test_another_tokenizer_is_refused(run):
    model, tokenizer = modeling.load(run / "sft" / "model", "cpu")
    other = modeling.train_tokenizer(["def run(x):\n    return x\n"], len(tokenizer))
    assert len(other) == len(tokenizer) and other.get_vocab() != tokenizer.get_vocab()
    checkpoint.save_folder(model, other, run / "sft" / "model")
    refused(run, rf"{run}/sft/model/tokenizer.json is not the tokenizer that.*put back.*remove {run}/rl")


def test_the_same_problems_and_tokenizer_written_anew_and_older_checkpoints_go_on(run):
    (run / "problems" / "train.jsonl").write_text(
        "".join(json.dumps(problem.to_json(), indent=None, sort_keys=True) + "\n" for problem in PROBLEMS)
    )
    for path in (run / "rl" / "checkpoints").iterdir():  # as they were before they said what they were trained on
        plain = torch.load(path / "plain.pt", weights_only=True)
        assert plain.pop("inputs")
        torch.save(plain, path / "plain.pt")
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"]["plain.pt"] = checkpoint.manifest.entry(path / "plain.pt")
        (path / "manifest.json").write_text(json.dumps(manifest))
    assert in_child(run, None) == 0 and (run / "rl" / "DONE").is_file()
