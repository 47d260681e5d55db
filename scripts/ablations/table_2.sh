#!/usr/bin/env bash
# Table 2: Fast@p against torch.compile: the whole method, and trained against torch.compile too. Needs a GPU.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

((${#gpus[@]})) || fail "needs a GPU: on the CPU times are modelled and there is no compiled reference"
need mrs_pr_prs compile_reference
need_eval mrs_pr_prs mrs_pr_prs --turns "${EVAL_TURNS:-3}" --samples "${EVAL_SAMPLES:-8}" --reference both
need_eval compile_reference compile_reference --turns "${EVAL_TURNS:-3}" --samples "${EVAL_SAMPLES:-8}" --reference both
draw table_2
run_all
