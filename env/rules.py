"""What a verdict rests on: a named set of rules, the same for the reference and for the candidate.

Runs everywhere. `default` is ours; `kernelbench` and `paper` judge values and times as those two do, so that published
numbers can be compared like with like. Whether the candidate's own kernels do the work is checked under all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

PRECISIONS = ("ieee", "tf32")
REFERENCES = ("eager", "compile")
TIMES = ("eager", "device")


@dataclass(frozen=True)
class Rules:
    """One way of judging. Times in seconds unless the name says otherwise.

    trials: correctness trials in train mode. all_modes: eval mode, gradients on, moved weights and near-repeated inputs
    on top. tolerance: None for ours (by dtype, magnitude and output), else atol = rtol by dtype as `torch.allclose` has
    it, the largest precision first. mean_of: None for the paired, cold, interval-driven measurement, else the mean of
    that many warm calls a side. precision: float32 products on both sides, `ieee` or `tf32`. reference: run as it is or
    through torch.compile. rewarded_time: which of the two measured times `speedup` is made of. modelled: nothing is
    timed (the CPU): `mean_of` and `rewarded_time` don't apply, and tf32 is a tolerance only. max_host_gb: memory of one
    worker process on the host. spares: workers kept warm beside those in use.
    """

    name: str = "default"
    trials: int = 5
    all_modes: bool = True
    tolerance: dict[str, float] | None = None
    mean_of: int | None = None
    precision: str = "ieee"
    reference: str = "eager"
    rewarded_time: str = "eager"
    modelled: bool = False
    compile_timeout_s: float = 60.0
    run_timeout_s: float = 30.0
    max_host_gb: float = 8.0
    spares: int = 1
    weak_isolation: bool = False

    def __post_init__(self) -> None:
        for name, known in (("precision", PRECISIONS), ("reference", REFERENCES), ("rewarded_time", TIMES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} = {getattr(self, name)!r}: use one of {', '.join(known)}")
        if self.trials < 1:
            raise ValueError(f"trials = {self.trials}: at least one is needed to know whether a candidate is right")

    def describe(self) -> str:
        """In a word or two, for the verdict: by which rules it was reached."""
        timed = f"mean of {self.mean_of} warm calls" if self.mean_of else f"{self.rewarded_time} time"
        if self.modelled:
            timed = "modelled time"
        tolerated = self.modelled and self.precision == "tf32"
        products = "float32 with the tolerance of tf32" if tolerated else f"float32 as {self.precision}"
        return f"{self.name}, {products}, {self.reference} reference, {self.trials} trials, {timed}"

    def on(self, device: str) -> Rules:
        """The same rules as far as they apply on a device."""
        return replace(self, modelled=device == "cpu")


PROFILES = {
    "default": Rules(),
    # KernelBench since its version 0.1: torch.allclose with 1e-4 for float32 and 1e-2 below, five trials, the mean of
    # 100 calls that find the L2 cache as the last one left it.
    "kernelbench": Rules(
        name="kernelbench",
        all_modes=False,
        tolerance={"float64": 1e-4, "float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-2},
        mean_of=100,
    ),
    # Dr. Kernel / KernelGYM: 1e-2 for all.
    "paper": Rules(
        name="paper",
        all_modes=False,
        tolerance={"float64": 1e-2, "float32": 1e-2, "float16": 1e-2, "bfloat16": 1e-2},
        mean_of=100,
    ),
}


def rules_for(profile: str = "default", device: str = "cpu", **changes: object) -> Rules:
    """The rules of a profile on a device, with single fields changed. Raises ValueError naming what is unknown."""
    if profile not in PROFILES:
        raise ValueError(f"unknown verdict profile {profile!r}: use one of {', '.join(PROFILES)}")
    # On a GPU a worker's context takes a while, and the driver makes them one by one.
    return replace(PROFILES[profile], **{"spares": 24 if device == "cuda" else 1, **changes}).on(device)
