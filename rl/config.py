"""The settings of a run: one frozen tree, read from a recipe and `--set` overrides. Runs in every process.

Defaults are the paper's figures where it fixes one (arXiv 2602.05885; the authors' scripts where it is silent); the
recipes under rl/recipes/ override them. Unknown keys, wrong types and values that contradict each other are refused
with the place they came from.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rl.settings import ConfigError, Where, nearest, override, ranged, section

RECIPES = Path(__file__).parent / "recipes"

# Temperatures beyond these are greedy or uniform in fp32: log-probs of either carry nothing to learn from. Engines take
# no others either (rl/engines/base.py, Sampling).
COLDEST, HOTTEST = 1e-3, 100.0


@dataclass(frozen=True)
class Problems:
    """Where problems come from: our generator, or a folder of KernelBench-format files (then `path` names it).

    `allow_kernelbench`: training problems may be KernelBench's own, which are for evaluation otherwise.
    """

    source: Literal["generator", "folder"] = "generator"
    path: str = ""
    train: int = ranged(48, low=1)
    heldout: int = ranged(24, low=1)
    size: Literal["cpu", "gpu"] = "gpu"
    allow_kernelbench: bool = False


@dataclass(frozen=True)
class Env:
    """The judge. `slots` 0: as many as the device allows; `lanes`: candidates in work at once on each, which take about
    1.6 GiB of a GPU each (0: as suits a device of its own); `trials`: random inputs a candidate must match. `profile`,
    `precision`, `reference`, `time`: by whose rules values and times are judged (`env.rules`). `placement`: on the GPUs
    that the policy is on too, where sampling and judging take turns ("shared"), or on the others ("apart").
    """

    placement: Literal["shared", "apart"] = "shared"
    profile: Literal["default", "kernelbench", "paper"] = "default"
    precision: Literal["ieee", "tf32"] = "ieee"
    reference: Literal["eager", "compile"] = "eager"
    time: Literal["eager", "device"] = "eager"
    slots: int = ranged(0, low=0)
    lanes: int = ranged(0, low=0)
    trials: int = ranged(5, low=1)
    compile_timeout_s: float = ranged(60.0, above=0)
    run_timeout_s: float = ranged(60.0, above=0)


@dataclass(frozen=True)
class Model:
    """The policy: a Hugging Face folder (`path`), or, where `path` is empty, a small Qwen3-shaped model built anew.

    `context` (tokens) is the longest prompt + answer, for either kind. Beside a `path`, the sizes are for plans made
    where the folder isn't.
    """

    path: str = ""
    layers: int = ranged(4, low=1)
    width: int = ranged(192, low=8)
    heads: int = ranged(6, low=1)
    kv_heads: int = ranged(2, low=1)
    mlp: int = ranged(512, low=8)
    vocab_size: int = ranged(2048, low=300)
    context: int = ranged(18432, low=2)


@dataclass(frozen=True)
class Prompts:
    """What is said to the policy (rl/wording.py). `templates`: a folder in rl/templates/, or the path of another one.
    A feedback is quoted up to so many lines of so many characters."""

    templates: str = "default"
    feedback_lines: int = ranged(60, low=3)
    feedback_columns: int = ranged(240, low=20)


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible server, for a teacher or for evaluation: its `url` up to and with /v1, and the model's name
    there. `key_variable` names the environment variable that holds the key; it may be unset for servers without one.

    `timeout_s`: for one answer. `attempts`: tries of a request, with growing pauses where the server is busy.
    `parallel`: requests under way at once.
    """

    url: str = ""
    model: str = ""
    key_variable: str = "OPENAI_API_KEY"
    timeout_s: float = ranged(600.0, above=0)
    attempts: int = ranged(6, low=1)
    parallel: int = ranged(16, low=1)


@dataclass(frozen=True)
class Shares:
    """How often the scripted teacher gives each kind of first answer; they add up to 1."""

    decoy: float = ranged(0.2, low=0, high=1)
    wrong: float = ranged(0.1, low=0, high=1)
    broken: float = ranged(0.1, low=0, high=1)
    lazy: float = ranged(0.2, low=0, high=1)
    fused: float = ranged(0.25, low=0, high=1)
    tuned: float = ranged(0.15, low=0, high=1)


