"""What `env.evaluate`, `env.batch` and `env.serve` share: options that choose the rules, checks of what the command
line names, an orderly end on Ctrl-C or SIGTERM.

Runs in the driver.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from env.files import existing
from env.rules import PRECISIONS, PROFILES, REFERENCES, TIMES, Rules, rules_for

CPU, CUDA = "cpu", "cuda"


def add_rule_options(parser: argparse.ArgumentParser) -> None:
    """Options of both commands. What isn't given is what the profile says."""
    parser.add_argument(
        "--device",
        choices=(CPU, CUDA),
        default=CPU,
        help="cpu (default): Triton's interpreter and modelled times; cuda: a GPU and measured ones",
    )
    group = parser.add_argument_group("rules")
    group.add_argument(
        "--profile",
        choices=tuple(PROFILES),
        default="default",
        help="whose tolerances, trials and, on a GPU, way of timing; the check for hacks is on in all of them",
    )
    group.add_argument("--precision", choices=PRECISIONS, help="float32 products, on both sides")
    group.add_argument(
        "--reference", choices=REFERENCES, dest="reference_mode", help="the reference as it is or through torch.compile"
    )
    group.add_argument("--time", choices=TIMES, help="which of the two measured times the speedup is made of")
    group.add_argument("--seed", type=int, help="seed of the secret inputs; default: a fresh secret")
    group.add_argument(
        "--weak-isolation",
        action="store_true",
        help="judge even where this machine can't shut candidates in well enough",
    )


def chosen_rules(args: argparse.Namespace) -> Rules:
    """The rules that the options ask for. Raises ValueError for what the profile or the device doesn't go with."""
    changes = {
        name: value
        for name, value in (
            ("precision", args.precision),
            ("reference", args.reference_mode),
            ("rewarded_time", args.time),
        )
        if value is not None
    }
    if args.device == CPU and args.time == "device":
        raise ValueError("--time device: on the CPU times are modelled; it needs --device cuda")
    return rules_for(args.profile, args.device, weak_isolation=args.weak_isolation, **changes)


class Stopped(BaseException):
    """Ctrl-C or SIGTERM. `code` is what a shell expects of a process that ended like that: 130, 143."""

    def __init__(self, number: int):
        self.code = 128 + number
        super().__init__(
            "stopped by Ctrl-C" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
        )


class StopSignals:
    """Turns the first Ctrl-C or SIGTERM into `Stopped`; further ones can't disturb the end that follows.

    `held()` puts it off, so that nothing is half written.
    """

    def __init__(self) -> None:
        self.got = 0
        self._holding = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: object) -> None:
        if self.got:
            return
        self.got = number
        self._act(number)

    def _act(self, number: int) -> None:
        if not self._holding:
            raise Stopped(number)

    def ignore(self) -> None:
        """What was asked for is done: the end that follows is not disturbed any more."""
        self._holding = True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        if self.got:
            raise Stopped(self.got)


def gpu_list(text: str) -> list[str] | None:
    """--gpus: `all` (None) or numbers and UUIDs between commas."""
    if text == "all":
        return None
    names = [name.strip() for name in text.split(",")]
    if "" in names or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r}: give all, or each GPU once, as in 0,1")
    return names


def whole_number(least: int, instead: str = "") -> Callable[[str], int]:
    """The type of an option that takes whole numbers from `least` on. instead: what to do if less was wanted."""

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"{text}: at least {least}{f'; {instead}' if instead else ''}")
        return number

    return convert


# 0 would be silently the same as the default.
slot_count = whole_number(1, "leave it out for one a GPU, or one a core")


# Files that the command line names -----------------------------------------------------------------------------------


def check_input(argument: str, path: Path, wanted: str) -> None:
    """Raises ValueError where a file can't be read: which argument, which path, and what to give instead."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"{argument} {path}: no such file; give {wanted}") from error
    except OSError as error:
        raise ValueError(f"{argument} {path}: can't be read ({error.strerror}); give {wanted}") from error
    if stat.S_ISDIR(mode):
        raise ValueError(f"{argument} {path}: a folder, not a file; give {wanted}")
    if not os.access(path, os.R_OK):
        raise ValueError(f"{argument} {path}: may not be read by this user; chmod it, or give {wanted}")


def check_output(argument: str, path: Path) -> None:
    """Raises ValueError where a file can't be written, or its folder can't be made: before anything takes long."""
    what = f"{argument} {path}"
    if path.is_dir():
        raise ValueError(f"{what}: a folder; give the name of a file in it")
    if path.exists():
        if not path.is_file():
            raise ValueError(f"{what}: no ordinary file, and what is written must be kept; give the name of a file")
        if not os.access(path, os.R_OK | os.W_OK):
            raise ValueError(f"{what}: may not be read and written by this user; chmod it, or give another file")
        return
    above = existing(path.parent)
    if not above.is_dir():
        raise ValueError(f"{what}: {above} is no folder; give another file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"{what}: this user may not write to {above}; give a file elsewhere")
