"""Several ranks on one machine, for tests: forked processes that find each other as torchrun's do."""

from __future__ import annotations

import os
import socket
import traceback

import torch

from rl import distributed


def run_ranks(count, function, *arguments):
    """function(*arguments) in `count` gloo ranks at once; the list of what they return (tensors and plain values).

    Forked, so that nothing is imported again. Raises AssertionError with the trace of ranks that fail.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(count):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            os._exit(_rank(write, rank, count, port, function, arguments))
        os.close(write)
        children.append((child, read))
    results = []
    for child, read in children:
        with os.fdopen(read, "rb") as pipe:
            data = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        results.append((status, data))
    failed = [data.decode() or f"exit status {status}" for status, data in results if status]
    assert not failed, "\n".join(failed)
    return [_loaded(data) for _, data in results]


def _rank(write, rank, count, port, function, arguments):
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip
    with os.fdopen(write, "wb") as pipe:
        try:
            torch.set_num_threads(1)
            distributed.start("cpu")
            result = function(*arguments)
            distributed.stop()
            torch.save(result, pipe)
        except BaseException:
            pipe.write(traceback.format_exc().encode())
            return 1
    return 0


def _loaded(data):
    import io

    return torch.load(io.BytesIO(data), weights_only=True)
