"""Judge over HTTP: `python -m env.serve [--device cpu|cuda] [--port 10907] [--token-file FILE]`.

Runs in the driver. Accepted jobs and their verdicts are in `--store`; killed at any instant and started again, it
goes on with what has no verdict. Bound to this machine's loopback unless told otherwise, and to nothing else without a
token (a file, or the variable ENV_SERVE_TOKEN: a command line can be read by everybody). Ends with 2 where it can't
start, and with 130 or 143 within 5 s of Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from env.commands import (
    CPU,
    CUDA,
    Stopped,
    StopSignals,
    add_rule_options,
    check_output,
    chosen_rules,
    gpu_list,
    slot_count,
    whole_number,
)
from env.pool import Pool, PoolError
from env.rules import Rules
from env.serve_front import Front
from env.serve_limits import TOKEN_VARIABLE, LimitError, Rates, check_address, read_token
from env.store import Store, StoreError

PORT = 10907  # where clients of KernelGYM look
OPEN_REQUESTS_S = 1  # for answers that are on their way, once stopping
POOL_PATIENCE_S = 2.5
CONNECTIONS = 2048
NEEDED = ("fastapi", "uvicorn")


class _Signals(StopSignals):
    """The first Ctrl-C or SIGTERM: `Stopped` while starting, then what `then` was set to. Further ones do nothing."""

    then: Callable[[], None] | None = None

    def _act(self, number: int) -> None:
        if self.then is None:
            raise Stopped(number)
        self.then()


def missing_packages() -> list[str]:
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def open_port(host: str, port: int) -> socket.socket:
    """Raises OSError naming the address: before the evaluators start, which takes a while."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise OSError(f"{host}:{port}: {error.strerror or error}; give another --host or --port") from error
    return listener


def serve(front: Front, app: object, listener: socket.socket, signals: _Signals) -> None:
    """Answer until a signal comes."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # ours are in place, and outlast this server

    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, proxy_headers=False, lifespan="off",
        limit_concurrency=CONNECTIONS, timeout_graceful_shutdown=OPEN_REQUESTS_S,
    )  # fmt: skip
    server = Server(config)

    def end() -> None:
        front.begin_stop()
        server.should_exit = True

    signals.then = end
    asyncio.run(server.serve(sockets=[listener]))


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")
    return value


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 to 65535")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m env.serve", description="Judge candidates over HTTP.")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind to; another than loopback needs a token")
    parser.add_argument("--port", type=_port, default=PORT, help=f"default {PORT}; 0 takes a free one and prints it")
    parser.add_argument("--token-file", type=Path, help=f"a file (mode 600) with the token; else {TOKEN_VARIABLE}")
    parser.add_argument("--store", type=Path, default=Path("runs/serve/store.sqlite"), help="jobs and verdicts")
    parser.add_argument(
        "--queue", type=whole_number(1), default=10_000, help="candidates that may wait; more are told to come later"
    )
    parser.add_argument("--rate", type=_amount, default=1000, help="jobs a second and address; 0: no limit")
    parser.add_argument("--max-body-mb", type=whole_number(1), default=32, help="size of a request")
    parser.add_argument("--keep-days", type=_amount, default=30, help="verdicts older than this are removed; 0: none")
    parser.add_argument("--gpus", type=gpu_list, default=[], help="all, or 0,1: GPUs to judge on, one evaluator each")
    parser.add_argument("--slots", type=slot_count, default=0, help="evaluators; default: one a GPU, or one a core")
    add_rule_options(parser)
    parser.set_defaults(device=None)
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.gpus != [] and args.device == CPU:
        parser.error("--gpus and --device cpu contradict each other")
    args.device = args.device or (CPU if args.gpus == [] else CUDA)
    if missing := missing_packages():
        print(
            f"env.serve: {' and '.join(missing)} can't be found: pip install -r requirements-serve.txt", file=sys.stderr
        )
        return 2
    with _Signals() as signals:
        try:
            return _run(args, chosen_rules(args), signals)
        except (LimitError, OSError, ValueError, PoolError, StoreError) as error:
            print(f"env.serve: {error}", file=sys.stderr)
            return 2
        except Stopped as stop:
            print(f"env.serve: {stop}", file=sys.stderr)
            return stop.code


def _run(args: argparse.Namespace, rules: Rules, signals: _Signals) -> int:
    token = read_token(args.token_file)
    check_address(args.host, token)
    check_output("--store", args.store)
    from env.serve_app import make_app

    with contextlib.closing(open_port(args.host, args.port)) as listener:
        store = Store(args.store, f"{args.device}: {rules.describe()}", args.queue)
        with contextlib.closing(store):
            pool = Pool(args.device, args.slots, args.seed, rules, gpus=args.gpus or None)
            front = Front(store, pool, args.keep_days * 86400)
            rates = Rates(args.rate, max(1, int(2 * args.rate)))
            app = make_app(front, rules, token, rates, args.max_body_mb << 20)
            listener.listen(CONNECTIONS)  # who comes from now on waits for an answer, and is not turned away
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(
                f"env.serve: http://{shown}:{port}, {len(pool)} at once on {pool.info.get('device', args.device)}, "
                f"{store.queued} waiting in {args.store}, {'a token is needed' if token else 'no token'}",
                flush=True,
            )
            serve(front, app, listener, signals)
            if not front.stop(POOL_PATIENCE_S):
                # Evaluators end when this process does; waiting for the candidates that they judge takes too long.
                print(
                    "env.serve: stopped; candidates in work are judged after the next start",
                    file=sys.stderr,
                    flush=True,
                )
                sys.stdout.flush()
                os._exit(128 + (signals.got or signal.SIGTERM))
    return 128 + signals.got if signals.got else 0


if __name__ == "__main__":
    raise SystemExit(main())
