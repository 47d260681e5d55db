"""One offline HTML page about a run: `python -m analysis.report --run DIR` writes DIR/report.html. No GPU, no torch.

Works on any state of the folder: what a stage hasn't made yet is named, damaged lines are left out and counted. The
page has no link and no foreign font; a content policy in it forbids the browser to load anything, and to run anything
but the viewer's script (analysis/viewer.js).
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections import Counter
from pathlib import Path
from string import Template
from typing import Any

from analysis import examples, viewer
from analysis.examples import number, pill, text
from analysis.figures import rl_figures, sft_figures
from analysis.load import Run, load, trajectories
from env.files import write_atomic

TEMPLATE = Path(__file__).with_name("report_template.html")
COMMAND = {
    "prepare": "scripts.prepare",
    "cold start": "rl.collect",
    "SFT": "rl.sft",
    "RL": "rl.train",
    "evaluate SFT": "eval.heldout --which sft",
    "evaluate RL": "eval.heldout --which rl",
}


class ReportError(Exception):
    """Why there is nothing to report on."""


def image(svg: str, caption: str) -> str:
    """A figure as an inlined image: in an <img> the ids of several SVGs can't meet, and no SVG can run anything."""
    data = base64.b64encode(svg.encode()).decode()
    source = f'<img alt="{text(caption)}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{source}<figcaption>{text(caption)}</figcaption></figure>"


def figures(drawn: list[tuple[str, str]], missing: str) -> str:
    """All figures in a grid, or a sentence where there are none."""
    if not drawn:
        return f"<p class=lead>{text(missing)}</p>"
    return f"<div class=figures>{''.join(image(svg, caption) for caption, svg in drawn)}</div>"


def card(title: str, rows: list[tuple[str, object]]) -> str:
    lines = "".join(f"<div><span>{text(name)}</span><span>{text(value)}</span></div>" for name, value in rows)
    return f"<section class=card><h3>{text(title)}</h3>{lines}</section>"


def cards(run: Run) -> str:
    """Device and versions, stages, seconds, size of the run."""
    versions, config = run.versions, run.config
    named = ("device", "python", "torch", "triton", "transformers", "numpy")
    parts = [card("Device and versions", [(name, versions.get(name, "not noted")) for name in named])]
    states = "".join(f"<div><span>{text(name)}</span><span>{pill(state)}</span></div>" for name, state, _ in run.states)
    parts.append(f"<section class=card><h3>Stages</h3>{states}</section>")
    spent: Counter[str] = Counter()
    for lines, words in ((run.stages, ""), (run.shared_stages, " (shared)")):
        for line in lines:
            if isinstance(line.get("seconds"), int | float):
                spent[f"{line.get('stage')}{words}"] += line["seconds"]
    if spent:
        rows = [(name, f"{seconds:.0f} s") for name, seconds in spent.items()]
        parts.append(card("Wall-clock", [*rows, ("together", f"{sum(spent.values()) / 60:.1f} min")]))
    if config:

        def get(section: str, key: str) -> object:
            return config.get(section, {}).get(key, "—")

        shape = f"{get('rollout', 'prompts_per_step')} x {get('rollout', 'samples_per_prompt')}"
        rows = [
            ("train / held out", f"{get('problems', 'train')} / {get('problems', 'heldout')}"),
            ("RL steps", f"{len(run.rl_metrics)} of {get('train', 'steps')}"),
            ("prompts x samples", shape),
            ("turns", get("rollout", "turns")),
            ("advantage", get("advantage", "estimator")),
            ("MRS / PRS", f"{get('rejection', 'mrs')} / {get('rejection', 'prs')}"),
            ("seed", config.get("seed", "—")),
        ]
        parts.append(card("Run", rows))
    return "".join(parts)


def _cell(interval: dict[str, Any] | None, percent: bool) -> str:
    form = ".1%" if percent else ".3f"
    if not interval or interval.get("value") is None:
        return "<td class=n>—</td>"
    bounds = f"[{number(interval.get('low'), form)}, {number(interval.get('high'), form)}]"
    return f"<td class=n>{number(interval['value'], form)} <span class=interval>{bounds}</span></td>"


def _difference(interval: dict[str, Any] | None, percent: bool, more_is_better: bool) -> str:
    if not interval or interval.get("value") is None:
        return "<td class=n>—</td><td class=n>—</td>"
    scale, form, unit = (100, "+.1f", " pp") if percent else (1, "+.3f", "")
    low, high = (interval[name] * scale for name in ("low", "high"))
    clear = ""
    if low > 0 or high < 0:  # the interval leaves out zero
        clear = "better" if (low > 0) == more_is_better else "worse"
    return (
        f"<td class='n {clear}'>{interval['value'] * scale:{form}}{unit} "
        f"<span class=interval>[{low:{form}}, {high:{form}}]</span></td>"
        f"<td class=n>{interval['better']} up, {interval['worse']} down</td>"
    )


