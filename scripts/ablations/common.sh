# What every file in this folder shares; sourced, never run. A file says which variants and seeds it needs and what it
# draws from them; `run_all` runs what is missing, over the GPUs at hand or one after another on the CPU.
#
#   bash scripts/ablations/figure_4.sh                 runs what is missing, then draws
#   bash scripts/ablations/figure_4.sh --dry-run       prints every command, checks every setting, runs nothing
#   bash scripts/ablations/figure_4.sh --draw          draws from what is there
#
# Environment:
#   SIZE=mini|full     mini (default): the miniature, recipe mini-gpu, or mini-cpu where there is no GPU.
#                      full: scripts/ablations/full.toml, the paper's figures; needs MODEL (a Hugging Face folder),
#                      PROBLEMS (a folder of KernelBench-format files to train on), TEACHER_URL and TEACHER_MODEL
#                      (an OpenAI-compatible server for the cold start), and KERNELBENCH_DIR for the tables
#   SEEDS="1 2 3"      a run each
#   RUNS=DIR           where runs go; default runs/ablations/<recipe>
#   SET="a.b=c …"      further settings for all runs, e.g. SET="train.steps=2 eval.every=1" for a try; use another RUNS
#   EVAL_PROBLEMS=N    how many problems figure 6 and the tables evaluate on; default 64 of the miniature's, all of
#                      KernelBench's. With another number use another RUNS, too. What runs evaluate on
#                      by themselves is in SET: problems.heldout, eval.samples
#   EVAL_SAMPLES=N     samples a problem there; default 4 in figure 6, 8 in the tables
#   EVAL_TURNS=N       turns a sample there; default 14 in figure 6, 3 in the tables
#   GPUS="0 1"         which GPUs; default: all that are visible
#   GPUS_PER_RUN=N     default: 1 for mini, all for full
#   PYTHON=PATH        as in scripts/setup.sh
#
# Runs are RUNS/<variant>/seed<N>; the cold start and SFT of a seed are the same for all variants and made once, in
# RUNS/base/seed<N>. The same command goes on where it stopped: a finished run is not run again.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$HERE/../.."
STEM="$(basename "$0" .sh)"

fail() { echo "$STEM: $*" >&2; exit 2; }
mode=run
for argument in "$@"; do
    case "$argument" in
        --dry-run) mode=dry ;;
        --draw) mode=draw ;;
        -h | --help)
            sed -n '2,/^source/{/^source/d;s/^# \{0,1\}//;p}' "$0"
            sed -n '4,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "$HERE/common.sh"
            exit 0
            ;;
        *) fail "unknown argument $argument; known: --dry-run, --draw, --help" ;;
    esac
done

# A dry run reads settings only: any Python will do, and nothing is installed.
if [[ "$mode" == dry ]]; then PYTHON="${PYTHON:-python3}"; else source scripts/setup.sh; fi
export PYTHON
source "$HERE/variants.sh"

# ---- size, recipe, GPUs
SIZE="${SIZE:-mini}"
SEEDS="${SEEDS:-1 2 3}"
if [[ -z "${GPUS+set}" ]]; then
    GPUS="${CUDA_VISIBLE_DEVICES-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | xargs || true)}"
