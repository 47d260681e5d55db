"""Sequential test-time scaling: what a later turn is shown of the earlier ones. Pure; runs in the driver.

vanilla   every turn so far: the conversation grows until the context is full.
context   the `keep` turns with the highest reward, in the order in which they were taken, each with its feedback: the
          history is kept outside, the prompt stays bounded, and there is no limit to the number of turns. With 4, the
          first five turns are the same as in vanilla.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rl.engines.base import Completion
from rl.prompts import Chat, TextChat
from rl.records import Turn


def kept_turns(turns: Sequence[Turn], keep: int) -> list[int]:
    """Places of the `keep` turns with the highest reward, ascending; of equal ones the later (it saw more). A turn
    without a reward ranks last."""
    ranked = sorted(range(len(turns)), key=lambda i: (_reward(turns[i]), i), reverse=True)
    return sorted(ranked[:keep])


def _reward(turn: Turn) -> float:
    return float("-inf") if turn.reward is None else turn.reward


class ContextChat:
    """A chat whose later prompts hold the best turns only. limit: tokens that a prompt may have; while it has more, the
    worst turn is left out too, down to one (0: no limit)."""

    def __init__(self, chat: Chat | TextChat, keep: int, limit: int = 0) -> None:
        if keep < 1:
            raise ValueError(f"keep = {keep}: at least one turn must be kept")
        self.chat, self.keep, self.limit = chat, keep, limit
        self.stop_ids = chat.stop_ids

    def first_prompt(self, message: str) -> Sequence[Any]:
        return self.chat.first_prompt(message)

    def next_prompt(self, turns: Sequence[Turn], message: str) -> Sequence[Any]:
        """The problem, then the kept answers, each with the message that followed it."""
        for keep in range(min(self.keep, len(turns)), 0, -1):
            prompt = self._prompt(turns, message, kept_turns(turns, keep))
            if not self.limit or self.chat.length(prompt) <= self.limit:
                break
        return prompt

    def _prompt(self, turns: Sequence[Turn], message: str, places: Sequence[int]) -> Sequence[Any]:
        asked = turns[0].prompt_text
        prompt = self.chat.first_prompt(asked)
        shown: list[Turn] = []
        for place in places:
            ids = list(prompt) if turns[place].completion_ids else []
            shown.append(replace(turns[place], prompt_ids=ids, prompt_text=asked))
            asked = turns[place + 1].prompt_text if place + 1 < len(turns) else message
            prompt = self.chat.next_prompt(shown, asked)
        return prompt

    def answer_text(self, completion: Completion) -> str:
        return self.chat.answer_text(completion)

    def length(self, prompt: Sequence[Any]) -> int:
        return self.chat.length(prompt)
