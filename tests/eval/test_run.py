"""eval/run.py: what it asks, writes, refuses and resumes; a server that misbehaves in every way; small contexts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from made_up import MadeUpJudge, answer, serving

from env.pool import PoolError
from env.problems import ProblemError, load
from eval import evaluation, policies, run
from eval.settings import RunError
from rl import modeling
from rl.config import load_recipe
from rl.engines import openai
from rl.engines.base import EngineError
from rl.records import read_trajectories

pytestmark = pytest.mark.budget(60)

ROOT = Path(__file__).parents[2]
GOOD = "```python\nclass ModelNew: pass  # {}\n```"
SMALL = [
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "model.kv_heads=1",
    "model.mlp=16",
    "model.vocab_size=400",
]


def arguments(out: Path, *more: str, model: str = "teacher", problems: str = "generator:heldout:3"):
    return run.parser().parse_args(
        ["--model", model, "--problems", problems, "--out", str(out), "--device", "cpu", *more]
    )


@pytest.fixture
def judges(monkeypatch) -> list[MadeUpJudge]:
    """The judges that were opened, in order."""
    opened: list[MadeUpJudge] = []

    def make(config):
        opened.append(MadeUpJudge(reference=config.env.reference))
        return opened[-1]

    monkeypatch.setattr(evaluation, "make_pool", make)
    monkeypatch.setattr(openai, "LONGEST_PAUSE_S", 0.01)
    monkeypatch.setenv("no_proxy", "*")
    return opened


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "model"
    config = load_recipe("mini-cpu", [*SMALL, "model.context=600"])
    modeling.build_initial(config, ["import torch\n", "status: correct\n"], folder)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    """What must not depend on kills or on the clock."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if "wall" not in path.name} | {
        "seconds.json": b"",
        ".lock": b"",
    }


def test_a_whole_evaluation_leaves_what_it_promises(tmp_path, judges, capsys):
    run.main(arguments(tmp_path, "--samples", "4", "--turns", "2", "--best-of", "3"))
    names = {path.name for path in tmp_path.iterdir()}
    assert {"settings.json", "versions.json", "trajectories.jsonl", "parallel.jsonl", "summary.json", "DONE"} <= names
    trajectories = list(read_trajectories(tmp_path / "trajectories.jsonl"))
    assert [(t.problem_id, t.sample_index) for t in trajectories][:5] == [
        *((trajectories[0].problem_id, i) for i in range(4)),
        (trajectories[4].problem_id, 0),
    ]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["problems"], summary["samples"], summary["turns"]) == (3, 4, 2)
    assert set(summary["fast"]) == {"0.0", "1.0", "1.2", "1.5", "2.0"} and summary["cost"]["turn2"]["verdicts"] > 1
    # Single answers draw like the first turns: the first four of the sequential samples among them.
    single = list(read_trajectories(tmp_path / "parallel.jsonl"))
    assert len(single) == 9 and all(len(t.turns) == 1 for t in single)
    assert single[0].turns[0].completion_text == trajectories[0].turns[0].completion_text
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["config"]["eval"]["samples"] == 4 and settings["problems"]["count"] == 3
    parts = [json.loads(line).get("part") for line in (tmp_path / "wall.jsonl").read_text().splitlines()]
    assert parts.count("samples") == 1 and parts.count("best-of") == 1
    seconds = json.loads((tmp_path / "seconds.json").read_text())
    assert seconds["turn2"]["judge_s"] == pytest.approx(0.5 * summary["cost"]["turn2"]["verdicts"])
    printed = capsys.readouterr().out
    assert "Fast@1.2" in printed and "hack ratio" in printed
    run.main(arguments(tmp_path, "--samples", "4", "--turns", "2", "--best-of", "3"))
    assert len(judges) == 1 and "done before" in capsys.readouterr().out


@pytest.mark.parametrize("breaks_after", [0, 20, 50, 70])
def test_killed_and_resumed_the_results_are_identical(tmp_path, judges, monkeypatch, breaks_after):
    options = ("--samples", "2", "--turns", "2", "--best-of", "1")
    whole, cut = (arguments(tmp_path / n, *options, problems="generator:heldout:20") for n in ("whole", "cut"))
    run.main(whole)
    make = evaluation.make_pool
    monkeypatch.setattr(evaluation, "make_pool", lambda config: MadeUpJudge(breaks_after))
    with pytest.raises(KeyboardInterrupt):
        run.main(cut)
    assert not (cut.out / "DONE").exists()
    monkeypatch.setattr(evaluation, "make_pool", make)
    run.main(cut)
    assert files(whole.out) == files(cut.out)
    assert judges[-1].asked <= judges[0].asked


