#!/usr/bin/env bash
# Figure 4: TRLOO, GRPO, single turn, gamma = 0, no hacking check; over steps and over turns.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need trloo grpo single_turn gamma_0 no_hack_check
draw figure_4
run_all
