"""Common to all tests: the environment before any import, a time budget a module, GPU tests only with a GPU.

A module says `pytestmark = pytest.mark.budget(SECONDS)`; without it, DEFAULT_BUDGET_S holds. Set-up, call and
tear-down of its tests are added up; once the sum is over the budget, its tests fail. TEST_BUDGET_SCALE stretches all.
"""

from __future__ import annotations

import os

# Triton reads TRITON_INTERPRET when a kernel is decorated and OpenMP its thread count when loaded: before imports.
# TRITON_INTERPRET=0 from outside is kept, for GPU tests that compile in this process.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections import defaultdict
from pathlib import Path

import pytest

DEFAULT_BUDGET_S = 60.0
SLOWEST_SHOWN = 10
SCALE = float(os.environ.get("TEST_BUDGET_SCALE", "1"))

_spent_s: dict[str, float] = defaultdict(float)
_budget_s: dict[str, float] = {}
_over: set[str] = set()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU; skipped where there is none")
    # Test modules of different folders share names (test_metrics.py): import them by path, not by basename.
    config.option.importmode = "importlib"


def _module(item: pytest.Item) -> str:
    return item.nodeid.split("::")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = Path("/dev/nvidiactl").exists()
    for item in items:
        marker = item.get_closest_marker("budget")
        budget = float(marker.args[0]) if marker else DEFAULT_BUDGET_S
        _budget_s[_module(item)] = budget * SCALE
        if item.get_closest_marker("timeout") is None:
            # A hanging test never comes to the sum below: it is ended, with time to spare for a late one.
            item.add_marker(pytest.mark.timeout(2 * budget * SCALE + 10))
        if item.get_closest_marker("gpu") and not gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    module = _module(item)
    _spent_s[module] += call.duration
    over = _spent_s[module] > _budget_s.get(module, DEFAULT_BUDGET_S * SCALE)
    # A tear-down goes over on its own only if the test before it was still within: one failure a test is enough.
    if over and report.passed and (report.when == "call" or (report.when == "teardown" and module not in _over)):
        report.outcome = "failed"
        report.longrepr = (
            f"{module}: {_spent_s[module]:.1f} s spent, over its budget of {_budget_s[module]:.0f} s; make the tests "
            "faster, or raise the module's pytest.mark.budget and say why (slow machine: TEST_BUDGET_SCALE=3)"
        )
    if over and report.when != "setup":
        _over.add(module)
    return report


def pytest_terminal_summary(terminalreporter) -> None:
    slowest = sorted(_spent_s.items(), key=lambda pair: -pair[1])[:SLOWEST_SHOWN]
    if not slowest:
        return
    terminalreporter.section("slowest modules (spent / budget, seconds)")
    for module, spent in slowest:
        terminalreporter.write_line(f"{spent:7.1f} / {_budget_s.get(module, DEFAULT_BUDGET_S):5.0f}  {module}")
