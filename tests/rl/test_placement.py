"""The arithmetic of large recipes: it gives back what was measured, and what doesn't fit is said with a remedy."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from rl import boxes, memory_plan, placement, time_plan
from rl.boxes import BOXES, GIB, Box, Lengths, Shape
from rl.config import ConfigError, load_recipe
from scripts import plan

pytestmark = pytest.mark.budget(20)

SMALL = Shape(28, 2048, 6144, 16, 8, 128, 151936, True)  # Qwen3-1.7B's sizes, what was measured
H100, H200 = BOXES
SPLIT = ["placement.kind=split", "placement.rollout_gpus=3"]


@pytest.fixture(params=["drkernel-8b", "drkernel-14b"])
def config(request):
    return load_recipe(request.param)


def with_settings(config, *settings):
    return load_recipe(config.name, list(settings))


def test_published_sizes():
    sizes = {name: boxes.shape_of(load_recipe(f"drkernel-{name}")).parameters / 1e9 for name in ("8b", "14b")}
    assert sizes == pytest.approx({"8b": 8.19, "14b": 14.77}, rel=2e-3)
    assert SMALL.parameters == pytest.approx(1.72e9, rel=2e-3)


def test_decoding_takes_what_was_measured():
    """29 600 tokens a second: 256 sequences, 200 + 256 tokens, one H200."""
    one = replace(H200, gpus=1)
    settings = ["rollout.turns=1", "rollout.batch_size=256", "rollout.max_new_tokens=256", "engine.memory_share=0.9"]
    config = load_recipe("drkernel-8b", settings)
    seconds = time_plan.seconds(config, SMALL, one, Lengths(answer=256, first_prompt=200))["sampling"]
    assert 256 * 256 / seconds == pytest.approx(29_600, rel=0.05)


@pytest.mark.parametrize(("recompute", "measured"), [("true", 25_235), ("false", 31_083)])
def test_updates_take_what_was_measured(recompute, measured):
    """Rows of 8 192 tokens on one H200."""
    config = load_recipe("drkernel-8b", [f"train.recompute={recompute}", "rollout.turns=1"])
    lengths = Lengths(answer=6192, first_prompt=2000)
    seconds = time_plan.seconds(config, SMALL, replace(H200, gpus=1), lengths)["update"]
    assert 256 * 8192 / seconds == pytest.approx(measured, rel=0.06)


def test_parts_add_up_by_hand():
    """The 14B on eight GPUs of 80 GB."""
    config = load_recipe("drkernel-14b")
    shape = boxes.shape_of(config)
    parts = memory_plan.phases(config, shape, H100)
    learning, sampling = parts["learning"], parts["sampling"]
    count = 14.768e9
    assert parts["starting"]["learner: weights (fp32, whole)"] == pytest.approx(4 * count, rel=1e-3)
    assert learning["learner: weights and gradients (fp32, its shard)"] == pytest.approx(count, rel=1e-3)
    assert learning["learner: Adam's moments (fp32, its shard)"] == pytest.approx(count, rel=1e-3)
    assert sampling["engine: weights (bf16, whole)"] == pytest.approx(2 * count, rel=1e-3)
    assert sampling["learner: weights (fp32, its shard)"] == pytest.approx(0.5 * count, rel=1e-3)
    assert sampling["learner: Adam's moments (fp32, its shard)"] == pytest.approx(count, rel=1e-3)
    engine = sum(size for name, size in sampling.items() if name.startswith("engine"))
    assert engine == pytest.approx(0.5 * 79.1 * GIB, rel=1e-3)  # its share, whole
    # Keys and values of a token: 2 * 8 heads * 128 * 40 layers in bf16.
    rows = memory_plan.cache_memory(config, shape, H100) / (163_840 * 18_432)
    assert f"holds {rows:.1f} whole rows" in "\n".join(placement.describe(config, shape, H100))


@pytest.mark.parametrize("box", BOXES, ids=["80", "141"])
def test_both_recipes_fit_both_boxes(config, box):
    shape = boxes.shape_of(config)
    assert memory_plan.faults(config, shape, box) == []
    share = memory_plan.largest_share(config, shape, box)
    assert share >= config.engine.memory_share
    for value, fits in ((share, True), (share + 0.02, False)):
        changed = with_settings(config, f"engine.memory_share={value}")
        assert (memory_plan.faults(changed, shape, box) == []) == fits


@pytest.mark.parametrize(
    ("settings", "phase", "remedy"),
    [
        (["train.recompute=false"], "learning", "train.recompute=true"),
        (["train.micro_batch_tokens=131072"], "learning", "train.micro_batch_tokens=18432"),
        (["model.context=32768", "train.micro_batch_tokens=32768"], "learning", "train.offload_optimizer=true"),
        ([*SPLIT, "engine.memory_share=0.9"], "sampling", "engine.memory_share="),
        ([*SPLIT, "placement.rollout_gpus=5"], "learning", "train.offload_optimizer=true"),
        ([*SPLIT, "env.placement=apart", "env.lanes=64"], "judging", "env.lanes="),
        (["engine.memory_share=0.9"], "sampling", "engine.memory_share="),
        (["env.lanes=24"], "sampling", "env.lanes="),
    ],
)
def test_what_does_not_fit_is_said_with_what_helps(settings, phase, remedy):
    """And what is said to help does: the recipe with it has no such fault."""
    config = load_recipe("drkernel-14b", settings)
    shape = boxes.shape_of(config)
    fault = next(fault for fault in memory_plan.faults(config, shape, H100) if fault.startswith(phase))
    assert re.search(r"needs \d+\.\d GiB a GPU more than there are", fault) and remedy in fault
    helps = re.search(re.escape(remedy) + r"[\d.]*", fault).group().rstrip(".")
    mended = load_recipe("drkernel-14b", [*settings, helps])
    assert not [f for f in memory_plan.faults(mended, shape, H100) if f.startswith(phase)]


def test_an_engine_without_room_for_a_row_is_told_its_share():
    config = load_recipe("drkernel-14b", ["engine.memory_share=0.38"])
    shape = boxes.shape_of(config)
    (fault,) = memory_plan.faults(config, shape, H100)
    needed = re.search(r"must be (0\.\d+) at least", fault).group(1)
    assert "too small for one row of 18432 tokens" in fault
    mended = load_recipe("drkernel-14b", [f"engine.memory_share={float(needed) + 0.01:.2f}"])
    assert memory_plan.faults(mended, shape, H100) == []


def test_a_model_that_no_setting_saves_asks_for_more_gpus():
    config = load_recipe("drkernel-14b", ["env.lanes=1", "train.offload_optimizer=true"])
    tiny = Box("two small ones", 2, 24 * GIB, 1e12)
    learning = next(f for f in memory_plan.faults(config, boxes.shape_of(config), tiny) if f.startswith("learning"))
    assert learning.endswith("more GPUs, or a smaller model")
    starting = next(f for f in memory_plan.faults(config, boxes.shape_of(config), tiny) if f.startswith("starting"))
    assert "GPUs with more memory" in starting and "needs 60.5 GiB a GPU more" in starting  # 1.5 * 55.0 + 2 - 24


def test_turns_end_where_the_context_does(config):
    shape = boxes.shape_of(config)
    short, long = (time_plan.seconds(config, shape, H200, Lengths(answer)) for answer in (512, 8192))
    judged = 256 / 8 / (4.5 * config.env.lanes / 24)
    assert short["judging"] == pytest.approx(3 * judged) and long["judging"] == pytest.approx(judged)


def test_split_gives_each_role_its_own_gpus_memory():
    """14B, 80 GB: five learn (their shards are a fifth), two sample, one judges; what the host holds, by hand."""
    apart = ["placement.kind=split", "placement.rollout_gpus=2", "env.placement=apart", "train.offload_optimizer=true"]
    config = load_recipe("drkernel-14b", [*apart, "engine.memory_share=0.9"])
    shape, count = boxes.shape_of(config), 14.768e9
    parts = memory_plan.phases(config, shape, H100)
    assert not any(name.startswith(("engine", "judge")) and size for name, size in parts["learning"].items())
    held = parts["learning"]["learner: weights and gradients (fp32, its shard)"]
    assert held == pytest.approx(8 * count / 5, rel=1e-3)
    moments = parts["learning"]["learner: Adam's moments (fp32, its shard)"]
    assert moments == 8 * 151_936 * 5120 // 5  # the embedding's alone, one at a time
    assert not any(not name.startswith(("engine", "contexts")) and size for name, size in parts["sampling"].items())
    assert sum(parts["sampling"].values()) == pytest.approx(0.9 * H100.memory + 2 * GIB, rel=1e-3)
    assert parts["judging"] == {"judge": 8 * int(1.6 * GIB), "contexts": 2 * GIB}
    host = memory_plan.host_memory(config, shape, 8)
    assert list(host.values()) == pytest.approx([5 * 4 * count, 2 * 2 * count, 8 * count], rel=1e-3)
    assert sum(memory_plan.host_memory(load_recipe("drkernel-14b"), shape, 8).values()) == 8 * 4 * shape.parameters
    said = "\n".join(placement.describe(config, shape, H100))
    assert "5 learn while 2 sample, 1 judge" in said and "while judging: 14.8 of 79.1" in said


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ([], lambda s, j, o, u, p: s + j + o + u + p),
        (SPLIT, lambda s, j, o, u, p: max(s + j, o + u) + p),
        ([*SPLIT, "placement.staleness=0"], lambda s, j, o, u, p: s + j + o + u + p),
        ([*SPLIT, "env.placement=apart"], lambda s, j, o, u, p: max(s, j, o + u) + p),
        (["env.placement=apart"], lambda s, j, o, u, p: max(s, j) + o + u + p),
    ],
)
def test_what_overlaps_counts_once(config, settings, rule):
    changed = with_settings(config, *settings)
    phases = time_plan.seconds(changed, boxes.shape_of(changed), H200, Lengths(2048))
    assert time_plan.together(changed, phases) == pytest.approx(rule(*phases.values()))


def test_a_gpu_less_to_learn_or_sample_takes_so_much_longer(config):
    """Shares of a step are inverse to GPUs; the push through the host's memory is its bytes over the two rates."""
    split = with_settings(config, *SPLIT, "rollout.batch_size=16")
    shape = boxes.shape_of(config)
    whole, part = (time_plan.seconds(c, shape, H200, Lengths(8192)) for c in (config, split))
    assert part["update"] == pytest.approx(whole["update"] * 8 / 5)
    assert part["judging"] == pytest.approx(whole["judging"] * 8 / 3)
    push = 2 * shape.parameters * 2 / 0.85e9
    assert part["push of weights, through shared memory"] == pytest.approx(push, rel=0.02)
    offloaded = with_settings(config, *SPLIT, "rollout.batch_size=16", "train.offload_optimizer=true")
    more = time_plan.seconds(offloaded, shape, H200, Lengths(8192))["update"] - part["update"]
    assert more == pytest.approx(16 * shape.parameters / 5 / 40e9)


