#!/usr/bin/env bash
# Figure 2, left: trained with and without the hacking check, both evaluated with it.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need trloo no_hack_check
draw figure_2
run_all
