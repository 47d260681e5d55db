"""An evaluation from settings to summary: sample, judge, judge again, score. Runs in the driver; eval/run.py is its
command.

Sampling and judging overlap: with a server, and on several GPUs (the first samples, the others judge), a sample goes on
as soon as its own verdict is in; on one GPU, where decoding would be in every measured time, they take turns; on the
CPU an answer is judged while the others are still being written.
"""

from __future__ import annotations

import contextlib
import json
import platform
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from env.pool import Pool
from env.records import Problem
from eval import cost, scores
from eval.context import ContextChat
from eval.rejudge import rejudge
from eval.settings import RunError, Settings, write_json
from eval.watch import BESIDE, Watch, WatchedEngine, WatchedJudge
from rl.config import Config
from rl.engines.base import Engine
from rl.plan import Plan, evaluation_plan
from rl.prompts import Chat, TextChat
from rl.records import Trajectory, read_trajectories
from rl.rollout import evaluate_problems, make_pool


def evaluate(settings: Settings, problems: list[Problem], engine: Engine, chat: Chat | TextChat, folder: Path) -> dict:
    """Sample and judge what `folder` lacks, summarise, write; returns the summary under the first reference."""
    config = Config.from_json(settings.config)
    plan = _plan(config, engine, chat)
    if settings.scaling == "context":
        room = plan.sampling.context - plan.least_answer if plan.sampling.context else 0
        chat = ContextChat(chat, settings.keep, room)
    _refuse_too_small(chat, plan, problems)
    total = len(problems) * (plan.samples * plan.turns + settings.best_of)
    done = [path for path in (folder / "trajectories.jsonl", folder / "parallel.jsonl") if path.is_file()]
    before = sum(len(trajectory.turns) for path in done for trajectory in read_trajectories(path))
    with contextlib.ExitStack() as stack:
        judge = stack.enter_context(make_pool(_with_reference(config, settings.references[0])))
        write_versions(folder / "versions.json", judge)
        watch = stack.enter_context(Watch(folder / "wall.jsonl", total, before, "evaluation"))
        engine, watched = WatchedEngine(engine, watch), WatchedJudge(judge, watch)
        trajectories = evaluate_problems(
            engine, watched, chat, problems, plan, folder / "trajectories.jsonl", "sampling"
        )
        if settings.best_of:
            engine.part = BESIDE
            single = replace(plan, samples=settings.best_of, turns=1)
            evaluate_problems(engine, watched, chat, problems, single, folder / "parallel.jsonl", "best-of")
    write_summary(folder / "summary.json", trajectories, plan, problems, settings)
    for reference in settings.references[1:]:
        second = _judged_again(trajectories, problems, config, reference, folder)
        write_summary(folder / f"summary.{reference}.json", second, plan, problems, settings)
    seconds = cost.seconds_by_turn(trajectories, plan.turns, folder / "wall.jsonl")
    write_json(folder / "seconds.json", seconds)
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def _plan(config: Config, engine: Engine, chat: Chat | TextChat) -> Plan:
    plan = evaluation_plan(config, chat.stop_ids, config.eval.samples)
    if engine.takes == "messages":  # sampled elsewhere: nothing disturbs the judge
        return replace(plan, schedule="free", sampling=replace(plan.sampling, context=0))
    return plan


def _judged_again(
    trajectories: list[Trajectory], problems: list[Problem], config: Config, reference: str, folder: Path
) -> list[Trajectory]:
    turns = sum(len(trajectory.turns) for trajectory in trajectories)
    by_id = {problem.id: problem for problem in problems}
    path = folder / f"trajectories.{reference}.jsonl"
    before = sum(len(t.turns) for t in read_trajectories(path)) if path.is_file() else 0
    with (
        make_pool(_with_reference(config, reference)) as judge,
        Watch(folder / f"wall.{reference}.jsonl", turns, before, f"{reference} reference") as watch,
    ):
        return rejudge(trajectories, by_id, WatchedJudge(judge, watch), config.reward, path)


def write_summary(
    path: Path, trajectories: list[Trajectory], plan: Plan, problems: list[Problem], settings: Settings
) -> None:
    """summary.json: scores with and without degenerate problems, cost by turn, what could not be judged and why."""
    degenerate, stale = [], []
    if settings.degenerate:
        degenerate, stale = scores.listed(scores.read_list(Path(settings.degenerate["path"])), problems)
    summary = scores.score(trajectories, plan.samples, plan.turns, plan.seed % 2**32, degenerate)
    summary["stale_in_list"] = stale
    summary["cost"] = cost.by_turn(trajectories, plan.turns)
    summary["not_judged"] = {
        trajectory.problem_id: turn.verdict["message"][:300]
        for trajectory in trajectories
        for turn in trajectory.turns
        if turn.verdict["status"] == "problem_error"
    }
    write_json(path, summary)


def write_versions(path: Path, judge: Pool) -> None:
    """With what the verdicts are reached; kept from the first start, a later one that differs is noted beside it."""
    now = {
        **judge.info["versions"],
        "device": judge.info["device"],
        "rules": judge.rules.describe(),
        "transformers": metadata.version("transformers"),
        "platform": platform.platform(),
    }
    if not path.exists():
        write_json(path, now)
    elif json.loads(path.read_text(encoding="utf-8")) != now:
        print("eval.run: begun with other versions (versions.json); numbers may not be comparable", flush=True)
        write_json(path.with_name("versions.resumed.json"), now)


def _with_reference(config: Config, reference: str) -> Config:
    return replace(config, env=replace(config.env, reference=reference))


def _refuse_too_small(chat: Chat | TextChat | ContextChat, plan: Plan, problems: list[Problem]) -> None:
    """Raises RunError where no problem's first prompt leaves room for an answer; says how many don't."""
    if not plan.sampling.context:
        return
    room = plan.sampling.context - plan.least_answer
    lengths = [chat.length(chat.first_prompt(plan.wording.first_message(problem))) for problem in problems]
    too_long = sum(length > room for length in lengths)
    if too_long == len(problems):
        raise RunError(
            f"no problem fits: the shortest first prompt has {min(lengths)} tokens, and a context of "
            f"{plan.sampling.context} leaves {room} beside an answer. Lower rollout.max_new_tokens "
            f"({plan.sampling.max_new_tokens}), or set rollout.min_new_tokens to what an answer needs at least"
        )
    if too_long:
        print(f"eval.run: {too_long} of {len(problems)} problems don't fit into the context and count as failed")
