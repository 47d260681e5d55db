"""One evaluator: a trusted process pinned to one GPU (or one CPU slot) that judges what the pool sends it.

Runs as a process of its own, started by `env.pool`. It holds the device context, a fork server and one judge a lane;
lanes are threads, which compile and check candidates beside each other and take turns at timing.
"""

from __future__ import annotations

import functools
import os
import queue
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection

from env import isolation
from env.extract import candidate_source
from env.feedback import render
from env.gate import DeviceGate
from env.records import Problem, Verdict, sha256
from env.room import Room
from env.rules import Rules


@dataclass(frozen=True)
class Job:
    """One candidate on its way to a judge. `raw`: `response` is a model's whole answer, code still to be found."""

    id: int
    problem: Problem
    response: str
    raw: bool


@dataclass(frozen=True)
class Setup:
    """What an evaluator is told first: all but its GPU."""

    device: str
    lanes: int
    rules: Rules
    secret: int


def _versions() -> dict[str, str]:
    import platform

    import torch
    import triton

    return {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "cpu (modelled times)"


def _judge_one(judge: object, job: Job) -> Verdict:
    entry = job.problem.entry_point
    source = candidate_source(job.response, job.raw, entry)
    if source is None:
        verdict = Verdict(
            status="compile_error",
            message=f"No closed Python code block that defines class {entry}New was found in the answer.",
            problem_sha256=job.problem.sha256,
            candidate_sha256=sha256(job.response),
        )
        verdict.feedback = render(verdict)
        return verdict
    return judge.judge(job.problem, source)


def run(connection: Connection) -> None:
    """Serve the pool's jobs until it closes the connection.

    Gets a `Setup`, prepares what doesn't depend on a GPU (imports, fork server), says ("loaded", scratch), and stands
    by until it is told its GPU (what CUDA_VISIBLE_DEVICES shall say; empty on the CPU); then ("ready", info). In place
    of either: ("failed", why).
    """
    setup: Setup = connection.recv()
    device = setup.device
    isolation.set_parent_death_signal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle: it closes the connection
    os.environ["OMP_NUM_THREADS"] = "1"
    server = None
    try:
        from env.worker import ForkServer

        # It imports torch beside this process.
        limit = int(setup.rules.max_host_gb * 2**30)
        server = ForkServer(device, wait=False, max_host_bytes=limit, weak_isolation=setup.rules.weak_isolation)
        import torch

        from env.judge import Judge
        from env.spares import Spares

        torch.set_num_threads(1)
        # Lanes are threads: one that times must not wait 5 ms for its turn after each answer.
        sys.setswitchinterval(0.0005)
        server.wait_ready()
        connection.send(("loaded", str(server.home)))
        try:
            gpu = connection.recv()
        except (EOFError, OSError):
            server.close()  # the pool never needed this one
            return
        gate = DeviceGate()
        if device == "cuda":
            # Read when CUDA starts, which it hasn't here.
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
            torch.zeros(1, device="cuda")
            gate.calibrate()
        spares = Spares(server, setup.rules, gate, gpu)
        judges = [Judge(setup.rules, setup.secret, gate, spares)]
        references = judges[0].references
        judges += [Judge(setup.rules, setup.secret, gate, spares, references) for _ in range(setup.lanes - 1)]
        info = {"device": _device_name(device), "versions": _versions(), "scratch": str(server.home)}
        connection.send(("ready", info))
    except Exception as error:
        connection.send(("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=3)}"))
        if server is not None:
            server.close()
        return
    closing = threading.Event()
    threading.Thread(target=_leave_without, args=(server, closing), daemon=True).start()

    def clear() -> None:
        references.let_go()
        spares.close(keep=2)
        if device == "cuda":
            torch.cuda.empty_cache()

    _serve(connection, judges, info, Room(clear))
    closing.set()
    for judge in judges:
        judge.close()
    spares.close()
    server.close()


def _leave_without(server: object, closing: threading.Event) -> None:
    """Without its fork server nobody can be judged here any more: leave, so that the pool starts another evaluator."""
    server.process.wait()
    if not closing.is_set():
        os._exit(3)


def _serve(connection: Connection, judges: list, info: dict, room: Room) -> None:
    jobs: queue.Queue[Job | None] = queue.Queue()
    sending = threading.Lock()

    def lane(judge: object) -> None:
        while (job := jobs.get()) is not None:
            try:
                verdict = room.judge(job.problem.sha256, functools.partial(_judge_one, judge, job))
            except Exception as error:
                verdict = Verdict(status="infra_error", message=f"the judge failed: {traceback.format_exc(limit=6)}")
                verdict.feedback = render(verdict)
                if "CUDA" in str(error):
                    # A broken context judges nobody any more: the pool starts another evaluator.
                    os._exit(3)
            if verdict.status == "infra_error" and not judge.server.alive():
                os._exit(3)  # before the verdict is out: the job is judged again elsewhere
            verdict.device, verdict.versions = info["device"], info["versions"]
            with sending:
                connection.send(("verdict", job.id, verdict.to_json()))

    threads = [threading.Thread(target=lane, args=(judge,), daemon=True) for judge in judges]
    for thread in threads:
        thread.start()
    try:
        while (job := connection.recv()) is not None:
            jobs.put(job)
    except (EOFError, OSError):
        # The driver is gone: what is in flight has nobody to go to.
        os._exit(0)
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    # Under its importable name: objects that are pickled here must be found as env.evaluator.X there.
    from env.evaluator import run as serve

    serve(Connection(int(sys.argv[1])))
