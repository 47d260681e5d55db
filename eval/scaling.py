"""Does sequence pay? Test-time scaling curves of evaluations: `python -m eval.scaling DIR [DIR …]`. Runs in the driver.

For each turn of each evaluation: Fast@p at that turn and best of history, with intervals, and what a sample has cost by
then (tokens, seconds, verdicts). Beside it, parallel best-of-N at equal token budget: N single answers cost what the
turns so far cost, and Fast@p@N says how often one of them is fast enough. Writes DIR/scaling.json, prints tables.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval import cost, estimators, scores
from eval.metrics import Interval, Tally, fast_tally, ratio, share_text
from eval.settings import RunError, read, write_json
from rl.records import Trajectory, read_trajectories

SHOWN = 1.2


def curve(
    trajectories: Sequence[Trajectory], single: Sequence[Trajectory], turns: int, p: float, seed: int = 0
) -> list[dict[str, Any]]:
    """A point a turn: {turn, last, best, parallel, cost}. single: one-turn samples, those of a best-of run, or none:
    then the first turns of the samples themselves."""
    costs = cost.by_turn(trajectories, turns)
    single = single or trajectories
    one = cost.by_turn(single, 1)["turn1"]
    points = []
    for turn in range(1, turns + 1):
        point = {
            "turn": turn,
            "last": ratio(_fast(trajectories, p, turn, False), seed),
            "best": ratio(_fast(trajectories, p, turn, True), seed),
            "cost": costs[f"turn{turn}"],
            "parallel": {},
        }
        for budget in budgets(costs[f"turn{turn}"]):
            point["parallel"][budget] = parallel(single, p, costs[f"turn{turn}"][budget] / one[budget], seed)
        points.append(point)
    return points


def budgets(costs: dict[str, Any]) -> list[str]:
    """What can be held equal: sampled tokens (latency and most of the money), all tokens (prompts read again included);
    characters where a server tells no tokens."""
    return ["new_tokens", "all_tokens"] if costs.get("new_tokens") is not None else ["new_characters"]


def parallel(single: Sequence[Trajectory], p: float, times: float, seed: int) -> dict[str, Any]:
    """Fast@p@n of single answers for n = `times` rounded down (at least 1): what the same budget buys in parallel.

    value None where fewer than n samples of every problem are there; `needed` says how many there should be.
    """
    # A budget of exactly n answers must not become n - 1 by rounding.
    needed = max(1, int(times + 1e-9))
    tally = estimators.fast_at_k_tally(single, p, needed, 1)
    return {"n": needed, "times": times, **_complete(tally, seed)}


def _complete(tally: Tally, seed: int) -> Interval:
    """Only where every problem that counts at all has enough samples: else the hard-to-judge ones would drop out."""
    enough = [below for _, below in tally.values()]
    return ratio(tally, seed) if enough and all(enough) else {"value": None, "low": None, "high": None}


def _fast(trajectories: Sequence[Trajectory], p: float, turn: int, best: bool) -> Tally:
    return scores.best_tally(trajectories, p, turn) if best else fast_tally(list(trajectories), p, turn)


def of_run(folder: Path) -> dict[str, Any]:
    """The curves of an evaluation's folder at every threshold, as scaling.json holds them. Raises RunError."""
    settings = read(folder)
    path = folder / "trajectories.jsonl"
    trajectories = list(read_trajectories(path)) if path.is_file() else []
    if not trajectories:
        raise RunError(f"{folder}: no trajectories yet; run eval.run first")
    beside = folder / "parallel.jsonl"
    single = list(read_trajectories(beside)) if beside.is_file() else []
    config = settings["config"]
    seconds = cost.seconds_by_turn(trajectories, config.eval.turns, folder / "wall.jsonl")
    points = {str(p): curve(trajectories, single, config.eval.turns, p, config.seed) for p in scores.THRESHOLDS}
    return {
        "scaling": settings["scaling"],
        "keep": settings["keep"],
        "single_answers_from": "parallel.jsonl" if single else "the first turns of the samples themselves",
        "points": points,
        "seconds": seconds,
    }


def table(result: dict[str, Any], p: float) -> str:
    """The curve at one threshold as text."""
    points = result["points"][str(p)]
    kind = budgets(points[0]["cost"])
    heads = ["turn", f"Fast@{p:g} last", f"Fast@{p:g} best"]
    heads += [f"best of N, equal {name.replace('_', ' ')}" for name in kind]
    heads += [name.replace("_", " ") for name in kind] + ["verdicts", "sampling s", "judge s"]
    rows = [heads]
    for point in points:
        seconds = result["seconds"][f"turn{point['turn']}"]
        row = [str(point["turn"]), share_text(point["last"]), share_text(point["best"])]
        for name in kind:
            beside = point["parallel"][name]
            row.append(f"N={beside['n']}: {share_text(beside) if beside['value'] is not None else 'too few samples'}")
        row += [f"{point['cost'][name]:.0f}" for name in kind] + [f"{point['cost']['verdicts']:.2f}"]
        row += ["-" if seconds[name] is None else f"{seconds[name]:.2f}" for name in ("sampling_s", "judge_s")]
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)


def main(folders: Sequence[Path], p: float) -> None:
    for folder in folders:
        result = of_run(folder)
        write_json(folder / "scaling.json", result)
        keep = f", best {result['keep']} turns in the prompt" if result["scaling"] == "context" else ""
        print(f"{folder} ({result['scaling']}{keep}); single answers: {result['single_answers_from']}")
        print(f"cost of a sample up to that turn, on average\n{table(result, p)}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="eval.scaling", description="Test-time scaling curves of evaluations.")
    parser.add_argument("folders", type=Path, nargs="+", help="folders of eval.run, e.g. one vanilla and one context")
    parser.add_argument("--p", type=float, choices=scores.THRESHOLDS, default=SHOWN, help="threshold that is printed")
    arguments = parser.parse_args()
    try:
        main(arguments.folders, arguments.p)
    except (RunError, ValueError, json.JSONDecodeError) as error:
        sys.exit(f"eval.scaling: {error}")
