"""Joining a Ray cluster, and saying why where that can't be.

Runs in the driver. Importing this needs no ray: it is looked for when a cluster is asked for.
"""

from __future__ import annotations

import signal
import socket
import threading
from typing import Any

from env.ray_node import HERE
from env.tickets import PoolError


def load_ray() -> Any:
    """The module. Raises PoolError where it isn't installed."""
    try:
        import ray
    except ImportError as error:
        raise PoolError(f"ray can't be imported ({error}): pip install -r requirements-ray.txt") from error
    return ray


def connect(ray: Any, address: str) -> bool:
    """Join the cluster at HOST:PORT, or "auto": the one that runs on this machine. False where this process is in one
    already. Raises PoolError where there is none."""
    if ray.is_initialized():
        return False
    if address != "auto":
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise PoolError(f"no address of a Ray cluster: {address!r}; give HOST:PORT of its head, or auto")
        try:  # Ray itself tries for two minutes, and then ends this process
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise PoolError(f"no Ray cluster answers at {address} ({error}); `ray start --head` starts one") from error
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if main else {}
    try:
        runtime = {"py_modules": [str(HERE)], "excludes": ["__pycache__"]}
        ray.init(address=address, runtime_env=runtime, log_to_driver=False, logging_level="WARNING")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise PoolError(f"no Ray cluster at {address}: {error}") from error
    finally:
        for number, handler in handlers.items():  # Ray takes SIGTERM for itself
            signal.signal(number, handler)
    return True
