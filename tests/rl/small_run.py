"""A run folder small enough to be trained on in seconds, with a judge that reads the text alone, for tests."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import Future

from env.problems import write_jsonl
from env.records import Problem, Verdict
from rl import modeling, train
from rl.config import load_recipe

PROBLEMS = [Problem(f"p{i}", f"class Model:\n    n = {i}\n") for i in range(6)]
SMALL = [
    "model.layers=1", "model.width=24", "model.heads=2", "model.kv_heads=1", "model.mlp=32", "model.vocab_size=300",
    "model.context=256", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=4", "rollout.max_new_tokens=6",
    "train.steps=5", "train.checkpoint_every=2", "optim.lr=0.02", "eval.every=0",
]  # fmt: skip


class Judge:
    """Likes the letter e: a judgement of the text alone. Kills the whole process at its `kill_at`-th submission."""

    def __init__(self, kill_at=None):
        self.count, self.kill_at = 0, kill_at

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return None

    def submit(self, problem, response, raw=True):
        self.count += 1
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        future = Future()
        status = "correct" if len(response) % 2 else "incorrect"
        speedup = float(min(3, response.count("e")))
        verdict = Verdict(status, speedup=speedup, profiling_ratio=0.35 if "a" in response else 1.0, feedback="go on")
        verdict.cost = {"total_s": self.count * 1.0}
        future.set_result(verdict)
        return future


def prepare(run, *overrides):
    config = load_recipe("mini-cpu", [*SMALL, *overrides])
    run.mkdir()
    (run / "config.json").write_text(json.dumps(config.to_json()))
    write_jsonl(PROBLEMS, run / "problems" / "train.jsonl")
    modeling.build_initial(config, ["class Model:\n", "go on\n"], run / "sft" / "model")
    return config


def durable(run):
    """Everything that must be the same in two equal runs, by name."""
    files = [run / "rl" / "metrics.jsonl", *(run / "rl" / "model").iterdir(), *(run / "rl" / "trajectories").iterdir()]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def start(run, kill_at=None, first=lambda: None):
    """Run the stage in a forked process, which calls `first` before; returns its id."""
    child = os.fork()
    if child == 0:
        train.make_pool = lambda config: Judge(kill_at)
        first()
        try:
            train.main(run)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return child


def ended(child):
    """Wait for a process; its exit status (negative: the signal that ended it)."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(run, kill_at):
    return ended(start(run, kill_at))
