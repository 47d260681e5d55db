"""Many nodes, one queue: `RayPool(address)`, `submit` → future, `close`, as `env.pool.Pool` has them.

Runs in the driver, on a machine of the cluster; needs `ray` (requirements-ray.txt). Each node has one actor
(`env.ray_node`) with an ordinary Pool over its GPUs or cores. Nodes that join get one while the pool is open. What a
node had in work when it was lost is judged elsewhere; what was in work on two that were lost gets `infra_error`.
"""

from __future__ import annotations

import queue
import secrets
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from env.pool import PoolError, patience_s, refuse_settings
from env.ray_cluster import connect, load_ray
from env.ray_node import NodeJudge, facts
from env.records import Problem, Verdict
from env.rules import Rules, rules_for
from env.tickets import Ticket, Tickets, lost

DEATHS = 2  # nodes that may be lost with an answer in work, until it is given up
LOSSES = 3  # times that an actor may be lost on a node that lives, without a verdict between them
LOOK_S = 1.0  # between looks for nodes that joined
NO_NODE_S = 300.0  # how long answers wait for a node that judges
CLOSE_S = 30.0


@dataclass(eq=False)
class _Node:
    """An actor on a node. lanes: 0 until its pool is open."""

    id: str
    name: str
    actor: Any
    lanes: int = 0
    in_flight: set[Ticket] = field(default_factory=set)


