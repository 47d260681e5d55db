"""The policy and its tokenizer: load a Hugging Face folder, or build a small one. Runs in SFT, RL and evaluation.

The small model is Qwen3-shaped and is saved as an ordinary folder, so everything after it treats both kinds alike. Its
byte-level BPE may merge across the words of a line, up to whole lines: code that follows a pattern takes a few dozen
tokens where a usual tokenizer takes hundreds, which is what makes sampling on a CPU affordable.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rl import checkpoint, distributed, seeding
from rl.config import Config, ConfigError
from rl.manifest import MANIFEST
from rl.model_shapes import LAYER
from rl.prompts import ASSISTANT, CHAT_TEMPLATE, END, PAD, USER

# What BPE may merge into one token, in the order of trying. A line of code is one piece, but for the indentation (and
# the comment mark) before an assignment: so a statement is the same token wherever it stands, and copying it from the
# reference is copying a token. In unindented lines, which is where feedback stands, numbers stand alone: else every
# line with a new number in it would be a new word, unmergeable, and taken byte by byte.
PIECES = (
    r"[ \t]+(?:# )?(?=\w+ = )"  # indentation of an assignment
    r"|\w+ = [^\n]*\n"  # the assignment itself
    r"|[ \t][^\n]*\n"  # any other indented line
    r"|[0-9]+(?:\.[0-9]+)?"
    r"|[^\n0-9]+\n?"
    r"|\n"
)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def build_initial(config: Config, texts: Iterable[str], out_dir: Path) -> None:
    """Train a tokenizer on `texts`, initialise a model of the sizes in `config.model` from `config.seed`, save both.

    The folder appears whole or not at all.
    """
    tokenizer = train_tokenizer(texts, config.model.vocab_size)
    sizes = config.model
    shape = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=sizes.width,
        intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.width // sizes.heads,
        max_position_embeddings=sizes.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeding.derive(config.seed, "init"))
        model = Qwen3ForCausalLM(shape)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.save_folder(model, tokenizer, out_dir)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocab_size` tokens, chat markers included; any text survives encode and decode."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    markers = [PAD, USER, ASSISTANT, END]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=markers,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def load(path: Path | str, device: str) -> tuple[Any, Any]:
    """(model, tokenizer) of a Hugging Face folder, the model in fp32 on `device`.

    Raises FileNotFoundError where there is no model folder (a bare name would be taken for one to download), and
    ModelError for one that is damaged, incomplete, or not of a causal language model with its tokenizer.
    """
    path = Path(path)
    _refuse(path)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # of any kind: a damaged configuration reaches deep into the model's own class
        raise _cannot(path, error) from error
    if absent := sorted(report["missing_keys"]):
        # transformers would draw them at random, with a warning: a policy that is none.
        raise ModelError(f"{path} lacks weights, e.g. {absent[0]}: it is damaged, or of another kind of model")
    if beyond := sorted(name for name in report["unexpected_keys"] if LAYER.search(name)):
        raise ModelError(
            f"{path} holds weights of layers that its config.json doesn't have, e.g. {beyond[0]}: get it anew"
        )
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise ModelError(
            f"{path}: the tokenizer has {len(tokenizer)} tokens and the model embeddings for only "
            f"{model.get_input_embeddings().num_embeddings}: they don't belong together"
        )
    return model.to(device).eval(), tokenizer


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a folder whose weights somebody else loads; refuses what `load` refuses unread."""
    _refuse(path)
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise _cannot(path, error) from error


def _refuse(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} is no model folder: it has no config.json")
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        # transformers would make up an empty one.
        raise ModelError(f"{path} has no tokenizer ({', '.join(TOKENIZER_FILES)}): add the files of the model's own")
    if damage := distributed.agree(lambda: checkpoint.folder_damage(path)):
        raise ModelError(
            f"{path} is damaged: {damage}. Put a copy back; or remove it and the DONE beside it, and its stage makes "
            f"it again. If it was changed on purpose, delete its {MANIFEST}"
        )


def _cannot(path: Path, error: Exception) -> ModelError:
    reason = str(error).partition("\n")[0]
    return ModelError(
        f"{path} can't be loaded ({reason}): give a whole folder of a causal language model, with its weights and its "
        "tokenizer"
    )


class ModelError(ConfigError):
    """A model folder that can't be used; the message says what is wrong with it."""
