"""Figure 6: test-time scaling over turns. `python -m analysis.figure_6 --runs ROOT --out DIR`.

Reads ROOT/eval/scaling_vanilla/*/seed<N>/ and ROOT/eval/scaling_context/*/seed<N>/ (scripts/eval.sh --turns 14).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from analysis import evaluations, statistics
from analysis.evaluations import Evaluation
from analysis.looks import FAST_UNIT, draw_band, legend, look, name_axes, note, panels, share_axis, styled
from analysis.plots import Drawing, save
from analysis.runs import AnalysisError

VARIANTS = {"scaling_vanilla": "vanilla", "scaling_context": "context management"}
THRESHOLD = 1.2


@styled
def draw(found: dict[str, list[Evaluation]], p: float = THRESHOLD) -> Drawing:
    """Fast@p by turn: the turn itself and the best of history up to it, with intervals."""
    figure, (axes,) = panels(1)
    drawing = Drawing(figure)
    title = f"Fast@{p:g} over turns"
    longest = max(evaluation.turns for several in found.values() for evaluation in several)
    missing = []
    for index, (label, several) in enumerate(found.items()):
        turns = list(range(1, max(evaluation.turns for evaluation in several) + 1))
        for best, words in ((False, "last turn"), (True, "best of history")):
            values = [statistics.ratio(evaluations.tallies(several, evaluations.fast(p, turn, best))) for turn in turns]
            there = [(turn, value) for turn, value in zip(turns, values) if value.value is not None]
            x = np.array([turn for turn, _ in there])
            low, high = (np.array([getattr(v, side) for _, v in there]) for side in ("low", "high"))
            name, style = f"{label}, {words}", look(2 * index + best) | {"color": f"C{index}"}
            axes.plot(x, [v.value for _, v in there], label=name, gid=name, **style)
            draw_band(axes, x, low, high, style["color"], name)
            drawing.rows += [(title, name, turn, v.value, v.low, v.high, v.runs) for turn, v in there]
        if turns[-1] < longest:
            axes.axvspan(
                turns[-1] + 0.5, longest + 0.5, facecolor="none", edgecolor="#DDDDDD", hatch="..", lw=0, gid="gap"
            )
            missing.append(f"{label}: {turns[-1]} of {longest} turns")
    name_axes(axes, title, "turn", FAST_UNIT)
    share_axis(axes)
    note(axes, missing, [], len(found))
    legend(figure)
    drawing.caption = [
        f"Fast@{p:g} at a turn, and at the best turn up to it. A sample that ended earlier (its context was full) is "
        "not fast at later turns. Nothing is smoothed. Bands: 95 % bootstrap interval over seeds and problems (over "
        "problems only, for one seed).",
        *missing,
    ]
    return drawing


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Figure 6: test-time scaling.")
    parser.add_argument("--runs", type=Path, required=True, help="folder with eval/scaling_*/*/seed<N>/")
    parser.add_argument("--out", type=Path, required=True, help="where the figure goes")
    options = parser.parse_args(arguments)
    found, notes = {}, []
    try:
        for key, label in VARIANTS.items():
            several = evaluations.find(options.runs, key, "rl")
            notes += [note for evaluation in several for note in evaluation.notes]
            if several := [evaluation for evaluation in several if evaluation.trajectories]:
                found[label] = several
            else:
                notes.append(
                    f"{label}: left out, no sample in {options.runs / 'eval' / key}/*/seed*/trajectories.jsonl"
                )
        if not found:
            raise AnalysisError(f"nothing to draw: {'; '.join(notes)}")
        drawing = draw(found)
    except AnalysisError as error:
        print(f"analysis.figure_6: {error}", file=sys.stderr)
        return 2
    if any("modelled" in evaluation.time_kinds for several in found.values() for evaluation in several):
        drawing.caption.append("Times are modelled on the CPU, not measured: speedups here say nothing about any GPU.")
    drawing.caption += notes
    print("\n".join(map(str, save(drawing, options.out, "figure_6"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
