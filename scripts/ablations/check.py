"""Checks every run of an ablation before any is started: lines "RECIPE VARIANT SETTING…" on standard input.

`scripts/ablations/*.sh --dry-run` calls it. Exit status 2, with every mistake, where rl/config.py refuses a setting.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rl.config import ConfigError, load_recipe


def faults(lines: list[str]) -> list[str]:
    """What is wrong, one message a run."""
    found = []
    for line in lines:
        recipe, variant, *settings = line.split()
        try:
            load_recipe(recipe, settings)
        except ConfigError as error:
            found.append(f"{variant}: {error}")
    return found


if __name__ == "__main__":
    given = [line for line in sys.stdin.read().splitlines() if line.strip()]
    wrong = faults(given)
    print("\n".join(wrong) or f"# all settings of {len(given)} runs are known to rl/config.py", flush=True)
    sys.exit(2 if wrong else 0)