class RayPool:
    """A context manager over the evaluators of a cluster; opens as soon as one node can judge.

    address: HOST:PORT of the head, or "auto". slots: evaluators a node; 0 means one a GPU, or one a CPU that the node
    offers to Ray. device, seed, rules and lanes are those of Pool. A node that offers none is left alone. `judged`
    counts verdicts by node; `refused` says why a node isn't used. Raises PoolError where no node can judge.
    """

    def __init__(
        self, address: str = "auto", device: str = "cpu", slots: int = 0, seed: int | None = None,
        rules: Rules | None = None, lanes: int = 0,
    ):  # fmt: skip
        refuse_settings(device, slots, lanes, rules, seed)
        self.device = device
        self.rules = (rules or rules_for(device=device)).on(device)
        self.info: dict[str, Any] = {}
        self.judged: Counter[str] = Counter()
        self.refused: dict[str, str] = {}
        seed = secrets.randbits(60) if seed is None else seed  # the same for all nodes: so is the verdict
        self._settings = {"device": device, "slots": slots, "seed": seed, "rules": self.rules, "lanes": lanes}
        # An answer may have waited its turn alone on the node, after an evaluator was lost there.
        self._patience_s = 3 * patience_s(self.rules)
        self._tickets = Tickets()
        self._waiting: deque[Ticket] = deque()
        self._nodes: list[_Node] = []
        self._no_more: set[str] = set()
        self._losses: Counter[str] = Counter()
        self._idle_since = time.monotonic()
        # Everything that happens comes through here to one thread, which alone touches what is above.
        self._events: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._opened: Future = Future()
        self._ray = load_ray()
        # Now, as `connect` hands the source out: it may be edited while the pool is open.
        self._wanted = facts()
        self._ours = connect(self._ray, address)
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        try:
            self._opened.result()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RayPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """How many candidates are judged at once, on the nodes that are there now."""
        return sum(node.lanes for node in list(self._nodes))

    def submit(self, problem: Problem, response: str, raw: bool = True) -> Future:
        """Queue a candidate, as Pool.submit. Where no node is left for NO_NODE_S, its verdict is infra_error."""
        future, ticket = self._tickets.issue(problem, response, raw)
        if ticket is not None:
            self._events.put(lambda: self._waiting.append(ticket))
        return future

    def close(self) -> None:
        """End all actors and their evaluators. Futures that have no result yet are cancelled."""
        if self._closed:
            return
        self._closed = True
        self._tickets.close()
        self._events.put(None)
        self._thread.join()
        self._settle()
        closing = [node.actor.close.remote() for node in self._nodes]
        if closing:
            self._ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
        for node in self._nodes:
            self._ray.kill(node.actor)
        for ticket in self._take_all():
            ticket.future.cancel()
        self._nodes = []
        if self._ours:
            self._ray.shutdown()

    def _settle(self) -> None:
        """What was submitted or decided until now."""
        while not self._events.empty():
            if (event := self._events.get()) is not None:
                event()

    # One thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        look = 0.0
        try:
            while True:
                if time.monotonic() >= look:
                    self._look_for_nodes()
                    self._lose_the_silent()
                    look = time.monotonic() + LOOK_S
                try:
                    event = self._events.get(timeout=max(0.0, look - time.monotonic()))
                except queue.Empty:
                    continue
                if event is None:
                    return
                event()
                self._send()
        except Exception as error:
            # Whoever waits must not wait for ever.
            self._tickets.close()
            if not self._opened.done():
                self._opened.set_exception(PoolError(f"the cluster can't be used: {error}"))
            self._settle()
            self._give_up(f"the pool of the cluster failed: {type(error).__name__}: {error}")
            raise

    def _look_for_nodes(self) -> None:
        """Start an actor on nodes that have none; give up what waits where none could judge for too long."""
        known = {node.id for node in self._nodes} | self._no_more
        alive = [row for row in self._ray.nodes() if row["Alive"]]
        resource = "GPU" if self.device == "cuda" else "CPU"
        usable = [row for row in alive if row["Resources"].get(resource, 0) >= 1]
        for row in usable:
            if row["NodeID"] not in known:
                self._start(row, int(row["Resources"][resource]))
        if any(node.lanes for node in self._nodes):
            self._idle_since = time.monotonic()
        waited = time.monotonic() - self._idle_since
        if not self._opened.done() and (not self._nodes or waited > NO_NODE_S):
            none = f"none of {len(usable)} was ready in {waited:.0f} s" if usable else f"none offers a {resource}"
            why = "; ".join(f"{name}: {why}" for name, why in self.refused.items()) or none
            self._opened.set_exception(PoolError(f"no node of the cluster can judge on {self.device}: {why}"))
        elif waited > NO_NODE_S:
            self._give_up(f"no node of the cluster could judge for {waited:.0f} s")

    def _start(self, row: dict[str, Any], count: int) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # All of its GPUs, or all of its cores: nobody else's work runs beside a measurement.
        takes = {"num_gpus": count, "num_cpus": 0} if self.device == "cuda" else {"num_cpus": count}
        here = NodeAffinitySchedulingStrategy(row["NodeID"], soft=False)
        actor = self._ray.remote(NodeJudge).options(scheduling_strategy=here, max_concurrency=10_000, **takes)
        node = _Node(row["NodeID"], f"{row['NodeManagerHostname']}/{row['NodeID'][:8]}", actor.remote())
        self._nodes.append(node)
        settings = {**self._settings, "slots": self._settings["slots"] or count}
        self._when_done(node, node.actor.open.remote(self._wanted, settings), lambda told: self._ready(node, *told))

    def _when_done(self, node: _Node, ref: Any, then: Callable[[Any], None]) -> None:
        """Later, on this thread: what a call returned goes to `then`; one that failed means that its node is lost."""

        def handle(future: Future) -> None:
            if node not in self._nodes:
                return  # lost already, and its work with others: a verdict that comes after all doesn't count
            try:
                told = future.result()
            except self._ray.exceptions.RayError as error:
                self._lose(node, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
                return
            then(told)

        ref.future().add_done_callback(lambda future: self._events.put(lambda: handle(future)))

    def _ready(self, node: _Node, kind: str, told: Any) -> None:
        if kind == "refused":
            self._refuse(node, told)
            return
        node.lanes, info = told
        self.info = self.info or info
        self._when_done(node, node.actor.outlive.remote(), lambda _: None)
        if not self._opened.done():
            self._opened.set_result(None)

    def _refuse(self, node: _Node, why: str) -> None:
        self._no_more.add(node.id)
        self.refused[node.name] = why
        print(f"env.ray_pool: node {node.name} is not used: {why}", file=sys.stderr)
        self._drop(node)

    def _drop(self, node: _Node) -> None:
        self._nodes.remove(node)
        self._ray.kill(node.actor)

    def _send(self) -> None:
        """Give what waits to the node with the most free lanes."""
        while self._waiting and (free := [node for node in self._nodes if node.lanes > len(node.in_flight)]):
            node = max(free, key=lambda node: node.lanes - len(node.in_flight))
            ticket = self._waiting.popleft()
            ticket.started = time.monotonic()
            node.in_flight.add(ticket)
            job = ticket.job
            ref = node.actor.judge.remote(job.problem, job.response, job.raw)
            self._when_done(node, ref, lambda told, node=node, ticket=ticket: self._decide(node, ticket, told))

    def _decide(self, node: _Node, ticket: Ticket, verdict: dict[str, Any]) -> None:
        if ticket not in node.in_flight:
            return  # given up already
        node.in_flight.remove(ticket)
        self._losses[node.id] = 0
        self.judged[node.name] += 1
        self._tickets.decide(ticket, Verdict.from_json(verdict))

    def _lose(self, node: _Node, why: str) -> None:
        """A node is gone, or its actor: its work is first in line elsewhere, but for what was on too many such."""
        self._drop(node)
        self._losses[node.id] += 1
        for ticket in node.in_flight:
            ticket.nodes.append(f"{node.name} ({why})")
            if len(ticket.nodes) < DEATHS:
                self._waiting.appendleft(ticket)
            else:
                told = f"in work on {len(ticket.nodes)} nodes when they were lost: {', '.join(ticket.nodes)}"
                self._tickets.decide(ticket, lost(ticket.job.problem, told))
        if self._losses[node.id] >= LOSSES:
            self._no_more.add(node.id)
            self.refused[node.name] = f"lost {LOSSES} times without a verdict between, last: {why}"

    def _lose_the_silent(self) -> None:
        end = time.monotonic() - self._patience_s
        for node in [node for node in self._nodes if any(ticket.started < end for ticket in node.in_flight)]:
            self._lose(node, f"no verdict for {self._patience_s:.0f} s")
        self._send()

    def _give_up(self, why: str) -> None:
        for ticket in self._take_all():
            self._tickets.decide(ticket, lost(ticket.job.problem, why))

    def _take_all(self) -> list[Ticket]:
        """Everything that has no verdict yet, which nobody works for any more."""
        left = [*self._waiting, *(ticket for node in self._nodes for ticket in node.in_flight)]
        for held in (self._waiting, *(node.in_flight for node in self._nodes)):
            held.clear()
        return left
