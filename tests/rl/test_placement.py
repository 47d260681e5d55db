"""The arithmetic of large recipes: it gives back what was measured, and what doesn't fit is said with a remedy."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from rl import placement
from rl.config import ConfigError, load_recipe
from rl.placement import BOXES, GIB, Box, Lengths, Shape
from scripts import plan

pytestmark = pytest.mark.budget(20)

SMALL = Shape(28, 2048, 6144, 16, 8, 128, 151936, True)  # Qwen3-1.7B's sizes, what was measured
H100, H200 = BOXES


@pytest.fixture(params=["drkernel-8b", "drkernel-14b"])
def config(request):
    return load_recipe(request.param)


def with_settings(config, *settings):
    return load_recipe(config.name, list(settings))


def test_published_sizes():
    sizes = {name: placement.shape_of(load_recipe(f"drkernel-{name}")).parameters / 1e9 for name in ("8b", "14b")}
    assert sizes == pytest.approx({"8b": 8.19, "14b": 14.77}, rel=2e-3)
    assert SMALL.parameters == pytest.approx(1.72e9, rel=2e-3)


def test_decoding_takes_what_was_measured():
    """29 600 tokens a second: 256 sequences, 200 + 256 tokens, one H200."""
    one = replace(H200, gpus=1)
    settings = ["rollout.turns=1", "rollout.batch_size=256", "rollout.max_new_tokens=256", "engine.memory_share=0.9"]
    config = load_recipe("drkernel-8b", settings)
    seconds = placement.seconds(config, SMALL, one, Lengths(answer=256, first_prompt=200))["sampling"]
    assert 256 * 256 / seconds == pytest.approx(29_600, rel=0.05)


@pytest.mark.parametrize(("recompute", "measured"), [("true", 25_235), ("false", 31_083)])
def test_updates_take_what_was_measured(recompute, measured):
    """Rows of 8 192 tokens on one H200."""
    config = load_recipe("drkernel-8b", [f"train.recompute={recompute}", "rollout.turns=1"])
    lengths = Lengths(answer=6192, first_prompt=2000)
    seconds = placement.seconds(config, SMALL, replace(H200, gpus=1), lengths)["update"]
    assert 256 * 8192 / seconds == pytest.approx(measured, rel=0.06)


def test_parts_add_up_by_hand():
    """The 14B on eight GPUs of 80 GB."""
    config = load_recipe("drkernel-14b")
    shape = placement.shape_of(config)
    learning, sampling = placement.learning_memory(config, shape, 8), placement.sampling_memory(config, shape, 8, H100)
    count = 14.768e9
    assert learning["learner: weights, gradients, Adam's moments (fp32, its shard)"] == pytest.approx(
        2 * count, rel=1e-3
    )
    assert sampling["engine: weights (bf16, whole)"] == pytest.approx(2 * count, rel=1e-3)
    assert sampling["learner: weights and Adam's moments (fp32, its shard)"] == pytest.approx(1.5 * count, rel=1e-3)
    engine = sum(size for name, size in sampling.items() if name.startswith("engine"))
    assert engine == pytest.approx(0.5 * 79.1 * GIB, rel=1e-3)  # its share, whole
    # Keys and values of a token: 2 * 8 heads * 128 * 40 layers in bf16.
    rows = placement.cache_memory(config, shape, H100) / (163_840 * 18_432)
    assert f"holds {rows:.1f} whole rows" in "\n".join(placement.describe(config, shape, H100))


@pytest.mark.parametrize("box", BOXES, ids=["80", "141"])
def test_both_recipes_fit_both_boxes(config, box):
    shape = placement.shape_of(config)
    assert placement.faults(config, shape, box) == []
    share = placement.largest_share(config, shape, box)
    assert share >= config.engine.memory_share
    for value, fits in ((share, True), (share + 0.02, False)):
        changed = with_settings(config, f"engine.memory_share={value}")
        assert (placement.faults(changed, shape, box) == []) == fits


@pytest.mark.parametrize(
    ("settings", "phase", "remedy"),
    [
        (["train.recompute=false"], "learning", "train.recompute=true"),
        (["train.micro_batch_tokens=131072"], "learning", "train.micro_batch_tokens=18432"),
        (["engine.memory_share=0.9"], "sampling", "engine.memory_share="),
        (["env.lanes=24"], "sampling", "env.lanes="),
    ],
)
def test_what_does_not_fit_is_said_with_what_helps(settings, phase, remedy):
    """And what is said to help does: the recipe with it has no such fault."""
    config = load_recipe("drkernel-14b", settings)
    shape = placement.shape_of(config)
    fault = next(fault for fault in placement.faults(config, shape, H100) if fault.startswith(phase))
    assert re.search(r"needs \d+\.\d GiB a GPU more than there are", fault) and remedy in fault
    helps = re.search(re.escape(remedy) + r"[\d.]*", fault).group().rstrip(".")
    mended = load_recipe("drkernel-14b", [*settings, helps])
    assert not [f for f in placement.faults(mended, shape, H100) if f.startswith(phase)]


def test_an_engine_without_room_for_a_row_is_told_its_share():
    config = load_recipe("drkernel-14b", ["engine.memory_share=0.38"])
    shape = placement.shape_of(config)
    (fault,) = placement.faults(config, shape, H100)
    needed = re.search(r"must be (0\.\d+) at least", fault).group(1)
    assert "too small for one row of 18432 tokens" in fault
    mended = load_recipe("drkernel-14b", [f"engine.memory_share={float(needed) + 0.01:.2f}"])
    assert placement.faults(mended, shape, H100) == []


def test_a_model_that_no_setting_saves_asks_for_more_gpus():
    config = load_recipe("drkernel-14b", ["env.lanes=1"])
    tiny = Box("two small ones", 2, 24 * GIB, 1e12)
    learning = next(f for f in placement.faults(config, placement.shape_of(config), tiny) if f.startswith("learning"))
    assert learning.endswith("more GPUs, or a smaller model")


def test_turns_end_where_the_context_does(config):
    shape = placement.shape_of(config)
    short, long = (placement.seconds(config, shape, H200, Lengths(answer)) for answer in (512, 8192))
    judged = 256 / 8 / (4.5 * config.env.lanes / 24)
    assert short["judging"] == pytest.approx(3 * judged) and long["judging"] == pytest.approx(judged)


SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 300,
}


def test_sizes_of_a_folder_are_read_and_defaults_are_those_of_the_field(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"head_dim": None}))
    shape = placement.shape_of(load_recipe("drkernel-8b", [f"model.path={tmp_path}"]))
    assert shape == Shape(2, 64, 96, 4, 4, 16, 300, False)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "Expecting"),
        ("[]", "'list' object"),
        (b"\xff", "codec"),
        ("{}", "hidden_size is None"),
        (json.dumps(SIZES | {"hidden_size": "64"}), "hidden_size is '64'"),
        (json.dumps(SIZES | {"num_attention_heads": 0}), "num_attention_heads is 0"),
        (json.dumps(SIZES | {"vocab_size": True}), "vocab_size is True"),
        (json.dumps(SIZES | {"head_dim": -1}), "head_dim is -1"),
    ],
)
def test_a_folder_that_gives_no_sizes_is_told_by_file(tmp_path, capsys, content, words):
    path = tmp_path / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=rf"{path} gives no sizes of a model .*{words}"):
        placement.shape_of(load_recipe("drkernel-8b", [f"model.path={tmp_path}"]))
    assert plan.main(["drkernel-8b", "--set", f"model.path={tmp_path}"]) == 2
    assert words in capsys.readouterr().err
