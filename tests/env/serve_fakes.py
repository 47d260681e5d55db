"""What the tests of the HTTP front share: a pool that stands in for the real one, and a documented request."""

from __future__ import annotations

import time
from concurrent.futures import Future

from env.records import STATUSES, Verdict
from env.store import Question

TOKEN = "a-token-of-the-tests-0123456789"


class FakePool:
    """Gives verdicts at once, or when `release` is called. A candidate's text says which status it gets."""

    def __init__(self, hold: bool = False):
        self.asked: list[str] = []
        self.info = {"device": "a fake", "versions": {}}
        self._held: list[tuple[Future, str]] | None = [] if hold else None

    def __len__(self) -> int:
        return 2

    def submit(self, problem, response, raw=True) -> Future:
        self.asked.append(response)
        future: Future = Future()
        if self._held is None:
            future.set_result(self._verdict(response))
        else:
            self._held.append((future, response))
        return future

    def release(self) -> None:
        held, self._held = self._held, None
        for future, response in held:
            future.set_result(self._verdict(response))

    def close(self) -> None:
        for future, _ in self._held or []:
            future.cancel()

    def _verdict(self, response: str) -> Verdict:
        status = next((status for status in STATUSES if status in response.split()), "correct")
        verdict = Verdict(status=status, message=f"it was {status}", feedback=f"status: {status}", device="a fake")
        if status == "correct":
            verdict.speedup, verdict.reference_us, verdict.candidate_us = 2.0, 40.0, 20.0
        return verdict


def question(text: str = "candidate", **changes) -> Question:
    return Question(reference="reference", response=text, **changes)


def wait_for(what, timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


# As the README of KernelGYM shows a standalone kernel with its test cases.
KERNEL_SIMPLE = """
import torch
import triton
import triton.language as tl

@triton.jit
def add_kernel(x_ptr, y_ptr, output_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    pid = tl.program_id(axis=0)
    offsets = pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    tl.store(output_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask), mask=mask)

class ModelNew(torch.nn.Module):
    def forward(self, x, y):
        output = torch.empty_like(x)
        n_elements = x.numel()
        add_kernel[(triton.cdiv(n_elements, 1024),)](x, y, output, n_elements, BLOCK_SIZE=1024)
        return output

def get_init_inputs():
    return []

def get_inputs():
    return [torch.randn(1024, device='cuda'), torch.randn(1024, device='cuda')]

def get_cases():
    x = torch.randn(1024, device='cuda')
    y = torch.randn(1024, device='cuda')
    expected = x + y
    return [{"inputs": [x, y], "outputs": expected}]
"""
