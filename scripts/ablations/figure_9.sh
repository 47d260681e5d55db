#!/usr/bin/env bash
# Figure 9: PRS with and without softness, and without PR and PRS.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need mrs_pr_prs prs_hard mrs
draw figure_9
run_all
