"""analysis/: a made-up run in every state of completeness and damage; hostile text must stay text."""

from __future__ import annotations

import html
import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import examples, figures, load, report, viewer
from env.records import STATUSES, Verdict
from eval import metrics
from rl.config import load_recipe
from rl.records import Trajectory, Turn, append_trajectories

pytestmark = pytest.mark.budget(60)

HOSTILE = (
    "</pre><script>alert(1)</script><img src=http://evil/x onerror=alert(2)>&\x00\x1b[31m\u202egnp\ud800 $title ${x}"
)


def turn(status: str, speedup: float | None = None, reward: float | None = 0.0, text: str = "code") -> Turn:
    verdict = Verdict(
        status=status,
        message="" if status == "correct" else f"message {text}",
        speedup=speedup,
        speedup_low=speedup,
        speedup_high=speedup,
        reference_us=18.4,
        candidate_us=18.4 / speedup if speedup else None,
        time_kind="modelled" if speedup else "",
        profiling_ratio=0.8 if speedup else None,
        profile=[{"name": f"kernel {text}", "own": True, "count": 1, "time_us": 4.0}] if speedup else [],
        feedback=f"feedback {text}",
    ).to_json()
    parts = {"correct": float(status == "correct")}
    return Turn(
        [1, 2], [3], [-0.5], 3, "stop", f"prompt {text}", f"answer {text}", verdict, reward, parts, 0.25, ["prs"]
    )


def some_trajectories(text: str = "plain") -> list[Trajectory]:
    return [
        Trajectory("p1", 0, [turn("compile_error", text=text), turn("correct", 2.5, 4.3, text)], 2),
        Trajectory("p1", 1, [turn("hack", text=text)], 2),
        Trajectory("p2", 0, [turn("correct", 1.1, 2.9, text), turn("incorrect", text=text)], 2),
        Trajectory("p2", 1, [turn("infra_error", reward=None, text=text)], 2, ended="infra"),
    ]


def write_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(folder: Path, text: str = "plain", steps: int = 12) -> Path:
    """A complete run folder with made-up numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(load_recipe("mini-cpu").to_json()))
    (folder / "versions.json").write_text(
        json.dumps({"device": "a CPU", "torch": "2.13.0", "commit": "0123456789abcdef"})
    )
    write_lines(folder / "problems/heldout.jsonl", [])
    write_lines(folder / "stages.jsonl", [{"stage": "Set-up", "seconds": 40}, {"stage": "RL", "seconds": 300}])
    write_lines(
        folder / "sft/metrics.jsonl", [{"step": s, "sft/loss": 3 / s, "sft/accuracy": 1 - 1 / s} for s in range(1, 40)]
    )
    rows = []
    for step in range(1, steps + 1):
        x = step / steps
        row = {"step": step, "reward/mean": 1 + x, "reward/mean_turn1": 0.8 + x, "reward/mean_turn2": 1.2 + x}
        row |= {"reward/correct": 0.4 + 0.4 * x, "reward/speedup": 1 + x, "reward/profiling_ratio": 0.5}
        row |= {f"fast/{p}_turn{t}": 0.2 * t + 0.3 * x for p in ("1.0", "1.2") for t in (1, 2)}
        row |= {"status/correct": 0.4 + 0.4 * x, "status/hack": 0.3 - 0.25 * x, "status/incorrect": 0.3 - 0.15 * x}
        row |= {"hack/ratio": 0.3 - 0.25 * x, "policy/entropy": 0.9 - 0.3 * x, "policy/grad_norm": 0.4}
        row |= {"policy/ppl_rollout": 1.5, "policy/ppl_learner": 1.51, "policy/logprob_gap": 1e-6}
        rows.append(row | {"mask/mrs": 0.05, "mask/prs": 0.2 * x, "mask/infra": 0.0, "policy/loss": None})
    write_lines(folder / "rl/metrics.jsonl", rows)
    wall = [{"step": s, "seconds/rollout": 6, "seconds/judge": 4, "seconds/learn": 3} for s in range(1, steps + 1)]
    write_lines(folder / "rl/wall.jsonl", wall)
    append_trajectories(folder / "rl/trajectories/step_00012.jsonl", some_trajectories(text))
    append_trajectories(folder / "collect/trajectories.jsonl", some_trajectories("from the cold start"))
    summaries = []
    for which, speedup in (("sft", 1.05), ("rl", 2.0)):
        evaluated = [
            Trajectory(
                f"h{p}",
                s,
                [turn("hack" if (p + s) % 4 == 0 else "correct", 1.0 + p / 20, 2.0), turn("correct", speedup, 3.0)],
            )
            for p in range(8)
            for s in range(2)
        ]
        append_trajectories(folder / "eval" / which / "trajectories.jsonl", evaluated)
        summaries.append(metrics.summarise(evaluated, 2, 2))
        (folder / "eval" / which / "summary.json").write_text(json.dumps(summaries[-1]))
    (folder / "eval/comparison.json").write_text(json.dumps(metrics.compare(*summaries)))
    for stage in ("collect", "sft", "rl", "eval/sft", "eval/rl"):
        (folder / stage / "DONE").touch()
    return folder


@pytest.fixture(scope="module")
def complete(tmp_path_factory) -> Path:
    """The folder of a complete run with its report."""
    folder = make_run(tmp_path_factory.mktemp("complete") / "mini-cpu")
    report.main(folder)
    return folder


@pytest.fixture
def no_figures(monkeypatch):
    """For tests of the text: drawing the curves is most of a report's seconds."""
    monkeypatch.setattr(report, "rl_figures", lambda metrics, wall: [])
    monkeypatch.setattr(report, "sft_figures", lambda metrics: [])


