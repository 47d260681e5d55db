"""What is refused before a run starts: model folders of every kind of brokenness, placements, templates, data."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3ForCausalLM

from env.problems import ProblemError
from rl import modeling, preflight
from rl.config import ConfigError, load_recipe
from rl.policy import Policy
from scripts import prepare

pytestmark = pytest.mark.budget(40)

SMALL = ["model.layers=1", "model.width=16", "model.heads=2", "model.kv_heads=1", "model.mlp=16", "model.context=200"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    modeling.build_initial(load_recipe("mini-cpu", SMALL), ["import torch\n"], folder)
    return folder


@pytest.fixture
def model(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "model")
    return tmp_path / "model"


def edit(path, **changes):
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | changes))


def test_a_whole_folder_has_no_fault(model):
    assert preflight.model_faults(model, 200) == []


def without_weights(model):
    (model / "model.safetensors").unlink()


def with_a_shard_missing(model):
    shutil.move(model / "model.safetensors", model / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4975\n"


def cut(path, share):
    os.truncate(path, int(path.stat().st_size * share))


def with_half_a_config(model):
    text = (model / "config.json").read_text()
    (model / "config.json").write_text(text[: len(text) // 2])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda model: (model / "config.json").unlink(), "no config.json"),
        (with_half_a_config, "config.json is damaged"),
        (lambda model: edit(model / "config.json", architectures=["BertModel"]), "BertModel"),
        (without_weights, r"lacks its weights: no .safetensors"),
        (with_a_shard_missing, "model-00002-of-00002.safetensors"),
        (lambda model: cut(model / "model.safetensors", 0.9), r"has \d+ bytes instead of \d+"),
        (lambda model: cut(model / "model.safetensors", 0.001), "is cut or no safetensors file"),
        (lambda model: (model / "model.safetensors").write_bytes(b""), r"\(0 bytes\)"),
        (lambda model: (model / "model.safetensors").write_text(LFS_POINTER), "Git LFS pointer"),
        (lambda model: (model / "model.safetensors").write_bytes(b"\x08" + bytes(15)), "damaged header"),
        (lambda model: (model / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"[]"), "damaged header"),
        (lambda model: (model / "model.safetensors.index.json").write_text("{"), "index.json is damaged"),
        (
            lambda model: (model / "model.safetensors.index.json").write_text('{"weight_map": [1]}'),
            "index.json is damag",
        ),
        (lambda model: edit(model / "config.json", architectures="Qwen3ForCausalLM"), "architectures is 'Qwen3"),
        (lambda model: edit(model / "config.json", architectures=[1]), r"architectures is \[1\]"),
        (lambda model: (model / "config.json").write_bytes(b"\xff\xfe{}"), "config.json is damaged"),
        (lambda model: (model / "tokenizer.json").write_text("{"), "no tokenizer that loads"),
        (lambda model: edit(model / "config.json", vocab_size=100), r"tokens and the model 100"),
        (lambda model: edit(model / "config.json", max_position_embeddings=128), "model.context = 200"),
        (lambda model: (model / "chat_template.jinja").write_text("{{ messages[0].content }}"), "drops or rewrites"),
    ],
)
def test_a_folder_that_can_not_be_trained_is_refused_by_name(model, damage, words):
    damage(model)
    faults = "\n".join(preflight.model_faults(model, 200))
    assert re.search(words, faults), faults
    assert str(model) in faults


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"hidden_size": 24},
            r"model.embed_tokens.weight is \[\d+, 16\] in the weights and \[\d+, 24\] by config.json",
        ),
        ({"vocab_size": 5000}, r"model.embed_tokens.weight is \[\d+, 16\] in the weights and \[5000, 16\] by config"),
        (
            {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
            "config.json says 3 layers, the weights have 1",
        ),
        ({"intermediate_size": 20}, r"mlp.down_proj.weight is \[16, 16\] in the weights and \[16, 20\]"),
        ({"num_attention_heads": 4}, r"self_attn.o_proj.weight is \[16, 16\] in the weights and \[16, 32\]"),
        ({"num_key_value_heads": 2}, r"self_attn.k_proj.weight is \[8, 16\] in the weights and \[16, 16\]"),
        ({"tie_word_embeddings": False}, r"lm_head.weight is missing \(1 of \d+ tensors\)"),
        (
            {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]},
            "none of its tensors belongs to the model",
        ),
        ({"num_hidden_layers": 5}, "describes no model that can be built"),  # and layer_types says 1
        ({"hidden_size": "16"}, "describes no model that can be built"),
        ({"hidden_size": None}, "describes no model that can be built"),
        ({"num_attention_heads": 0}, "describes no model that can be built|in the weights and"),
        ({"model_type": "nothing known"}, "describes no model that can be built"),
    ],
)
def test_a_configuration_of_other_sizes_than_the_weights_is_refused(model, changes, words):
    edit(model / "config.json", **changes)
    faults = "\n".join(preflight.model_faults(model, 100))
    assert re.search(words, faults) and str(model) in faults, faults


def gpt2(model):
    edit(model / "config.json", architectures=["GPT2LMHeadModel"], model_type="gpt2")


def test_a_causal_model_of_another_shape_is_told_which_shape_is_trained(model):
    gpt2(model)
    faults = "\n".join(preflight.model_faults(model, 200))
    assert re.search("is GPT2LMHeadModel .*rotary positions and a plain output head.*e.g. Qwen3ForCausalLM", faults)
    assert "no causal" not in faults


def save_as(kind, model, **sizes):
    """Weights of another kind of model in the place of the small one's; settings that its class has by default are
    not written down, as in many published folders."""
    config = AutoConfig.for_model(
        kind, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_hidden_layers=sizes.pop("layers", 2), max_position_embeddings=8192, pad_token_id=0,
        vocab_size=512, **sizes,
    )  # fmt: skip
    (model / "manifest.json").unlink(missing_ok=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("kind", "settings", "window"),
    [
        ("mistral", {"sliding_window": 64}, 64),
        ("mistral", {"sliding_window": 200}, None),
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, 64),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, None),
        ("qwen3", {"sliding_window": 64, "use_sliding_window": True, "layer_types": [FULL, SLIDING]}, 64),
        ("qwen3", {"sliding_window": 64, "use_sliding_window": True, "layer_types": [FULL, FULL]}, None),
        ("phi3", {"sliding_window": 64}, 64),
    ],
)
def test_a_window_shorter_than_the_context_is_refused_before_the_cold_start(model, kind, settings, window):
    """And only where it is, and where some layer has it."""
    save_as(kind, model, **settings)
    told = rf"attends to the last {window} tokens only, and model.context is 200: lower model.context to {window}"
    faults = preflight.model_faults(model, 200)
    assert len(faults) == (window is not None) and all(re.search(told, fault) for fault in faults), faults
    assert preflight.model_faults(model, window or 200) == []


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"use_sliding_window": False}, 0),
        ({"use_sliding_window": True}, 1),
        ({}, 1),
        ({"use_sliding_window": True, "layer_types": [FULL]}, 0),
        ({"sliding_window": None}, 0),
    ],
)
def test_a_window_that_is_switched_off_is_none(monkeypatch, model, settings, count):
    """Also for a class that keeps what config.json says as it is (Qwen2's own turns the window into None)."""
    monkeypatch.setattr(preflight.model_shapes, "settings", lambda *given: {"sliding_window": 64, **settings})
    assert len(preflight.model_faults(model, 200)) == count


def test_a_window_that_is_the_classs_own_counts(model):
    save_as("mistral", model)
    written = json.loads((model / "config.json").read_text())
    written.pop("sliding_window", None)
    (model / "config.json").write_text(json.dumps(written))
    (fault,) = preflight.model_faults(model, 5000)
    assert "the last 4096 tokens only, and model.context is 5000" in fault


def test_soft_capping_is_refused_by_name(model):
    """Both caps; without them the same model is fine. The learner, which can't tell by its two short rows, refuses
    that of attention too."""
    save_as("gemma2", model, sliding_window=4096)
    (fault,) = preflight.model_faults(model, 200)
    assert str(model) in fault
    assert "(attn_logit_softcapping = 50.0, final_logit_softcapping = 30.0)" in fault
    edit(model / "config.json", final_logit_softcapping=None)
    (fault,) = preflight.model_faults(model, 200)
    assert "(attn_logit_softcapping = 50.0)" in fault
    with pytest.raises(ConfigError, match=r"soft-caps.*softcap = 50\.0"):
        Policy(modeling.load(model, "cpu")[0])
    edit(model / "config.json", attn_logit_softcapping=None)
    assert preflight.model_faults(model, 200) == []
    Policy(modeling.load(model, "cpu")[0])


def test_shards_and_weights_of_the_inner_model_alone_are_compared_too(model, monkeypatch):
    weights = load_file(model / "model.safetensors")
    aside = Qwen3ForCausalLM._keys_to_ignore_on_load_unexpected
    monkeypatch.setattr(Qwen3ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.7\."])
    save_file(weights | {"model.layers.7.x": weights["model.norm.weight"].clone()}, model / "model.safetensors")
    assert preflight.model_faults(model, 200) == []
    monkeypatch.setattr(Qwen3ForCausalLM, "_keys_to_ignore_on_load_unexpected", aside)
    assert "config.json says 1 layers, the weights have 2" in "".join(preflight.model_faults(model, 200))
    inner = {name.removeprefix("model."): weight for name, weight in weights.items()}
    save_file(inner, model / "model.safetensors", metadata={"format": "pt"})
    assert preflight.model_faults(model, 200) == []
    parts = [dict(list(weights.items())[:3]), dict(list(weights.items())[3:])]
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (model / "model.safetensors").unlink()
    for name, part in zip(names, parts):
        save_file(part, model / name, metadata={"format": "pt"})
    weight_map = {tensor: name for name, part in zip(names, parts) for tensor in part}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file({"another.layout": weights["model.norm.weight"]}, model / "consolidated.safetensors")
    assert preflight.model_faults(model, 200) == []
    edit(model / "config.json", hidden_size=32)
    assert "and 8 more tensors" in "\n".join(preflight.model_faults(model, 200))


def test_prepare_says_it_before_a_gpu_is_touched(model, tmp_path):
    without_weights(model)
    config = load_recipe("mini-cpu", [f"model.path={model}", "prompts.templates=nowhere"])
    faults = "\n".join(prepare.check(config, tmp_path / "run"))
    assert "lacks its weights" in faults and "prompts.templates = 'nowhere'" in faults
    assert not (tmp_path / "run").exists()


def test_a_context_without_room_for_any_prompt_is_refused(model):
    settings = ["rollout.max_new_tokens=96", "model.context=100"]
    (fault,) = preflight.faults(load_recipe("mini-cpu", settings))
    assert "model.context = 100 is too small" in fault and "96 more fit (rollout.max_new_tokens)" in fault
    least = int(re.search(r"set it to (\d+) at least", fault)[1])
    assert preflight.faults(load_recipe("mini-cpu", [*settings[:1], f"model.context={least}"])) == []
    assert len(preflight.faults(load_recipe("mini-cpu", [*settings[:1], f"model.context={least - 1}"]))) == 1
    # Where the model is there, its own tokens are counted: more than a token a line.
    (fault,) = preflight.faults(
        load_recipe("mini-cpu", [*settings[:1], f"model.context={least}", f"model.path={model}"])
    )
    assert int(re.search(r"prompt has (\d+) tokens", fault)[1]) > least - 96
    tiny = ["rollout.max_new_tokens=2", "rollout.min_new_tokens=1", "model.context=4"]
    (fault,) = preflight.faults(load_recipe("mini-cpu", tiny))
    assert "1 more fit (rollout.min_new_tokens)" in fault


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], []),
        (["train.steps=2"], []),
        (["train.steps=1"], ["optim.warmup_steps = 2 is more than train.steps = 1: the learning rate ends at 50%"]),
        (["eval.every=40"], ["eval.every = 40 is more than train.steps = 32", "eval.every=0: not at all"]),
        (["eval.every=32"], []),
        (["placement.kind=split"], ["one optimiser step back", "MRS counts", "rejection.importance=token corrects"]),
        (["placement.kind=split", "rejection.importance=token"], []),
        (["placement.kind=split", "placement.staleness=0"], []),
    ],
)
def test_what_nobody_is_likely_to_want_is_said(capsys, tmp_path, overrides, words):
    small = ["problems.train=8", "problems.heldout=4", *overrides]
    arguments = [f"--set={pair}" for pair in small]
    assert prepare.main(["--recipe", "mini-cpu", "--run", str(tmp_path / "run"), *arguments]) == 0
    said = capsys.readouterr().err
    assert said.startswith("prepare: note: ") == bool(words) and all(word in said for word in words)


