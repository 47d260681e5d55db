"""Table 2: Fast@p by problem set against `torch.compile`. `python -m analysis.table_2 --runs ROOT --out DIR`.

The answers are those of table 1, judged again (`scripts/eval.sh … --reference both`). Needs a GPU's evaluations: on the
CPU there is no compiled reference.
"""

from __future__ import annotations

import sys

from analysis import paper, tables

WANTED = {
    "TRLOO + MRS + PR + PRS": ("mrs_pr_prs", "rl"),
    "trained against torch.compile": ("compile_reference", "rl"),
}
TITLE = "Table 2: Fast@p, torch.compile reference"

if __name__ == "__main__":
    sys.exit(tables.main("table_2", TITLE, WANTED, "trajectories.compile.jsonl", paper.TABLE_2))
