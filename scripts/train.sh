#!/usr/bin/env bash
# The whole loop, one stage after the other: cold start -> SFT -> RL -> held-out evaluation -> report.
#
#   bash scripts/train.sh                                     the recipe for this machine, into runs/<recipe>
#   bash scripts/train.sh mini-cpu                            2 CPU cores, Triton's interpreter: under 25 minutes, set-up included
#   bash scripts/train.sh mini-gpu                            1 GPU, measured kernels (rl/recipes/mini-gpu.toml)
#   bash scripts/train.sh mini-cpu --run short --set train.steps=2 --set collect.trajectories=40
#   bash scripts/train.sh mini-cpu --dry-run                  settings, plan, placement, memory, checks; nothing is written
#   bash scripts/train.sh mini-cpu --until sft                stops behind a stage (prepare, collect, sft, rl, eval)
#
# RECIPE: a name in rl/recipes/ or a .toml file. --set a.b=c: overrides one setting (repeatable). --run NAME: the folder
# runs/NAME (or a path, if it has a slash). Ctrl-C stops everything; the same command goes on where it stopped: a stage
# that is complete says so and ends at once, and a stage that was cut short resumes.
# PYTHON=/path/to/python uses that interpreter as it is (scripts/setup.sh). RANKS=N splits SFT and RL over N processes, a
# GPU each, by torchrun; without it scripts/ranks.py decides: where the engine is vllm, all GPUs that learn; else one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' scripts/train.sh; }
fail() { echo "train: $*" >&2; exit 2; }

# ---- arguments
recipe="" run="" dry="" until="report" overrides=()
while (($#)); do
    case "$1" in
        --set) [[ $# -ge 2 ]] || fail "--set needs key=value, e.g. --set train.steps=3"; overrides+=(--set "$2"); shift ;;
        --set=*) overrides+=(--set "${1#--set=}") ;;
        --run) [[ $# -ge 2 && -n "$2" ]] || fail "--run needs a name, e.g. --run first"; run="$2"; shift ;;
        --run=*) run="${1#--run=}" ;;
        --until) [[ $# -ge 2 ]] || fail "--until needs a stage, e.g. --until sft"; until="$2"; shift ;;
        --until=*) until="${1#--until=}" ;;
        --dry-run) dry=1 ;;
        -h | --help) usage; exit 0 ;;
        -*) fail "unknown option $1; known: --set KEY=VALUE, --run NAME, --until STAGE, --dry-run, --help" ;;
        *) [[ -z "$recipe" ]] || fail "two recipes given: $recipe and $1"; recipe="$1" ;;
    esac
    shift
done

if [[ -n "${RANKS:-}" && ! "$RANKS" =~ ^[1-9][0-9]*$ ]]; then fail "RANKS=$RANKS: a number of processes, 1 or more"; fi
[[ " prepare collect sft rl eval report " == *" $until "* ]] ||
    fail "--until $until: no such stage; known: prepare, collect, sft, rl, eval, report"

# ---- Ctrl-C or kill: whatever runs has a process group of its own, and all that came of it goes within 5 s
child=""

