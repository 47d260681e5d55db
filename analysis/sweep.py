"""The sweep over PRS's tau and s and MRS's bounds, held against the whole method. `python -m analysis.sweep ...`."""

from __future__ import annotations

import sys

from analysis.compare import main_of_variants

VARIANTS = {
    "mrs_pr_prs": "tau 0.3, s 0.1, MRS 0.999",
    "tau_0.1": "tau 0.1",
    "tau_0.2": "tau 0.2",
    "tau_0.5": "tau 0.5",
    "s_0.05": "s 0.05",
    "s_0.2": "s 0.2",
    "mrs_0.9999": "MRS 0.9999",
    "mrs_0.99": "MRS 0.99",
    "mrs_trajectory": "MRS by trajectory",
}

if __name__ == "__main__":
    sys.exit(main_of_variants("sweep", "Sweep over tau, s and the bounds of MRS.", VARIANTS))