@pytest.mark.parametrize(
    ("overrides", "gpus", "world", "words"),
    [
        (["env.placement=apart"], 1, 1, "env.placement = apart needs a GPU beside the 1"),
        (["env.placement=apart"], 4, 4, "beside the 4"),
        (["env.placement=apart", "env.slots=3"], 4, 2, "env.slots = 3: the judge needs a GPU a slot and has 2"),
        (["env.slots=2"], 1, 1, "env.slots = 2"),
        ([], 2, 3, "torchrun starts 3 ranks"),
    ],
)
def test_placements_that_can_not_be(monkeypatch, overrides, gpus, world, words):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    (fault,) = preflight.placement_faults(load_recipe("mini-gpu", overrides), [str(i) for i in range(gpus)])
    assert words in fault and f"visible: {gpus}" in fault


SPLIT, APART = "placement.kind=split", ["env.placement=apart", "placement.judge_gpus=2"]
EIGHT = [SPLIT, "placement.rollout_gpus=3", *APART]


@pytest.mark.parametrize(
    ("overrides", "gpus", "world", "words"),
    [
        ([SPLIT], 1, 1, "1 learn .a GPU a rank of torchrun., 1 sample .*shares those: 2 .*1. Use placement.kind=coloc"),
        ([SPLIT], 4, 4, "5 GPUs are needed; visible: 4. Start fewer ranks .RANKS=N., or use placement.kind=colocated"),
        ([SPLIT, "placement.rollout_gpus=8"], 8, 1, "9 GPUs .* Lower placement.rollout_gpus, or use"),
        (EIGHT, 8, 4, "4 learn .* 3 sample .* 2 judge .* 9 GPUs .* Lower placement.rollout_gpus or placement.judge_gp"),
        ([*EIGHT, "env.slots=3"], 8, 3, "env.slots = 3: the judge needs a GPU a slot and has 2 of 8"),
        ([SPLIT, "env.slots=2"], 8, 7, "env.slots = 2: the judge needs a GPU a slot and has 1 of 8"),
    ],
)
def test_a_split_that_can_not_be_is_refused_before_the_cold_start(monkeypatch, tmp_path, overrides, gpus, world, words):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setattr(preflight, "visible_gpus", lambda: [str(i) for i in range(gpus)])
    config = load_recipe("mini-gpu", ["engine.name=vllm", *overrides])
    assert re.search(words, "\n".join(prepare.check(config, tmp_path / "run")))


