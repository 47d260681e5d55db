"""What this machine can isolate and measure: `python -m env.doctor [--json] [--device cpu|cuda]`.

Runs in the driver and tries everything in real workers, as a hostile candidate would, instead of asking the system what
it claims. Exits 0 when the minimum for running foreign code is met, else 1. Needs no GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from env import doctor_probes as probes
from env import hostmemory, isolation
from env.landlock import ROOT
from env.wire import WireError, WireTimeout
from env.worker import ForkServer, Worker, WorkerDied, WorkerTimeout, is_running

HOG_LIMIT = 768 << 20
_LEFT_BEHIND = "kernel-judge-dr"
NOT_TRIED = "couldn't be tried"
# A candidate that gets through one of these must not be run, whatever the layers claim.
_REACHED = ("write outside its folder", "reach the network")
_MUST_BE_REFUSED = (*_REACHED, "leave a process behind")


@dataclass(frozen=True)
class Finding:
    """One line of the report. `ok`: None where it doesn't apply here."""

    area: str
    name: str
    ok: bool | None
    detail: str
    advice: str = ""


def _finding(area: str, name: str, ok: bool | None, detail: str) -> Finding:
    # Without a GPU its line says what that means; the lines about it needn't.
    return Finding(
        area, name, ok, detail, probes.ADVICE.get(name, "") if ok is False or (name == "GPU" and not ok) else ""
    )


def _load(worker: Worker, source: str, timeout_s: float = 60.0) -> dict:
    path = f"{worker.scratch}/probe.py"
    return worker.call("load", timeout_s, source=source, path=path, module="probe", watch=None, **{"class": "Probe"})


def _facts(server: ForkServer, source: str) -> dict[str, str]:
    """Run a probe in a worker of its own. Returns what it found, or {"": why it found nothing}."""
    worker = server.fork()
    try:
        reply = _load(worker, source)
        if not reply["ok"]:
            return {"": reply["message"]}
        return json.loads(worker.call("init_inputs", 30.0)["layout"]["items"][0]["value"])
    except (WorkerDied, WorkerTimeout) as error:
        return {"": f"the worker ended: {error}"}
    finally:
        worker.end()


# Isolation -----------------------------------------------------------------------------------------------------------


def layers(report: dict[str, str]) -> list[Finding]:
    """The layers that a worker has, as the fork server's first one reported them."""
    return [
        _finding("layer", name, state == "on", "" if state == "on" else state.removeprefix("off: "))
        for name, state in sorted(report.items(), key=lambda item: item[1] != "on")
    ]


def _reach(server: ForkServer) -> list[Finding]:
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        # The mode lets any user read and write it: only the sandbox is in the way.
        secret = Path(folder) / "secret.txt"
        secret.write_text("a file of yours")
        secret.chmod(0o666)
        Path(folder).chmod(0o755)
        source = probes.fill(probes.REACH, 
            secret=str(secret), readme=str(ROOT / "README.md"), home=str(server.home), judge=os.getpid(),
            port=listener.getsockname()[1],
        )  # fmt: skip
        facts = _facts(server, source)
    if "" in facts:  # the probe found nothing
        return [_finding("tried", name, False, f"{NOT_TRIED}: {facts['']}") for name in _REACHED]
    return [_finding("tried", name, answer.startswith("refused"), answer) for name, answer in facts.items()]


def _leave_behind(server: ForkServer) -> Finding:
    worker = server.fork()
    started, pids = False, []
    try:
        started = _load(worker, probes.fill(probes.LEAVE_BEHIND, name=_LEFT_BEHIND))["ok"]
        pids = hostmemory.descendants(worker.supervisor)[0]
    except (WorkerDied, WorkerTimeout) as error:
        return _finding("tried", "leave a process behind", False, f"{NOT_TRIED}: {error}")
    finally:
        worker.end()
    left = [pid for pid in pids if is_running(pid)]
    if not started or len(pids) < 2:
        return _finding("tried", "leave a process behind", False, f"{NOT_TRIED}: no process was started")
    ended = f"refused: {len(pids)} processes ended with the worker"
    return _finding("tried", "leave a process behind", not left, f"done: {len(left)} left" if left else ended)


