#!/usr/bin/env bash
# Table 1: Fast@p by problem set against the eager reference: cold start, TRLOO, the whole method.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need trloo mrs_pr_prs
need_eval cold_start base --turns "${EVAL_TURNS:-3}" --samples "${EVAL_SAMPLES:-8}"
need_eval trloo trloo --turns "${EVAL_TURNS:-3}" --samples "${EVAL_SAMPLES:-8}"
need_eval mrs_pr_prs mrs_pr_prs --turns "${EVAL_TURNS:-3}" --samples "${EVAL_SAMPLES:-8}"
draw table_1
run_all
