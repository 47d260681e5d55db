"""From a problem and feedback to token ids, and from stored text to the same ids. Runs in the driver and in SFT.

A conversation is one growing list of ids: the prompt of a later turn is the last prompt, the completion as it was
sampled, and the ids of the new user turn. Nothing that was sampled is ever tokenised again, so the learner sees the
very tokens that the engine did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from env.records import Problem
from rl.records import Trajectory

TEMPLATES = Path(__file__).parent / "templates"

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

FEEDBACK_LINES = 16
FEEDBACK_COLUMNS = 160
# Where an answer goes in a rendered conversation; no template would write this by itself.
_ANSWER = "\x02answer\x02"


@dataclass(frozen=True)
class Layout:
    """The fixed texts of a tokenizer's chat format.

    between  from the end of an answer to the beginning of the next user message, end-of-turn marker first
    after    from the end of a user message to the beginning of the answer
    end_id   the token that ends an answer
    """

    between: str
    after: str
    end_id: int


def first_message(problem: Problem) -> str:
    """The user's message of turn 1: the task and the reference in a ```python block."""
    return _template("first_turn").format(entry_point=problem.entry_point, source=problem.source.strip("\n"))


def next_message(feedback: str) -> str:
    """The user's message of a later turn: the verdict's feedback, shortened, and the request to improve."""
    return _template("next_turn").format(feedback=shorten(feedback))


def shorten(text: str, lines: int = FEEDBACK_LINES, columns: int = FEEDBACK_COLUMNS) -> str:
    """At most `lines` lines of at most `columns` characters, cut in the middle: the start names the error, the end
    often says why."""
    kept = [_cut(line, columns, " ... ") for line in text.strip().split("\n")]
    if len(kept) > lines:
        kept = _cut(kept, lines, ["..."])
    return "\n".join(kept)


def first_prompt(tokenizer, message: str) -> list[int]:
    """Ids of a conversation that begins with the user's `message` and waits for the answer."""
    text = _render(tokenizer, [{"role": "user", "content": plain(tokenizer, message)}], True)
    return _encode(tokenizer, text)


def next_prompt(tokenizer, prompt_ids: Sequence[int], completion_ids: Sequence[int], message: str) -> list[int]:
    """prompt_ids + completion_ids + ids of the new user turn, up to where the next answer begins.

    A completion that was cut off before its end token gets the end-of-turn marker as part of the new prompt, where it
    is no sampled token and isn't trained on.
    """
    return [*prompt_ids, *completion_ids, *_user_turn(tokenizer, completion_ids, message)]


def stop_ids(tokenizer) -> tuple[int, ...]:
    """Tokens that end an answer: the chat format's end-of-turn marker, and the tokenizer's end of text."""
    ends = {layout(tokenizer).end_id, tokenizer.eos_token_id}
    return tuple(sorted(token for token in ends if token is not None))


def answer_text(tokenizer, completion_ids: Sequence[int]) -> str:
    """What the judge and the viewer get: the completion without its end token or other special tokens."""
    return tokenizer.decode(completion_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def encode_trajectory(tokenizer, trajectory: Trajectory) -> tuple[list[int], list[int]]:
    """(ids, loss_mask), each [tokens], of a trajectory known by its text, laid out exactly as a rollout lays it out.

    Every turn's prompt_text is that turn's user message alone. The mask is 1 at the answers' tokens, their end token
    included. Raises ValueError for a trajectory without turns.
    """
    if not trajectory.turns:
        raise ValueError(f"problem {trajectory.problem_id!r} sample {trajectory.sample_index}: no turns")
    ids: list[int] = []
    mask: list[int] = []
    answer: list[int] = []
    for turn in trajectory.turns:
        new = _user_turn(tokenizer, answer, turn.prompt_text) if ids else first_prompt(tokenizer, turn.prompt_text)
        answer = [*_encode(tokenizer, plain(tokenizer, turn.completion_text)), layout(tokenizer).end_id]
        ids += [*new, *answer]
        mask += [0] * len(new) + [1] * len(answer)
    return ids, mask


def conversation_text(trajectory: Trajectory, message: str) -> str:
    """The whole conversation as plain text, ending with the user's new `message`: the prompt of a text-only model."""
    parts = [part for turn in trajectory.turns for part in (turn.prompt_text, turn.completion_text)]
    return "\n".join([*parts, message])


def layout(tokenizer) -> Layout:
    """The tokenizer's chat format. Raises ValueError for a template that can't be continued turn by turn."""
    conversation = [("user", "\x02first\x02"), ("assistant", _ANSWER), ("user", "\x02second\x02")]
    text = _render(tokenizer, [{"role": role, "content": content} for role, content in conversation], True)
    _, answer, tail = text.partition(_ANSWER)
    between, second, after = tail.partition("\x02second\x02")
    if not (answer and second):
        raise ValueError("the tokenizer's chat template drops or rewrites messages; give the model folder a plain one")
    ids = _encode(tokenizer, between)
    if not ids:
        raise ValueError("the tokenizer's chat template puts nothing between an answer and the next message")
    return Layout(between, after, ids[0])


def plain(tokenizer, text: str) -> str:
    """`text` with special tokens spelled apart: an error message that quotes a marker must not become one."""
    for token in tokenizer.added_tokens_decoder.values():
        if token.special:
            text = text.replace(token.content, f"{token.content[:1]} {token.content[1:]}")
    return text


def _user_turn(tokenizer, completion_ids: Sequence[int], message: str) -> list[int]:
    form = layout(tokenizer)
    ids = _encode(tokenizer, form.between + plain(tokenizer, message) + form.after)
    return ids[1:] if completion_ids and completion_ids[-1] == form.end_id else ids


def _encode(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _render(tokenizer, messages: list[dict[str, str]], generate: bool) -> str:
    template = tokenizer.chat_template or PLAIN_TEMPLATE
    return tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=generate
    )


def _template(name: str) -> str:
    return (TEMPLATES / f"{name}.txt").read_text(encoding="utf-8").rstrip("\n")


def _cut(sequence, limit: int, mark):
    """A str or list of at most `limit` items; where it is longer, `mark` takes the place of its middle."""
    if len(sequence) <= limit:
        return sequence
    head = (limit - len(mark) + 1) // 2
    tail = limit - len(mark) - head
    return sequence[:head] + mark + sequence[len(sequence) - tail :]
