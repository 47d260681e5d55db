#!/usr/bin/env bash
# The Python environment: makes .venv at the repository's root once, and again when requirements.txt changes.
#
#   source scripts/setup.sh     from another script: sets ROOT and PYTHON
#   bash scripts/setup.sh       by hand; minutes the first time, under a second afterwards
#
# PYTHON=/path/to/python in the environment: that interpreter is used as it is and nothing is installed (for images
# that bring their own torch); it is only checked that the packages are there.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# Prints the newest interpreter on the PATH that is recent enough.
_setup_find_python() {
    local candidate
    for candidate in python3 python3.12 python3.11 python3.13; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return 0
        fi
    done
    echo "setup: Python 3.11 or newer is needed, but 'python3' is $(python3 --version 2>&1 || true)." >&2
    echo "setup: install one (e.g. python3.11) or set PYTHON=/path/to/python to an environment that has the packages." >&2
    return 1
}

# Checks a given interpreter without importing the packages: importing torch alone takes seconds.
_setup_check_given() {
    if ! command -v "$PYTHON" >/dev/null; then
        echo "setup: PYTHON=$PYTHON is not a program; set it to a Python >= 3.11 or unset it" >&2
        return 1
    fi
    "$PYTHON" - "$ROOT/requirements.txt" <<'PY'
import importlib.util
import re
import sys

if sys.version_info < (3, 11):
    sys.exit(f"setup: PYTHON={sys.executable} is Python {sys.version.split()[0]}; 3.11 or newer is needed")
RUN_TIME = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "matplotlib", "tqdm", "tensorboard")
missing = [name for name in RUN_TIME if importlib.util.find_spec(name) is None]
if missing:
    pins = dict(re.findall(r"^([\w-]+)(==\S+)", open(sys.argv[1], encoding="utf-8").read(), re.M))
    wanted = " ".join(f"{name}{pins.get(name, '')}" for name in missing)
    sys.exit(
        f"setup: PYTHON={sys.executable} lacks: {', '.join(missing)}.\n"
        f"setup: install them there ({sys.executable} -m pip install {wanted}) or unset PYTHON to get a fresh .venv"
    )
PY
}

# Installs into .venv. Called under the lock.
_setup_install() {
    local venv="$1" wanted="$2" base
    base="$(_setup_find_python)" || return 1
    if [[ ! -f "$venv/.stamp" ]]; then
        # No stamp: the first time, or an install that was cut short. A half-installed package can look whole to pip.
        find "$venv" -mindepth 1 -maxdepth 1 ! -name .lock -exec rm -rf {} +
        "$base" -m venv "$venv" || return 1
    fi
    rm -f "$venv/.stamp"
    echo "setup: installing requirements.txt into .venv (minutes the first time)" >&2
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$ROOT/requirements.txt" >&2 || {
        echo "setup: the install failed (above); run the same command again, it starts over" >&2
        return 1
    }
    echo "$wanted" >"$venv/.stamp.tmp" && mv "$venv/.stamp.tmp" "$venv/.stamp"
    if [[ "${CUDA_VISIBLE_DEVICES-unset}" != "" && "${TRITON_INTERPRET:-0}" != 1 ]] && command -v nvidia-smi >/dev/null; then
        echo "setup: a GPU is here; optional: $venv/bin/python -m pip install -r requirements-gpu.txt (vLLM, shared GPU buffers)" >&2
    fi
}

_setup() {
    if [[ -n "${PYTHON:-}" ]]; then
        _setup_check_given
        return
    fi
    local venv="$ROOT/.venv" wanted
    wanted="$(sha256sum <"$ROOT/requirements.txt" | cut -d' ' -f1)"
    # The interpreter is started as well: it is gone when the Python that .venv was made from has been removed.
    _setup_ready() { [[ "$(cat "$venv/.stamp" 2>/dev/null)" == "$wanted" ]] && "$venv/bin/python" -c '' 2>/dev/null; }
    if ! _setup_ready; then
        mkdir -p "$venv"
        (
            flock 9
            if ! _setup_ready; then
                [[ -f "$venv/.stamp" ]] && ! "$venv/bin/python" -c '' 2>/dev/null && rm -f "$venv/.stamp"
                _setup_install "$venv" "$wanted"
            fi
        ) 9>"$venv/.lock" || return 1
    fi
    PYTHON="$venv/bin/python"
}

if ! _setup; then
    # `return` when sourced, `exit` when run.
    return 1 2>/dev/null || exit 1
fi
export PYTHON ROOT
