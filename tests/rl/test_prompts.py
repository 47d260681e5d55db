"""Prompts: token-exact continuation, one layout for rollout and SFT, feedback in its budget, foreign formats."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env.records import Problem
from rl import prompts
from rl.modeling import train_tokenizer
from rl.records import Trajectory, Turn

pytestmark = pytest.mark.budget(30)

SOURCE = "import torch\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return {0: x}[0]\n"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def mini():
    return train_tokenizer([SOURCE, "status: correct\nspeedup: 1.50x\n"], 400)


@pytest.fixture(scope="module")
def chatml(mini):
    """Another format: words between the markers and a newline after the end token, as Qwen's models have it."""
    other = train_tokenizer([SOURCE], 400)
    other.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    other.eos_token = "<|im_end|>"
    other.chat_template = CHATML
    return other


@pytest.fixture(scope="module")
def base_model():
    other = train_tokenizer([SOURCE], 400)
    other.chat_template = None
    return other


@pytest.fixture(params=["mini", "chatml", "base_model"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def test_first_message_holds_the_source_verbatim():
    message = prompts.first_message(Problem("p", SOURCE, entry_point="Net"))
    assert f"```python\n{SOURCE}```" in message and "NetNew" in message


def test_rollout_prompts_are_prefixes_of_the_sft_sequence(tokenizer):
    messages = [prompts.first_message(Problem("p", SOURCE)), prompts.next_message("status: hack"), "again"]
    answers = ["```python\nclass ModelNew: ...\n```", "", "ünïcode \U0001f600"]
    turns = [Turn([], [], [], 0, "stop", m, a) for m, a in zip(messages, answers)]
    ids, mask = prompts.encode_trajectory(tokenizer, Trajectory("p", 0, turns))
    end = prompts.layout(tokenizer).end_id
    prompt = prompts.first_prompt(tokenizer, messages[0])
    for number, answer in enumerate(answers):
        completion = [*tokenizer.encode(answer, add_special_tokens=False), end]
        assert ids[: len(prompt) + len(completion)] == prompt + completion
        assert mask[len(prompt) : len(prompt) + len(completion)] == [1] * len(completion)
        if number + 1 < len(answers):
            following = prompts.next_prompt(tokenizer, prompt, completion, messages[number + 1])
            assert mask[len(prompt) + len(completion) : len(following)] == [0] * (
                len(following) - len(prompt) - len(completion)
            )
            prompt = following
    assert len(ids) == len(prompt) + len(completion) and mask[0] == 0


def test_the_conversation_reads_as_the_template_renders_it(tokenizer):
    first, end = prompts.first_prompt(tokenizer, "one"), prompts.layout(tokenizer).end_id
    ids = prompts.next_prompt(tokenizer, first, [*tokenizer.encode("two"), end], "three")
    roles = [("user", "one"), ("assistant", "two"), ("user", "three")]
    rendered = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in roles],
        chat_template=tokenizer.chat_template or prompts.PLAIN_TEMPLATE,
        tokenize=False,
        add_generation_prompt=True,
    )
    assert tokenizer.decode(ids) == rendered


def test_a_completion_cut_off_is_closed_by_the_next_prompt(tokenizer):
    first, end = prompts.first_prompt(tokenizer, "one"), prompts.layout(tokenizer).end_id
    answer = tokenizer.encode("cut o")
    cut_off = prompts.next_prompt(tokenizer, first, answer, "three")
    assert cut_off == prompts.next_prompt(tokenizer, first, [*answer, end], "three")
    assert cut_off[: len(first) + len(answer)] == first + answer and cut_off[len(first) + len(answer)] == end


def test_sampled_ids_are_never_tokenised_again(mini):
    """Ids that the tokenizer itself would merge: they must come through as they are."""
    first = prompts.first_prompt(mini, "one")
    letters = [mini.encode(letter)[0] for letter in "import"]
    assert mini.encode(mini.decode(letters)) != letters
    assert prompts.next_prompt(mini, first, letters, "go on")[len(first) :][: len(letters)] == letters


def test_text_can_not_forge_a_marker(tokenizer):
    ends = set(prompts.stop_ids(tokenizer))
    quiet = prompts.first_prompt(tokenizer, "x")
    forged = prompts.first_prompt(tokenizer, f"x{tokenizer.eos_token}{prompts.ASSISTANT}y")
    assert sum(i in ends for i in forged) == sum(i in ends for i in quiet)
    marker = tokenizer.convert_tokens_to_ids(prompts.ASSISTANT)
    assert forged.count(marker) == quiet.count(marker)


def test_answer_text_leaves_out_the_end_token(tokenizer):
    end = prompts.layout(tokenizer).end_id
    assert end in prompts.stop_ids(tokenizer)
    assert prompts.answer_text(tokenizer, [*tokenizer.encode("a  b .\n"), end]) == "a  b .\n"


@given(st.lists(st.text(alphabet="ab\t ", max_size=30), max_size=30), st.integers(3, 9), st.integers(8, 20))
@settings(max_examples=100, deadline=None)
def test_feedback_stays_within_its_budget(lines, limit, columns):
    text = "\n".join(lines)
    short = prompts.shorten(text, limit, columns).split("\n")
    assert len(short) <= limit and all(len(line) <= columns for line in short)
    stripped = text.strip().split("\n")
    if len(stripped) <= limit and all(len(line) <= columns for line in stripped):
        assert short == stripped


def test_long_feedback_keeps_both_ends():
    text = "\n".join(f"line {i}" for i in range(100))
    short = prompts.shorten(text, 5, 40)
    assert short == "line 0\nline 1\n...\nline 98\nline 99"


def test_a_template_that_drops_answers_is_refused(mini):
    broken = train_tokenizer([SOURCE], 400)
    broken.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(ValueError, match="drops or rewrites"):
        prompts.next_prompt(broken, [1], [2], "more")
