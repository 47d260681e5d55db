"""Training rows, and their way into packed micro-batches. Runs in the learner and in SFT.

Rows of a micro-batch are laid end to end in one sequence, so no computation goes into padding; positions restart with
every row, and attention (rl/attention.py) keeps them apart.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rl.records import Trajectory


@dataclass
class Row:
    """One turn as the learner sees it: token ids and log-probs exactly as they were sampled.

    ids               [tokens]             prompt, then completion
    start             where the completion begins in `ids`
    rollout_logprobs  [completion tokens]  under the sampling distribution
    advantage         None: no return is known, the row neither trains nor counts in the loss's denominator
    masks             why the row doesn't train though it counts ("mrs", "veto", "prs"); empty: it trains
    The rest says which turn it is: `turn` counts from 0.
    Raises ValueError where a log-prob is missing or no number: a guess would bias the gradient silently.
    """

    ids: list[int]
    start: int
    rollout_logprobs: list[float]
    advantage: float | None = None
    masks: list[str] = field(default_factory=list)
    problem_id: str = ""
    step: int = 0
    sample_index: int = 0
    turn: int = 0

    def __post_init__(self) -> None:
        where = f"problem {self.problem_id!r} step {self.step} sample {self.sample_index} turn {self.turn}"
        if self.start < 1:
            raise ValueError(f"{where}: the prompt is empty, so nothing predicts the first token")
        if len(self.rollout_logprobs) != len(self.ids) - self.start:
            raise ValueError(
                f"{where}: {len(self.ids) - self.start} completion tokens but {len(self.rollout_logprobs)} log-probs"
            )
        if not all(math.isfinite(value) for value in self.rollout_logprobs):
            raise ValueError(f"{where}: a rollout log-prob is not finite")

    @property
    def trajectory(self) -> tuple[str, int, int]:
        """Equal for the turns of one trajectory, different between trajectories."""
        return self.problem_id, self.step, self.sample_index

    @property
    def target_positions(self) -> range:
        """Where in `ids` the tokens stand that are trained on."""
        return range(self.start, len(self.ids))


def rows_of(trajectory: Trajectory) -> list[Row]:
    """A row a turn, in order. A row shares its turn's `masks` list, so that a mask put on the row shows on the turn."""
    return [
        Row(
            ids=turn.prompt_ids + turn.completion_ids,
            start=len(turn.prompt_ids),
            rollout_logprobs=turn.logprobs,
            advantage=turn.advantage,
            masks=turn.masks,
            problem_id=trajectory.problem_id,
            step=trajectory.step,
            sample_index=trajectory.sample_index,
            turn=index,
        )
        for index, turn in enumerate(trajectory.turns)
    ]


@dataclass(frozen=True)
class Pack:
    """Rows of one forward pass, end to end.

    input_ids      [1, tokens]
    position_ids   [1, tokens]   from 0 in every row
    starts         [rows + 1]    int32: where each row begins, and the end of the last
    longest        tokens of the longest row
    where          [targets]     the positions that predict a target
    targets        [targets]     token ids to predict, row after row
    members        [rows]        index of each row in the list that the pack was made from
    target_counts  [rows]        targets of each row

    Without members it is a dummy: one token, no target, whose loss and gradient are exactly 0. Ranks that have run out
    of rows take part in the others' communication with it.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    starts: torch.Tensor
    longest: int
    where: torch.Tensor
    targets: torch.Tensor
    members: list[int]
    target_counts: list[int]


def deal(lengths: Sequence[int], members: Sequence[int], token_limit: int, ranks: int = 1) -> list[list[list[int]]]:
    """Split `members` (indices into `lengths`) into micro-batches: [ranks][micro-batches] of members.

    Every rank gets the same number of micro-batches, as few as hold at most `token_limit` tokens each and as even as
    taking the longest first makes them; one may be empty. A row longer than the limit gets one of its own.
    """
    if not members:
        return [[] for _ in range(ranks)]
    ordered = sorted(members, key=lambda m: (-lengths[m], m))
    rounds = max(1, math.ceil(sum(lengths[m] for m in members) / (token_limit * ranks)))
    while True:
        bins: list[list[int]] = [[] for _ in range(rounds * ranks)]
        loads = [(0, index) for index in range(len(bins))]
        for member in ordered:
            load, index = heapq.heappop(loads)
            bins[index].append(member)
            heapq.heappush(loads, (load + lengths[member], index))
        if all(len(batch) <= 1 or sum(lengths[m] for m in batch) <= token_limit for batch in bins):
            return [bins[rank::ranks] for rank in range(ranks)]
        rounds += 1


def make_pack(
    sequences: Sequence[Sequence[int]],
    target_positions: Sequence[Sequence[int]],
    members: Sequence[int],
    device: torch.device | str,
) -> Pack:
    """Lay the `members` of `sequences` end to end in a Pack on `device`.

    target_positions: for each sequence, the positions (>= 1) of the tokens to predict.
    """
    lengths = [len(sequences[m]) for m in members] or [1]
    ids = torch.tensor([token for m in members for token in sequences[m]] or [0])
    starts = torch.tensor([0, *lengths]).cumsum(0)
    predicted = [begin + p for begin, m in zip(starts.tolist(), members) for p in target_positions[m]]
    places = torch.tensor(predicted, dtype=torch.long)
    return Pack(
        input_ids=send(ids.unsqueeze(0), device),
        position_ids=send(torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0), device),
        starts=send(starts.to(torch.int32), device),
        longest=max(lengths),
        where=send(places - 1, device),
        targets=send(ids[places], device),
        members=list(members),
        target_counts=[len(target_positions[m]) for m in members],
    )


def send(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a CPU tensor to the device without waiting for what runs there: from pageable memory CUDA would."""
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
