#!/usr/bin/env bash
# Figure 8: the hacking ratio over steps, with the hacking check and (for contrast) without.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need trloo no_hack_check
draw figure_8
run_all
