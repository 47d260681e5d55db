#!/usr/bin/env bash
# Cold-start data from any teacher, through the judge: the first stages of scripts/train.sh alone.
#
#   bash scripts/collect.sh                                             the scripted teacher, into runs/<recipe>/collect
#   bash scripts/collect.sh mini-cpu --run strong --teacher http://host:8000/v1 --model NAME
#   bash scripts/collect.sh mini-cpu --set collect.trajectories=200 --set collect.keep.hack=0.5
#
# --teacher: `scripted`, or the address of an OpenAI-compatible server up to and with /v1; then --model names the model
# there, and $OPENAI_API_KEY holds its key if it wants one. What is kept for training: collect.keep.STATUS, a share by the
# status of the last turn; what could not be judged is dropped. All other options as in scripts/train.sh, which goes on
# from here in the same folder with the same options. Results: messages.jsonl and messages.parquet beside the trajectories.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "collect: $*" >&2; exit 2; }

teacher="scripted" model="" rest=()
while (($#)); do
    case "$1" in
        --teacher | --model) [[ $# -ge 2 && -n "$2" ]] || fail "$1 needs a value"; declare "${1#--}=$2"; shift ;;
        --teacher=*) teacher="${1#--teacher=}" ;;
        --model=*) model="${1#--model=}" ;;
        -h | --help) sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' scripts/collect.sh; exit 0 ;;
        *) rest+=("$1") ;;
    esac
    shift
done
case "$teacher" in
    scripted | script) [[ -z "$model" ]] || fail "--model $model: the scripted teacher has no model; give --teacher URL" ;;
    http://* | https://*)
        [[ -n "$model" ]] || fail "--teacher $teacher needs --model NAME, the model's name on that server"
        rest+=(--set collect.teacher=server --set "server.url=$teacher" --set "server.model=$model")
        ;;
    *) fail "--teacher $teacher: give scripted, or a server's address up to and with /v1, e.g. http://host:8000/v1" ;;
esac
exec bash scripts/train.sh "${rest[@]}" --until collect
