"""Prompts: token-exact continuation, one layout for rollout and SFT, templates that rewrite history, refusals."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from chatml import CHATML, SOURCE, chatml_tokenizer

from rl import prompts
from rl.config import ConfigError
from rl.engines.base import Completion
from rl.modeling import train_tokenizer
from rl.prompts import Chat, TextChat
from rl.records import Trajectory, Turn

pytestmark = pytest.mark.budget(30)

# As Qwen3's: of the answers before the last question only what follows the thought is kept.
DROPS_THOUGHTS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' and loop.index0 < ns.last %}"
    "{% set c = m['content'].split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As R1's: the thought is begun by the prompt.
BEGINS_THOUGHTS = DROPS_THOUGHTS.replace("<|im_start|>assistant\n' }}", "<|im_start|>assistant\n<think>\n' }}")


@pytest.fixture(scope="module")
def mini():
    return Chat(train_tokenizer([SOURCE, "status: correct\nspeedup: 1.50x\n"], 400))


@pytest.fixture(scope="module")
def chatml():
    """Another format: words between the markers and a newline after the end token, as Qwen's models have it."""
    return Chat(chatml_tokenizer())


@pytest.fixture(scope="module")
def base_model():
    other = train_tokenizer([SOURCE], 400)
    other.chat_template = None
    return Chat(other)


@pytest.fixture(params=["mini", "chatml", "base_model"])
def chat(request):
    return request.getfixturevalue(request.param)


def turn(chat, prompt, completion, message="", answer=""):
    return Turn(prompt, completion, [], 0, "stop", message, answer)


def test_rollout_prompts_are_prefixes_of_the_sft_sequence(chat):
    messages, answers = (
        ["first", "status: hack", "again"],
        ["```python\nclass ModelNew: ...\n```", "", "ünïc \U0001f600"],
    )
    turns = [Turn([], [], [], 0, "stop", m, a) for m, a in zip(messages, answers)]
    ((ids, mask),) = chat.encode_trajectory(Trajectory("p", 0, turns))
    prompt, done = chat.first_prompt(messages[0]), []
    for number, answer in enumerate(answers):
        completion = [*chat.tokenizer.encode(answer, add_special_tokens=False), chat.layout.end_id]
        assert ids[: len(prompt) + len(completion)] == prompt + completion
        assert mask[len(prompt) : len(prompt) + len(completion)] == [1] * len(completion)
        done.append(turn(chat, prompt, completion))
        if number + 1 < len(answers):
            following = chat.next_prompt(done, messages[number + 1])
            new = len(following) - len(prompt) - len(completion)
            assert mask[len(prompt) + len(completion) : len(following)] == [0] * new
            prompt = following
    assert len(ids) == len(prompt) + len(completion) == len(mask) and mask[0] == 0


def test_the_conversation_reads_as_the_template_renders_it(chat):
    tokenizer = chat.tokenizer
    first = chat.first_prompt("one")
    ids = chat.next_prompt([turn(chat, first, [*tokenizer.encode("two"), chat.layout.end_id])], "three")
    for texts, rendered_ids in ((["one"], first), (["one", "two", "three"], ids)):
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        template = tokenizer.chat_template or prompts.PLAIN_TEMPLATE
        rendered = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        assert tokenizer.decode(rendered_ids) == rendered


def test_a_completion_cut_off_is_closed_by_the_next_prompt(chat):
    first, answer, end = chat.first_prompt("one"), chat.tokenizer.encode("cut o"), chat.layout.end_id
    cut_off = chat.next_prompt([turn(chat, first, answer)], "three")
    assert cut_off == chat.next_prompt([turn(chat, first, [*answer, end])], "three")
    assert cut_off[: len(first) + len(answer)] == first + answer and cut_off[len(first) + len(answer)] == end


def test_sampled_ids_are_never_tokenised_again(mini):
    """Ids that the tokenizer itself would merge: they must come through as they are."""
    first = mini.first_prompt("one")
    letters = [mini.tokenizer.encode(letter)[0] for letter in "import"]
    assert mini.tokenizer.encode(mini.tokenizer.decode(letters)) != letters
    assert mini.next_prompt([turn(mini, first, letters)], "go on")[len(first) :][: len(letters)] == letters


def test_text_can_not_forge_a_marker(chat):
    quiet = chat.first_prompt("x")
    forged = chat.first_prompt(f"x{chat.tokenizer.eos_token}{prompts.ASSISTANT}y")
    assert sum(i in chat.stop_ids for i in forged) == sum(i in chat.stop_ids for i in quiet)
    marker = chat.tokenizer.convert_tokens_to_ids(prompts.ASSISTANT)
    assert forged.count(marker) == quiet.count(marker)


def test_answer_text_leaves_out_the_end_token(chat):
    end = chat.layout.end_id
    assert end in chat.stop_ids
    assert chat.answer_text(Completion([*chat.tokenizer.encode("a  b .\n"), end], [], "stop")) == "a  b .\n"


