"""KernelBench's files, both ways. Runs in the driver.

python -m eval.kernelbench write DIR --runs RUNS --name NAME      an evaluation as its run folder and baseline file
python -m eval.kernelbench rejudge RUNS/NAME --problems KERNELBENCH --out DIR      its kernels under our rules

After `write`, in KernelBench's repository: scripts/benchmark_eval_analysis.py run_name=NAME level=1 hardware=x
baseline=x eval_results_dir=RUNS baseline_file=RUNS/NAME_baseline.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

from env.pool import PoolError, visible_gpus
from env.problems import ProblemError, load, write_jsonl
from env.rules import PROFILES
from eval import compare, kernelbench_read, kernelbench_write, scores
from eval.rejudge import rejudge
from eval.settings import (
    SKIP_BROKEN,
    RunError,
    Settings,
    claim,
    load_problems,
    problem_identity,
    resolve_config,
    write_json,
)
from eval.watch import Watch, WatchedJudge
from rl.checkpoint import mark_done
from rl.config import ConfigError
from rl.rollout import make_pool


def write(args: argparse.Namespace) -> None:
    settings, trajectories, _ = compare.load(args.folder)
    problems = load(args.folder / "problems.jsonl")
    turns = settings["config"].eval.turns
    if args.turn not in ("last", "best") and not (args.turn.isdigit() and 1 <= int(args.turn) <= turns):
        raise RunError(f"--turn {args.turn}: last, best, or a number from 1 to {turns}")
    folders = kernelbench_write.write(trajectories, problems, turns, args.runs, args.name, args.turn)
    print(f"written: {', '.join(map(str, folders))} and {args.runs / f'{args.name}_baseline.json'}")


def judge_again(args: argparse.Namespace) -> None:
    problems = load_problems(args.problems, args.skip_broken)
    trajectories, notes = kernelbench_read.read_kernels(args.folder, problems)
    theirs = kernelbench_read.read_results(args.folder)
    baseline = None
    if args.baseline:
        try:
            baseline = json.loads(args.baseline.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(f"{args.baseline}: not a baseline file ({error})") from error
    used = {trajectory.problem_id for trajectory in trajectories}
    problems = [problem for problem in problems if problem.id in used]
    device = args.device or ("cuda" if visible_gpus() else "cpu")
    samples = max(sum(t.problem_id == id for t in trajectories) for id in used)
    changes = [f"device={device}", "eval.turns=1", f"eval.samples={samples}", f"env.profile={args.profile}"]
    if device == "cpu":
        changes += ["problems.size=cpu", "train.autocast=false", "train.compile=false"]
    config = resolve_config(None, changes, args.set)
    digest = hashlib.sha256(json.dumps([t.to_json() for t in trajectories], sort_keys=True).encode()).hexdigest()
    settings = Settings(
        model={"kind": "KernelBench run", "path": str(args.folder), "sha256": digest},
        problems=problem_identity(args.problems, problems),
        references=(config.env.reference,),
        scaling="vanilla",
        keep=1,
        best_of=0,
        config=config.to_json(),
    )
    args.out.mkdir(parents=True, exist_ok=True)
    claim(args.out, settings)
    write_jsonl(problems, args.out / "problems.jsonl")
    path = args.out / "trajectories.jsonl"
    with (
        make_pool(config) as judge,
        Watch(args.out / "wall.jsonl", len(trajectories), 0, "rejudge") as watch,
    ):
        by_id = {problem.id: problem for problem in problems}
        judged = rejudge(trajectories, by_id, WatchedJudge(judge, watch), config.reward, path, raw=False)
    found = kernelbench_read.differences(judged, problems, theirs, baseline)
    write_json(args.out / "differences.json", {**found, "left_out": notes})
    write_json(args.out / "summary.json", scores.score(judged, samples, 1, config.seed))
    mark_done(args.out)
    print(kernelbench_read.table(found))
    for note in notes:
        print(f"  left out: {note}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="eval.kernelbench", description="KernelBench's files, both ways.")
    commands = made.add_subparsers(dest="command", required=True)
    one = commands.add_parser("write", help="an evaluation as KernelBench's run folder")
    one.add_argument("folder", type=Path, help="folder of eval.run")
    one.add_argument("--runs", type=Path, required=True, help="where run folders go")
    one.add_argument("--name", required=True, help="of the run")
    one.add_argument("--turn", default="last", help="which turn stands for a sample: last, best, or a number")
    two = commands.add_parser("rejudge", help="the kernels of a KernelBench run under our rules")
    two.add_argument("folder", type=Path, help="its runs/<name>")
    two.add_argument("--problems", required=True, help="KernelBench's problems: folder or parquet")
    two.add_argument("--out", type=Path, required=True)
    two.add_argument("--skip-broken", action="store_true", help=SKIP_BROKEN)
    two.add_argument("--baseline", type=Path, help="its timing file, to show both speedups")
    two.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where a GPU is visible")
    two.add_argument("--profile", choices=tuple(PROFILES), default="default", help="whose tolerances and timing")
    two.add_argument("--set", action="append", default=[], metavar="A.B=C", help="one setting (rl/config.py)")
    return made


if __name__ == "__main__":
    arguments = parser().parse_args()
    try:
        (write if arguments.command == "write" else judge_again)(arguments)
    except KeyboardInterrupt:
        sys.exit("eval.kernelbench: stopped; the same command goes on from here")
    except (RunError, ConfigError, PoolError, ProblemError, ValueError) as error:
        sys.exit(f"eval.kernelbench: {error}")
