"""The rollout process: samples and judges steps while the learner trains on the one before (placement.kind = split).

Started by rl/rollout_link.py, one a GPU that samples, never by hand. It owns an engine, with weights of its own, and
the first of them the judge's pool. It does what it is told in order: load these weights, sample step n, evaluate.
A step's file appears in rl/trajectories under its name when it is whole. It dies with the learner, and its pool with
it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from env.isolation import set_parent_death_signal
from env.problems import load_jsonl
from env.records import Problem
from rl import distributed, shared_weights
from rl.config import Config, load_run
from rl.engines.folder import folder_engine
from rl.engines.ranks import RankEngine, together
from rl.metrics import evaluation_metrics
from rl.plan import evaluation_plan, pick_problems, training_plan
from rl.prompts import Chat
from rl.records import step_path
from rl.rollout import Judge, evaluate_problems, make_pool, rollout


@dataclass
class Rollouter:
    """What one rollout process holds. With several, all are told the same; the first one judges and writes."""

    folder: Path  # <run>/rl
    config: Config
    engine: Any
    judge: Judge | None
    chat: Chat
    train: Sequence[Problem]
    heldout: Sequence[Problem]
    connection: Connection

    def load(self, task: dict[str, Any]) -> None:
        """Take over weights. Raises EngineError where they didn't arrive."""
        descriptor = reduction.recv_handle(self.connection)
        weights = shared_weights.read(descriptor, task["layout"], task["checksum"])
        self.engine.push_named(weights, task["expected"])

    def sample(self, task: dict[str, Any]) -> dict[str, Any]:
        """All rollouts of a step. Returns wall-clock values, and when it began and ended."""
        step, begun = task["step"], time.perf_counter()
        path = step_path(self.folder, step)
        partial = path.with_name(f".sampling-{path.name}")
        problems = pick_problems(self.train, self.config.rollout.prompts_per_step, self.config.seed, step)
        plan = training_plan(self.config, self.chat, step, task["version"], task["vocabulary"])

        def action() -> dict[str, float]:
            partial.unlink(missing_ok=True)
            _, wall = rollout(self.engine, self.judge, self.chat, problems, plan, partial, f"step {step}")
            partial.replace(path)
            return wall

        wall = together(self.engine, action)
        return {"wall": wall, "begun": begun, "ended": time.perf_counter()}

    def evaluate(self, task: dict[str, Any]) -> dict[str, Any]:
        """Held-out problems under the present weights, as metrics eval/*."""
        path, begun = step_path(self.folder, task["step"], "evaluation"), time.perf_counter()
        plan = evaluation_plan(self.config, self.chat.stop_ids, self.config.eval.during_samples, task["version"])

        def action() -> dict[str, float]:
            path.unlink(missing_ok=True)
            found = evaluate_problems(self.engine, self.judge, self.chat, self.heldout, plan, path)
            return evaluation_metrics(found)

        metrics = together(self.engine, action)
        return {"metrics": metrics, "wall": {"seconds/evaluate": time.perf_counter() - begun}}

    def serve(self) -> None:
        """Do what is asked until there is no more, or nobody who asks."""
        while True:
            try:
                task = self.connection.recv()
            except EOFError:
                return
            if task["do"] == "stop":
                return
            answer = getattr(self, task["do"])(task)
            if answer is not None and distributed.first():
                self.connection.send({"done": task["do"], "step": task["step"], **answer})


def run(run: Path, connection: Connection, gpu: str = "", judge_gpus: Sequence[str] = ()) -> None:
    """Start engine and judge, say so, and serve. gpu: of the engine; judge_gpus: as CUDA_VISIBLE_DEVICES names them."""
    config = load_run(run)
    first = os.environ.get("RANK", "0") == "0"
    # The judge first: it must see GPUs that the engine must not.
    with make_pool(config, list(judge_gpus)) if first else contextlib.nullcontext() as judge:
        if config.device == "cuda":
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        else:
            torch.set_num_threads(1)  # the learner computes on the other cores meanwhile
        distributed.start(config.device)
        ranks = distributed.world()
        engine, chat = folder_engine(run / "sft" / "model", config, config.train.autocast, ranks=ranks)
        train = load_jsonl(run / "problems" / "train.jsonl")
        heldout = load_jsonl(run / "problems" / "heldout.jsonl") if config.eval.every else []
        shared = RankEngine(engine) if ranks > 1 else engine
        rollouter = Rollouter(run / "rl", config, shared, judge, chat, train, heldout, connection)
        dtype = str(engine.dtype).removeprefix("torch.")
        distributed.gather(None)  # all are there
        if first:
            connection.send({"done": "start", "probe": engine.probe(), "dtype": dtype})
        rollouter.serve()


def main(connection: Connection, *arguments: Any, parent: int) -> int:
    """`run`, for a process of its own: dies with `parent`, says what went wrong. Returns its exit status."""
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        return 1  # it died before
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all: the learner alone says what happens then
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that the pool is closed
    try:
        run(*arguments[:1], connection, *arguments[1:])
    except Exception as error:  # whatever it is: the learner has to hear of it
        text = f"{type(error).__name__}: {error}"
        print(f"rl.rollouter: {text}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            connection.send({"failed": text})
        return 1
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The rollout process of a split placement; rl.train starts it.")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--connection", type=int, required=True, help="descriptor of the learner's socket")
    parser.add_argument("--parent", type=int, required=True, help="process id of the learner")
    parser.add_argument("--gpu", default="")
    parser.add_argument("--judge-gpus", default="")
    given = parser.parse_args()
    judges = [gpu for gpu in given.judge_gpus.split(",") if gpu]
    sys.exit(main(Connection(given.connection), given.run, given.gpu, judges, parent=given.parent))
