"""Judge every case of tests/cases: `python scripts/bench_env.py [--device cuda] [--out F]`.

A measurement, not a test: it says which verdicts are right and writes the raw verdicts with device, versions and date.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from env.files import write_atomic  # noqa: E402
from env.pool import Pool  # noqa: E402
from env.records import Problem  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kinds", default="abcdeh", help="first letters of the cases to judge")
    parser.add_argument("--only", default="", help="part of the case's name")
    parser.add_argument("--lanes", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    rows = []
    with Pool(args.device, slots=1, lanes=args.lanes) as pool:
        start = time.monotonic()
        asked = []
        for folder in sorted((ROOT / "tests" / "cases").iterdir()):
            if folder.name[0] not in args.kinds or args.only not in folder.name:
                continue
            expected = json.loads((folder / "expected.json").read_text())
            problem = Problem(id=folder.name, source=(folder / "reference.py").read_text())
            raw = expected["input_kind"] == "raw_response"
            candidate = next(folder.glob("candidate*")).read_text(encoding="utf-8", errors="surrogateescape")
            asked.append((folder.name, expected, pool.submit(problem, candidate, raw=raw)))
        for name, expected, future in asked:
            verdict = future.result()
            right = verdict.status in expected["acceptable"]
            rows.append(
                {"case": name, "right": right, "acceptable": expected["acceptable"], "verdict": verdict.to_json()}
            )
            speed = "" if verdict.speedup is None else f" {verdict.speedup:.2f}x pr {verdict.profiling_ratio:.2f}"
            why = verdict.evidence.get("rule") or verdict.message[:110].replace("\n", " ")
            mark = "ok   " if right else "WRONG"
            print(
                f"{mark} {name:34s} {verdict.status:14s}{speed} {verdict.cost.get('total_s', 0):5.1f}s {why}",
                flush=True,
            )
        seconds = time.monotonic() - start
        info = pool.info
    right = sum(row["right"] for row in rows)
    print(
        f"{right} of {len(rows)} right on {info['device']} in {seconds:.0f} s "
        f"({len(rows) / seconds:.2f} verdicts a second)"
    )
    if args.out:
        result = {
            "date": datetime.date.today().isoformat(),
            "command": " ".join(sys.argv),
            **info,
            "seconds": seconds,
            "rows": rows,
        }
        write_atomic(args.out, json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
