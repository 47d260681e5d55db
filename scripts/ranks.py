"""Over how many processes `scripts/train.sh` splits SFT and RL: `python -m scripts.ranks --recipe NAME [--set a.b=c]`
prints the number.

With the `vllm` engine every rank samples on its own GPU and the learner is sharded over all: one rank a visible GPU, or
half of them where the judge has GPUs of its own (`env.placement = apart`). With `hf` rank 0 alone samples, so more
ranks only make room for a larger learner: 1, unless RANKS=N says otherwise.
"""

from __future__ import annotations

import argparse
import sys

from env.pool import visible_gpus
from rl.config import Config, ConfigError, load_recipe


def ranks(config: Config, gpus: int) -> int:
    """Processes for a config on a machine with so many visible GPUs; at least 1."""
    if config.device != "cuda" or config.engine.name != "vllm":
        return 1
    return max(1, gpus // 2 if config.env.placement == "apart" else gpus)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print over how many processes train.sh splits SFT and RL.")
    parser.add_argument("--recipe", required=True, help="a name in rl/recipes/ or a .toml file")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    try:
        print(ranks(load_recipe(options.recipe, options.overrides), len(visible_gpus())))
    except ConfigError as error:
        sys.exit(f"scripts.ranks: {error}")