@dataclass(frozen=True)
class Keep:
    """What share of the collected trajectories SFT trains on, by the status of their last turn. Those that could not be
    judged are never kept."""

    correct: float = ranged(1.0, low=0, high=1)
    incorrect: float = ranged(1.0, low=0, high=1)
    hack: float = ranged(1.0, low=0, high=1)
    compile_error: float = ranged(1.0, low=0, high=1)
    runtime_error: float = ranged(1.0, low=0, high=1)
    timeout: float = ranged(1.0, low=0, high=1)
    oom: float = ranged(1.0, low=0, high=1)


@dataclass(frozen=True)
class Collect:
    """Cold-start data: trajectories in which the teacher answers through the environment. `teacher`: the script that
    knows the generator's problems, whose first answers have `shares`, or the model behind `server`."""

    teacher: Literal["script", "server"] = "script"
    trajectories: int = ranged(8000, low=1)
    turns: int = ranged(5, low=1)
    shares: Shares = field(default_factory=Shares)
    keep: Keep = field(default_factory=Keep)


@dataclass(frozen=True)
class Sft:
    """Supervised training on the collected trajectories; `batch_tokens` is one optimiser step's tokens."""

    epochs: int = ranged(4, low=1)
    lr: float = ranged(1e-6, above=0)
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    batch_tokens: int = ranged(64 * 18432, low=1)
    warmup_share: float = ranged(0.05, low=0, high=0.99)


@dataclass(frozen=True)
class Engine:
    """What samples. `hf`: the learner's own model, no copy of it. `vllm`: vLLM in this process, for models of real size
    (rl/engines/vllm.py); under torchrun one a rank. The rest is for vllm alone.

    `memory_share`: of the whole GPU, vLLM's part while it is awake. `kv_cache_gib`: its key-value cache; 0: what
    its part leaves beside the weights. `seeded`: an answer's draws come from its own seed; without, sampling is faster.
    `eager`: no compiling and no graphs: starts in seconds, samples slower. `push_timeout_s`: for handing over weights.
    """

    name: Literal["hf", "vllm"] = "hf"
    memory_share: float = ranged(0.5, above=0, high=0.98)
    kv_cache_gib: float = ranged(0.0, low=0)
    seeded: bool = True
    eager: bool = False
    push_timeout_s: float = ranged(120.0, above=0)


@dataclass(frozen=True)
class Placement:
    """Who works where in RL. `colocated`: all GPUs sample, judge and learn in turn. `split`: another process samples
    and judges on other devices than the learner's, while the learner is at the step before (rl/split.py); the GPUs
    behind the learner's (one a rank) are `rollout_gpus`, then, with env.placement = apart, `judge_gpus`.

    `staleness`: optimiser steps between the weights that sample a step and those that it trains; 0 overlaps nothing.
    `rollout_timeout_s`: the learner waits no longer for a step's rollouts.
    """

    kind: Literal["colocated", "split"] = "colocated"
    staleness: int = ranged(1, low=0, high=1)
    rollout_gpus: int = ranged(1, low=1)
    judge_gpus: int = ranged(1, low=1)
    rollout_timeout_s: float = ranged(7200.0, above=0)


@dataclass(frozen=True)
class Rollout:
    """Sampling for training. `batch_size` is how many prompts an engine decodes at once.

    `min_new_tokens`: a turn is begun only where at least so many tokens fit into the context behind its prompt (0: all
    of max_new_tokens); a trajectory ends there otherwise. `max_infra_share`: where more of a step's turns can't be
    judged, by nobody's fault, training pauses instead of learning from the rest.
    """

    prompts_per_step: int = ranged(16, low=1)
    samples_per_prompt: int = ranged(16, low=1)
    turns: int = ranged(3, low=1)
    max_new_tokens: int = ranged(8192, low=1)
    temperature: float = ranged(1.0, low=COLDEST, high=HOTTEST)
    top_p: float = ranged(1.0, above=0, high=1)
    min_new_tokens: int = ranged(0, low=0)
    batch_size: int = ranged(64, low=1)
    max_infra_share: float = ranged(0.25, low=0, high=1)


@dataclass(frozen=True)
class Earns:
    """What an answer earns that isn't correct, by its status."""

    incorrect: float = ranged(0.0)
    hack: float = ranged(0.0)
    compile_error: float = ranged(0.0)
    runtime_error: float = ranged(0.0)
    timeout: float = ranged(0.0)
    oom: float = ranged(0.0)


@dataclass(frozen=True)
class Reward:
    """R = C + C * min(speedup, speedup_cap) + C * PR; without `hack_check` a hack that is right earns too."""

    speedup_cap: float = ranged(3.0, above=0)
    profiling_ratio: bool = True
    hack_check: bool = True
    earns: Earns = field(default_factory=Earns)


