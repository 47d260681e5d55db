"""Each part taken from the whole method, and other baselines. `python -m analysis.leave_one_out --runs R --out D`."""

from __future__ import annotations

import sys

from analysis.compare import main_of_variants

VARIANTS = {
    "mrs_pr_prs": "whole method",
    "no_mrs": "no MRS",
    "no_pr": "no PR",
    "mrs_pr": "PRS off",
    "prs_hard": "PRS hard",
    "no_cap": "no speedup cap",
    "compile_reference": "torch.compile reference",
    "trloo": "TRLOO alone",
    "grpo": "GRPO (mean)",
    "grpo_std": "GRPO (std)",
    "rloo": "RLOO by trajectory",
}

if __name__ == "__main__":
    sys.exit(main_of_variants("leave_one_out", "Each part taken from the whole method.", VARIANTS))
