"""The judge on one node of a Ray cluster: an ordinary `env.pool.Pool` behind an actor's methods.

Runs in an actor's process, one a node, started by `env.ray_pool`, from whose machine it gets this package's source.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
from pathlib import Path
from typing import Any

from env.pool import Pool, PoolError
from env.records import Problem

HERE = Path(__file__).resolve().parent


def facts() -> dict[str, str]:
    """What must be the same on all nodes for equal verdicts: torch, triton, and a digest of this package's source.

    Imports neither. A package that isn't installed is "missing".
    """
    found = {}
    for name in ("torch", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    digest = hashlib.sha256()
    for path in sorted(HERE.glob("*.py")):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    found["env"] = digest.hexdigest()[:16]
    return found


class NodeJudge:
    """Becomes an actor. Its methods are coroutines: as many answers are in work as the driver sends."""

    def __init__(self) -> None:
        self.pool: Pool | None = None

    async def open(self, wanted: dict[str, str], settings: dict[str, Any]) -> tuple[str, Any]:
        """Open the pool: ("ready", (lanes of all its evaluators, its info)), or ("refused", why)."""
        mine = facts()
        differ = [f"{name} is {mine[name]}, the driver's {its}" for name, its in wanted.items() if mine[name] != its]
        if differ:
            return "refused", "; ".join(differ)
        try:
            self.pool = await asyncio.to_thread(Pool, **settings)
        except PoolError as error:
            return "refused", str(error)
        return "ready", (len(self.pool), self.pool.info)

    async def judge(self, problem: Problem, response: str, raw: bool) -> dict[str, Any]:
        """The verdict as JSON."""
        assert self.pool is not None, "open comes first"
        return (await asyncio.wrap_future(self.pool.submit(problem, response, raw))).to_json()

    async def outlive(self) -> None:
        """Never ends: a call that fails when this process or its node is lost, also where nothing else is in work."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """End the evaluators and remove their scratch."""
        if self.pool is not None:
            await asyncio.to_thread(self.pool.close)
