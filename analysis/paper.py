"""Numbers quoted from the paper (arXiv 2602.05885), to stand beside ours and never to be mixed with them.

Percent of samples on KernelBench levels 1, 2, 3 at (Fast@1, Fast@1.2); 8 samples a problem, 3 turns, H100.
"""

from __future__ import annotations

Row = dict[str, tuple[float, float]]

TABLE_1: dict[str, Row] = {
    "GPT-5": {"L1": (19.5, 16.5), "L2": (46.7, 28.6), "L3": (21.0, 12.0)},
    "Claude-4.5-Sonnet": {"L1": (15.5, 13.5), "L2": (50.0, 26.7), "L3": (21.0, 11.0)},
    "AutoTriton": {"L1": (4.5, 3.6), "L2": (30.6, 9.2), "L3": (7.5, 0.0)},
    "cold-start 8B": {"L1": (7.5, 6.6), "L2": (8.8, 5.6), "L3": (0.5, 0.0)},
    "Dr. Kernel 8B": {"L1": (15.9, 12.8), "L2": (46.0, 20.0), "L3": (10.8, 1.0)},
    "Dr. Kernel 14B": {"L1": (20.3, 16.9), "L2": (49.2, 25.6), "L3": (8.8, 1.2)},
    "14B, test-time scaling, last turn": {"L1": (24.1, 18.8), "L2": (59.8, 31.6), "L3": (17.1, 3.0)},
    "14B, test-time scaling, best turn": {"L1": (39.3, 25.1), "L2": (80.9, 47.8), "L3": (29.8, 7.3)},
}
TABLE_2: dict[str, Row] = {
    "Dr. Kernel 14B": {"L1": (17.8, 5.0), "L2": (23.5, 1.9), "L3": (9.2, 3.0)},
}
