# The variants: what each changes in the recipe. Sourced by common.sh. One list for all figures, so that a run is shared
# by those that show it, and two figures can't mean different things by one name.
#
# Figures 2, 4 and 8 are about advantages and the hacking check: their base is TRLOO alone. Figures 5, 7 and 9 add MRS
# (with the token veto), PR and PRS one after the other; mrs_pr_prs is the whole method, and the sweep starts from it.

plain="rejection.mrs=off rejection.token_veto=0.0 rejection.prs=off reward.profiling_ratio=false"
mrs="rejection.mrs=sample rejection.token_veto=0.0001"
whole="$mrs reward.profiling_ratio=true rejection.prs=soft rejection.prs_tau=0.3 rejection.prs_s=0.1"

declare -A VARIANTS=(
    [trloo]="advantage.estimator=trloo $plain"
    [no_hack_check]="advantage.estimator=trloo $plain reward.hack_check=false"
    [grpo]="advantage.estimator=grpo $plain"
    [grpo_std]="advantage.estimator=grpo_std $plain"
    [rloo]="advantage.estimator=rloo $plain"
    [single_turn]="advantage.estimator=trloo $plain rollout.turns=1"
    [gamma_0]="advantage.estimator=trloo $plain advantage.gamma=0.0"

    [mrs]="$mrs rejection.prs=off reward.profiling_ratio=false"
    [mrs_pr]="$mrs rejection.prs=off reward.profiling_ratio=true" # PRS off
    [mrs_pr_prs]="$whole"                                         # PRS soft
    [prs_hard]="$whole rejection.prs=hard"
    [no_mrs]="$whole rejection.mrs=off rejection.token_veto=0.0"
    [no_pr]="$whole reward.profiling_ratio=false"
    [no_cap]="$whole reward.speedup_cap=1000000000.0" # a cap that nothing reaches
    [compile_reference]="$whole env.reference=compile"

    [tau_0.1]="$whole rejection.prs_tau=0.1"
    [tau_0.2]="$whole rejection.prs_tau=0.2"
    [tau_0.5]="$whole rejection.prs_tau=0.5"
    [s_0.05]="$whole rejection.prs_s=0.05"
    [s_0.2]="$whole rejection.prs_s=0.2"
    [mrs_0.9999]="$whole rejection.mrs_low=0.9999 rejection.mrs_high=1.0001"
    [mrs_0.99]="$whole rejection.mrs_low=0.99 rejection.mrs_high=1.01"
    [mrs_trajectory]="$whole rejection.mrs=trajectory"
)