fi
read -ra gpus <<<"${GPUS//,/ }"
common=()
case "$SIZE" in
    mini)
        if ((${#gpus[@]})); then recipe=mini-gpu; else recipe=mini-cpu; fi
        common=(eval.every=4 eval.during_samples=2)
        GPUS_PER_RUN="${GPUS_PER_RUN:-1}"
        ;;
    full)
        recipe=scripts/ablations/full.toml
        for name in MODEL PROBLEMS TEACHER_URL TEACHER_MODEL; do
            [[ -n "${!name:-}" ]] || fail "SIZE=full needs $name (MODEL: a Hugging Face folder, PROBLEMS: a folder of
 problems to train on, TEACHER_URL and TEACHER_MODEL: the server that plays the strong model in the cold start)"
        done
        ((${#gpus[@]})) || fail "SIZE=full needs GPUs, and none is visible; SIZE=mini runs on the CPU"
        common=(model.path="$MODEL" problems.path="$PROBLEMS" server.url="$TEACHER_URL" server.model="$TEACHER_MODEL")
        GPUS_PER_RUN="${GPUS_PER_RUN:-${#gpus[@]}}"
        ;;
    *) fail "SIZE=$SIZE; known: mini, full" ;;
esac
[[ "$GPUS_PER_RUN" =~ ^[1-9][0-9]*$ ]] || fail "GPUS_PER_RUN=$GPUS_PER_RUN is no number of GPUs"
if ((${#gpus[@]} && GPUS_PER_RUN > ${#gpus[@]})); then
    fail "GPUS_PER_RUN=$GPUS_PER_RUN, but only ${#gpus[@]} are visible (${gpus[*]})"
fi
for name in EVAL_PROBLEMS EVAL_SAMPLES EVAL_TURNS; do
    [[ -z "${!name:-}" || "${!name}" =~ ^[1-9][0-9]*$ ]] || fail "$name=${!name} is no number, 1 or more; leave it out"
done
RUNS="${RUNS:-runs/ablations/$(basename "$recipe" .toml)}"
[[ "$RUNS" == */* ]] || RUNS="./$RUNS" # scripts/train.sh takes a path by its slash
read -ra extra <<<"${SET:-}"

jobs=()       # "train VARIANT SEED"
jobs_after=() # "eval NAME VARIANT SEED SET ARGUMENTS…", which need their runs
declare -A queued=()

# need VARIANT…: queue a run of each variant for each seed.
need() {
    local variant seed
    for variant in "$@"; do
        [[ -n "${VARIANTS[$variant]+set}" ]] || fail "no variant $variant in scripts/ablations/variants.sh"
        if [[ "$variant" == compile_reference ]] && ((!${#gpus[@]})); then
            echo "$STEM: $variant is left out: on the CPU times are modelled and there is no compiled reference" >&2
            continue
        fi
        for seed in $SEEDS; do
            [[ -n "${queued[$variant $seed]+set}" ]] || jobs+=("train $variant $seed")
            queued[$variant $seed]=1
        done
    done
}

# need_eval NAME VARIANT ARGUMENTS…: queue an evaluation of the variant's runs, into RUNS/eval/NAME/<set>/seed<N>. The
# variant "base" is the cold start's model, before RL.
need_eval() {
    local name="$1" variant="$2" seed set sets
    shift 2
    if [[ "$SIZE" == full && -n "${EVAL_PROBLEMS:-}" ]]; then set -- "$@" --limit "$EVAL_PROBLEMS"; fi
    for seed in $SEEDS; do
        sets="$(problem_sets "$seed")" # ends the script where it fails
        for set in $sets; do jobs_after+=("eval $name $variant $seed $set $*"); done
    done
}
# problem_sets SEED: what trained models are evaluated on, by scripts/eval.sh's names.
problem_sets() {
    if [[ "$SIZE" == mini ]]; then
        local spec="generator:heldout:${EVAL_PROBLEMS:-64}:$1"
        ((${#gpus[@]})) && echo "$spec:gpu" || echo "$spec"
    else
        [[ -n "${KERNELBENCH_DIR:-}" ]] || fail "the tables need KERNELBENCH_DIR, the folder that holds level1/"
        echo "$KERNELBENCH_DIR/level1" "$KERNELBENCH_DIR/level2" "$KERNELBENCH_DIR/level3"
    fi
}

# settings VARIANT SEED: all overrides of a run, one a line; the last one of a key counts.
settings() {
    local words
    read -ra words <<<"${VARIANTS[$1]}"
    printf '%s\n' "name=$1" "seed=$2" "${common[@]}" "${words[@]}" "${extra[@]}"
}

# base_settings SEED: the same without a variant, for the cold start and SFT.
base_settings() { printf '%s\n' name=base "seed=$1" "${common[@]}" "${extra[@]}"; }

# job_line JOB: the command of a job, for people and for --dry-run.
job_line() {
    local kind a b c d rest
    read -r kind a b c d rest <<<"$1"
    if [[ "$kind" == train ]]; then
        local sets=() setting
        while read -r setting; do sets+=(--set "$setting"); done < <(settings "$a" "$b")
        echo "bash scripts/train.sh $recipe --run $RUNS/$a/seed$b ${sets[*]}"
    else
        local model="$RUNS/$b/seed$c"
        [[ "$b" != base ]] || model+=/sft/model
        echo "bash scripts/eval.sh $model $d --run $RUNS/eval/$a/$(basename "${d//:/-}")/seed$c $rest"
    fi
}

# log_of JOB: where its output goes. Of an evaluation's problem set only the last part: a file's name has an end.
log_of() {
    local kind a b c d
    read -r kind a b c d _ <<<"$1"
    [[ "$kind" == train ]] && c="" || c="_${c}_$(basename "${d//:/-}")"
    echo "$RUNS/logs/${kind}_${a}_$b$c.log"
}

# draw MODULE…: what is drawn in the end, e.g. draw figure_4.
draw() { drawn+=("$@"); }
drawn=()

draw_all() {
    local module status=0
    for module in "${drawn[@]}"; do
        echo "== python -m analysis.$module --runs $RUNS --out $RUNS/figures"
        [[ "$mode" == dry ]] || "$PYTHON" -m "analysis.$module" --runs "$RUNS" --out "$RUNS/figures" || status=$?
    done
    return "$status"
}

dry_run() {
    local job line seed
    echo "# $STEM: ${#jobs[@]} runs, ${#jobs_after[@]} evaluations, recipe $recipe, GPUs: ${gpus[*]:-none (CPU)}"
    for seed in $SEEDS; do echo "# cold start and SFT of seed $seed, once for all variants: $RUNS/base/seed$seed"; done
    for job in "${jobs[@]}" "${jobs_after[@]}"; do job_line "$job"; done
    {
        for seed in $SEEDS; do echo "$recipe base $(base_settings "$seed" | paste -sd' ')"; done
        for job in "${jobs[@]}"; do
            read -r _ variant seed <<<"$job"
            echo "$recipe $variant $(settings "$variant" "$seed" | paste -sd' ')"
        done
    } | "$PYTHON" "$HERE/check.py"
    draw_all
}

# ---- the queue: one worker a group of GPUs (one on the CPU), each takes the next job until none is left
take() { # prints the number of the next job, or fails
    (
        flock 9
        local next
        next="$(<"$queue/next")"
        ((next < $1)) || exit 1
        echo $((next + 1)) >"$queue/next"
        echo "$next"
    ) 9>"$queue/lock"
}

worker() { # worker GPUS JOB…
    local visible="$1" index child="" log job
    shift
    trap '[[ -z "$child" ]] || { kill -TERM "$child" 2>/dev/null; wait "$child"; }; exit 143' TERM
    if [[ -n "$visible" ]]; then export CUDA_VISIBLE_DEVICES="$visible"; fi
    local all=("$@")
    while index="$(take ${#all[@]})"; do
        job="${all[index]}"
        log="$(log_of "$job")"
        echo "$STEM: [$((index + 1))/${#all[@]}]${visible:+ GPU $visible,} $job -> $log"
        run_job "$job" >"$log" 2>&1 &
        child=$!
        if ! wait "$child"; then
            echo "$STEM: FAILED: $job, see $log" >&2
            tail -n 3 "$log" | sed 's/^/    /' >&2
            echo "$job" >>"$queue/failed"
        fi
        child=""
    done
}

# run_job JOB: in a process of its own; a TERM reaches the program that it waits for.
run_job() {
    local kind a b words
    child=""
    trap interrupt TERM
    read -r kind a b _ <<<"$1"
    if [[ "$kind" == train ]]; then
        if [[ -e "$RUNS/$a/seed$b/eval/rl/DONE" ]]; then echo "done already"; return; fi
        base "$b"
        from_base "$a" "$b"
    fi
    local -a command
    read -ra command <<<"$(job_line "$1")"
    call "${command[@]}"
}

interrupt() { # Ctrl-C for the program that call waits for, and its end if that doesn't help
    if [[ -n "$child" ]]; then
        # TERM, which train.sh takes just as well: started in the background of a script, all of us ignore INT. Killed,
        # it would leave its stage behind, which has a process group of its own.
        local signal
        for signal in INT TERM; do
            kill "-$signal" -- "-$child" 2>/dev/null || true
            for _ in {1..80}; do kill -0 -- "-$child" 2>/dev/null || break 2; sleep 0.1; done
        done
        kill -KILL -- "-$child" 2>/dev/null || true
    fi
    exit 143
}

call() { # call COMMAND…: in a process group of its own, where SIGINT isn't ignored as it is in background jobs
    local status=0
    set -m
    "$@" </dev/null &
    child=$!
    set +m
    wait "$child" || status=$?
    child=""
    if ((status)); then exit "$status"; fi
}

# base SEED: the cold start and SFT of a seed, once. Others wait for it.
base() {
    local run="$RUNS/base/seed$1" sets=() setting
    mkdir -p "$run"
    exec 7>>"$run/.lock"
    while ! flock -w 5 7; do echo "waiting for $run"; done
    if [[ ! -e "$run/sft/DONE" ]]; then
        while read -r setting; do sets+=(--set "$setting"); done < <(base_settings "$1")
        export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(($(nproc) < 8 ? $(nproc) : 8))}"
        # Threads that wait for each other sleep: where they spin, a small model takes 4 to 12 times as long on a busy machine.
        export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
        export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONHASHSEED=0
        export CUBLAS_WORKSPACE_CONFIG=:4096:8
        base_stage Prepare problems/heldout.jsonl scripts.prepare --recipe "$recipe" --run "$run" "${sets[@]}"
        base_stage "Cold start" collect/DONE rl.collect --run "$run"
        base_stage SFT sft/DONE rl.sft --run "$run"
    fi
    exec 7>&-
}

# base_stage TITLE DONE_FILE MODULE ARGUMENTS…: runs it and notes its seconds in the base's stages.jsonl, as
# scripts/train.sh does for a run; those of a stage that was complete before are noted already.
base_stage() {
    local title="$1" complete="" started=$SECONDS
    [[ ! -e "$run/$2" ]] || complete=1
    shift 2
    call "$PYTHON" -m "$@"
    [[ -n "$complete" ]] || printf '{"stage": "%s", "seconds": %d}\n' "$title" $((SECONDS - started)) >>"$run/stages.jsonl"
}

# from_base VARIANT SEED: the base's problems, trajectories and SFT model, copied before the run itself begins, and what
# they cost, as shared_stages.jsonl: the run's own stages.jsonl doesn't hold it.
from_base() {
    local from="$RUNS/base/seed$2" run="$RUNS/$1/seed$2" part
    mkdir -p "$run"
    for part in problems collect sft; do
        if [[ -d "$from/$part" && ! -e "$run/$part" ]]; then
            rm -rf "$run/.$part.tmp"
            cp -r --reflink=auto "$from/$part" "$run/.$part.tmp"
            rm -rf "$run/.$part.tmp/checkpoints" # of SFT: only needed to go on with it
            mv "$run/.$part.tmp" "$run/$part"
        fi
    done
    if [[ -e "$from/stages.jsonl" ]]; then
        cp "$from/stages.jsonl" "$run/.shared.tmp"
        mv "$run/.shared.tmp" "$run/shared_stages.jsonl"
    fi
}

run_queue() { # run_queue JOB…
    (($#)) || return 0
    local groups=() i workers=()
    if ((${#gpus[@]})); then
        for ((i = 0; i + GPUS_PER_RUN <= ${#gpus[@]}; i += GPUS_PER_RUN)); do
            groups+=("$(IFS=,; echo "${gpus[*]:i:GPUS_PER_RUN}")")
        done
    else
        groups=("")
    fi
    echo 0 >"$queue/next"
    for i in "${!groups[@]}"; do
        worker "${groups[i]}" "$@" &
        workers+=($!)
    done
    pids=("${workers[@]}")
    wait "${workers[@]}" || true
    pids=()
}

run_all() {
    if [[ "$mode" == dry ]]; then dry_run; return; fi
    if [[ "$mode" == draw ]]; then draw_all; return; fi
    mkdir -p "$RUNS/logs"
    queue="$(mktemp -d)"
    pids=()
    stop() {
        trap '' INT TERM HUP
        echo "$STEM: stopping; the same command goes on from here" >&2
        ((${#pids[@]})) && kill -TERM "${pids[@]}" 2>/dev/null
        wait
        rm -rf "$queue"
        exit 130
    }
    trap stop INT TERM HUP
    run_queue "${jobs[@]}"
    run_queue "${jobs_after[@]}"
    local failed=0
    [[ ! -e "$queue/failed" ]] || failed="$(wc -l <"$queue/failed")"
    rm -rf "$queue"
    draw_all || failed=$((failed + 1))
    if ((failed)); then fail "$failed failed (above); mend the cause and run the same command again to go on"; fi
}
