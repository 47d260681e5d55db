"""Held-out evaluation of a stage's model: `python -m eval.heldout --run DIR --which sft|rl`. Runs in the driver.

Samples `config.eval` from DIR/<which>/model on DIR/problems/heldout.jsonl and writes below DIR/eval/<which>:
trajectories.jsonl, summary.json and DONE. Both evaluations draw from the same seeds; once both are there,
DIR/eval/comparison.json holds their paired differences. Run again after a kill, it goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from env.files import write_atomic
from env.pool import PoolError
from env.problems import ProblemError, load_jsonl
from eval import metrics
from rl import prompts, seeding
from rl.checkpoint import mark_done
from rl.config import Config, ConfigError, load_run
from rl.engines.base import Engine, Sampling
from rl.rollout import Judge, Plan, evaluate_problems, make_pool

STAGES = ("sft", "rl")


def evaluate(run: Path, which: str, config: Config, engine: Engine, judge: Judge, tokenizer) -> dict:
    """Sample, judge and summarise; returns the summary that it wrote. Trajectories on disk already are kept."""
    settings = config.eval
    plan = Plan(
        samples=settings.samples,
        turns=settings.turns,
        context=config.model.context,
        sampling=Sampling(
            config.rollout.max_new_tokens, settings.temperature, settings.top_p, prompts.stop_ids(tokenizer)
        ),
        reward=config.reward,
        # Without `which`: the two policies are compared under the same draws.
        seed=seeding.derive(config.seed, "heldout"),
        overlap=config.device == "cpu",
    )
    folder = run / "eval" / which
    problems = load_jsonl(run / "problems" / "heldout.jsonl")
    title = f"evaluate {which}"
    trajectories = evaluate_problems(engine, judge, tokenizer, problems, plan, folder / "trajectories.jsonl", title)
    summary = metrics.summarise(trajectories, settings.samples, settings.turns, seed=config.seed)
    write_atomic(folder / "summary.json", json.dumps(summary, indent=1, sort_keys=True, allow_nan=False) + "\n")
    return summary


def write_comparison(run: Path, seed: int) -> None:
    """Write eval/comparison.json (RL minus SFT) if both summaries are there."""
    paths = [run / "eval" / which / "summary.json" for which in STAGES]
    if all(path.is_file() for path in paths):
        before, after = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
        text = json.dumps(metrics.compare(before, after, seed), indent=1, sort_keys=True, allow_nan=False)
        write_atomic(run / "eval" / "comparison.json", text + "\n")


def describe(summary: dict) -> str:
    """One line for the console."""

    def share(interval: dict) -> str:
        value = interval["value"]
        return "not measured" if value is None else f"{value:.1%} [{interval['low']:.1%}, {interval['high']:.1%}]"

    last = f"turn{summary['turns']}"
    fast = ", ".join(f"Fast@{p} {share(by_turn[last])}" for p, by_turn in summary["fast"].items())
    return f"{summary['problems']} problems: {fast}, hack ratio {share(summary['hack_ratio'])}"


def main(run: Path, which: str) -> None:
    """The whole stage on a run folder; returns at once where DONE is there."""
    folder = run / "eval" / which
    if (folder / "DONE").exists():
        print(f"{folder}: done before")
        return
    config = load_run(run)
    model_path = run / which / "model"
    if not (model_path / "config.json").is_file():
        raise FileNotFoundError(
            f"{model_path} holds no model; the stage rl.{'train' if which == 'rl' else which} makes it"
        )
    seeding.seed_everything(config.seed)
    from rl import modeling  # imports transformers, which takes seconds: not for a finished stage
    from rl.engines.hf import HFEngine

    model, tokenizer = modeling.load(model_path, config.device)
    engine = HFEngine(model, config.rollout.batch_size, config.train.autocast)
    with make_pool(config) as judge:
        summary = evaluate(run, which, config, engine, judge, tokenizer)
    write_comparison(run, config.seed)
    mark_done(folder)
    print(describe(summary))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Evaluate a model of a run on its held-out problems.")
    parser.add_argument("--run", type=Path, required=True, help="run folder, with config.json and problems/")
    parser.add_argument("--which", choices=STAGES, required=True, help="whose model")
    arguments = parser.parse_args()
    try:
        main(arguments.run, arguments.which)
    except (ConfigError, FileNotFoundError, PoolError, ProblemError) as error:
        sys.exit(f"eval.heldout: {error}")
