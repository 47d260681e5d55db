"""What a CUDA context costs, and whether making one beside a measurement moves it: JSON on stdout, needs a GPU.

Runs as a process of its own, started by the section `contexts` of scripts/bench_env.py. Every candidate needs a fresh
process with a context, and the driver makes them one by one: that bounds the verdicts a second. Another process times a
small and a larger kernel all the while, as `env.bench` does, and writes down when: windows in which contexts were made
are held against quiet ones.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STEPS = ("cuda", "flush", "profiler")
# Environment variables that CUDA reads when it starts, by name of the setting.
SETTINGS = {
    "as it is": {},
    "1 connection": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    "2 connections": {"CUDA_DEVICE_MAX_CONNECTIONS": "2"},
    "1 connection, 1 copy": {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_DEVICE_MAX_COPY_CONNECTIONS": "1"},
}
LIMIT_S = 25.0
QUIET_S = 1.5
CALLS = 24


def _become_ready(settings: dict[str, str]) -> list[float]:
    """All that a worker does before it is ready (`env.runner.op_warm`). Returns seconds a step and the time now."""
    import torch

    from env.profile import warm_profiler

    os.environ.update(settings)
    times = [time.time()]
    torch.zeros(1, device="cuda")
    times.append(time.time())
    torch.empty(256 << 20, dtype=torch.uint8, device="cuda").zero_()
    torch.cuda.synchronize()
    times.append(time.time())
    warm_profiler()
    times.append(time.time())
    return [after - before for before, after in itertools.pairwise(times)] + [times[-1]]


class Burst:
    """`count` processes, at most `width` starting at once. All are ended when it is over, whatever happens."""

    def __init__(self, count: int, width: int, settings: dict[str, str]):
        self.count, self.width, self.settings = count, width, settings
        self.pids: list[int] = []
        self.rows: list[list[float]] = []

    def run(self) -> dict[str, Any]:
        began = time.time()
        read, write = os.pipe()
        try:
            while len(self.rows) < self.count:
                while len(self.pids) < min(self.count, len(self.rows) + self.width):
                    self.pids.append(self._start(write))
                if not select.select([read], [], [], began + LIMIT_S - time.time())[0]:
                    raise TimeoutError(f"{len(self.rows)} of {self.count} contexts after {LIMIT_S:.0f} s")
                self.rows += [json.loads(line) for line in os.read(read, 65536).splitlines()]
            ready = max(row[-1] for row in self.rows) - began
        finally:
            ending = time.time()
            for pid in self.pids:
                os.kill(pid, signal.SIGKILL)
            for pid in self.pids:
                os.waitpid(pid, 0)
            os.close(read)
            os.close(write)
        steps = {name: round(sum(row[i] for row in self.rows) / self.count, 3) for i, name in enumerate(STEPS)}
        return {
            "count": self.count, "width": self.width, "mean_s": steps, "ready_s": round(ready, 3),
            "each_s": round(ready / self.count, 3), "exit_each_s": round((time.time() - ending) / self.count, 3),
            "from": began, "to": ending,
        }  # fmt: skip

    def _start(self, write: int) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                # One write below PIPE_BUF: lines of different processes don't mix.
                os.write(write, (json.dumps(_become_ready(self.settings)) + "\n").encode())
                signal.pause()
            finally:
                os._exit(0)
        return pid


def time_kernels(path: Path) -> None:
    """Time two kernels for as long as this process lives; a line a block: [when, which, times in us]."""
    import torch

    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    shapes = {"small": (1024, 1024), "large": (8192, 2048)}
    tensors = {name: [torch.randn(shape, device="cuda") for _ in range(2)] for name, shape in shapes.items()}
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(CALLS)]
    with open(path, "a", buffering=1, encoding="utf-8") as file:
        while True:
            for name, (x, y) in tensors.items():
                for start, end in events:
                    flush.zero_()
                    torch.cuda._sleep(80_000)
                    start.record()
                    torch.mul(x, 2.0, out=y)
                    end.record()
                torch.cuda.synchronize()
                times = [start.elapsed_time(end) * 1e3 for start, end in events]
                file.write(json.dumps([time.time(), name, times]) + "\n")


def during(blocks: list[list[Any]], begin: float, end: float) -> dict[str, Any]:
    """What the timed kernels took within a window: the better third of calls, as `env.timing` has it."""
    import numpy as np

    from env.timing import lower_mean

    found = {}
    for name in ("small", "large"):
        centres = [
            float(lower_mean(np.array(times))) for when, kind, times in blocks if kind == name and begin < when < end
        ]
        if centres:
            spread = float(np.std(centres) / np.mean(centres))
            found[name] = {
                "blocks": len(centres),
                "us": round(float(np.median(centres)), 3),
                "spread": round(spread, 4),
            }
    return found


def contexts(context: Any) -> None:
    """Section: contexts made 16 at once, 4 at once and one by one, under each setting."""
    if context.device != "cuda":
        context.data["skipped"] = "needs a GPU"
        return
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench.contexts"], cwd=ROOT, capture_output=True, text=True,
        timeout=60.0 * context.minutes + 60.0, start_new_session=True,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"contexts could not be measured: {done.stderr[-800:]}")
    context.data.update(json.loads(done.stdout))
    for row in context.data["bursts"]:
        print("  ", json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--timer", type=Path, default=None, help="(used by itself) time kernels into this file")
    parser.add_argument("--count", type=int, default=16)
    args = parser.parse_args()
    if args.timer is not None:
        time_kernels(args.timer)
        return
    # Before forking, as the fork server does. This process makes no context.
    for name in ("torch._dynamo", "torch._inductor", "env.profile"):
        importlib.import_module(name)

    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "blocks"
        log.touch()
        command = [sys.executable, "-m", "scripts.bench.contexts", "--timer", str(log)]
        timer = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            end = time.time() + 60
            while not log.stat().st_size and timer.poll() is None and time.time() < end:
                time.sleep(0.1)
            for name, settings in SETTINGS.items():
                for width in (args.count, 4, 1):
                    quiet = time.time()
                    time.sleep(QUIET_S)
                    row = Burst(args.count if width > 1 else 4, width, settings).run()
                    found.append({"setting": name, **row, "quiet_from": quiet})
        finally:
            timer.kill()
            timer.wait()
        blocks = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("]")]
    for row in found:
        begin, end, quiet = row.pop("from"), row.pop("to"), row.pop("quiet_from")
        row["quiet"], row["beside"] = during(blocks, quiet, begin), during(blocks, begin, end)
    print(json.dumps({"bursts": found}))


if __name__ == "__main__":
    main()