class Page(HTMLParser):
    """Tags, attributes and visible text of a page."""

    def __init__(self, source: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


def test_a_complete_run_has_every_part(complete):
    page = Page((complete / "report.html").read_text(encoding="utf-8"))
    for part in (
        "mini-cpu",
        "Times are modelled, not measured.",
        "a CPU",
        "2.13.0",
        "0123456789ab",
        "Fast@1.2, turn 2",
        "Hack ratio",
        "+100.0 pp",
        "5.7 min",
        "Fastest",
        "A hack",
        "A failure",
        "prompt plain",
        "answer plain",
        "feedback plain",
        "kernel plain",
        "+0.250",
        "prs",
    ):
        assert part in page.text, part
    assert "not finished" not in page.text and "could be read" not in page.text
    assert page.tags.count("img") == 14


def test_figures_are_whole_svgs_and_nothing_points_outside(complete):
    source = (complete / "report.html").read_text(encoding="utf-8")
    for data in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", source):
        svg = b64decode(data).decode()
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert not re.search(r"(href|src)=\"(?!#)", svg)
    page = Page(source)
    assert not {"link", "iframe", "a", "object", "base"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert all(value.startswith("data:image/svg+xml") for name, value in page.attributes if name in ("src", "href"))
    assert "url(" not in source and "@import" not in source


def test_equal_runs_give_equal_bytes(tmp_path, complete):
    assert report.build(make_run(tmp_path / "mini-cpu")) == (complete / "report.html").read_text(encoding="utf-8")


def test_hostile_text_stays_text(tmp_path, no_figures):
    path = report.main(make_run(tmp_path / "run", HOSTILE))
    source = path.read_bytes().decode("utf-8")  # and no surrogate has broken the encoding
    page = Page(source)
    # The only scripts are the viewer's data and the one whose hash the content policy names.
    bodies = re.findall(r"<script[^>]*>(.*?)</script>", source, re.DOTALL)
    assert len(bodies) == page.tags.count("script") and bodies[-1] == viewer.SCRIPT.read_text()
    assert all(re.fullmatch("[A-Za-z0-9+/=]+", body) for body in bodies[:-1])
    assert f"script-src 'sha256-{viewer.script_hash()}'" in html.unescape(source)
    assert "onerror" not in dict(page.attributes)
    assert "<script>alert(1)</script>" in page.text and "$title ${x}" in page.text
    for invisible in ("\x00", "\x1b", "\u202e", "\ud800"):
        assert invisible not in source
    assert "\\u202e" in page.text


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_escaping_is_undone_by_the_reader_and_holds_no_markup(value):
    shown = examples.text(value)
    assert "<" not in shown and ">" not in shown and '"' not in shown and "'" not in shown
    plain = value.replace("\r\n", "\n")
    if not examples._INVISIBLE.search(plain):
        assert html.unescape(shown) == plain


@pytest.mark.parametrize(
    ("removed", "said"),
    [
        (["rl", "eval"], "RL is missing"),
        (["rl/DONE", "eval"], "RL is unfinished"),
        (["eval/rl"], "evaluate RL is missing"),
        (["sft", "rl", "eval", "collect"], "cold start is missing"),
    ],
)
def test_an_unfinished_run_says_which_stage_is_missing(tmp_path, removed, said, no_figures):
    run = make_run(tmp_path / "run")
    for name in removed:
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
    text = Page(report.build(run)).text
    assert "This run is not finished." in text and said in text


def test_damaged_files_are_said_and_the_rest_is_shown(tmp_path, no_figures):
    run = make_run(tmp_path / "run")
    for name in ("rl/metrics.jsonl", "rl/trajectories/step_00012.jsonl", "eval/rl/trajectories.jsonl"):
        with open(run / name, "a") as file:
            file.write('{"step": 13, "rew')
    with open(run / "eval/sft/trajectories.jsonl", "a") as file:
        file.write('{"problem_id": "p", "turns": [{"unknown": 1}], "sample_index": 0}\n')
    (run / "versions.json").write_text("{")
    text = Page(report.build(run)).text
    assert "rl/metrics.jsonl: 1 damaged line left out" in text
    assert "trajectories/step_00012.jsonl: 1 damaged line left out" in text
    assert "sft/trajectories.jsonl: 1 records of another version" in text
    assert "versions.json" in text and "Fast@1.2, turn 2" in text


def test_an_empty_folder_or_none_names_what_is_missing(tmp_path):
    with pytest.raises(report.ReportError, match=r"config\.json.*evaluate RL.*scripts/train\.sh"):
        report.build(tmp_path)
    with pytest.raises(report.ReportError, match="not a folder"):
        report.build(tmp_path / "none")


def test_a_measured_run_has_no_banner_about_modelled_times(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"name": "gpu", "device": "cuda"}))
    measured = turn("correct", 1.5, 2.5)
    measured.verdict["time_kind"] = "eager"
    append_trajectories(tmp_path / "rl/trajectories/step_00001.jsonl", [Trajectory("p", 0, [measured])])
    text = Page(report.build(tmp_path)).text
    assert "modelled" not in text and "CUDA events" in text