@pytest.mark.parametrize("box", BOXES, ids=["80", "141"])
def test_placements_that_are_recommended_are_recipes_that_fit(config, box):
    """Taken as they are printed; each the quickest of its kind that fits."""
    shape = boxes.shape_of(config)
    said = [line for line in placement.describe(config, shape, box) if " with placement." in line]
    fitting = [c for _, c in placement.placements(config, shape, box) if not memory_plan.faults(c, shape, box)]
    number = len({(c.placement.kind, c.env.placement) for c in fitting})
    for answer, lines in ((2048, said[:number]), (8192, said[number:])):

        def takes(candidate, answer=answer):
            return time_plan.together(candidate, time_plan.seconds(candidate, shape, box, Lengths(answer)))

        assert len(lines) == number
        for line in lines:
            seconds, _, settings = line.partition(" with ")
            chosen = with_settings(config, *settings.split())
            assert memory_plan.faults(chosen, shape, box) == []
            kind = chosen.placement.kind, chosen.env.placement
            quickest = min(takes(c) for c in fitting if (c.placement.kind, c.env.placement) == kind)
            assert takes(chosen) == pytest.approx(quickest)
            assert float(seconds.replace(",", "")) == pytest.approx(quickest, abs=0.51)
    kinds = [c.placement.kind for _, c in placement.placements(config, shape, box)]
    assert kinds.count("colocated") == 2 and kinds.count("split") == 7 + 6 + 5  # judges beside samplers, one, two apart


def test_a_box_with_too_few_gpus_says_so(config):
    split = with_settings(config, "placement.kind=split", "placement.rollout_gpus=8")
    said = placement.describe(split, boxes.shape_of(split), H200)
    assert "no GPU of 8 is left to learn: lower placement.rollout_gpus" in said[-1]


SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 300,
}


def test_sizes_of_a_folder_are_read_and_defaults_are_those_of_the_field(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"head_dim": None}))
    shape = boxes.shape_of(load_recipe("drkernel-8b", [f"model.path={tmp_path}"]))
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
        boxes.shape_of(load_recipe("drkernel-8b", [f"model.path={tmp_path}"]))
    assert plan.main(["drkernel-8b", "--set", f"model.path={tmp_path}"]) == 2
    assert words in capsys.readouterr().err
