"""What a run needs of this machine beside folders: a GPU that is free, its driver, a compiler. Runs in scripts.prepare.

Asks nvidia-smi and looks at files; CUDA is not touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

# A GPU on which nobody works still has some of its memory taken by the driver.
IDLE_BYTES = 2 * 2**30
BUSY_ALLOWED = "ALLOW_BUSY_GPU"


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi tells of it: `total` and `used` in bytes, `processes` as (pid, program)."""

    index: str
    uuid: str
    name: str
    total: int
    used: int
    processes: tuple[tuple[str, str], ...] = ()


def _query(what: str) -> list[list[str]]:
    """Rows of an nvidia-smi query; [] where there is no driver that answers."""
    command = ["nvidia-smi", what, "--format=csv,noheader,nounits"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[part.strip() for part in line.split(",")] for line in out.splitlines() if line.strip()]


def gpus(visible: list[str]) -> list[Gpu]:
    """Those of the machine's GPUs that `visible` names by index or UUID, as CUDA_VISIBLE_DEVICES does."""
    rows = [row for row in _query("--query-gpu=index,uuid,name,memory.total,memory.used") if len(row) == 5]
    running = [row for row in _query("--query-compute-apps=gpu_uuid,pid,process_name") if len(row) >= 3]
    found = []
    for index, uuid, name, total, used in rows:
        if any(wanted == index or (wanted and uuid.startswith(wanted)) for wanted in visible):
            mine = tuple((pid, program) for owner, pid, program, *_ in running if owner == uuid)
            found.append(Gpu(index, uuid, name, _mib(total), _mib(used), mine))
    return found


def _mib(text: str) -> int:
    return int(text) * 2**20 if text.isdigit() else 0  # "[N/A]" on some


def faults(found: list[Gpu]) -> list[str]:
    """What keeps a run from these GPUs, one message each: no compiler for Triton's launchers, somebody else at work."""
    said = []
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang", "cc")), "")
    if not compiler or not shutil.which(compiler.split()[0]):
        said.append(
            f"no C compiler ({'CC=' + compiler if compiler else 'gcc, clang or cc'}), which Triton needs to launch "
            "kernels: install one (apt-get install gcc), or set CC to it"
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        said.append(
            f"no {header}, which Triton needs to launch kernels: install Python's headers (apt-get install "
            "python3-dev), or set PYTHON to an interpreter that brings them"
        )
    if os.environ.get(BUSY_ALLOWED) == "1":
        return said
    for gpu in found:
        if not gpu.processes and gpu.used <= IDLE_BYTES:
            continue
        who = ", ".join(f"{program} (pid {pid})" for pid, program in gpu.processes[:4]) or "a process that isn't shown"
        said.append(
            f"GPU {gpu.index} is in use: {gpu.used / 2**30:.1f} GiB are taken by {who}. Times measured beside somebody "
            f"else mean nothing: wait, choose another one (CUDA_VISIBLE_DEVICES), or set {BUSY_ALLOWED}=1"
        )
    return said