def test_a_step_written_twice_counts_once_and_the_later_one(tmp_path):
    write_lines(tmp_path / "m.jsonl", [{"step": 2, "x": 1}, {"step": 1, "x": 5}, {"step": 2, "x": 3}, {"no": "step"}])
    assert load.read_steps(tmp_path / "m.jsonl", []) == [{"step": 1, "x": 5}, {"step": 2, "x": 3}]


def test_examples_are_the_fastest_an_improvement_a_hack_and_a_failure():
    slow = Trajectory("slow", 0, [turn("correct", 1.2, 2.2)])
    fast = Trajectory("fast", 0, [turn("correct", 2.9, 3.9)])
    fake = Trajectory("fake", 0, [turn("hack", 50.0)])
    better = Trajectory("better", 0, [turn("incorrect"), turn("correct", 1.3, 2.3)])
    failed = Trajectory("failed", 0, [turn("timeout")])
    chosen = examples.pick(("here", item) for item in [slow, fake, failed, better, fast])
    assert [item.problem_id for _, _, item in chosen] == ["fast", "better", "fake", "failed"]
    assert examples.pick([("here", Trajectory("i", 0, [turn("infra_error", reward=None)]))]) == []


def test_a_very_long_answer_is_cut_and_the_cut_is_said():
    shown = examples.text("x" * 50_000)
    assert len(shown) < 21_000 and "30000 more characters" in shown


def test_curves_cope_with_gaps_nulls_and_one_step():
    rows = [{"step": 1, "hack/ratio": None, "policy/entropy": 0.5}]
    drawn = figures.rl_figures(rows, [])
    assert len(drawn) == 1
    assert figures.lines("t", rows, {"hack/ratio": "hacks"}, "turns (%)") is None
    assert figures.stacked("t", rows, {"hack/ratio": "hacks"}, {}, "share") is None


def test_every_curve_of_the_report_has_units_and_nothing_is_cut_off(monkeypatch):
    names = [f"reward/{part}" for part in ("mean", "mean_turn1", "mean_turn2", "correct", "speedup", "profiling_ratio")]
    names += [f"fast/{p}_turn{turn}" for p in ("1.0", "1.2") for turn in range(1, 6)]
    names += [f"status/{status}" for status in STATUSES] + [f"mask/{why}" for why in ("mrs", "veto", "prs", "infra")]
    names += ["hack/ratio", "policy/entropy", "policy/grad_norm", "policy/ppl_rollout", "policy/ppl_learner"]
    names += ["policy/logprob_gap", "tokens/completion_mean", "sft/loss", "sft/accuracy", "sft/grad_norm"]
    phases = ("generate", "judge_wait", "old_logprobs", "update", "push_weights", "evaluation", "checkpoint", "step")
    titles = []

    def check(figure) -> str:
        (axes,) = figure.axes
        titles.append(axes.get_title("left"))
        assert axes.get_xlabel() == "step" and axes.get_ylabel(), titles[-1]
        figure.canvas.draw()
        box = axes.get_tightbbox(figure.canvas.get_renderer())
        assert box.x0 >= 0 and box.y0 >= 0, (titles[-1], box)
        assert box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, (titles[-1], box)
        plt.close(figure)
        return ""

    monkeypatch.setattr(figures, "as_svg", check)
    for size in (0.001234, 1.0, 12345.6):  # ticks of any width
        rows = [{"step": step} | dict.fromkeys(names, size * step / 9) for step in range(1, 9)]
        figures.rl_figures(rows, [{"step": 1} | {f"seconds/{phase}": size for phase in phases}])
        figures.sft_figures(rows)
    assert len(titles) == 3 * 16 and len(set(titles)) == 16


def test_every_status_has_a_colour_of_its_own():
    assert set(figures.STATUS_COLOURS) == set(STATUSES)
    assert len(set(figures.STATUS_COLOURS.values())) == len(STATUSES)


def test_what_was_made_once_for_all_variants_is_in_the_wall_clock(tmp_path):
    run = make_run(tmp_path / "v")
    write_lines(run / "shared_stages.jsonl", [{"stage": "Cold start", "seconds": 100}, {"stage": "SFT", "seconds": 20}])
    words = re.sub(r"<[^>]+>", " ", report.cards(load.load(run)))
    shown = dict(re.findall(r"(RL|SFT \(shared\)|Cold start \(shared\)|together) +(\d+ s|[\d.]+ min)", words))
    assert shown == {"RL": "300 s", "Cold start (shared)": "100 s", "SFT (shared)": "20 s", "together": "7.7 min"}
