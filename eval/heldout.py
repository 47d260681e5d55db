"""Held-out evaluation: `python -m eval.heldout --run DIR --which sft|rl|server`. Runs in the driver.

Samples `config.eval` from DIR/<which>/model, or from the model behind `config.server`, on DIR/problems/heldout.jsonl
and writes below DIR/eval/<which>: trajectories.jsonl, summary.json and DONE. All evaluations draw from the same seeds;
once those of both stages are there, DIR/eval/comparison.json holds their paired differences. Run again after a kill, it
goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from env.files import write_atomic
from env.pool import PoolError
from env.problems import ProblemError, load_jsonl
from eval import metrics
from rl import checkpoint, seeding
from rl.config import Config, ConfigError, load_run
from rl.engines.base import Engine, EngineError
from rl.engines.folder import folder_engine
from rl.plan import evaluation_plan
from rl.prompts import Chat, TextChat
from rl.records import DamagedRecords
from rl.rollout import Judge, evaluate_problems, make_pool

STAGES = ("sft", "rl")
SERVER = "server"


def evaluate(run: Path, which: str, config: Config, engine: Engine, judge: Judge, chat: Chat | TextChat) -> dict:
    """Sample, judge and summarise; returns the summary that it wrote. Trajectories on disk already are kept."""
    plan = evaluation_plan(config, chat.stop_ids, config.eval.samples)
    if engine.takes == "messages":  # sampled elsewhere: nothing disturbs the judge
        plan = replace(plan, schedule="free")
    folder = run / "eval" / which
    problems = load_jsonl(run / "problems" / "heldout.jsonl")
    title = f"evaluate {which}"
    trajectories = evaluate_problems(engine, judge, chat, problems, plan, folder / "trajectories.jsonl", title)
    summary = metrics.summarise(trajectories, plan.samples, plan.turns, seed=config.seed)
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
    last = f"turn{summary['turns']}"
    fast = ", ".join(f"Fast@{p} {metrics.share_text(by_turn[last])}" for p, by_turn in summary["fast"].items())
    return f"{summary['problems']} problems: {fast}, hack ratio {metrics.share_text(summary['hack_ratio'])}"


def main(run: Path, which: str) -> None:
    """The whole stage on a run folder; returns at once where DONE is there."""
    folder = run / "eval" / which
    if checkpoint.is_done(folder, "trajectories.jsonl"):
        print(f"{folder}: done before")
        return
    config = load_run(run)
    seeding.seed_everything(config.seed)
    engine, chat = _server(config) if which == SERVER else _stage(run, which, config)
    with make_pool(config) as judge:
        summary = evaluate(run, which, config, engine, judge, chat)
    write_comparison(run, config.seed)
    checkpoint.mark_done(folder)
    print(describe(summary))


def _stage(run: Path, which: str, config: Config) -> tuple[Engine, Chat]:
    """The model that a stage made, and its tokenizer's chat format."""
    path = run / which / "model"
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} holds no model; the stage rl.{'train' if which == 'rl' else which} makes it")
    return folder_engine(path, config, bf16=config.train.autocast)  # what training samples from


def _server(config: Config) -> tuple[Engine, TextChat]:
    from rl.engines.openai import OpenAIEngine

    return OpenAIEngine(config.server), TextChat()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Evaluate a model of a run on its held-out problems.")
    parser.add_argument("--run", type=Path, required=True, help="run folder, with config.json and problems/")
    parser.add_argument("--which", choices=(*STAGES, SERVER), required=True, help="whose model")
    arguments = parser.parse_args()
    try:
        main(arguments.run, arguments.which)
    except (
        checkpoint.CheckpointError,
        ConfigError,
        DamagedRecords,
        EngineError,
        OSError,
        PoolError,
        ProblemError,
    ) as error:
        sys.exit(f"eval.heldout: {error}")