def _exhaust(server: ForkServer) -> list[Finding]:
    """A memory hog that stops by itself soon after a small limit, and a small fork bomb."""
    worker = server.fork()
    try:
        _load(worker, probes.fill(probes.HOG, mebibytes=(HOG_LIMIT >> 20) + 512))
        memory = _finding("tried", "fill the memory", False, "done: 512 MiB over its limit and not ended")
    except (WorkerDied, WorkerTimeout) as error:
        ended = getattr(error, "oom", False)
        said = f"refused: ended at its limit of {HOG_LIMIT / 2**30:.2f} GiB of host memory"
        memory = _finding("tried", "fill the memory", ended, said if ended else f"{NOT_TRIED}: {error}")
    finally:
        worker.end()
    wanted = isolation.MAX_PROCESSES + 100
    worker = server.fork()
    try:
        _load(worker, probes.fill(probes.FORK_BOMB, processes=wanted))
        count = len(hostmemory.descendants(worker.supervisor)[0])
        verb = "refused" if count <= isolation.MAX_PROCESSES else "done"
        bomb = _finding("tried", "fork bomb", verb == "refused", f"{verb}: {count} of {wanted} processes")
    except (WorkerDied, WorkerTimeout) as error:
        ended = getattr(error, "oom", False)
        bomb = _finding("tried", "fork bomb", ended, f"{'refused' if ended else NOT_TRIED}: {error}")
    finally:
        worker.end()
    return [memory, bomb]


# Measurement ---------------------------------------------------------------------------------------------------------


def _said(facts: dict[str, str], names: tuple[str, ...]) -> list[Finding]:
    """Findings from facts that say "done: ..." or "failed: ..."."""
    why = facts.get("", "not reached")
    return [
        _finding(
            "measure", name, facts.get(name, "").startswith("done"), facts.get(name, why).partition(": ")[2] or why
        )
        for name in names
    ]


def _gpu() -> Finding:
    tool = shutil.which("nvidia-smi")
    if not tool or not Path("/dev/nvidiactl").exists():
        return _finding("measure", "GPU", None, "none visible")
    query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    lines = found.stdout.strip().splitlines()
    detail = "; ".join(lines) or found.stderr.strip()
    return _finding("measure", "GPU", found.returncode == 0 and bool(lines), detail)


