"""Judge one candidate: `python -m env.evaluate REFERENCE CANDIDATE [--json] [--device cpu|cuda]`.

Runs in the driver. Exits 0 whenever a verdict was reached, 2 where the question can't be asked (no such file, no
device).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from env.pool import Pool, PoolError
from env.problems import ProblemError, load_file
from env.records import Problem, Verdict
from env.rules import Rules


def render_text(verdict: Verdict) -> str:
    """A verdict for a terminal."""
    lines = [verdict.feedback]
    if verdict.speedup is not None:
        lines.append(
            f"{verdict.time_kind} times: reference {verdict.reference_us:.2f} us, "
            f"candidate {verdict.candidate_us:.2f} us, "
            f"speedup {verdict.speedup:.3f} [{verdict.speedup_low:.3f}, {verdict.speedup_high:.3f}]"
        )
    lines.append(f"device: {verdict.device}; {verdict.cost.get('total_s', 0):.2f} s")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m env.evaluate", description="Judge one candidate against a reference."
    )
    parser.add_argument(
        "reference", type=Path, help="KernelBench-format file: class Model, get_inputs, get_init_inputs"
    )
    parser.add_argument("candidate", type=Path, help="Python file that defines class ModelNew")
    parser.add_argument("--json", action="store_true", help="print the verdict as one JSON object")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cpu: Triton's interpreter, modelled times"
    )
    parser.add_argument("--raw", action="store_true", help="the candidate file holds a model's whole answer")
    parser.add_argument("--entry-point", default="Model", help="name of the reference class")
    parser.add_argument("--seed", type=int, default=None, help="seed of the secret inputs; default: a fresh secret")
    args = parser.parse_args(argv)
    try:
        reference = load_file(args.reference) if args.entry_point == "Model" else None
        problem = reference or Problem(
            id=args.reference.stem, source=args.reference.read_text(), entry_point=args.entry_point
        )
        response = args.candidate.read_text(encoding="utf-8", errors="surrogateescape")
        with Pool(args.device, slots=1, seed=args.seed, rules=Rules(), lanes=1) as pool:
            verdict = pool.submit(problem, response, raw=args.raw).result()
    except (OSError, UnicodeDecodeError, ProblemError, PoolError) as error:
        print(f"env.evaluate: {error}", file=sys.stderr)
        return 2
    print(json.dumps(verdict.to_json()) if args.json else render_text(verdict))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
