"""From messages to token ids, and from stored text to the same ids. Runs in the driver and in SFT.

A conversation is one growing list of ids: the prompt of a later turn is the last prompt, the completion as it was
sampled, and the ids of the new user turn. Nothing that was sampled is tokenised again, so the learner sees the very
tokens that the engine did. A chat template that rewrites history (Qwen3's drops the think-blocks of earlier answers) is
followed where it does: then a turn's prompt doesn't extend the last one, and each row holds what its turn was given.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl.config import ConfigError
from rl.engines.base import Completion
from rl.records import Trajectory, Turn

# The roles' markers of the small model's tokenizer, each one token.
USER, ASSISTANT, END, PAD = "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# For base models, whose tokenizer has no chat template: plain words, and the tokenizer's own end-of-text token.
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '### ' + message['role'].capitalize() + '\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant\n' }}{% endif %}"
)
# Stand-ins for messages in a rendered conversation; no template would write these by itself.
_FIRST, _ANSWER, _SECOND = "\x02first\x02", "\x02answer\x02", "\x02second\x02"
_THINKING_ANSWER = f"<think>\n\x02thought\x02\n</think>\n\n{_ANSWER}"
_CODE = "```python\nclass ModelNew(nn.Module):\n    x = {0: a[1] + 2} @ b  # <= 3\n```"


@dataclass(frozen=True)
class Layout:
    """The fixed texts of a tokenizer's chat format.

    before   from the beginning to the first user message
    between  from the end of an answer to the beginning of the next user message, end-of-turn marker first
    after    from the end of a user message to the beginning of the answer
    end_id   the token that ends an answer
    """

    before: str
    between: str
    after: str
    end_id: int


class Chat:
    """A tokenizer's way of putting a conversation into ids, found out once.

    Raises ConfigError for a tokenizer that can't be used: no end-of-turn token, a template that drops messages, code
    that doesn't survive. `rewrites`: the template writes earlier answers differently from how they were given.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special = re.compile("|".join(re.escape(text) for text in sorted(special, key=len, reverse=True)) or "$^")
        if tokenizer.chat_template is None and tokenizer.eos_token is None:
            raise ConfigError(
                "the tokenizer has neither a chat template nor an end-of-text token, so no answer could end; set "
                "eos_token or chat_template in the model folder's tokenizer_config.json"
            )
        kept = tokenizer.decode(self._encode(_CODE), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if kept.strip() != _CODE:
            raise ConfigError(
                f"the tokenizer can't write Python: {_CODE!r} comes back as {kept!r}; use a model trained on code"
            )
        self.layout = self._find_layout()
        self.stop_ids = tuple(sorted({self.layout.end_id, tokenizer.eos_token_id} - {None}))
        # A base model that begins texts with a token does so without a template too.
        begins = tokenizer.chat_template is None and tokenizer.encode("") == [tokenizer.bos_token_id]
        self._lead = [tokenizer.bos_token_id] if begins else []
        self.rewrites = any(
            self._rendered([(_FIRST, answer)], _SECOND) != self._appended(answer)
            for answer in (_ANSWER, _THINKING_ANSWER)
        )

    def first_prompt(self, message: str) -> list[int]:
        """Ids of a conversation that begins with the user's `message` and waits for the answer."""
        return self._lead + self._encode(self.layout.before + self.plain(message) + self.layout.after)

    def next_prompt(self, turns: Sequence[Turn], message: str) -> list[int]:
        """Ids that the next turn is given: the last turn's prompt_ids + completion_ids + ids of the new user turn.

        A completion that was cut off before its end token gets the end-of-turn marker as part of the new prompt, where
        it is no sampled token and isn't trained on. Where the template rewrites this very history, the ids are those of
        the conversation as it renders it.
        """
        last = turns[-1]
        ids = [*last.prompt_ids, *last.completion_ids, *self._user_turn(last.completion_ids, message)]
        if self.rewrites:
            texts = [(self.plain(turn.prompt_text), self.plain(turn.completion_text)) for turn in turns]
            rendered = self._rendered(texts, self.plain(message))
            if rendered != self.tokenizer.decode(ids[len(self._lead) :], clean_up_tokenization_spaces=False):
                return self._lead + self._encode(rendered)
        return ids

    def answer_text(self, completion: Completion) -> str:
        """What the judge and the viewer get: the completion without its end token or other special tokens."""
        return self.tokenizer.decode(completion.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def length(self, prompt: Sequence[int]) -> int:
        """Tokens of the context that a prompt takes."""
        return len(prompt)

    def encode_trajectory(self, trajectory: Trajectory) -> list[tuple[list[int], list[int]]]:
        """Sequences (ids, loss_mask), each [tokens], of a trajectory known by its text, laid out as a rollout does.

        One sequence for all turns whose prompts extend each other; a turn for which the template rewrites history
        begins another. The mask is 1 at the answers' tokens, and each answer is trained on once: with its end token,
        unless it was cut off, which must not teach to stop there. Raises ValueError for a trajectory without turns.
        """
        if not trajectory.turns:
            raise ValueError(f"problem {trajectory.problem_id!r} sample {trajectory.sample_index}: no turns")
        sequences: list[tuple[list[int], list[int]]] = []
        done: list[Turn] = []
        for turn in trajectory.turns:
            message, answer = turn.prompt_text, turn.completion_text
            prompt = self.next_prompt(done, message) if done else self.first_prompt(message)
            completion = self._encode(self.plain(answer))
            if turn.finish_reason == "stop":
                completion.append(self.layout.end_id)
            before, mask = sequences[-1] if sequences else ([], [])
            if sequences and prompt[: len(before)] == before:
                sequences.pop()
            else:
                before, mask = [], []
            mask = [*mask, *[0] * (len(prompt) - len(before)), *[1] * len(completion)]
            sequences.append((prompt + completion, mask))
            done.append(Turn(prompt, completion, [], 0, turn.finish_reason, message, answer))
        return sequences

    def plain(self, text: str) -> str:
        """`text` with special tokens spelled apart: an error message that quotes a marker must not become one."""
        return self._special.sub(lambda found: f"{found[0][:1]} {found[0][1:]}", text)

    def _user_turn(self, completion_ids: Sequence[int], message: str) -> list[int]:
        ids = self._encode(self.layout.between + self.plain(message) + self.layout.after)
        return ids[1:] if completion_ids and completion_ids[-1] == self.layout.end_id else ids

    def _find_layout(self) -> Layout:
        text = self._rendered([(_FIRST, _ANSWER)], _SECOND)
        before, first, rest = text.partition(_FIRST)
        _, answer, tail = rest.partition(_ANSWER)
        between, second, after = tail.partition(_SECOND)
        if not (first and answer and second):
            raise ConfigError(
                "the tokenizer's chat template drops or rewrites messages, so no conversation of several turns can be "
                "had; give the model folder one that writes every user and assistant message"
            )
        # Where the first message ends, not where a later one does: they may differ only by what a later turn adds.
        opening = self._rendered([], _FIRST)
        if not opening.startswith(before + _FIRST):
            raise ConfigError("the tokenizer's chat template begins a conversation differently once it has an answer")
        after = opening[len(before + _FIRST) :]
        for place, token in enumerate(self._encode(between)):
            known = token in self.tokenizer.added_tokens_decoder or token == self.tokenizer.eos_token_id
            marker = self.tokenizer.decode([token])
            if known and not between.partition(marker)[0].strip():
                return Layout(before, between[between.index(marker) :], after, token)
            if place >= 1 or known:
                break
        pieces = self.tokenizer.convert_ids_to_tokens(self._encode(between))[:6]
        raise ConfigError(
            f"no single token ends an answer: behind one the chat template writes {between[:24]!r}, which this "
            f"tokenizer takes apart as {pieces}; add the marker to the tokenizer as a special token, or use the chat "
            "template that belongs to it"
        )

    def _appended(self, answer: str) -> str:
        """A conversation of two turns as ids are put together: every answer stays as it was given."""
        form = self.layout
        return f"{form.before}{_FIRST}{form.after}{answer}{form.between}{_SECOND}{form.after}"

    def _rendered(self, turns: Sequence[tuple[str, str]], message: str) -> str:
        """The template's own text of a conversation of (message, answer) turns and a new message."""
        messages = [
            {"role": role, "content": content}
            for turn in turns
            for role, content in zip(("user", "assistant"), turn, strict=True)
        ]
        template = self.tokenizer.chat_template or PLAIN_TEMPLATE
        try:
            return self.tokenizer.apply_chat_template(
                [*messages, {"role": "user", "content": message}],
                chat_template=template,
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise ConfigError(f"the tokenizer's chat template fails on an ordinary conversation: {error}") from error

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


class TextChat:
    """The same for servers that take messages and tokenise by themselves: a prompt is the list of messages so far."""

    stop_ids: tuple[int, ...] = ()

    def first_prompt(self, message: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": message}]

    def next_prompt(self, turns: Sequence[Turn], message: str) -> list[dict[str, str]]:
        said = [
            {"role": role, "content": text}
            for turn in turns
            for role, text in (("user", turn.prompt_text), ("assistant", turn.completion_text))
        ]
        return [*said, {"role": "user", "content": message}]

    def answer_text(self, completion: Completion) -> str:
        return completion.text

    def length(self, prompt: Sequence[dict[str, str]]) -> int:
        return 0  # the server knows, and says so where it is too long


def conversation_text(trajectory: Trajectory, message: str) -> str:
    """The whole conversation as plain text, ending with the user's new `message`: the prompt of a text-only model."""
    parts = [part for turn in trajectory.turns for part in (turn.prompt_text, turn.completion_text)]
    return "\n".join([*parts, message])
