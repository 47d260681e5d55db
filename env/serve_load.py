"""What the HTTP front takes while candidates are judged: `python -m env.serve_load [--seconds 10] [--slots N]`.

Starts a server with the real pool, floods it with different candidates over some connections, kills it with SIGKILL,
and starts it again: every id that was accepted must still be there. Prints one JSON object. Exits 1 where one is lost.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from env.commands import slot_count, whole_number
from env.pool import ROOT

REFERENCE = """import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2.0

def get_inputs():
    return [torch.randn(8, 64)]

def get_init_inputs():
    return []
"""
CANDIDATE = """import torch, triton, triton.language as tl

@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2.0, mask=i < n)

class ModelNew(torch.nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        double[(triton.cdiv(x.numel(), 512),)](x, y, x.numel(), BLOCK=512)
        return y
"""


@contextlib.contextmanager
def server(store: Path, slots: int):
    """(process, port) of a server that answers."""
    command = [sys.executable, "-m", "env.serve", "--port", "0", "--store", str(store)]
    command += ["--queue", "1000000", "--rate", "0", *(["--slots", str(slots)] if slots else [])]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        if not line:
            raise SystemExit("env.serve_load: the server did not start")
        yield process, int(line.split(":")[3].partition(",")[0])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: object = None) -> tuple[int, dict]:
    data = None if body is None else json.dumps(body)
    connection.request(method, path, data, {"Content-Type": "application/json"} if data else {})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def flood(port: int, thread: int, end: float, accepted: list[str], latencies_ms: list[float]) -> None:
    """Submit one after the other until the server is gone or the time is up."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    number = 0
    with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
        while time.monotonic() < end:
            name = f"{thread}-{number}"
            began = time.monotonic()
            job = {"id": name, "reference": REFERENCE, "candidate": f"{CANDIDATE}# {name}\n"}
            if ask(connection, "POST", "/v1/jobs", job)[0] == 202:
                accepted.append(name)
                latencies_ms.append(1000 * (time.monotonic() - began))
            number += 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m env.serve_load", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--connections", type=whole_number(1), default=8)
    parser.add_argument("--slots", type=slot_count, default=0, help="evaluators; default: one a core")
    args = parser.parse_args(argv)
    accepted: list[str] = []
    latencies_ms: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store.sqlite"
        with server(store, args.slots) as (process, port):
            began = time.monotonic()
            arguments = [(port, i, began + args.seconds + 5, accepted, latencies_ms) for i in range(args.connections)]
            threads = [threading.Thread(target=flood, args=given) for given in arguments]
            for thread in threads:
                thread.start()
            time.sleep(args.seconds)
            seconds, count = time.monotonic() - began, len(accepted)
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            judged = ask(connection, "GET", "/health")[1]["total_processed"]
            process.kill()
            for thread in threads:
                thread.join()
        with server(store, args.slots) as (_, port):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            lost = [name for name in accepted if ask(connection, "GET", f"/v1/status/{name}")[0] != 200]
    latencies_ms.sort()
    print(
        json.dumps(
            {
                "accepted_per_s": round(count / seconds, 1),
                "median_ms": round(latencies_ms[len(latencies_ms) // 2], 1),
                "p99_ms": round(latencies_ms[int(0.99 * len(latencies_ms))], 1), "accepted": len(accepted),
                "verdicts_meanwhile": judged, "lost_over_kill_9": len(lost), "cores": os.cpu_count(),
                "load_1min": round(os.getloadavg()[0], 1),
            }
        )
    )  # fmt: skip
    return 1 if lost else 0


if __name__ == "__main__":
    raise SystemExit(main())