def _clocks() -> Finding:
    """Clocks and throttle reasons through NVML, which is optional."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return _finding("measure", "clocks and throttling", True, f"{clock} MHz, throttle reasons {reasons:#x}")
    except ImportError:
        return _finding("measure", "clocks and throttling", False, "the package nvidia-ml-py (pynvml) isn't installed")
    except Exception as error:  # NVML's own classes, which exist only where the package does
        return _finding("measure", "clocks and throttling", False, f"{type(error).__name__}: {error}")


def _with_server(device: str, ask: Callable[[ForkServer], list[Finding]]) -> list[Finding]:
    try:
        server = ForkServer(device, weak_isolation=True)
    except (WireError, WireTimeout) as error:
        return [_finding("measure", f"{device} workers", False, f"the fork server couldn't start: {error}")]
    try:
        return ask(server)
    finally:
        server.close()


def measurable(device: str) -> list[Finding]:
    """What can be measured with workers for a GPU: `cuda` asks for one, `cpu` only for what needs none."""
    gpu = _gpu()
    found = [gpu]

    def ask(server: ForkServer) -> list[Finding]:
        findings = _said(_facts(server, probes.fill(probes.COMPILE, capability=90)), ("Triton compiles", "C compiler"))
        names = ("CUDA in a worker", "Triton on the GPU", "bfloat16", "profiler events")
        if gpu.ok:
            return findings + _said(_facts(server, probes.CUDA), names)
        return findings + [_finding("measure", name, None, "no GPU") for name in names]

    if device == "cuda" or gpu.ok:
        found += _with_server("cuda", ask)
        bindings = (
            importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None
        )
        found.append(_finding("measure", "cuda-bindings", bindings, "" if bindings else "not installed"))
        found.append(_clocks() if gpu.ok else _finding("measure", "clocks and throttling", None, "no GPU"))
    else:
        found.append(
            _finding("measure", "bfloat16", False, "Triton's interpreter computes it wrongly: refused on the CPU")
        )
    return found


def versions() -> dict[str, str]:
    """Versions of what a number depends on."""
    found = {"python": platform.python_version(), "kernel": platform.release(), "machine": platform.machine()}
    for name in ("torch", "triton", "numpy", "cuda-bindings", "nvidia-ml-py"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "-"
    return found


# The report ----------------------------------------------------------------------------------------------------------


def examine(device: str) -> dict:
    """Try everything. Returns {"minimum_met", "missing", "findings", "versions", "seconds"}."""
    started = time.monotonic()
    findings: list[Finding] = []
    missing: list[str] = []
    try:
        server = ForkServer("cpu", max_host_bytes=HOG_LIMIT, weak_isolation=True)
    except (WireError, WireTimeout) as error:
        missing = [f"no worker can be started ({error}); the reason is in the lines above"]
    else:
        try:
            missing = isolation.minimum(server.isolation)
            findings += layers(server.isolation)
            findings += [*_reach(server), _leave_behind(server), *_exhaust(server)]
            findings += _said(_facts(server, probes.INTERPRETER), ("Triton's interpreter",))
        finally:
            server.close()
        through = [f for f in findings if f.name in _MUST_BE_REFUSED and not f.ok]
        missing += [
            f"a worker {'may' if finding.detail.startswith(NOT_TRIED) else 'could'} {finding.name} ({finding.detail})"
            for finding in through
        ]
        findings += measurable(device)
    return {
        "minimum_met": not missing,
        "missing": missing,
        "findings": [asdict(finding) for finding in findings],
        "versions": versions(),
        "seconds": round(time.monotonic() - started, 1),
    }


_TITLES = {
    "layer": "Layers around a worker",
    "tried": "Tried from inside a worker",
    "measure": "Measurement",
}


def render(report: dict) -> str:
    """The report as a table for a terminal, advice below what is missing."""
    lines: list[str] = []
    for area, title in _TITLES.items():
        rows = [finding for finding in report["findings"] if finding["area"] == area]
        if not rows:
            continue
        lines += ["", title]
        for row in rows:
            good, bad = (
                ("refused", "POSSIBLE") if area == "tried" else ("on", "OFF") if area == "layer" else ("yes", "NO")
            )
            state = "-" if row["ok"] is None else good if row["ok"] else bad
            if row["detail"].startswith(NOT_TRIED):
                state = "UNKNOWN"
            detail = row["detail"].removeprefix("refused: ").removeprefix("done: ")
            lines.append(f"  {row['name']:<30}{state:<10}{detail}".rstrip())
            if row["advice"]:
                lines += textwrap.wrap(row["advice"], 100, initial_indent="      -> ", subsequent_indent="         ")
    lines += ["", "Versions", "  " + ", ".join(f"{name} {value}" for name, value in report["versions"].items()), ""]
    if report["minimum_met"]:
        lines.append("The minimum for running foreign code is met.")
    else:
        lines.append("The minimum for running foreign code is NOT met. Missing:")
        lines += [f"  - {text}" for text in report["missing"]]
    return "\n".join(lines).lstrip("\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m env.doctor",
        description="What this machine can isolate and measure, tried in real workers.",
        epilog=f"Where a driver doesn't bear a layer, {isolation.LAYERS_OFF}='own uid,seccomp' (names as in the table) "
        "leaves layers out, to find the one: a diagnosis, no setting to live with.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None, help="default: cuda where a GPU is visible")
    args = parser.parse_args(argv)
    try:
        report = examine(args.device or ("cuda" if Path("/dev/nvidiactl").exists() else "cpu"))
    except KeyboardInterrupt:
        print("env.doctor: stopped by Ctrl-C; nothing is known", file=sys.stderr)
        return 130
    print(json.dumps(report, indent=1) if args.json else render(report))
    return 0 if report["minimum_met"] else 1


if __name__ == "__main__":
    sys.exit(main())
