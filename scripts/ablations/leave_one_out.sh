#!/usr/bin/env bash
# Beyond the paper's figures: each part taken from the whole method, other baselines, no speedup cap.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need mrs_pr_prs no_mrs no_pr mrs_pr prs_hard no_cap compile_reference trloo grpo grpo_std rloo
draw leave_one_out
run_all
