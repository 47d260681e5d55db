"""Measure what the judge must reach: `python scripts/bench_env.py --device cuda --out FILE.json [--sections a,b]`.

    cases        every case of tests/cases against the statuses that are right
    throughput   verdicts a second in steady state, and what bounds them
    exclusive    how long a verdict holds the GPU alone
    self         error of the speedup of a program against itself
    contexts     what a CUDA context costs, which every candidate needs, and whether making one moves timings
    ratio        profiling ratio of all-Triton and of lazy answers against the truth
    recovery     seconds until the next verdict after hangs, crashes and kills
    soak         what hundreds of mixed candidates leave behind, and whether some judged alone come out the same
    hog          how far the machine's memory goes up before a candidate that eats it is stopped
    kernelbench  every KernelBench reference as its own candidate (needs KERNELBENCH_DIR)

A measurement, not a test. Runs in the driver, without CUDA. Every section has a time box (--minutes). FILE is rewritten
after every section and now and then within one, so that a run cut short keeps what it has; run again with the same
FILE, other sections stay in it, and kernelbench goes on where it stopped, as soak does with those judged alone. On the
CPU times are modelled and sizes tiny: that tries the plumbing and says nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from env.files import write_atomic  # noqa: E402
from scripts.bench import machine  # noqa: E402
from scripts.bench.contexts import contexts  # noqa: E402
from scripts.bench.kernelbench import kernelbench  # noqa: E402
from scripts.bench.ratio import ratio  # noqa: E402
from scripts.bench.recovery import recovery  # noqa: E402
from scripts.bench.report import figures, summary, table  # noqa: E402
from scripts.bench.soak import hog_check, soak  # noqa: E402
from scripts.bench.stream import Context  # noqa: E402
from scripts.bench.verdicts import cases, exclusive, self_check, throughput  # noqa: E402
from scripts.bench_kernelbench import kernelbench_folder  # noqa: E402

SECTIONS = {
    "cases": cases, "throughput": throughput, "exclusive": exclusive, "self": self_check,
    "contexts": contexts, "ratio": ratio,
    "recovery": recovery, "soak": soak, "hog": hog_check, "kernelbench": kernelbench,
}  # fmt: skip
MINUTES = {
    "cases": 5.0, "throughput": 2.0, "exclusive": 2.0, "self": 3.0, "contexts": 2.0, "ratio": 2.0,
    "recovery": 5.0, "soak": 12.0, "hog": 2.0, "kernelbench": 20.0,
}  # fmt: skip


def minutes_by_section(text: str) -> dict[str, float]:
    """`3` for all, `soak=8,recovery=2` for some. Raises ValueError naming what isn't understood."""
    found = dict(MINUTES)
    for part in filter(None, text.split(",")):
        name, _, value = part.rpartition("=")
        if name and name not in SECTIONS:
            raise ValueError(f"--minutes {part}: unknown section; known: {', '.join(SECTIONS)}")
        try:
            minutes = float(value)
        except ValueError:
            raise ValueError(f"--minutes {part}: write a number, or SECTION=NUMBER") from None
        for section in [name] if name else SECTIONS:
            found[section] = minutes
    return found


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, with `sections` and `minutes` worked out."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], epilog=__doc__.split("\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=None, help="JSON file; sections that it holds already stay in it")
    parser.add_argument("--sections", default="", help="some of them, comma-separated; all where left out")
    parser.add_argument("--minutes", default="", help="time box of each section: 3, or soak=8,recovery=2")
    parser.add_argument("--seed", type=int, default=7, help="of the judge's inputs and of every order drawn here")
    parser.add_argument("--lanes", type=int, default=0, help="candidates judged at once; 0: the pool's own choice")
    parser.add_argument("--kinds", default="abcdeh", help="cases: first letters of those to judge")
    parser.add_argument("--only", default="", help="cases, recovery, kernelbench: part of the name")
    parser.add_argument("--limit", type=int, default=0, help="kernelbench: at most so many problems")
    parser.add_argument("--throughput-limit", type=int, default=0, help="at most so many verdicts; 0: until time is up")
    parser.add_argument("--self-runs", type=int, default=0, help="0: 50 on a GPU, 8 on the CPU")
    parser.add_argument("--soak-count", type=int, default=0, help="0: 600 on a GPU, 2000 on the CPU")
    parser.add_argument("--soak-again", type=int, default=100, help="how many of them are judged again alone")
    args = parser.parse_args(arguments)
    wanted = [name.strip() for name in args.sections.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in SECTIONS]
    if unknown:
        parser.error(f"unknown section {', '.join(unknown)}; known: {', '.join(SECTIONS)}")
    if "kernelbench" in wanted:
        kernelbench_folder()  # ends the program now, not after an hour of measuring
    elif not wanted and not os.environ.get("KERNELBENCH_DIR"):
        print("KERNELBENCH_DIR is not set: section kernelbench is left out", flush=True)
        wanted = [name for name in SECTIONS if name != "kernelbench"]
    args.sections = [name for name in SECTIONS if name in (wanted or SECTIONS)]
    try:
        args.minutes = minutes_by_section(args.minutes)
    except ValueError as error:
        parser.error(str(error))
    return args


