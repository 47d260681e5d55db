"""A pool over a real local Ray cluster: nodes join, leave and are killed, and every answer gets its one verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from env import batch
from env.generator import chain_of, generate
from env.pool import Pool, PoolError
from env.ray_node import facts
from env.ray_pool import RayPool
from env.records import Problem
from env.rules import Rules
from rl.teacher_templates import fused, wrong

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before ray is imported
ray = pytest.importorskip("ray", reason="ray can't be imported: pip install -r requirements-ray.txt")

# A node takes 3 to 6 s to start, an evaluator on it 5: six of each, one after the other.
pytestmark = pytest.mark.budget(300)

ROOT = Path(__file__).resolve().parents[2]
RULES = Rules(trials=1, compile_timeout_s=20, run_timeout_s=10)
WAIT_S = 60 * float(os.environ.get("TEST_BUDGET_SCALE", "1"))


class Nodes:
    """A cluster whose head judges nothing (it offers no CPU); `add` and `kill` nodes that offer one each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        quick = {"health_check_period_ms": 500, "health_check_failure_threshold": 3, "health_check_timeout_ms": 1000}
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **SMALL, "_system_config": quick})
        self.address = self._cluster.address
        self._nodes: dict[str, object] = {}

    def add(self, **arguments: object) -> str:
        node = self._cluster.add_node(num_cpus=1, **SMALL, **arguments)
        self._nodes[node.node_id] = node
        return node.node_id

    def kill(self, name: str) -> None:
        """`name` as the pool has it: HOST/first characters of the id."""
        found = next(key for key in self._nodes if key.startswith(name.rpartition("/")[2]))
        self._cluster.remove_node(self._nodes.pop(found), allow_graceful=False)

    def end(self) -> None:
        self._cluster.shutdown()


SMALL = {"object_store_memory": 80 * 2**20, "include_dashboard": False}


@pytest.fixture(scope="module")
def nodes():
    nodes = Nodes()
    yield nodes
    nodes.end()


def wait_until(condition: Callable[[], object], seconds: float = WAIT_S) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


def without_cost(verdict) -> dict:
    return {key: value for key, value in verdict.to_json().items() if key != "cost"}


