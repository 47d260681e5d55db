"""Table 1: Fast@p by problem set against the eager reference. `python -m analysis.table_1 --runs ROOT --out DIR`."""

from __future__ import annotations

import sys

from analysis import paper, tables

WANTED = {"cold start": ("cold_start", "rl"), "TRLOO": ("trloo", "rl"), "TRLOO + MRS + PR + PRS": ("mrs_pr_prs", "rl")}
TITLE = "Table 1: Fast@p, eager reference"

if __name__ == "__main__":
    sys.exit(tables.main("table_1", TITLE, WANTED, "trajectories.jsonl", paper.TABLE_1))
