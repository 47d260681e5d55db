"""The profiling ratio against the truth: answers all in Triton, and lazy ones that leave most to torch.

Runs in the driver; the truth on a GPU comes from `scripts.bench.share`, a process that runs nothing but our own text.
On the CPU, where times are modelled, the truth is the model's own formula on passes counted by hand.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from env.modelled import modelled_us
from env.records import Problem, Verdict
from scripts.bench.candidates import answer, problem, specs
from scripts.bench.stream import Context, Item, run_items

ROOT = Path(__file__).resolve().parents[2]
SHARE_TIMEOUT_S = 180


@dataclass(frozen=True)
class Lazy:
    """`before` and `after` are torch expressions in x, `own` is one kernel's in a; (passes over x, launches) of the
    torch parts are what the modelled truth is made of."""

    name: str
    before: str
    own: tuple[str, str]  # torch, triton
    after: str
    passes: int
    launches: int


LAZY = (
    Lazy("half", "x", ("x * 2.0 + 1.0", "a * 2.0 + 1.0"), "torch.relu(x)", 2, 1),
    Lazy("softmax_after", "x", ("x * 0.5 + x * x", "a * 0.5 + a * a"), "torch.softmax(x, dim=-1) * 4.0", 4, 2),
    Lazy("softmax_before", "torch.softmax(x, dim=-1)", ("x * x + x", "a * a + a"), "x", 2, 1),
    Lazy("one_of_five", "torch.relu(x * 2.0)", ("x + 0.5", "a + 0.5"), "torch.abs(x - 1.0)", 8, 4),
    Lazy(
        "one_of_eleven", "torch.abs(torch.relu(x * 2.0 + 1.0) - 0.5)", ("x * 1.5", "a * 1.5"),
        "torch.sigmoid(torch.relu(x - 0.25) * 0.5 + 0.1)", 20, 10,
    ),
)  # fmt: skip

_REFERENCE = """\
import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x):
        x = {before}
        x = {own}
        return {after}


def get_inputs():
    return [torch.randn({rows}, {cols})]


def get_init_inputs():
    return []
"""
_CANDIDATE = """\
import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def part_{name}(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(out_ptr + i, {own}, mask=i < n)


class ModelNew(nn.Module):
    def before(self, x):
        return {before}

    def own(self, x):
        out = torch.empty_like(x)
        part_{name}[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)
        return out

    def after(self, x):
        return {after}

    def forward(self, x):
        return self.after(self.own(self.before(x)))
"""


def shape(device: str) -> tuple[int, int]:
    """128 MB on a GPU: more than its L2, so that a part takes as long alone as behind the other parts."""
    return (8192, 4096) if device == "cuda" else (16, 256)


def lazy_item(lazy: Lazy, device: str) -> Item:
    rows, cols = shape(device)
    texts = {"before": lazy.before, "after": lazy.after, "name": lazy.name}
    source = _REFERENCE.format(**texts, own=lazy.own[0], rows=rows, cols=cols)
    return Item(
        lazy.name,
        Problem(id=f"lazy-{lazy.name}", source=source, level=1, origin="benchmark"),
        _CANDIDATE.format(**texts, own=lazy.own[1]),
        ("correct", "hack"),  # how little is too little is the judge's to say; the share must be right either way
    )


def modelled_share(lazy: Lazy, device: str) -> float:
    """The kernel's share of the modelled time."""
    rows, cols = shape(device)
    nbytes = 4 * rows * cols
    own = modelled_us(2 * nbytes, 1)
    return own / (own + modelled_us(lazy.passes * nbytes, lazy.launches))


def measured_shares(items: list[Item], device: str) -> dict[str, Any]:
    """{name: {before_us, own_us, after_us, share}} from CUDA graphs of each part, in a process of our own."""
    rows, cols = shape(device)
    request = {"shape": [rows, cols], "sources": {item.name: item.source for item in items}}
    result = subprocess.run(
        [sys.executable, "-m", "scripts.bench.share"], cwd=ROOT, input=json.dumps(request), capture_output=True,
        text=True, timeout=SHARE_TIMEOUT_S,
    )  # fmt: skip
    if result.returncode != 0:
        raise RuntimeError(f"the plain loop of the ratio section failed: {result.stderr[-1500:]}")
    return json.loads(result.stdout.splitlines()[-1])


def ratio(context: Context) -> None:
    """Compare verdict.profiling_ratio with 1 for all-Triton answers and with the truth for lazy ones."""
    lazy = [lazy_item(kind, context.device) for kind in LAZY]
    # Before the pool: its workers would share the GPU with the plain loop.
    if context.device == "cuda":
        truth = measured_shares(lazy, context.device)
    else:
        truth = {kind.name: {"share": modelled_share(kind, "cpu")} for kind in LAZY}
    context.data["truth"] = truth
    whole = [
        Item(f"{spec.name}_all", problem(spec), answer(spec, 700_000 + number), ("correct",), facts={"all": True})
        for number, spec in enumerate(specs(context.device))
    ]

    def look(row: dict[str, Any], verdict: Verdict) -> None:
        row["profile"] = verdict.profile[:12]
        if row["name"] in truth:
            row["truth"] = truth[row["name"]]["share"]
            if verdict.profiling_ratio is not None:
                row["points_off"] = 100.0 * (verdict.profiling_ratio - row["truth"])

    rows = context.data.setdefault("rows", [])
    context.data["asked"] = len(lazy + whole)
    with context.pool() as pool:
        _, facts = run_items(
            context, pool, lazy + whole, context.deadline(), "ratio", len(lazy + whole), rows=rows, look=look
        )
    context.data.update(facts)
