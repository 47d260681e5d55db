#!/usr/bin/env bash
# Evaluate a model on a problem set: Fast@p with intervals, pass@k, hack ratio, test-time scaling (eval/run.py).
#
#   bash scripts/eval.sh MODEL PROBLEMS [--run NAME] [options of eval.run]
#
#   bash scripts/eval.sh runs/mini-cpu generator:heldout:24                    a run of ours, on problems it never saw
#   bash scripts/eval.sh runs/mini-gpu/rl/checkpoints/step_00010 generator:heldout:24:0:gpu
#   bash scripts/eval.sh /models/Qwen3-8B KernelBench/level1 --samples 8 --turns 3 --reference both
#   bash scripts/eval.sh http://localhost:8000/v1 KernelBench/level2 --name my-model --turns 14 --scaling context
#   bash scripts/eval.sh teacher generator:heldout:24 --plan                   only the arithmetic of how long it takes
#
# MODEL: a Hugging Face folder, a run's folder or one of its checkpoints, an OpenAI-compatible server (with --name), or
# teacher. PROBLEMS: a folder in KernelBench's format, .parquet, .jsonl, .py, or generator:heldout:COUNT[:SEED[:gpu]].
# --run NAME: the folder runs/eval/NAME (or a path, if it has a slash); without it one is named after model and problems.
# Other options: bash scripts/eval.sh --help. All visible GPUs are used: one samples, all judge (CUDA_VISIBLE_DEVICES
# chooses). Ctrl-C stops everything; the same command goes on where it stopped.
# Afterwards: python -m eval.scaling DIR, python -m eval.compare DIR DIR, python -m eval.kernelbench --help.
# PYTHON=/path/to/python uses that interpreter as it is (scripts/setup.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' scripts/eval.sh; }
fail() { echo "eval: $*" >&2; exit 2; }

# ---- arguments
run="" positional=() options=() help=""
while (($#)); do
    case "$1" in
        --run) [[ $# -ge 2 && -n "$2" ]] || fail "--run needs a name, e.g. --run first"; run="$2"; shift ;;
        --run=*) run="${1#--run=}" ;;
        -h | --help) help=1 ;;
        --plan) # its value may be missing
            options+=("$1")
            if [[ $# -ge 2 && "$2" != -* ]]; then options+=("$2"); shift; fi ;;
        --*=* | --skip-broken) options+=("$1") ;;
        --*) [[ $# -ge 2 ]] || fail "$1 needs a value"; options+=("$1" "$2"); shift ;;
        *) positional+=("$1") ;;
    esac
    shift
done
if [[ -n "$help" ]]; then usage; fi
if [[ -z "$help" && ${#positional[@]} -ne 2 ]]; then
    fail "give a model and a problem set, e.g. bash scripts/eval.sh runs/mini-cpu generator:heldout:24 (--help says more)"
fi

# ---- set-up
source scripts/setup.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(($(nproc) < 8 ? $(nproc) : 8))}"
# Threads that wait for each other sleep: where they spin, a small model takes 4 to 12 times as long on a busy machine.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONHASHSEED=0
export CUBLAS_WORKSPACE_CONFIG=:4096:8 # deterministic matrix products; read when the first CUDA context is made
if [[ -n "$help" ]]; then echo; exec "$PYTHON" -m eval.run --help; fi

if [[ -z "$run" ]]; then
    run="$(printf '%s-on-%s' "${positional[0]}" "${positional[1]}" | tr -c 'A-Za-z0-9.-' '_')"
fi
[[ "$run" == */* ]] || run="runs/eval/$run"
# In this process's place: Ctrl-C and kill reach the program itself, which ends its evaluators.
exec "$PYTHON" -m eval.run --model "${positional[0]}" --problems "${positional[1]}" --out "$run" "${options[@]}"
