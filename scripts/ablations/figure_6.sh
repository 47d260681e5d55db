#!/usr/bin/env bash
# Figure 6: the whole method's model over 14 turns, with every turn in the prompt and with the best 4.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need mrs_pr_prs
need_eval scaling_vanilla mrs_pr_prs --turns "${EVAL_TURNS:-14}" --samples "${EVAL_SAMPLES:-4}" --scaling vanilla
need_eval scaling_context mrs_pr_prs --turns "${EVAL_TURNS:-14}" --samples "${EVAL_SAMPLES:-4}" --scaling context --keep 4
draw figure_6
run_all