# descendants PID: it and all processes below it, whoever they run as. The judge's have sessions of their own.
descendants() {
    local line pid rest parent queue=("$1")
    declare -A below=()
    for pid in /proc/[0-9]*; do
        { read -r line <"$pid/stat"; } 2>/dev/null || continue
        rest="${line##*) }"
        parent="${rest#* }"
        below[${parent%% *}]+=" ${pid#/proc/}"
    done
    while ((${#queue[@]})); do
        pid="${queue[0]}"
        queue=("${queue[@]:1}" ${below[$pid]:-})
        echo "$pid"
    done
}

stop() {
    trap '' INT TERM HUP
    echo "train: stopping; the same command goes on from here" >&2
    if [[ -n "$child" ]]; then
        local all
        all="$(descendants "$child")"
        kill -INT -- "-$child" 2>/dev/null || true
        # shellcheck disable=SC2086
        for _ in {1..30}; do kill -0 $all 2>/dev/null || break; sleep 0.1; done
        # shellcheck disable=SC2086
        kill -KILL $(descendants "$child") $all 2>/dev/null || true
    fi
    exit 130
}
trap stop INT TERM HUP

# guarded COMMAND...: runs it in a process group of its own, so that `stop` can end it; returns its status.
guarded() {
    local status=0
    set -m # and SIGINT not ignored, as it is for background jobs of a script
    "$@" </dev/null &
    child=$!
    set +m
    wait "$child" || status=$?
    child=""
    return "$status"
}

# ---- set-up
SECONDS=0
guarded bash scripts/setup.sh || exit 1
source scripts/setup.sh
setup_s=$SECONDS
if [[ -z "$recipe" ]]; then
    recipe="$("$PYTHON" -c 'import torch; print("mini-gpu" if torch.cuda.is_available() else "mini-cpu")')"
    echo "train: no recipe given; this machine gets $recipe"
fi
if [[ -z "$run" ]]; then run="$(basename "$recipe" .toml)"; fi
[[ "$run" == */* ]] || run="runs/$run"

cores="$(nproc)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores < 8 ? cores : 8))}"
# Threads that wait for each other sleep: where they spin, a small model takes 4 to 12 times as long on a busy machine.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONHASHSEED=0
export CUBLAS_WORKSPACE_CONFIG=:4096:8 # deterministic matrix products; read when the first CUDA context is made

# Before anything is checked: whether there are GPUs enough depends on it.
ranks="${RANKS:-1}"
if [[ -z "${RANKS:-}" ]] && (($(nvidia-smi -L 2>/dev/null | grep -c '^GPU') > 1)); then
    ranks="$("$PYTHON" -m scripts.ranks --recipe "$recipe" "${overrides[@]}")" || exit 2
fi

if [[ -n "$dry" ]]; then
    WORLD_SIZE="$ranks" guarded "$PYTHON" -m scripts.prepare --recipe "$recipe" --run "$run" "${overrides[@]}" --dry-run || exit "$?"
    echo "Stages of $run:"
fi

# ---- one run a folder: the lock is inherited by every stage, so it holds until the last of their processes is gone
if [[ -z "$dry" ]]; then
    mkdir -p "$run"
    exec 8>>"$run/.lock"
    flock -n 8 || fail "$run is in use by another run; wait for it, stop it, or give this one its own folder: --run NAME"
fi

# stage TITLE DONE_FILE ARGUMENTS...: runs `python ARGUMENTS`. Whether a stage with a DONE_FILE (may be empty) is complete
# is for the program to say, which also sees whether its results are there; then its time is not noted again.
stage() {
    local title="$1" done_file="$2" started=$SECONDS status=0 noted=""
    shift 2
    if [[ -n "$done_file" && -e "$run/$done_file" ]]; then noted=1; fi
    echo "== $title: python $*"
    if [[ -n "$dry" ]]; then return; fi
    guarded "$PYTHON" "$@" || status=$?
    if ((status != 0)); then
        # Refused before it began: leave no empty folder behind.
        if [[ -z "$(find "$run" -mindepth 1 -maxdepth 1 ! -name .lock ! -name stages.jsonl -print -quit)" ]]; then
            rm -rf "$run"
        fi
        echo "train: '$title' failed (exit $status, above); mend the cause and run the same command again to go on" >&2
        exit "$status"
    fi
    if [[ -n "$noted" ]]; then return; fi
    printf '{"stage": "%s", "seconds": %d}\n' "$title" $((SECONDS - started)) >>"$run/stages.jsonl"
    echo "== $title: $((SECONDS - started)) s"
}

# ---- the loop
if [[ -z "$dry" ]]; then
    [[ -s "$run/stages.jsonl" ]] || printf '{"stage": "Set-up", "seconds": %d}\n' "$setup_s" >"$run/stages.jsonl"
fi
# enough STAGE: ends here if that was the last one asked for.
enough() { if [[ "$until" == "$1" ]]; then echo "train: done up to $1 in $SECONDS s; see $run"; exit 0; fi; }

WORLD_SIZE="$ranks" \
stage "Prepare" ""                   -m scripts.prepare --recipe "$recipe" --run "$run" "${overrides[@]}"
enough prepare
# Without the -- torchrun would take --run for its own.
if ((ranks > 1)); then split=(-m torch.distributed.run --standalone --nproc-per-node "$ranks" -m --); else split=(-m); fi
stage "Cold start" collect/DONE      -m rl.collect --run "$run"
enough collect
stage "SFT" sft/DONE                 "${split[@]}" rl.sft --run "$run"
enough sft
stage "RL" rl/DONE                   "${split[@]}" rl.train --run "$run"
enough rl
stage "Evaluate SFT" eval/sft/DONE   -m eval.heldout --run "$run" --which sft
stage "Evaluate RL" eval/rl/DONE     -m eval.heldout --run "$run" --which rl
enough eval
stage "Report" ""                    -m analysis.report --run "$run"
if [[ -z "$dry" ]]; then echo "train: all done in $SECONDS s; open $run/report.html"; fi