@pytest.mark.parametrize(
    ("overrides", "gpus", "world"),
    [
        (["env.placement=apart"], 4, 2),
        (["env.slots=2"], 2, 2),
        ([SPLIT], 2, 1),
        (["engine.name=vllm", *EIGHT], 8, 3),
        (["engine.name=vllm", *EIGHT, "env.slots=2"], 8, 3),
    ],
)
def test_placements_that_can_be(monkeypatch, overrides, gpus, world):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    assert preflight.placement_faults(load_recipe("mini-gpu", overrides), [str(i) for i in range(gpus)]) == []


@pytest.mark.parametrize("content", ["", "class Model", "x = 1\n"])
def test_an_empty_or_malformed_data_set_is_refused(tmp_path, content):
    folder = tmp_path / "data"
    folder.mkdir()
    if content:
        (folder / "1.py").write_text(content)
    settings = ["problems.source=folder", f"problems.path={folder}", "problems.train=4", "problems.heldout=1"]
    with pytest.raises((prepare.PrepareError, ProblemError), match=str(folder)):
        prepare.make_problems(load_recipe("mini-cpu", settings))


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"{}", "holds no settings"), (b"[1]", "holds no settings"), (b"\xff\xfe", "is damaged"), (b"{", "is damaged")],
)
def test_a_run_folder_whose_settings_are_none_is_left_alone(tmp_path, capsys, content, words):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_bytes(content)
    assert prepare.main(["--recipe", "mini-cpu", "--run", str(tmp_path / "run")]) == 2
    assert words in capsys.readouterr().err and (tmp_path / "run" / "config.json").read_bytes() == content


def test_more_steps_may_be_asked_for_until_rl_is_complete(tmp_path, capsys):
    run, small = tmp_path / "run", [f"--set={pair}" for pair in ("problems.train=8", "problems.heldout=4")]
    start = ["--recipe", "mini-cpu", "--run", str(run), *small]
    assert prepare.main([*start, "--set=train.steps=4"]) == 0
    assert prepare.main([*start, "--set=train.steps=6", "--set=train.keep_checkpoints=3"]) == 0
    assert json.loads((run / "config.json").read_text())["train"]["steps"] == 6
    assert prepare.main([*start, "--set=train.steps=6", "--set=optim.lr=1e-3"]) == 2
    said = capsys.readouterr().err
    assert "optim.lr" in said and "train.steps, train.checkpoint_every" in said and "train.steps: " not in said
    (run / "rl").mkdir()
    (run / "rl" / "DONE").touch()
    assert prepare.main([*start, "--set=train.steps=8", "--set=train.keep_checkpoints=3"]) == 2
    assert "train.steps: 6 -> 8" in capsys.readouterr().err
