#!/usr/bin/env bash
# Sweep over tau and s of PRS and over the bounds of MRS, around the whole method (tau 0.3, s 0.1, 0.999 to 1.001).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need mrs_pr_prs tau_0.1 tau_0.2 tau_0.5 s_0.05 s_0.2 mrs_0.9999 mrs_0.99 mrs_trajectory
draw sweep
run_all