def evaluation(run: Run) -> str:
    """The before/after table, with intervals and the paired difference over problems."""
    sft, rl = run.summaries.get("sft"), run.summaries.get("rl")
    if not sft and not rl:
        return "<p class=lead>Not evaluated yet.</p>"
    some = rl or sft
    last = some["turns"]
    rows = [("Mean reward", lambda s: s["reward_mean"], "reward_mean", False, True)]
    for p in some["fast"]:
        label = f"Fast@{p.removesuffix('.0')}"
        for turn in range(1, last + 1):
            # Problems' own values, and so the difference, are those of the last turn.
            key = f"fast_{p}" if turn == last else ""
            rows.append((f"{label}, turn {turn}", lambda s, p=p, t=turn: s["fast"][p].get(f"turn{t}"), key, True, True))
        rows.append((f"{label}, best turn", lambda s, p=p: s["fast"][p].get("best"), "", True, True))
    rows.append(("Hack ratio", lambda s: s["hack_ratio"], "hack_ratio", True, False))
    for status in some["status"]:
        if status != "hack":
            rows.append((f"Turns: {status.replace('_', ' ')}", lambda s, n=status: s["status"].get(n), "", True, True))
    body = "".join(
        f"<tr><td>{text(label)}</td>{_cell(sft and value(sft), percent)}{_cell(rl and value(rl), percent)}"
        f"{_difference(run.comparison.get(key) if key else None, percent, better)}</tr>"
        for label, value, key, percent, better in rows
    )
    excluded = "; ".join(
        f"{which.upper()}: "
        + ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in summary.get("excluded", {}).items() if count)
        for which, summary in run.summaries.items()
        if any(summary.get("excluded", {}).values())
    )
    return (
        f"<p class=lead>{some['problems']} problems, {some['samples']} samples each, {last} turns, the same draws for "
        "both. Brackets: 95 % bootstrap intervals over problems. Difference: RL minus SFT, problem by problem; "
        "coloured where its interval leaves out zero.</p><table><tr><th></th><th class=n>SFT</th><th class=n>RL</th>"
        f"<th class=n>difference</th><th class=n>problems</th></tr>{body}</table>"
        + (f"<p class=lead>Left out of all shares, being nobody's fault — {text(excluded)}.</p>" if excluded else "")
    )


def banners(run: Run, time_kinds: set[str]) -> str:
    """What a reader must know before any number."""
    parts = []
    if run.config.get("device") == "cpu" or "modelled" in time_kinds:
        parts.append(
            "<div class=banner><b>Times are modelled, not measured.</b> Kernels ran in Triton's interpreter on a CPU; "
            "a time is the bytes moved over a stated bandwidth plus a constant a launch. Speedups here say nothing "
            "about any GPU.</div>"
        )
    behind = [(name, state, makes) for name, state, makes in run.states if state != "done"]
    if behind:
        items = "".join(
            f"<li>{text(name)} is {state}, so {text(makes)} "
            f"{'may be incomplete' if state == 'unfinished' else 'can not be shown'} "
            f"(<code>python -m {COMMAND[name]}</code>)</li>"
            for name, state, makes in behind
        )
        parts.append(f"<div class=banner><b>This run is not finished.</b><ul>{items}</ul></div>")
    if resumed := run.versions.get("resumed_with"):
        parts.append(f"<div class='banner fault'>Resumed with other versions: {text(json.dumps(resumed))}</div>")
    if run.notes:
        items = "".join(f"<li>{text(note)}</li>" for note in run.notes)
        parts.append(f"<div class='banner fault'><b>Not everything could be read.</b><ul>{items}</ul></div>")
    return "".join(parts)


def build(folder: Path) -> str:
    """The page for a run folder. Raises ReportError, naming what is missing, where the folder is no run's."""
    if not folder.is_dir():
        raise ReportError(f"{folder} is not a folder; give a run's folder, e.g. --run runs/mini-cpu")
    run = load(folder)
    if all(state == "missing" for _, state, _ in run.states) and not run.summaries and not run.config:
        missing = ", ".join(name for name, _, _ in run.states)
        raise ReportError(
            f"{folder} holds nothing of a run: config.json and the output of every stage ({missing}) are missing; "
            "bash scripts/train.sh makes them"
        )
    kinds: set[str] = set()

    def noting_kinds():
        for source, trajectory in trajectories(folder, run.notes):
            kinds.update(turn.verdict.get("time_kind") or "" for turn in trajectory.turns if turn.verdict)
            yield source, trajectory

    picked = examples.pick(noting_kinds())
    turns = viewer.section(folder, run.notes)
    name = str(run.config.get("name") or "run")
    title = folder.resolve().name if folder.resolve().name == name else f"{folder.resolve().name} ({name})"
    measured = {"modelled": "modelled times", "eager": "CUDA events around calls (eager)"}
    method = ", ".join(sorted(measured.get(kind, kind) for kind in kinds - {""})) or "no times yet"
    commit = str(run.versions.get("commit", "not noted"))[:12]
    lead = f"{run.versions.get('device', 'device not noted')} · {method} · commit {commit}"
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=text(title),
        lead=text(lead),
        banners=banners(run, kinds),
        cards=cards(run),
        evaluation=evaluation(run),
        rl_figures=figures(rl_figures(run.rl_metrics, run.rl_wall), "No RL step is done yet."),
        sft_figures=figures(sft_figures(run.sft_metrics), "No step of supervised training is done yet."),
        examples="".join(examples.render(*one) for one in picked) or "<p class=lead>No trajectories yet.</p>",
        viewer=turns,
        script_hash=viewer.script_hash(),
        config=text(json.dumps(run.config, indent=1)),
    )


def main(folder: Path) -> Path:
    """Write the report; returns its path."""
    page = build(folder)
    write_atomic(folder / "report.html", page)
    return folder / "report.html"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a run's report.")
    parser.add_argument("--run", type=Path, required=True, help="run folder, in any state")
    try:
        print(main(parser.parse_args().run))
    except ReportError as error:
        sys.exit(f"analysis.report: {error}")