@dataclass(frozen=True)
class Advantage:
    """The baseline (rl/advantages.py) and the discount of the return."""

    estimator: Literal["trloo", "grpo", "grpo_std", "rloo", "reinforce"] = "trloo"
    gamma: float = ranged(1.0, low=0, high=1)


@dataclass(frozen=True)
class Rejection:
    """Rejection by train/rollout mismatch (MRS, token veto; `token_veto` 0: none) and by profiling ratio (PRS).

    `baseline`: rejected samples count in the baseline of the others ("keep", as in the authors' code) or don't.
    `importance`: weights pi_learner / pi_rollout on the loss, a token's own or the whole answer's, at most
    `importance_cap` (rl/rejection.py).
    """

    mrs: Literal["sample", "trajectory", "off"] = "sample"
    mrs_low: float = ranged(0.999, low=0, high=1)
    mrs_high: float = ranged(1.001, low=1)
    token_veto: float = ranged(1e-4, low=0, high=0.9)  # at 1 every last-bit difference would veto
    prs: Literal["soft", "hard", "off"] = "soft"
    prs_tau: float = ranged(0.3, low=0, high=1)
    prs_s: float = ranged(0.1, above=0)
    baseline: Literal["keep", "drop"] = "keep"
    importance: Literal["off", "token", "sequence"] = "off"
    importance_cap: float = ranged(2.0, low=1)


@dataclass(frozen=True)
class Loss:
    """PPO clip: the ratio stays in [1 - clip_low, 1 + clip_high]. `dual_clip` (0: off) bounds the loss of tokens with a
    negative advantage at that many times its size. `rows`: what the loss is a mean over, rows before or after
    rejection. `scale` divides the loss (see rl/loss.py)."""

    clip_low: float = ranged(0.2, above=0, high=1)
    clip_high: float = ranged(0.28, above=0)
    dual_clip: float = ranged(0.0, low=0)
    rows: Literal["valid", "kept"] = "valid"
    scale: float = ranged(1000.0, above=0)