class Report:
    """The report file: {device, …, sections: {name: raw numbers}, figures, summary}."""

    def __init__(self, path: Path | None, here: dict[str, Any]):
        self.path = path
        self.here = here
        self.sections: dict[str, dict[str, Any]] = {}
        if path is None or not path.exists():
            return
        old = json.loads(path.read_text())
        for name in ("device", "versions"):
            if old.get(name) != here[name]:
                sys.exit(
                    f"{path} was measured on another {name[:7]}: {old.get(name)}, not {here[name]}; name another --out"
                )
        self.sections = old["sections"]

    def figures(self) -> list[dict[str, Any]]:
        return figures(self.sections, "cpu" if self.here["device"].startswith("cpu ") else "cuda")

    def save(self) -> None:
        if self.path is None:
            return
        found = self.figures()
        result = {
            **self.here,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(sys.argv),
        }
        result["summary"] = summary(found, result)
        result.update(figures=found, sections=self.sections)
        write_atomic(self.path, json.dumps(result, indent=1) + "\n")


def run_section(name: str, report: Report, args: argparse.Namespace) -> None:
    """Measure one section; what goes wrong in it is written down and costs the others nothing."""
    data = report.sections.get(name, {}) if name in ("kernelbench", "soak") else {}
    for old in ("error", "stopped"):
        data.pop(old, None)
    data.update(
        minutes=args.minutes[name], command=" ".join(sys.argv), date=datetime.now(UTC).isoformat(timespec="seconds")
    )
    report.sections[name] = data
    context = Context(args.device, args.minutes[name], args.seed, args.lanes, data, report.save, args, report.sections)
    print(f"== {name} (at most {args.minutes[name]:g} minutes)", flush=True)
    started = time.monotonic()
    try:
        SECTIONS[name](context)
    except Exception:
        data["error"] = traceback.format_exc(limit=8)
        print(data["error"], file=sys.stderr, flush=True)
    except (KeyboardInterrupt, SystemExit):
        data["stopped"] = True
        raise
    finally:
        data["seconds"] = round(time.monotonic() - started, 2)
        report.save()
    for figure in [] if data.get("error") else figures({name: data}, args.device):
        print(f"   {figure['figure']}: {figure['measured']} (needed: {figure['needed']})", flush=True)


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that pools close and their processes end
    report = Report(args.out, machine.describe(args.device))
    machine.adopt_orphans()
    folder = machine.own_temporary_folder()
    try:
        for name in args.sections:
            run_section(name, report, args)
    except KeyboardInterrupt:
        print("\nstopped; what was measured is kept", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = report.figures()
    print(f"\n{report.here['device']}, {report.here['cores']} cores, {report.here['versions']}")
    if "bound" in report.sections.get("throughput", {}):
        print(f"throughput is bound by {report.sections['throughput']['bound']}")
    print(table(found))
    if args.out:
        print(f"written to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