def test_both_references_judge_the_same_answers(tmp_path, judges, monkeypatch):
    monkeypatch.setattr(run, "check_references", lambda *_: None)  # this judge needs no GPU
    run.main(arguments(tmp_path, "--samples", "3", "--turns", "2", "--reference", "both"))
    eager, compiled = (list(read_trajectories(tmp_path / f"trajectories{n}.jsonl")) for n in ("", ".compile"))
    texts = [[turn.completion_text for turn in t.turns] for t in eager]
    assert texts == [[turn.completion_text for turn in t.turns] for t in compiled]
    verdicts = [[turn.verdict["speedup"] for turn in t.turns] for t in eager]
    assert verdicts != [[turn.verdict["speedup"] for turn in t.turns] for t in compiled]
    assert [judge.rules.reference for judge in judges] == ["eager", "compile"]
    assert (tmp_path / "summary.compile.json").is_file()


def test_a_compiled_reference_needs_a_gpu(tmp_path, judges):
    for reference in ("compile", "both"):
        with pytest.raises(RunError, match=r"needs a GPU.*--reference eager"):
            run.main(arguments(tmp_path, "--reference", reference))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (("--samples", "2"), r"config\.eval\.samples: 1 -> 2"),
        (("--samples", "1", "--scaling", "context"), r"scaling: vanilla -> context"),
        (("--samples", "1", "--set", "eval.temperature=0.5"), r"config\.eval\.temperature: 1\.0 -> 0\.5"),
        (("--samples", "1", "--limit", "2"), r"problems\.count: 3 -> 2"),
    ],
)
def test_a_folder_of_other_settings_is_refused_with_the_difference(tmp_path, judges, options, difference):
    run.main(arguments(tmp_path, "--samples", "1", "--turns", "1"))
    with pytest.raises(RunError, match=difference):
        run.main(arguments(tmp_path, "--turns", "1", *options))


def test_a_folder_from_before_a_setting_existed_goes_on(tmp_path, judges):
    options = arguments(tmp_path, "--samples", "1", "--turns", "1")
    run.main(options)
    (path,) = tmp_path.rglob("settings.json")
    saved = json.loads(path.read_text())
    del saved["config"]["eval"]["temperature"], saved["config"]["rejection"]
    path.write_text(json.dumps(saved))
    run.main(options)
    with pytest.raises(RunError, match=r"config\.eval\.temperature: 1\.0 -> 0\.5"):
        run.main(arguments(tmp_path, "--samples", "1", "--turns", "1", "--set", "eval.temperature=0.5"))


def test_a_list_of_degenerate_problems_is_left_out_and_belongs_to_the_settings(tmp_path, judges):
    (first, *_) = load("generator:heldout:3")
    path = tmp_path / "list.json"
    entries = {first.id: {"sha256": first.sha256, "reasons": [{"kind": "zero", "detail": "made up"}]}}
    path.write_text(json.dumps({"version": 1, "problems": entries}))
    options = ("--samples", "2", "--turns", "1", "--degenerate", str(path))
    run.main(arguments(tmp_path / "out", *options))
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["degenerate"] == [first.id] and summary["without_degenerate"]["problems"] == 2
    path.write_text(json.dumps({"version": 1, "problems": {}}))
    with pytest.raises(RunError, match=r"degenerate\.sha256"):
        run.main(arguments(tmp_path / "out", *options))


def test_another_model_is_another_evaluation(tmp_path, judges, model_folder):
    run.main(arguments(tmp_path, "--samples", "1", "--turns", "1"))
    with pytest.raises(RunError, match=r"model\.kind: teacher -> folder"):
        short = ("--set", "rollout.max_new_tokens=8")
        run.main(arguments(tmp_path, "--samples", "1", "--turns", "1", *short, model=str(model_folder)))


def test_a_folder_in_use_is_left_alone(tmp_path, judges):
    with run._alone(tmp_path), pytest.raises(RunError, match="in use"):
        run.main(arguments(tmp_path))


def misbehaving(body: dict, nth: int):
    """Every trouble once, told apart by the request's seed; then an answer: good, empty, cut, or without code."""
    kind = body["seed"] % 8
    if nth == 1 and kind == 0:
        time.sleep(1.5)  # longer than the client waits
    if nth == 1 and kind == 1:
        return 429, {"error": "slow down"}, {"Retry-After": "0"}
    if nth == 1 and kind == 2:
        return 200, b"<html>a proxy's page</html>"
    if nth == 1 and kind == 3:
        return 503, b"busy"
    if kind == 4:
        return answer("")
    if kind == 5:
        return answer("```python\nclass ModelNew:\n    def forw", "length")
    if kind == 6:
        return answer("I can't write kernels, sorry.")
    if kind == 7 and len(body["messages"]) > 1:
        return 400, {"error": {"message": "maximum context length is 10 tokens"}}
    return answer(GOOD.format(body["seed"]))