@dataclass(frozen=True)
class Optim:
    """AdamW for RL (SFT takes all but the learning rate and its schedule from here). After `warmup_steps` the rate is
    constant, or falls to `final_lr_share` of `lr` at the last step."""

    lr: float = ranged(1e-6, above=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_lr_share: float = ranged(0.0, low=0, high=1)
    weight_decay: float = ranged(0.01, low=0)
    beta1: float = ranged(0.9, low=0, high=0.9999)
    beta2: float = ranged(0.999, low=0, high=0.999999)
    max_grad_norm: float = ranged(1.0, above=0)
    warmup_steps: int = ranged(0, low=0)


@dataclass(frozen=True)
class Train:
    """The RL loop. `micro_batch_tokens` bounds the tokens of one forward pass on one rank (memory, never the result).

    `autocast`: compute in bf16 over fp32 weights; for CUDA only. `recompute`: keep only the layers' inputs and compute
    the rest again in the backward pass (activation checkpointing: less memory, a third more work).
    `offload_optimizer`: Adam's moments are kept in the host's memory, half of what the learner's own state takes of a
    GPU (rl/offload.py). `compile`: compile the decoder layers; worth its minute for models of real size, for CUDA only.
    `max_skipped`: after so many steps in a row that trained nothing (every row masked, or no finite gradient) training
    pauses (rl/idle.py; 0: never).
    """

    steps: int = ranged(300, low=1)
    checkpoint_every: int = ranged(10, low=1)
    keep_checkpoints: int = ranged(2, low=1)
    micro_batch_tokens: int = ranged(32768, low=1)
    max_skipped: int = ranged(10, low=0)
    autocast: bool = False
    recompute: bool = False
    offload_optimizer: bool = False
    compile: bool = False


@dataclass(frozen=True)
class Eval:
    """Held-out evaluation: samples a problem, turns a sample, and their sampling.

    `every`: also during training, before the first step and then every so many (0: never), with `during_samples` a
    problem, into the metrics of training as eval/*.
    """

    samples: int = ranged(8, low=1)
    turns: int = ranged(3, low=1)
    temperature: float = ranged(1.0, low=COLDEST, high=HOTTEST)
    top_p: float = ranged(0.95, above=0, high=1)
    every: int = ranged(0, low=0)
    during_samples: int = ranged(1, low=1)


@dataclass(frozen=True)
class Config:
    """The whole tree; one a run, written to <run>/config.json."""

    name: str = "default"
    seed: int = ranged(0, low=0, high=2**64 - 1)
    device: Literal["cpu", "cuda"] = "cuda"
    problems: Problems = field(default_factory=Problems)
    env: Env = field(default_factory=Env)
    model: Model = field(default_factory=Model)
    prompts: Prompts = field(default_factory=Prompts)
    server: Server = field(default_factory=Server)
    collect: Collect = field(default_factory=Collect)
    sft: Sft = field(default_factory=Sft)
    engine: Engine = field(default_factory=Engine)
    placement: Placement = field(default_factory=Placement)
    rollout: Rollout = field(default_factory=Rollout)
    reward: Reward = field(default_factory=Reward)
    advantage: Advantage = field(default_factory=Advantage)
    rejection: Rejection = field(default_factory=Rejection)
    loss: Loss = field(default_factory=Loss)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    eval: Eval = field(default_factory=Eval)

    def to_json(self) -> dict[str, Any]:
        """Plain nested dict; `from_json` gives back an equal Config."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any], where: str = "config.json") -> Config:
        """Build and check a Config from nested dicts. Raises ConfigError that names `where`."""
        return _build(data, lambda *keys: where)


def load_recipe(name_or_path: str, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """The recipe rl/recipes/<name>.toml (or the TOML file at a path), with overrides "a.b=c" applied in order.

    Raises ConfigError for a missing or malformed file, an unknown key, a wrong type, or contradictory values.
    """
    path = Path(name_or_path) if name_or_path.endswith(".toml") else RECIPES / f"{name_or_path}.toml"
    if not path.is_file():
        known = sorted(recipe.stem for recipe in RECIPES.glob("*.toml"))
        raise ConfigError(f"no recipe {name_or_path!r}{nearest(name_or_path, known)}; known: {', '.join(known)}")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    origins: dict[str, str] = {}
    for text in overrides:
        override(data, text, origins)

    def where(*keys: str) -> str:
        """The last override of one of the keys, or of a key inside such a section; else the file."""
        for overridden, origin in reversed(origins.items()):
            if any(overridden == key or overridden.startswith(f"{key}.") for key in keys):
                return origin
        return str(path)

    return _build(data, where)


def load_run(run: Path | str) -> Config:
    """The Config of a run folder, from its config.json. Raises ConfigError where there is none, or a broken one."""
    path = Path(run) / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing: prepare the run folder first (scripts/prepare)") from error
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, or a number of thousands of digits
        raise ConfigError(f"{path}: not JSON: {error}; prepare the run folder again") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no settings, but {type(data).__name__}; prepare the run folder again")
    return Config.from_json(data, str(path))


def _build(data: dict[str, Any], where: Where) -> Config:
    config = section(Config, data, "", where)
    _check(config, where)
    return config


def _check(config: Config, where: Where) -> None:
    """Refuse values that are fine alone and wrong together."""

    def require(holds: bool, keys: list[str], message: str) -> None:
        if not holds:
            raise ConfigError(f"{where(*keys)}: {' and '.join(keys)}: {message}")

    problems, model, rollout, train = config.problems, config.model, config.rollout, config.train
    engine, rejection = config.engine, config.rejection
    folder = problems.source == "folder"
    total_share = sum(asdict(config.collect.shares).values())
    require(
        folder == bool(problems.path),
        ["problems.source", "problems.path"],
        "a path is needed with source = folder, and read only with it",
    )
    require(
        config.device == "cuda" or problems.size == "cpu",
        ["problems.size", "device"],
        "gpu-sized problems take hours in the CPU interpreter; use problems.size = cpu, or device = cuda",
    )
    require(
        config.device == "cuda" or not train.autocast, ["train.autocast", "device"], "bf16 autocast needs device = cuda"
    )
    require(config.device == "cuda" or not train.compile, ["train.compile", "device"], "compiling needs device = cuda")
    require(
        config.loss.dual_clip == 0 or config.loss.dual_clip > 1,
        ["loss.dual_clip"],
        f"{config.loss.dual_clip:g} would cut tokens that haven't moved; use 0 (off) or more than 1, e.g. 3",
    )
    require(
        model.heads % model.kv_heads == 0,
        ["model.heads", "model.kv_heads"],
        f"{model.heads} is not a multiple of {model.kv_heads}",
    )
    require(
        model.width % (2 * model.heads) == 0,
        ["model.width", "model.heads"],
        f"the width must be a multiple of 2 * heads = {2 * model.heads}: rotary positions rotate pairs",
    )
    require(
        rollout.max_new_tokens < model.context,
        ["rollout.max_new_tokens", "model.context"],
        f"{rollout.max_new_tokens} new tokens leave no room for a prompt in a context of {model.context}",
    )
    require(
        rollout.top_p == 1.0,
        ["rollout.top_p"],
        "must be 1.0: log-probs of a cut distribution can't be compared with the learner's",
    )
    require(
        folder or rollout.prompts_per_step <= problems.train,
        ["rollout.prompts_per_step", "problems.train"],
        f"{rollout.prompts_per_step} prompts a step, but only {problems.train} problems",
    )
    require(
        rollout.samples_per_prompt > 1 or not config.advantage.estimator.startswith("grpo"),
        ["rollout.samples_per_prompt", "advantage.estimator"],
        "grpo subtracts the group's mean: with one sample every advantage is 0",
    )
    require(
        config.device == "cuda" or (config.env.reference == "eager" and config.env.time == "eager"),
        ["device", "env.reference", "env.time"],
        "on the CPU times are modelled: there is neither a compiled reference nor a device time",
    )
    require(
        config.device == "cuda" or config.env.placement == "shared",
        ["env.placement", "device"],
        "apart means on other GPUs than the policy's, and needs device = cuda",
    )
    require(
        config.collect.teacher == "script" or bool(config.server.url and config.server.model),
        ["collect.teacher", "server.url", "server.model"],
        "a teacher on a server needs its url (http://host:port/v1) and the model's name there",
    )
    require(
        any(asdict(config.collect.keep).values()),
        ["collect.keep"],
        "every share is 0, so nothing would be left to train on",
    )
    require(
        not config.server.url or config.server.url.startswith(("http://", "https://")),
        ["server.url"],
        f"{config.server.url!r} is no http:// or https:// address",
    )
    require(
        rollout.min_new_tokens <= rollout.max_new_tokens,
        ["rollout.min_new_tokens", "rollout.max_new_tokens"],
        f"{rollout.min_new_tokens} is more than an answer may have, {rollout.max_new_tokens}",
    )
    require(
        config.rejection.baseline == "keep"
        or config.rejection.mrs != "off"
        or config.rejection.prs != "off"
        or config.rejection.token_veto > 0,
        ["rejection.baseline", "rejection.mrs", "rejection.prs", "rejection.token_veto"],
        "nothing is rejected, so nothing can be dropped from the baseline",
    )
    require(
        rejection.mrs == "off" or rejection.mrs_low < rejection.mrs_high,
        ["rejection.mrs_low", "rejection.mrs_high"],
        f"both are {rejection.mrs_low:g}: every answer whose log-probs differ in the last bit would be rejected; leave "
        "room between them, or set rejection.mrs = off",
    )
    for key in ("memory_share", "kv_cache_gib", "seeded", "eager"):
        value = getattr(engine, key)
        require(
            engine.name == "vllm" or value == getattr(Engine, key),
            [f"engine.{key}", "engine.name"],
            f"{value} is for vllm alone, and engine.name = {engine.name} reads it nowhere; leave it out, or use vllm",
        )
    _check_placement(config, require)
    require(abs(total_share - 1) < 1e-6, ["collect.shares"], f"must add up to 1, they add up to {total_share:g}")


def _check_placement(config: Config, require: Callable[[bool, list[str], str], None]) -> None:
    placement = config.placement
    changed = [
        key for key in ("staleness", "rollout_gpus", "judge_gpus", "rollout_timeout_s")
        if getattr(placement, key) != getattr(Placement, key)
    ]  # fmt: skip
    for key in changed:
        require(
            placement.kind == "split",
            [f"placement.{key}", "placement.kind"],
            "is for split alone, and placement.kind = colocated reads it nowhere; leave it out, or use split",
        )
        require(
            config.device == "cuda" or not key.endswith("_gpus"),
            [f"placement.{key}", "device"],
            "there are no GPUs to divide on the CPU; leave it out",
        )
    require(
        config.env.placement == "apart" or "judge_gpus" not in changed,
        ["placement.judge_gpus", "env.placement"],
        "the judge has GPUs of its own with env.placement = apart alone; shared means those that sample",
    )
    require(
        config.engine.name == "vllm" or "rollout_gpus" not in changed,
        ["placement.rollout_gpus", "engine.name"],
        "engine.name = hf samples on one GPU; use vllm for more",
    )
