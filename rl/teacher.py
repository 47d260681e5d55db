"""A scripted teacher that plays the strong model of the cold start: it answers from the prompt's text alone.

Runs where trajectories are collected, behind the same interface as a model. It shows the whole range of quality, good
and bad, because what comes out is the mixture that reinforcement learning then has to sort.

First turn: a quality is drawn by `shares`. Later turns mostly improve on the last status in the prompt: a failed answer
is followed by a correct kind (lazy, fused, tuned, in their shares) with probability RECOVERY, else by any kind by
`shares`; after lazy, fused and tuned the row of IMPROVE decides. An answer that nobody judged (infra_error,
problem_error) is drawn anew.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from env.generator import Chain, chain_of
from env.operators import MATMUL, OPERATORS, REDUCTION
from env.records import BLAMELESS_STATUSES, STATUSES
from rl import teacher_templates as templates
from rl.engines.base import Completion, EngineError, Request, Sampling, Source

KINDS = ("decoy", "wrong", "broken", "lazy", "fused", "tuned")
CORRECT_KINDS = ("lazy", "fused", "tuned")
RECOVERY = 0.75
IMPROVE: dict[str, dict[str, float]] = {
    "lazy": {"lazy": 0.2, "fused": 0.35, "tuned": 0.45},
    "fused": {"fused": 0.3, "tuned": 0.7},
    "tuned": {"tuned": 0.9, "fused": 0.1},
}
# Below this much of the time in own kernels, torch still does a part of the work.
LAZY_BELOW = 0.95

RESHAPING = (REDUCTION, MATMUL)

_BLOCK = re.compile(r"^```python[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_REFERENCE = re.compile(r"^class Model\b", re.MULTILINE)
_STATUS = re.compile(r"^status: (\w+)[ \t]*$", re.MULTILINE)
_RATIO = re.compile(r"^profiling ratio: ([0-9.]+)", re.MULTILINE)
_OWN_ROW = re.compile(r"^- triton ", re.MULTILINE)

_DECOYS = (
    ("A Triton kernel, and the reference.", templates.never_launched),
    ("A Triton kernel next to the reference.", templates.ignored),
)
_BROKEN = (
    ("One kernel for the chain.", templates.undefined_name),
    ("One kernel with a block of 100.", templates.odd_block),
    ("One kernel for the whole chain.", templates.missing_colon),
)


def reference_chain(prompt_text: str) -> Chain:
    """The chain of operators of the reference in a prompt: its first Python block that defines class Model.

    Raises ValueError where there is none, or where a line of its forward is no operator that the teacher knows.
    """
    for block in _BLOCK.finditer(prompt_text):
        if _REFERENCE.search(block.group(1)):
            return chain_of(block.group(1))
    raise ValueError(
        "the prompt has no ```python block that defines class Model: the teacher needs the reference in it"
    )


def last_kind(prompt_text: str) -> str:
    """What the last answer was, by the last feedback in a prompt: "" (none or not judged), "failed", or a correct kind.

    One own kernel is tuned, several are fused. Raises ValueError for a status that no verdict has.
    """
    found = list(_STATUS.finditer(prompt_text))
    if not found:
        return ""
    status, feedback = found[-1].group(1), prompt_text[found[-1].end() :]
    if status not in STATUSES:
        raise ValueError(f"the prompt says status {status!r}; known: {', '.join(STATUSES)}")
    if status in BLAMELESS_STATUSES:
        return ""
    if status != "correct":
        return "failed"
    ratio = _RATIO.search(feedback)
    if ratio is None or float(ratio.group(1)) < LAZY_BELOW:
        return "lazy"
    return "tuned" if len(_OWN_ROW.findall(feedback)) == 1 else "fused"


class ScriptedEngine:
    """The teacher as an engine of text: its draws come from each request's seed."""

    takes = "messages"

    def __init__(self, shares: dict[str, float]) -> None:
        self.shares = shares
        self._teacher = ScriptedTeacher()

    def push(self, model: object) -> None:
        raise EngineError("the script has no weights to change")

    def stream(self, source: Source, sampling: Sampling) -> Iterator[tuple[Request, Completion]]:
        """Requests and their answers, at once (rl/engines/base.py)."""
        while requests := source.take(source.most, wait=True):
            for request in requests:
                said = "\n".join(message["content"] for message in request.prompt)
                text = self._teacher.respond(said, random.Random(request.seed), self.shares)
                yield request, Completion([], [], "stop", text=text)


def _draw(weights: dict[str, float], rng: random.Random) -> str:
    kinds = [kind for kind in KINDS if weights.get(kind, 0.0) > 0.0]
    return rng.choices(kinds, [weights[kind] for kind in kinds])[0]


class ScriptedTeacher:
    """Answers like a model that knows Triton more or less: one sentence, one Python block defining ModelNew."""

    def respond(self, prompt_text: str, rng: random.Random, shares: dict[str, float]) -> str:
        """An answer to a prompt; `rng` decides everything, so equal states give equal answers.

        shares: weight of each of KINDS on the first turn and after failures. Raises ValueError for unknown or negative
        shares and for references that the teacher doesn't know.
        """
        unknown = sorted(set(shares) - set(KINDS))
        if unknown or min(shares.values(), default=0.0) < 0.0 or sum(shares.values()) <= 0.0:
            raise ValueError(f"shares must be weights >= 0, not all zero, of {', '.join(KINDS)}; got {shares}")
        chain = reference_chain(prompt_text)
        return self.answer(self._kind(last_kind(prompt_text), rng, shares), chain, rng)

    def _kind(self, last: str, rng: random.Random, shares: dict[str, float]) -> str:
        if last in IMPROVE:
            return _draw(IMPROVE[last], rng)
        correct = {kind: shares.get(kind, 0.0) for kind in CORRECT_KINDS}
        if last == "failed" and sum(correct.values()) > 0.0 and rng.random() < RECOVERY:
            return _draw(correct, rng)
        return _draw(shares, rng)

    def answer(self, kind: str, chain: Chain, rng: random.Random) -> str:
        """The text of an answer of one kind; `rng` picks among the variants of decoy, wrong and broken."""
        if kind == "decoy":
            sentence, write = rng.choice(_DECOYS)
            code = write(chain)
        elif kind == "broken":
            sentence, write = rng.choice(_BROKEN)
            code = write(chain)
        elif kind == "wrong":
            droppable = [number for number, name in enumerate(chain) if OPERATORS[name].kind not in RESHAPING]
            sentence, code = "One kernel, one pass.", templates.wrong(chain, rng.choice(droppable))
        elif kind == "lazy":
            sentence, code = "The first operator in Triton.", templates.lazy(chain)
        elif kind == "fused":
            sentence, code = "Two kernels with a buffer between.", templates.fused(chain)
        elif kind == "tuned":
            sentence, code = "One fused kernel, one pass over memory.", templates.tuned(chain)
        else:
            raise ValueError(f"unknown kind {kind!r}; known: {', '.join(KINDS)}")
        return f"{sentence}\n```python\n{code}\n```"
