"""Evaluate a model on a problem set: `python -m eval.run --model M --problems P --out DIR`. Runs in the driver.

Writes DIR/settings.json (all settings, resolved), versions.json, problems.jsonl, trajectories.jsonl, summary.json and
DONE; with --reference both also *.compile.*; with --best-of N also parallel.jsonl; wall-clock apart in wall.jsonl and
seconds.json. The same command goes on after a kill, and on the CPU ends in the same bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from env.pool import CPU_LANES, GPU_LANES, PoolError, visible_gpus
from env.problems import ProblemError, write_jsonl
from env.records import Problem, sha256
from eval import cost, evaluation, policies, scores
from eval.metrics import share_text
from eval.settings import (
    REFERENCES,
    SCALINGS,
    SKIP_BROKEN,
    RunError,
    Settings,
    check_references,
    claim,
    load_problems,
    problem_identity,
)
from eval.settings import resolve_config as resolve
from rl import seeding
from rl.checkpoint import CheckpointError, mark_done
from rl.config import Config, ConfigError
from rl.engines.base import EngineError

SHIPPED_LIST = Path(__file__).parent / "data" / "kernelbench_degenerate.json"
# In its lane: 600 mixed candidates in 24 lanes of an H200 came out at 4.5 a second (analysis/measured/judge-h200.json).
CPU_VERDICT_S, GPU_VERDICT_S = 0.4, 24 / 4.5


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="eval.run", description="Evaluate a model on a set of problems.")
    made.add_argument("--model", required=True, help="model folder, run or checkpoint of ours, http://…/v1, or teacher")
    made.add_argument("--name", default="", help="which model to ask a server for")
    made.add_argument("--problems", required=True, help="folder, .parquet, .jsonl, .py or generator:heldout:24")
    made.add_argument("--out", type=Path, required=True, help="folder of this evaluation")
    made.add_argument("--samples", type=int, help="a problem (default: the config's, 8)")
    made.add_argument("--turns", type=int, help="a sample (default: the config's, 3)")
    made.add_argument("--limit", type=int, default=0, help="only the first so many problems")
    made.add_argument("--skip-broken", action="store_true", help=SKIP_BROKEN)
    made.add_argument(
        "--scaling", choices=SCALINGS, default="vanilla", help="what later turns are shown of earlier ones"
    )
    made.add_argument("--keep", type=int, default=4, help="context: how many of the best turns")
    made.add_argument("--best-of", type=int, default=0, help="beside: so many one-turn samples a problem")
    made.add_argument("--reference", choices=(*REFERENCES, "both"), default="eager")
    made.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where a GPU is visible")
    made.add_argument("--degenerate", type=Path, help="list of degenerate problems (default: the shipped one)")
    made.add_argument("--recipe", help="take sampling, wording and rules from this recipe")
    made.add_argument("--set", action="append", default=[], metavar="A.B=C", help="one setting (rl/config.py)")
    made.add_argument(
        "--plan",
        nargs="?",
        const="",
        metavar="SECONDS|FOLDER",
        help="only say how long judging will take, at so many seconds a verdict, or as measured in an earlier folder",
    )
    made.add_argument("--evaluators", type=int, default=0, help="for --plan: how many (default: those here)")
    return made


def settings_of(args: argparse.Namespace) -> tuple[Settings, policies.Policy, list[Problem]]:
    """What the options ask for. Raises RunError, ConfigError or ProblemError naming what is wrong."""
    for name, least in (("samples", 1), ("turns", 1), ("keep", 1), ("best_of", 0), ("limit", 0), ("evaluators", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise RunError(f"--{name.replace('_', '-')} {value}: at least {least}")
    gpus = visible_gpus()
    device = args.device or ("cuda" if gpus else "cpu")
    references = REFERENCES if args.reference == "both" else (args.reference,)
    check_references(references, device)
    policy = policies.find(args.model, args.name)
    changes = [f"device={device}"]
    if device == "cpu":
        changes += ["problems.size=cpu", "train.autocast=false", "train.compile=false"]
    changes += [f"eval.{name}={getattr(args, name)}" for name in ("samples", "turns") if getattr(args, name)]
    if policy.kind == "server":
        changes += [f"server.url={json.dumps(policy.path)}", f"server.model={json.dumps(policy.name)}"]
    if device == "cuda" and len(gpus) > 1 and policy.kind in ("folder", "checkpoint"):
        changes.append("env.placement=apart")
    limit = policies.context_limit(policy)
    config = resolve(args.recipe or policy.config, changes, args.set)
    if limit is not None and config.model.context > limit:
        config = resolve(args.recipe or policy.config, [*changes, f"model.context={limit}"], args.set)
    problems = load_problems(args.problems, args.skip_broken)
    problems = problems[: args.limit] if args.limit else problems
    identity = problem_identity(args.problems, problems)
    named = args.degenerate or (SHIPPED_LIST if SHIPPED_LIST.is_file() else None)
    if named is not None:
        scores.read_list(named)
    settings = Settings(
        model=policy.identity(),
        problems=identity,
        references=references,
        scaling=args.scaling,
        keep=args.keep,
        best_of=args.best_of,
        degenerate={"path": str(named), "sha256": sha256(named.read_text(encoding="utf-8"))} if named else {},
        config=config.to_json(),
    )
    return settings, policy, problems


def main(args: argparse.Namespace) -> None:
    settings, policy, problems = settings_of(args)
    config = Config.from_json(settings.config)
    if args.plan is not None:
        print(planned(args, settings, len(problems)))
        return
    with _alone(args.out):
        claim(args.out, settings)
        if (args.out / "DONE").exists():
            print(f"{args.out}: done before")
            summary = json.loads((args.out / "summary.json").read_text(encoding="utf-8"))
        else:
            write_jsonl(problems, args.out / "problems.jsonl")
            seeding.seed_everything(config.seed)
            engine, chat = policies.open_policy(policy, config)
            summary = evaluation.evaluate(settings, problems, engine, chat, args.out)
            mark_done(args.out)
    print(describe(summary))


def planned(args: argparse.Namespace, settings: Settings, problems: int) -> str:
    """The arithmetic of --plan."""
    cuda = settings.config["device"] == "cuda"
    lanes = GPU_LANES if cuda else CPU_LANES  # a folder's verdicts were measured with as many beside, too
    if not args.plan:
        seconds = GPU_VERDICT_S if cuda else CPU_VERDICT_S
        source = "as measured on one H200" if cuda else "as measured on a CPU core"
    elif (Path(args.plan) / "wall.jsonl").is_file():
        seconds, source = cost.measured_verdict(Path(args.plan) / "wall.jsonl")
    else:
        try:
            seconds, source, lanes = float(args.plan), "as given", 1
        except ValueError:
            raise RunError(f"--plan {args.plan}: neither seconds nor an evaluation's folder with wall.jsonl") from None
    evaluators = args.evaluators or len(visible_gpus()) or 1
    answers = len(settings.references)
    text = cost.plan(
        problems,
        settings.config["eval"]["samples"] * answers,
        settings.config["eval"]["turns"],
        seconds,
        evaluators,
        lanes,
        source,
        settings.best_of,
    )[1]
    return text


def describe(summary: dict[str, Any]) -> str:
    """A few lines for the console."""
    last = f"turn{summary['turns']}"
    lines = [f"{summary['problems']} problems x {summary['samples']} samples x {summary['turns']} turns"]
    for p, by_turn in summary["fast"].items():
        tied = summary["ties"][p][last]["tied"]
        ties = f", {tied} tied" if tied else ""
        at_last, best = (share_text(by_turn[name], 6) for name in (last, "best"))
        lines.append(f"  Fast@{p}: last turn {at_last}{ties}, best of history {best}")
    lines.append(f"  hack ratio {share_text(summary['hack_ratio'], 6)}")
    if summary["degenerate"]:
        rest = summary["without_degenerate"]
        value = share_text(rest["fast"]["1.0"][last], 6) if rest else "none is left"
        lines.append(f"  without {len(summary['degenerate'])} degenerate problems: Fast@1.0 {value}")
    if excluded := {name: count for name, count in summary["excluded"].items() if count}:
        lines.append(f"  not counted: {', '.join(f'{count} {name}' for name, count in excluded.items())}")
    return "\n".join(lines)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Nobody else may write there meanwhile. Raises RunError."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(f"{folder} is in use by another evaluation; wait for it, or use another --out") from None
        yield


if __name__ == "__main__":
    try:
        main(parser().parse_args())
    except KeyboardInterrupt:
        sys.exit("eval.run: stopped; the same command goes on from here")
    except (
        RunError,
        ConfigError,
        EngineError,
        CheckpointError,
        OSError,
        PoolError,
        ProblemError,
        ValueError,
    ) as error:
        sys.exit(f"eval.run: {error}")
