"""How long each part of a lazy answer takes, by CUDA graphs in a plain loop: JSON on stdin, JSON on stdout.

Runs as a process of its own on the GPU and executes nothing but the benchmark's own texts: the truth that the profiling
ratio is held against may not come from the judge.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

CALLS, REPLAYS = 10, 9


def _load(name: str, source: str, folder: Path) -> Any:
    # From a file: Triton reads a kernel's source through it.
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ModelNew().cuda()


def graph_us(call: Any, x: Any) -> float:
    """Median microseconds of `call(x)` on the device, launches of the host left out."""
    import torch

    for _ in range(3):
        call(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call(x)
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000.0 / CALLS)
    return statistics.median(times)


def main() -> None:
    import torch

    request = json.load(sys.stdin)
    torch.manual_seed(3)
    x = torch.randn(*request["shape"], device="cuda")
    found = {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for name, source in request["sources"].items():
            model = _load(name, source, Path(folder))
            # A part that returns its input launches nothing, and an empty graph can't be captured.
            parts = {
                part: 0.0 if getattr(model, part)(x) is x else graph_us(getattr(model, part), x)
                for part in ("before", "own", "after")
            }
            whole = graph_us(model, x)
            row = {f"{part}_us": time for part, time in parts.items()}
            found[name] = {**row, "whole_us": whole, "share": parts["own"] / sum(parts.values())}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