def test_a_server_that_misbehaves_in_every_way_is_evaluated_all_the_same(tmp_path, judges):
    with serving(misbehaving) as (url, asked):
        options = ("--name", "m", "--samples", "8", "--turns", "2")
        limits = ("--set", "server.timeout_s=1.0", "--set", "server.attempts=8")
        run.main(arguments(tmp_path, *options, *limits, model=url, problems="generator:heldout:6"))
    found = list(read_trajectories(tmp_path / "trajectories.jsonl"))
    turns = [turn for t in found for turn in t.turns]
    assert {turn.completion_text[:8] for turn in turns} == {"", "```pytho", "I can't "}
    assert {turn.finish_reason for turn in turns} == {"stop", "length"}
    full = [t for t in found if t.ended == "context"]  # the server had no room for a second turn: there is none
    assert full and all(len(t.turns) == 1 for t in full)
    summary = json.loads((tmp_path / "summary.json").read_text())
    empty = sum("class ModelNew" not in turn.completion_text for turn in turns)
    judged = sum(turn.verdict["status"] != "infra_error" for turn in turns)
    assert summary["status"]["compile_error"]["value"] == pytest.approx(empty / judged)
    assert summary["cost"]["turn2"]["new_tokens"] is None and summary["cost"]["turn2"]["new_characters"] > 0
    assert {body["model"] for body in asked} == {"m"}


def test_a_server_that_never_answers_stops_it_and_what_is_done_is_kept(tmp_path, judges):
    broken = [False]

    def reply(body, nth):
        return (500, b"gone") if broken[0] else answer(GOOD.format(body["seed"]))

    with serving(reply) as (url, asked):
        args = arguments(
            tmp_path, "--name", "m", "--samples", "1", "--turns", "1", "--set", "server.attempts=2", model=url,
            problems="generator:heldout:10",
        )  # fmt: skip
        calls = iter(range(100))

        def until_nine(body, nth):
            broken[0] = next(calls) >= 9
            return reply(body, nth)

        with serving(until_nine) as (other, _):
            args.model = other
            with pytest.raises(EngineError, match=r"no answer in 2 tries.*server\.attempts"):
                run.main(args)
        kept = len(list(read_trajectories(tmp_path / "trajectories.jsonl")))
        assert 5 <= kept <= 9  # up to the first of those that were being asked
        broken[0], args.model = False, url  # the server moved: the same evaluation
        run.main(args)
    assert len(asked) == 10 - kept and (tmp_path / "DONE").exists()


def test_a_model_folder_with_a_small_context(tmp_path, judges, model_folder, capsys):
    base = ("--samples", "1", "--turns", "2", "--recipe", "mini-cpu")
    with pytest.raises(RunError, match=r"no problem fits.*context of 600.*max_new_tokens"):
        run.main(arguments(tmp_path / "none", *base, "--set", "rollout.max_new_tokens=500", model=str(model_folder)))
    args = arguments(tmp_path / "some", *base, "--set", "rollout.max_new_tokens=8", model=str(model_folder))
    run.main(args)
    settings = json.loads((args.out / "settings.json").read_text())
    assert settings["config"]["model"]["context"] == 600  # what the model was made for, not what was asked
    trajectories = list(read_trajectories(args.out / "trajectories.jsonl"))
    assert all(0 < len(turn.completion_ids) <= 8 for t in trajectories for turn in t.turns)
    summary = json.loads((args.out / "summary.json").read_text())
    assert summary["cost"]["turn1"]["new_tokens"] > 0


def test_a_checkpoint_is_evaluated_with_its_own_weights(tmp_path, model_folder):
    import torch

    from rl import checkpoint

    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "model").symlink_to(model_folder)
    model, _ = modeling.load(model_folder, "cpu")
    tensors = {f"model.{name}": p.detach() + 1.0 for name, p in model.named_parameters()}
    path = checkpoint.save(tmp_path / "rl" / "checkpoints", 3, tensors, {"step": 3}, keep=1)
    config = load_recipe("mini-cpu", SMALL)
    policy = policies.find(str(path))
    engine, _ = policies.open_policy(policy, config)
    got = dict(engine.model.named_parameters())
    assert all(torch.equal(got[name], p + 1.0) for name, p in model.named_parameters())
    assert policy.identity() != policies.find(str(model_folder)).identity()
    next(path.glob("*.distcp")).write_bytes(b"damaged")
    with pytest.raises(RunError, match="step_00003"):
        policies.find(str(path))


