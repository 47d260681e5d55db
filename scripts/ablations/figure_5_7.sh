#!/usr/bin/env bash
# Figures 5 and 7: TRLOO, + MRS, + PR, + PRS; Fast@1.2, entropy, gradient norm, perplexities.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need trloo mrs mrs_pr mrs_pr_prs
draw figure_5_7
run_all
