"""The kernel table of a forward pass on a GPU, with the candidate's own kernels told apart.

Runs in the worker. A device activity is an own kernel where its correlation id belongs to a driver call made while one
of the candidate's own Triton functions was being launched: never a matter of names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from env.launches import LaunchLog

_MARK = "kernel-judge-own-launch"
_COPIES = ("Memcpy", "Memset")


def warm_profiler() -> None:
    """The first use in a process costs seconds; later ones milliseconds."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()


@contextmanager
def _marked(name: str, own: bool) -> Iterator[None]:
    if not own:
        yield
        return
    with record_function(_MARK + name):
        yield


def profiled_call(model: Any, arguments: list, log: LaunchLog) -> list[dict[str, Any]]:
    """[{name, own, count, time_us}] for one forward pass, the longest first; empty where the profiler saw nothing."""
    log.around = _marked
    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            model(*arguments)
            torch.cuda.synchronize()
    finally:
        log.around = None
    return _table(list(profiler.profiler.kineto_results.events()))


def _table(events: list[Any]) -> list[dict[str, Any]]:
    on_device = torch.autograd.DeviceType.CUDA
    device_events = [e for e in events if e.device_type() == on_device and _MARK not in e.name()]
    host_events = [e for e in events if e.device_type() != on_device]
    marks = [
        (e.start_ns(), e.start_ns() + e.duration_ns(), e.name().removeprefix(_MARK))
        for e in host_events
        if e.name().startswith(_MARK)
    ]
    own_ids: dict[int, str] = {}
    for event in host_events:
        if event.correlation_id() and "aunch" in event.name():
            start = event.start_ns()
            kernel = next((name for low, high, name in marks if low <= start <= high), None)
            if kernel is not None:
                own_ids[event.correlation_id()] = kernel
    rows: dict[tuple[str, bool], list[float]] = {}
    for event in device_events:
        name = event.name()
        if event.duration_ns() <= 0 or name == "Context Sync" or "Synchronize" in name:
            continue
        own = event.correlation_id() in own_ids and not name.startswith(_COPIES)
        if own:
            name = own_ids[event.correlation_id()]  # as the launch log has it
        row = rows.setdefault((name[:120], own), [0, 0.0])
        row[0] += 1
        row[1] += event.duration_ns() / 1000.0
    table = [{"name": n, "own": own, "count": int(c), "time_us": t} for (n, own), (c, t) in rows.items()]
    return sorted(table, key=lambda row: (-row["time_us"], row["name"]))
