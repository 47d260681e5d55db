"""Over how many processes `scripts/train.sh` splits SFT and RL: `python -m scripts.ranks --recipe NAME [--set a.b=c]`
prints the number.

With the `vllm` engine the learner is sharded over all GPUs of its own. `placement.kind = colocated`: every visible
one, since each rank also samples, or half of them where the judge has GPUs of its own (`env.placement = apart`).
`split`: those that neither sample (`placement.rollout_gpus`) nor judge (`placement.judge_gpus`, with apart). With `hf`
more ranks only make room for a larger learner: 1, unless RANKS=N says otherwise.
"""

from __future__ import annotations

import argparse
import sys

from env.pool import visible_gpus
from rl.config import Config, ConfigError, load_recipe
from rl.roles import division


def ranks(config: Config, gpus: int) -> int:
    """Processes for a config on a machine with so many visible GPUs; at least 1 (that there are too few is said by
    rl/preflight.py)."""
    if config.device != "cuda" or config.engine.name != "vllm":
        return 1
    return max(1, division(config, gpus).learn)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print over how many processes train.sh splits SFT and RL.")
    parser.add_argument("--recipe", required=True, help="a name in rl/recipes/ or a .toml file")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    try:
        print(ranks(load_recipe(options.recipe, options.overrides), len(visible_gpus())))
    except ConfigError as error:
        sys.exit(f"scripts.ranks: {error}")