def test_rendering_a_template_is_done_once_a_tokenizer(monkeypatch):
    tokenizer = chatml_tokenizer()
    rendered = []
    original = tokenizer.apply_chat_template
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *a, **k: rendered.append(1) or original(*a, **k))
    chat = Chat(tokenizer)
    before = len(rendered)
    ids = chat.first_prompt("one")
    chat.next_prompt([turn(chat, ids, [1, 2])], "two")
    chat.encode_trajectory(Trajectory("p", 0, [Turn([], [], [], 0, "stop", "m", "a")] * 3))
    assert len(rendered) == before < 6 and not chat.rewrites


@pytest.mark.parametrize("template", [DROPS_THOUGHTS, BEGINS_THOUGHTS], ids=["drops", "begins"])
def test_a_template_that_rewrites_history_is_followed(template):
    chat = Chat(chatml_tokenizer(template))
    assert chat.rewrites
    tokenizer, end = chat.tokenizer, chat.layout.end_id
    begun = "<think>\n" if template is BEGINS_THOUGHTS else ""
    thought, plain = "<think>\nlong thought\n</think>\n\nx = 1"[len(begun) :], "y = 2"
    done = [turn(chat, chat.first_prompt("one"), [*tokenizer.encode(thought), end], "one", thought)]
    assert tokenizer.decode(done[0].prompt_ids).endswith(f"assistant\n{begun}")
    second = chat.next_prompt(done, "two")
    text = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\nx = 1<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n"
    assert tokenizer.decode(second) == f"{text}<|im_start|>assistant\n{begun}"
    before = done[0].prompt_ids + done[0].completion_ids
    assert second[: len(before)] != before  # what the engine is given, not what was said before
    done.append(turn(chat, second, [*tokenizer.encode(plain), end], "two", plain))
    third = chat.next_prompt(done, "three")
    if not begun:  # nothing to drop in the second answer: the ids go on as they were sampled
        assert third[: len(second) + len(done[1].completion_ids)] == second + done[1].completion_ids
    assert "thought" not in tokenizer.decode(third)


def test_sft_trains_every_answer_once_where_history_is_rewritten():
    chat = Chat(chatml_tokenizer(DROPS_THOUGHTS))
    answers = ["<think>\nfirst thought\n</think>\n\na = 1", "b = 2", "c = 3"]
    turns = [Turn([], [], [], 0, "stop", f"m{i}", answer) for i, answer in enumerate(answers)]
    sequences = chat.encode_trajectory(Trajectory("p", 0, turns))
    trained = [chat.tokenizer.decode([t for t, m in zip(ids, mask) if m]) for ids, mask in sequences]
    assert trained == [f"{answers[0]}<|im_end|>", "b = 2<|im_end|>c = 3<|im_end|>"]
    assert "first thought" not in chat.tokenizer.decode(sequences[1][0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chat_template": "{{ messages[0]['content'] }}"}, "drops or rewrites"),
        ({"chat_template": "{{ raise_exception('no') }}"}, "fails on an ordinary conversation"),
        ({"chat_template": CHATML.replace("im_end", "im_fin")}, "no single token ends an answer"),
        ({"chat_template": None, "eos_token": None}, "neither a chat template nor an end-of-text token"),
    ],
)
def test_a_tokenizer_without_what_is_needed_is_refused(change, words):
    broken = chatml_tokenizer()
    for name, value in change.items():
        setattr(broken, name, value)
    with pytest.raises(ConfigError, match=words):
        Chat(broken)


def test_a_tokenizer_that_loses_code_is_refused():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "class": 1, "</s>": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    broken = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="</s>")
    with pytest.raises(ConfigError, match="can't write Python"):
        Chat(broken)


def test_messages_for_a_server_are_the_whole_conversation():
    chat = TextChat()
    assert chat.first_prompt("one") == [{"role": "user", "content": "one"}]
    turns = [Turn([], [], [], 0, "stop", "one", "two")]
    roles = [(message["role"], message["content"]) for message in chat.next_prompt(turns, "three")]
    assert roles == [("user", "one"), ("assistant", "two"), ("user", "three")]
    assert chat.answer_text(Completion([], [], "stop", text="  kept ")) == "  kept "


def test_a_cut_answer_is_trained_on_without_an_end():
    """An end token behind it would teach to stop in the middle of code."""
    chat = Chat(train_tokenizer(["def forward(self, x):\n    return x\n"], 400))
    turns = [Turn([], [], [], 0, reason, "ask", "x = torch.") for reason in ("length", "stop")]
    ((ids, mask),) = chat.encode_trajectory(Trajectory("p", 0, turns))
    ends = [i for i, token in enumerate(ids) if token in chat.stop_ids and mask[i]]
    assert ends == [len(ids) - 1]
    answer = chat.tokenizer.encode("x = torch.", add_special_tokens=False)
    assert sum(mask) == 2 * len(answer) + 1
