"""The records that cross env's border: a problem in, a verdict out.

Runs in every process. Standard library only, so that readers of run folders need neither torch nor a GPU.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from typing import Any

RECORD_VERSION = 1

# The candidate's doing: these enter the reward.
CANDIDATE_STATUSES = ("correct", "incorrect", "hack", "compile_error", "runtime_error", "timeout", "oom")
# Ours: no reward, retried, never shown to the policy as its fault.
BLAMELESS_STATUSES = ("problem_error", "infra_error")
STATUSES = CANDIDATE_STATUSES + BLAMELESS_STATUSES
# Key of an infra_error's evidence: why a candidate's modelled times can't be proven. Trying again wouldn't help.
UNPROVEN = "unproven"


def sha256(text: str) -> str:
    """Hex digest of a text's UTF-8 bytes (lone surrogates survive, so that any model output can be hashed)."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class Problem:
    """A reference in the KernelBench format: a module class, `get_inputs()` and `get_init_inputs()`."""

    id: str
    source: str
    entry_point: str = "Model"
    level: int = 0
    name: str = ""
    origin: str = ""
    precision: str = "fp32"
    version: int = RECORD_VERSION

    @property
    def sha256(self) -> str:
        """Identity of the problem for caches: what it computes, not what it is called."""
        return sha256(f"{self.entry_point}\n{self.precision}\n{self.source}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Problem:
        return cls(**data)


@dataclass
class Verdict:
    """What the judge says of one candidate on one problem.

    Times are in microseconds and are None where nothing was measured. `time_kind` says what they are: `modelled` (CPU,
    bytes over a stated bandwidth plus a constant a launch) or `eager` (CUDA events around the call).
    `speedup` is reference_us / candidate_us, with a 95 % interval [speedup_low, speedup_high].
    `profile` rows: {name, own, count, time_us}; `profiling_ratio` = own device time / all device time, in [0, 1].
    `evidence` holds what the status rests on: {rule, ...} for a hack, launches, checks, isolation.
    `cost` is wall-clock seconds a stage: the only field that may differ between two equal runs on the CPU.
    """

    status: str
    message: str = ""
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    reference_us: float | None = None
    candidate_us: float | None = None
    time_kind: str = ""
    profiling_ratio: float | None = None
    profile: list[dict[str, Any]] = field(default_factory=list)
    values_match: bool | None = None
    evidence: dict[str, Any] = field(default_factory=dict)
    feedback: str = ""
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    seeds: dict[str, int] = field(default_factory=dict)
    problem_sha256: str = ""
    candidate_sha256: str = ""
    cost: dict[str, float] = field(default_factory=dict)
    version: int = RECORD_VERSION

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"unknown status {self.status!r}; known: {', '.join(STATUSES)}")

    @property
    def blameless(self) -> bool:
        """True where the fault is ours or the problem's: such a verdict earns nothing and is nobody's mistake."""
        return self.status in BLAMELESS_STATUSES

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Verdict:
        return cls(**data)
