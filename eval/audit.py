"""Which problems of a set are degenerate: `python -m eval.audit PROBLEMS --out LIST`. Runs in the driver.

Runs every reference as the judge does (env/reference.py): in a sandboxed worker, on secret inputs, at full size, on the
device. LIST names the problems with their reasons (eval/degenerate.py) and digests; eval.run --degenerate takes it.
Beside it, LIST.partial.jsonl holds a line a problem, so that a stopped audit goes on. Several problems are audited at
once (--lanes); what was too big beside others is tried again alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from env.pool import visible_gpus
from env.problems import ProblemError
from env.records import Problem
from env.reference import Reference, Rejected, TrialKind, as_problem_error
from env.rules import Rules
from eval.degenerate import Observed, reasons, tolerances
from eval.scores import LIST_VERSION
from eval.settings import SKIP_BROKEN, RunError, load_problems, write_json

TRIALS = 3
# Problems of KernelBench take up to 50 GiB each while they are compared.
LANES = {"cpu": 1, "cuda": 3}
RULES = Rules(run_timeout_s=120.0, spares=1)


class Auditor:
    """A context manager over a fork server, as an evaluator has one; `audit` runs one reference in a worker of it, and
    `lanes` threads may do so at once."""

    def __init__(self, device: str, seed: int | None = None, weak_isolation: bool = False, lanes: int = 1) -> None:
        self.device, self.lanes = device, lanes
        self.secret = secrets.randbits(60) if seed is None else seed
        self.rules = replace(RULES, weak_isolation=weak_isolation, spares=lanes)

    def __enter__(self) -> Auditor:
        from env.gate import DeviceGate
        from env.spares import Spares
        from env.worker import ForkServer

        gpu = ""
        if self.device == "cuda":
            gpus = visible_gpus()
            if not gpus:
                raise RunError("no GPU is visible: use --device cpu, for problems small enough for it")
            gpu = os.environ["CUDA_VISIBLE_DEVICES"] = gpus[0]  # read when CUDA starts, which it hasn't here
        with contextlib.ExitStack() as stack:
            limit = int(self.rules.max_host_gb * 2**30)
            server = ForkServer(self.device, max_host_bytes=limit, weak_isolation=self.rules.weak_isolation)
            stack.callback(server.close)
            gate = DeviceGate()
            if self.device == "cuda":
                torch.zeros(1, device="cuda")
                gate.calibrate()
            self.spares = Spares(server, self.rules, gate, gpu)
            stack.callback(self.spares.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def audit(self, problem: Problem) -> dict[str, Any]:
        """{"reasons": [...]}, or {"not_audited": why} where this machine is at fault. Never raises for a reference."""
        try:
            with as_problem_error():
                reference = Reference(self.spares.take(), problem, self.rules, self.secret)
            try:
                with as_problem_error():
                    found = reasons(observe(reference), tolerances())
                return {"reasons": found}
            finally:
                reference.end()
                if self.device == "cuda":
                    torch.cuda.empty_cache()  # kept for reuse here, it is missing in the next one's worker
        except Rejected as error:
            if error.status == "infra_error":
                return {"not_audited": error.message}
            return {"reasons": [{"kind": _kind(error.message), "detail": error.message[:400]}]}
        except torch.OutOfMemoryError as error:
            return {"not_audited": f"too big here: {error}"[:400]}


def observe(reference: Reference) -> Observed:
    """Run a reference on other inputs, other weights and another seed. Raises what env.session does, and Rejected."""
    trials = [reference.trial(TrialKind(f"trial{number}")) for number in range(TRIALS)]
    first, session = trials[0], reference.session

    def again(seed: int) -> torch.Tensor:
        session.set_inputs(first.layout, first.inputs)
        return session.call("run", train=True, grad=False, seed=seed).data

    reseeded, moved = again(1), None
    if reference.floats:
        session.load_state(reference.moved_state)
        moved = again(0)
        session.load_state(reference.state)
    for trial in trials[1:]:
        if (trial.layout, trial.outputs.layout) != (first.layout, first.outputs.layout):
            raise Rejected("problem_error", "inputs or outputs of another shape or dtype with another seed")
    return Observed(
        layout=first.outputs.layout,
        outputs=[trial.outputs.data for trial in trials],
        inputs_layout=first.layout,
        inputs=[trial.inputs for trial in trials],
        moved=moved,
        reseeded=reseeded,
    )


def _kind(message: str) -> str:
    """The judge's refusals of a reference by their words."""
    if "gives another output for the same inputs" in message:
        return "random"
    return "nan" if "NaN everywhere" in message else "fails"


