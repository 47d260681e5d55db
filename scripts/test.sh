#!/usr/bin/env bash
# Lint and tests. Arguments go to pytest:  bash scripts/test.sh tests/rl -k trloo
#
# Every test module has a wall-clock budget (tests/conftest.py). On a slow or busy machine: TEST_BUDGET_SCALE=3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m pytest "$@"
