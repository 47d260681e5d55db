"""Training rows, and their way into padded tensors. Runs in the learner and in SFT."""

from __future__ import annotations

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
class Batch:
    """Sequences of one forward pass, padded on the right.

    input_ids       [rows, tokens]  under a causal mask no real token sees the padding, so no attention mask is needed
    where           [targets] each: (row, column) of the position that predicts each target
    targets         [targets]       token ids to predict, row after row
    members         [rows]          index of each row in the list that the batch was made from
    target_counts   [rows]          targets of each row
    """

    input_ids: torch.Tensor
    where: tuple[torch.Tensor, torch.Tensor]
    targets: torch.Tensor
    members: list[int]
    target_counts: list[int]


def micro_batches(lengths: Sequence[int], members: Sequence[int], token_limit: int) -> list[list[int]]:
    """Split `members` (indices into `lengths`) into batches of at most `token_limit` padded tokens, longest first.

    Sorting by length keeps the padding small. A sequence longer than the limit gets a batch of its own.
    """
    batches: list[list[int]] = []
    for member in sorted(members, key=lambda m: (-lengths[m], m)):
        # The first of a batch is its longest, so its length is what all others are padded to.
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= token_limit:
            batches[-1].append(member)
        else:
            batches.append([member])
    return batches


def make_batch(
    sequences: Sequence[Sequence[int]],
    target_positions: Sequence[Sequence[int]],
    members: Sequence[int],
    device: torch.device | str,
) -> Batch:
    """Pad the `members` of `sequences` into a Batch on `device`.

    target_positions: for each sequence, the positions (>= 1) of the tokens to predict.
    """
    longest = max(len(sequences[m]) for m in members)
    input_ids = torch.zeros(len(members), longest, dtype=torch.long)
    rows, columns, targets = [], [], []
    for row, m in enumerate(members):
        ids, positions = torch.tensor(sequences[m]), torch.tensor(list(target_positions[m]), dtype=torch.long)
        input_ids[row, : len(ids)] = ids
        rows.append(torch.full_like(positions, row))
        columns.append(positions - 1)
        targets.append(ids[positions])
    return Batch(
        input_ids=input_ids.to(device),
        where=(torch.cat(rows).to(device), torch.cat(columns).to(device)),
        targets=torch.cat(targets).to(device),
        members=list(members),
        target_counts=[len(target_positions[m]) for m in members],
    )