def audit(problems: list[Problem], out: Path, auditor: Auditor, spec: str) -> dict[str, Any]:
    """Audit what LIST.partial.jsonl lacks, then write the list; returns it. Raises RunError for a partial file of
    another device."""
    partial = out.with_name(f"{out.name}.partial.jsonl")
    device = torch.cuda.get_device_name() if auditor.device == "cuda" else "cpu"
    done = dict(_read_partial(partial, device))
    out.parent.mkdir(parents=True, exist_ok=True)
    left = list({p.sha256: p for p in problems if p.sha256 not in done}.values())
    if auditor.lanes > 1:
        random.Random(0).shuffle(left)  # neighbours in a folder are alike: all large ones would meet
    with (
        open(partial, "a", encoding="utf-8") as file,
        tqdm(total=len(left), desc="audit", unit="problem") as bar,
    ):

        def note(problem: Problem, found: dict[str, Any], seconds: float) -> None:
            line = {"sha256": problem.sha256, "device": device, **found}
            done[problem.sha256] = line
            text = json.dumps({**line, "id": problem.id, "seconds": round(seconds, 2)}, sort_keys=True)
            file.write("\n" + text)  # a line cut short by a kill must not spoil this one
            file.flush()

        _audit_all(left, auditor, auditor.lanes, note, bar)
        if auditor.lanes > 1:
            again = [problem for problem in left if "not_audited" in done[problem.sha256]]
            bar.total += len(again)
            _audit_all(again, auditor, 1, note, bar)
    found = {p.id: done[p.sha256] for p in problems}
    data = {
        "version": LIST_VERSION,
        "audited": len(problems),
        "from": spec,
        "device": device,
        "versions": {"torch": torch.__version__},
        "trials": TRIALS,
        "problems": {
            id: {"sha256": line["sha256"], "reasons": line["reasons"]}
            for id, line in found.items()
            if line.get("reasons")
        },
        "not_audited": {id: line["not_audited"] for id, line in found.items() if "not_audited" in line},
    }
    write_json(out, data)
    return data


def _audit_all(
    problems: Sequence[Problem],
    auditor: Auditor,
    lanes: int,
    note: Callable[[Problem, dict[str, Any], float], None],
    bar: tqdm,
) -> None:
    """Each one's result to `note`, as it comes. What is raised in a lane ends all of them and is raised here."""
    stopping, writing = threading.Event(), threading.Lock()

    def one(problem: Problem) -> None:
        if stopping.is_set():
            return
        begun = time.perf_counter()
        try:
            found = auditor.audit(problem)
        except BaseException:
            stopping.set()
            raise
        with writing:
            note(problem, found, time.perf_counter() - begun)
            bar.update()

    with futures.ThreadPoolExecutor(lanes) as threads:
        try:
            for future in [threads.submit(one, problem) for problem in problems]:
                future.result()
        finally:
            stopping.set()  # stopped by hand: the lanes end what they have in work and take nothing new


def _read_partial(path: Path, device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if not path.is_file():
        return
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if line["device"] != device:
            raise RunError(f"{path} was begun on {line['device']}, this is {device}; go on there, or remove it")
        if "not_audited" not in line:  # another machine state may do
            yield line["sha256"], line


def describe(data: dict[str, Any]) -> str:
    lines = [f"{len(data['problems'])} of {data['audited']} problems are degenerate (on {data['device']})"]
    for id, entry in data["problems"].items():
        for reason in entry["reasons"]:
            under = f" [{', '.join(reason['passes'])}]" if "passes" in reason else ""
            lines.append(f"  {id}: {reason['kind']}: {reason['detail']}{under}")
    lines += [f"  not audited: {id}: {why}" for id, why in data["not_audited"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="eval.audit", description="Find degenerate problems.")
    parser.add_argument("problems", help="folder, .parquet, .jsonl, .py or generator:heldout:24")
    parser.add_argument("--out", type=Path, required=True, help="the list, e.g. eval/data/kernelbench_degenerate.json")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where a GPU is visible")
    parser.add_argument("--seed", type=int, help="of the secret inputs; default: a fresh secret")
    parser.add_argument("--limit", type=int, default=0, help="only the first so many problems")
    parser.add_argument("--lanes", type=int, help="problems at once (default: 3 on a GPU, 1 on the CPU)")
    parser.add_argument("--skip-broken", action="store_true", help=SKIP_BROKEN)
    parser.add_argument("--weak-isolation", action="store_true", help="run references where they can't be shut in well")
    arguments = parser.parse_args()
    try:
        chosen = load_problems(arguments.problems, arguments.skip_broken)
        chosen = chosen[: arguments.limit] if arguments.limit > 0 else chosen
        device = arguments.device or ("cuda" if visible_gpus() else "cpu")
        lanes = LANES[device] if arguments.lanes is None else arguments.lanes
        if lanes < 1:
            raise RunError(f"--lanes {lanes}: at least 1")
        with Auditor(device, arguments.seed, arguments.weak_isolation, lanes) as made:
            print(describe(audit(chosen, arguments.out, made, arguments.problems)))
    except KeyboardInterrupt:
        sys.exit("eval.audit: stopped; the same command goes on from here")
    except (RunError, ProblemError, RuntimeError) as error:
        sys.exit(f"eval.audit: {error}")