@pytest.mark.parametrize(("model", "words"), [("no/such/model", "no model there"), ("http://localhost:1/v1", "--name")])
def test_what_is_no_model_is_refused(model, words, tmp_path):
    with pytest.raises(RunError, match=words):
        run.main(arguments(tmp_path, model=model))


def test_a_problem_folder_with_broken_files(tmp_path, judges, capsys):
    folder = tmp_path / "problems"
    folder.mkdir()
    whole = "class Model: pass\ndef get_inputs(): pass\ndef get_init_inputs(): pass\n"
    (folder / "1_good.py").write_text(whole)
    (folder / "2_broken.py").write_text("no problem at all")
    with pytest.raises(ProblemError, match=r"2_broken\.py.*class Model"):
        run.main(arguments(tmp_path / "out", problems=str(folder)))
    (folder / "2_broken.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProblemError, match=r"2_broken\.py.*UTF-8"):
        run.main(arguments(tmp_path / "out", problems=str(folder)))
    assert not (tmp_path / "out").exists()
    settings, _, problems = run.settings_of(arguments(tmp_path / "out", "--skip-broken", problems=str(folder)))
    assert [problem.id for problem in problems] == ["1_good"] and settings.problems["count"] == 1
    assert f"left out: {folder / '2_broken.py'}: not text in UTF-8" in capsys.readouterr().err


def test_references_that_fail_are_named_and_count_for_nobody(tmp_path, judges, monkeypatch):
    verdict = MadeUpJudge.verdict

    def failing(self, problem, response):
        found = verdict(self, problem, response)
        if problem.id.endswith("0"):
            found.status, found.message, found.speedup = "problem_error", "the reference failed: NameError", None
        return found

    monkeypatch.setattr(MadeUpJudge, "verdict", failing)
    run.main(arguments(tmp_path, "--samples", "2", "--turns", "1"))
    summary = json.loads((tmp_path / "summary.json").read_text())
    (name,) = summary["not_judged"]
    assert summary["not_judged"][name] == "the reference failed: NameError"
    assert summary["excluded"]["problem_error"] == 2
    assert summary["per_problem"][name]["fast_1.0"] is None


@pytest.mark.parametrize("option", [("--samples", "0"), ("--turns", "-1"), ("--keep", "0"), ("--best-of", "-2")])
def test_numbers_that_mean_nothing_are_refused(tmp_path, option):
    with pytest.raises(RunError, match=rf"{option[0]} {option[1]}: at least"):
        run.main(arguments(tmp_path, *option))


def test_the_plan_shows_its_arithmetic_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "load_problems", lambda spec, skip_broken: [None] * 250)
    monkeypatch.setattr(run, "problem_identity", lambda spec, problems: {"count": len(problems)})
    options = ("--samples", "8", "--turns", "3", "--plan", "4", "--evaluators", "8")
    run.main(arguments(tmp_path / "out", *options))
    printed = capsys.readouterr().out
    assert "250 problems x 8 samples x 3 turns = 6000 verdicts" in printed
    assert "6000 verdicts x 4 s (as given) / (8 evaluators x 1 at once) = 3000 s = 0.83 h" in printed
    assert not (tmp_path / "out").exists()


def test_the_plan_takes_a_verdicts_cost_from_an_earlier_evaluation(tmp_path, judges, capsys):
    run.main(arguments(tmp_path / "first", "--samples", "1", "--turns", "1"))
    run.main(arguments(tmp_path / "second", "--samples", "2", "--turns", "1", "--plan", str(tmp_path / "first")))
    assert "6 verdicts x 0.5 s (mean of 3 verdicts in" in capsys.readouterr().out
    with pytest.raises(RunError, match="neither seconds nor"):
        run.main(arguments(tmp_path / "second", "--plan", "soon"))


def test_the_script_says_what_it_wants(tmp_path):
    def script(*args):
        return subprocess.run(
            ["bash", "scripts/eval.sh", *args], cwd=ROOT, capture_output=True, text=True, timeout=60,
            env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
        )  # fmt: skip

    assert "give a model and a problem set" in script().stderr
    run_to = ("--run", str(tmp_path / "x"))
    out = script("teacher", "generator:heldout:3", "--skip-broken", "--device", "cpu", "--plan", "1.5", *run_to)
    assert out.returncode == 0 and "3 problems x 8 samples x 3 turns = 72 verdicts" in out.stdout
    assert not (tmp_path / "x").exists()


def test_a_machine_without_gpus_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("env.pool.visible_gpus", list)
    args = arguments(tmp_path, "--samples", "1")
    args.device = "cuda"
    with pytest.raises(PoolError, match="no GPU is visible"):
        run.main(args)
