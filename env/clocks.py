"""What the GPU ran at while it was timed: clocks, and whether it was being slowed down.

Runs in the evaluator. Needs NVML's Python package (nvidia-ml-py); without it nothing is recorded, as the doctor says.
"""

from __future__ import annotations

from typing import Any

# Bits of NVML's clock event reasons that mean that the chip can't run as fast as it is asked to. Idle, and limits that
# somebody has set, are not among them: both sides are measured under those.
SLOWED = {0x08: "hardware slowdown", 0x20: "too hot (software)", 0x40: "too hot (hardware)", 0x80: "power brake"}


class Clocks:
    """One GPU's clocks, found by its UUID: NVML counts GPUs that CUDA doesn't show this process."""

    def __init__(self, nvml: Any, uuid: str):
        self.nvml = nvml
        nvml.nvmlInit()
        self.handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._reasons = getattr(
            nvml, "nvmlDeviceGetCurrentClocksEventReasons", None
        ) or getattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None)  # fmt: skip

    def read(self) -> dict[str, Any] | None:
        """{sm_mhz, memory_mhz, slowed: [why, …]}, None where the driver doesn't answer."""
        try:
            reasons = self._reasons(self.handle) if self._reasons else 0
            return {
                "sm_mhz": self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM),
                "memory_mhz": self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_MEM),
                "slowed": [why for bit, why in SLOWED.items() if reasons & bit],
            }
        except self.nvml.NVMLError:
            return None


def open_clocks() -> Clocks | None:
    """The clocks of the GPU that this process sees, None where they can't be read."""
    try:
        import pynvml
    except ImportError:
        return None
    import torch

    try:
        return Clocks(pynvml, f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    except (pynvml.NVMLError, AttributeError):  # (a torch that doesn't know its GPU's UUID)
        return None