def actors_and_evaluators() -> list[str]:
    """Command lines below this process of actors (Ray names a process after its class) and of evaluators."""
    parents, commands = {}, {}
    for entry in Path("/proc").iterdir():
        try:
            state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (OSError, IndexError):
            continue
        if entry.name.isdigit() and state not in "ZX":
            parents[int(entry.name)], commands[int(entry.name)] = int(parent), command

    def mine(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return [
        command
        for pid, command in commands.items()
        if ("NodeJudge" in command or "-m env.evaluator" in command) and mine(pid)
    ]


def slow(answers, seconds: float, tag: str) -> str:
    return answers.slow.replace("0.5", str(seconds)) + f"# {tag}\n"


def on_which(pool: RayPool) -> list[str]:
    return [node.name for node in list(pool._nodes) if node.in_flight]


def test_joins_leaves_and_a_kill_in_mid_batch_cost_no_verdict(nodes, answers):
    questions = [
        (problem, make(chain_of(problem.source)))
        for problem in generate("train", 6, seed=5, size="cpu")
        for make in (fused, lambda chain: wrong(chain, 0))
    ]
    with Pool("cpu", slots=1, seed=3, rules=RULES) as pool:
        futures = [pool.submit(problem, answer, raw=False) for problem, answer in questions]
        expected = [without_cost(future.result()) for future in futures]
    assert {"correct", "incorrect"} <= {verdict["status"] for verdict in expected}

    nodes.add()
    nodes.add()
    came: Counter = Counter()
    with RayPool(nodes.address, seed=3, rules=RULES) as pool:
        assert wait_until(lambda: len(pool) == 2), pool.refused
        futures = [pool.submit(problem, answer, raw=False) for problem, answer in questions]
        assert pool.submit(*questions[0], raw=False) is futures[0], "equal answers are judged once"
        more = [pool.submit(Problem("s", answers.reference), slow(answers, 0.5, f"{i}"), raw=False) for i in range(10)]
        for future in [*futures, *more]:
            future.add_done_callback(lambda future: came.update([future]))

        assert wait_until(lambda: len(pool.judged) == 2 and on_which(pool)), "both nodes are used"
        victim = on_which(pool)[0]
        nodes.kill(victim)
        nodes.add()
        assert [without_cost(future.result(WAIT_S)) for future in futures] == expected, "as the local pool has them"
        assert [future.result(WAIT_S).status for future in more] == ["correct"] * len(more)
        last = 0
        while len(pool.judged) < 3:  # the batch may have ended before the new node was ready
            assert last < 100, "the node that joined is not used"
            futures.append(pool.submit(Problem("s", answers.reference), slow(answers, 0.5, f"late {last}"), raw=False))
            futures[-1].add_done_callback(lambda future: came.update([future]))
            futures[-1].result(WAIT_S)
            last += 1
            if len(pool) == 2:
                beside = [
                    pool.submit(Problem("s", answers.reference), slow(answers, 0.5, f"both {last} {i}"), raw=False)
                    for i in range(4)
                ]
                assert [future.result(WAIT_S).status for future in beside] == ["correct"] * 4
        assert set(came.values()) == {1} and len(came) == len(futures) + len(more)
        assert pool.submit(*questions[0], raw=False) is futures[0], "also after the verdict"

        running = [pool.submit(Problem("s", answers.reference), slow(answers, 3, f"c{i}"), raw=False) for i in range(4)]
        assert wait_until(lambda: len(on_which(pool)) == 2) and actors_and_evaluators()
    assert all(future.done() for future in running) and running[-1].cancelled()
    assert wait_until(lambda: not actors_and_evaluators(), 10), actors_and_evaluators()
    with pytest.raises(PoolError, match="closed"):
        pool.submit(*questions[0])


def test_what_two_nodes_were_lost_with_is_given_up_and_the_rest_waits_for_a_node(nodes, answers):
    with RayPool(nodes.address, seed=3, rules=RULES) as pool:
        assert wait_until(lambda: len(pool) == 2), pool.refused
        guilty = pool.submit(Problem("s", answers.reference), slow(answers, 6, "guilty"), raw=False)
        killed = []
        for _ in range(2):
            assert wait_until(lambda: set(on_which(pool)) - set(killed))  # a loss is noticed after a second or two
            killed.append((set(on_which(pool)) - set(killed)).pop())
            nodes.kill(killed[-1])
        verdict = guilty.result(WAIT_S)
        assert verdict.status == "infra_error" and verdict.blameless and len(set(killed)) == 2
        assert all(name in verdict.message for name in killed), verdict.message
        assert len(pool) == 0
        waits = pool.submit(Problem("s", answers.reference), answers.correct, raw=False)
        time.sleep(1.0)
        assert not waits.done()
        nodes.add()
        assert waits.result(WAIT_S).status == "correct"


def test_a_node_with_another_triton_is_refused_by_name_and_a_batch_runs_on_the_other(nodes, answers, tmp_path, capsys):
    other = tmp_path / "site" / "triton-0.0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: triton\nVersion: 0.0.1\n")
    name = nodes.add(env_vars={"PYTHONPATH": str(other.parent)})
    lines = [{"id": i, "reference": answers.reference, "candidate": f"{answers.correct}# {i}\n"} for i in range(6)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.jsonl"
    assert batch.main([str(tmp_path / "in.jsonl"), str(out), "--ray", nodes.address, "--seed", "3"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(row["id"] for row in rows) == list(range(6))
    assert {row["verdict"]["status"] for row in rows} == {"correct"}
    said = capsys.readouterr().err
    assert f"{name[:8]} is not used: triton is 0.0.1, the driver's {facts()['triton']}" in said
    assert wait_until(lambda: not actors_and_evaluators(), 10), actors_and_evaluators()


def test_a_killed_driver_leaves_no_actor_and_the_batch_goes_on(nodes, answers, tmp_path):
    nodes.add()
    texts = [slow(answers, 0.2, f"driver {i}") for i in range(4)]
    lines = [{"id": i, "reference": answers.reference, "candidate": text} for i, text in enumerate(texts)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.jsonl"
    arguments = [str(tmp_path / "in.jsonl"), str(out), "--ray", nodes.address, "--seed", "3"]
    driver = subprocess.Popen([sys.executable, "-m", "env.batch", *arguments], cwd=ROOT)
    try:
        assert wait_until(lambda: out.exists() and out.stat().st_size) and actors_and_evaluators()
    finally:
        driver.kill()
        driver.wait()
    assert wait_until(lambda: not actors_and_evaluators(), 10), actors_and_evaluators()
    assert 1 <= len(out.read_text().splitlines()) < len(lines)
    assert batch.main(arguments) == 0
    assert sorted(json.loads(line)["id"] for line in out.read_text().splitlines()) == list(range(len(lines)))


def test_a_cluster_that_can_not_judge_says_why(nodes, monkeypatch):
    monkeypatch.setattr("env.ray_pool.facts", lambda: {**facts(), "env": "another"})
    with pytest.raises(
        PoolError, match=r"no node of the cluster can judge on cpu: .*: env is .*, the driver's another"
    ):
        RayPool(nodes.address, rules=RULES)
    with pytest.raises(PoolError, match="none offers a GPU"):
        RayPool(nodes.address, device="cuda")
    assert not ray.is_initialized()


def test_addresses_without_a_cluster():
    for address, why in (("head", "no address"), ("127.0.0.1:9", "no Ray cluster answers at 127.0.0.1:9")):
        with pytest.raises(PoolError, match=why):
            RayPool(address)


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PoolError, match=r"pip install -r requirements-ray\.txt"):
        RayPool("auto")
