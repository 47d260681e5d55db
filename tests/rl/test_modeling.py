"""The small model: a tokenizer that loses nothing and merges lines, a folder that Auto classes load, seeded weights."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl import modeling
from rl.config import Config, Model

pytestmark = pytest.mark.budget(40)

LINES = (
    "import torch\n    x = tl.load(x_ptr + offsets, mask=mask)\n    # x = tl.load(x_ptr + offsets, mask=mask)\n"
    "    @triton.jit\nspeedup: 1.83x\n"
)
SMALL = Config(seed=3, device="cpu", model=Model(layers=1, width=16, heads=2, kv_heads=1, mlp=16, vocab_size=400))


@pytest.fixture(scope="module")
def tokenizer():
    return modeling.train_tokenizer([LINES] * 3, 400)


@given(st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_survives(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_a_frequent_line_is_one_token_across_its_spaces(tokenizer):
    for line in ("import torch\n", "    @triton.jit\n"):
        assert len(tokenizer.encode(line)) == 1


def test_a_statement_is_the_same_token_wherever_it_stands(tokenizer):
    """In a reference, in a kernel and in a comment: copying it is then copying a token."""
    statement = "x = tl.load(x_ptr + offsets, mask=mask)\n"
    (alone,) = tokenizer.encode(statement)
    for indentation in ("    ", "    # "):
        before, copied = tokenizer.encode(indentation + statement)
        assert copied == alone
        assert tokenizer.decode([before]) == indentation


def test_numbers_in_feedback_stand_alone_so_that_new_ones_cost_only_themselves(tokenizer):
    known, new = tokenizer.encode("speedup: 1.83x\n"), tokenizer.encode("speedup: 7.12x\n")
    assert len(known) == 3 and known[0] == new[0] and known[-1] == new[-1]


def test_the_folder_is_an_ordinary_one(tmp_path):
    modeling.build_initial(SMALL, [LINES], tmp_path / "init")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "init")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "init")
    assert model.config.vocab_size == len(tokenizer) <= 400
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.config.eos_token_id == tokenizer.eos_token_id is not None
    assert tokenizer.chat_template and tokenizer.decode(tokenizer.encode(LINES)) == LINES
    loaded, _ = modeling.load(tmp_path / "init", "cpu")
    assert loaded.dtype == torch.float32 and not loaded.training


def test_weights_come_from_the_seed_alone(tmp_path):
    def weights(name: str, seed: int) -> torch.Tensor:
        config = replace(SMALL, seed=seed)
        modeling.build_initial(config, [LINES], tmp_path / name)
        return modeling.load(tmp_path / name, "cpu")[0].get_input_embeddings().weight

    first = weights("a", 3)
    torch.rand(5)
    assert torch.equal(first, weights("b", 3)) and not torch.equal(first, weights("c", 4))


def test_a_missing_folder_is_no_download(tmp_path):
    with pytest.raises(FileNotFoundError, match="no model folder"):
        modeling.load(tmp_path / "nothing", "cpu")


def cut_weights(folder):
    os.truncate(folder / "model.safetensors", 3000)


def lose_weights(folder):
    (folder / "model.safetensors").unlink()


def lose_a_weight(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def another_shape(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 32}))


def lose_tokenizer(folder):
    for path in folder.glob("token*"):
        path.unlink()


def larger_tokenizer(folder):
    modeling.train_tokenizer([LINES, "".join(map(chr, range(300, 900)))], 900).save_pretrained(folder)


DAMAGES = [cut_weights, lose_weights, lose_a_weight, another_shape, lose_tokenizer, larger_tokenizer]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_by_name(tmp_path, damage):
    modeling.build_initial(SMALL, [LINES], tmp_path / "init")
    damage(tmp_path / "init")
    with pytest.raises(modeling.ModelError, match=re.escape(str(tmp_path / "init"))):
        modeling.load(tmp_path / "init", "cpu")
