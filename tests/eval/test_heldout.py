"""eval/heldout.py with a real small model and a made-up judge: paired draws, resuming, the files that it promises."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path

import pytest

pytest.importorskip("rl.rollout")

from env.problems import write_jsonl
from env.records import Problem, Verdict, sha256
from eval import heldout
from rl import modeling
from rl.checkpoint import CheckpointError
from rl.config import load_recipe
from rl.engines.base import Completion, EngineError
from rl.prompts import TextChat

pytestmark = pytest.mark.budget(60)

SMALL = [
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "model.kv_heads=1",
    "model.mlp=16",
    "model.vocab_size=400",
]
SETTINGS = [*SMALL, "rollout.max_new_tokens=8", "eval.samples=2", "problems.heldout=10"]


class MadeUpJudge:
    """The verdict follows from the answer's hash; counts what it was asked, and can break off like a kill."""

    def __init__(self, breaks_after: int | None = None):
        self.asked = 0
        self.breaks_after = breaks_after

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, problem: Problem, response: str, raw: bool = True) -> Future:
        if self.asked == self.breaks_after:
            raise KeyboardInterrupt
        self.asked += 1
        status = ("correct", "correct", "hack", "incorrect", "infra_error")[
            int(sha256(problem.id + response)[:4], 16) % 5
        ]
        verdict = Verdict(status=status, feedback=f"status: {status}", cost={"total_s": 0.1})
        if status == "correct":
            verdict.speedup, verdict.profiling_ratio, verdict.time_kind = 1.5, 0.9, "modelled"
        future: Future = Future()
        future.set_result(verdict)
        return future


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    modeling.build_initial(load_recipe("mini-cpu", SETTINGS), ["import torch\n", "status: correct\n"], folder / "model")
    return folder / "model"


@pytest.fixture
def run(tmp_path, model_folder) -> Path:
    """A run folder whose SFT and RL models are the same one."""
    config = load_recipe("mini-cpu", SETTINGS)
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    problems = [Problem(f"p{n}", f"class Model: # {n}\n    pass\n") for n in range(10)]
    (tmp_path / "problems").mkdir()
    write_jsonl(problems, tmp_path / "problems/heldout.jsonl")
    for which in heldout.STAGES:
        (tmp_path / which).mkdir()
        (tmp_path / which / "model").symlink_to(model_folder)
    return tmp_path


@pytest.fixture
def judge(monkeypatch) -> MadeUpJudge:
    made_up = MadeUpJudge()
    monkeypatch.setattr(heldout, "make_pool", lambda config: made_up)
    return made_up


def test_equal_models_get_equal_draws_and_so_a_difference_of_exactly_nothing(run, judge):
    for which in heldout.STAGES:
        heldout.main(run, which)
    sft, rl = ((run / "eval" / which / "trajectories.jsonl").read_bytes() for which in heldout.STAGES)
    assert sft == rl and sft.count(b"\n") == 20
    comparison = json.loads((run / "eval/comparison.json").read_text())
    assert {"reward_mean", "fast_1.0", "fast_1.2", "hack_ratio"} == set(comparison)
    for difference in comparison.values():
        assert (difference["value"], difference["low"], difference["high"]) == (0, 0, 0)
    summary = json.loads((run / "eval/rl/summary.json").read_text())
    assert (summary["problems"], summary["samples"], summary["turns"]) == (10, 2, 2)
    assert set(summary["fast"]["1.0"]) == {"turn1", "turn2", "best"}
    assert 0 < summary["fast"]["1.0"]["best"]["value"] < 1 and summary["excluded"]["infra_error"] > 0


def test_a_finished_evaluation_is_not_done_again(run, judge):
    heldout.main(run, "sft")
    asked = judge.asked
    heldout.main(run, "sft")
    assert judge.asked == asked > 0
    assert not (run / "eval/comparison.json").exists()


def test_a_killed_evaluation_goes_on_and_ends_in_the_same_bytes(run, monkeypatch, judge):
    heldout.main(run, "rl")
    whole = {name: (run / "eval/rl" / name).read_bytes() for name in ("trajectories.jsonl", "summary.json")}
    for name in (*whole, "DONE"):
        (run / "eval/rl" / name).unlink()
    first_group = judge.asked - 5
    monkeypatch.setattr(heldout, "make_pool", lambda config: MadeUpJudge(breaks_after=first_group))
    with pytest.raises(KeyboardInterrupt):
        heldout.main(run, "rl")
    assert not (run / "eval/rl/DONE").exists() and (run / "eval/rl/trajectories.jsonl").exists()
    second = MadeUpJudge()
    monkeypatch.setattr(heldout, "make_pool", lambda config: second)
    heldout.main(run, "rl")
    assert 0 < second.asked < judge.asked
    assert whole == {name: (run / "eval/rl" / name).read_bytes() for name in whole}


def test_a_model_behind_a_server_is_evaluated_on_the_same_problems(run, judge, monkeypatch):
    class Strong:
        takes = "messages"

        def stream(self, source, sampling):
            while requests := source.take(3, wait=True):
                for request in requests:
                    said = request.prompt[0]["content"] + str(request.seed)
                    yield request, Completion([], [], "stop", text=f"answer {sha256(said)}")

    monkeypatch.setattr(heldout, "_server", lambda config: (Strong(), TextChat()))
    heldout.main(run, heldout.SERVER)
    summary = json.loads((run / "eval/server/summary.json").read_text())
    assert summary["problems"] == 10 and 0 < summary["fast"]["1.0"]["best"]["value"] < 1
    first = json.loads((run / "eval/server/trajectories.jsonl").read_text().splitlines()[0])
    assert first["turns"][0]["completion_text"].startswith("answer") and first["turns"][0]["prompt_ids"] == []


def test_without_an_address_no_server_is_evaluated(run, judge):
    with pytest.raises(EngineError, match=r"server\.url and server\.model"):
        heldout.main(run, heldout.SERVER)


def test_a_missing_model_is_named_with_the_stage_that_makes_it(run, judge):
    (run / "rl/model").unlink()
    with pytest.raises(FileNotFoundError, match=r"rl/model.*rl\.train"):
        heldout.main(run, "rl")


def test_the_summary_says_in_one_line_what_was_not_measured():
    nothing = {"value": None, "low": None, "high": None}
    some = {"value": 0.5, "low": 0.25, "high": 0.75}
    summary = {"problems": 3, "turns": 2, "fast": {"1.0": {"turn2": some}}, "hack_ratio": nothing}
    assert heldout.describe(summary) == "3 problems: Fast@1.0 50.0% [25.0%, 75.0%], hack ratio not measured"


def test_a_stage_that_says_it_is_done_without_its_result_is_refused(tmp_path):
    folder = tmp_path / "eval" / "rl"
    folder.mkdir(parents=True)
    (folder / "DONE").write_text("done\n")
    with pytest.raises(CheckpointError, match=r"DONE is there, but trajectories\.jsonl isn't: remove DONE"):
        heldout.main(tmp_path, "rl")
