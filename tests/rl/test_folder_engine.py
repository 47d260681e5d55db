"""The engine of a model folder: the plain one and vLLM's (made up), with the folder's weights or a checkpoint's."""

from __future__ import annotations

import shutil

import pytest
import torch

import rl.engines.vllm
from rl import checkpoint, modeling
from rl.config import load_recipe
from rl.engines.base import Sampling, generate
from rl.engines.folder import folder_engine
from rl.engines.hf import HFEngine

pytestmark = pytest.mark.budget(30)

SMALL = ["layers=1", "width=16", "heads=2", "kv_heads=1", "mlp=16", "vocab_size=400"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model"
    modeling.build_initial(config(), ["def forward(self, x):\n    return x\n"], path)
    return path


def config(*settings):
    return load_recipe("mini-cpu", [*(f"model.{setting}" for setting in SMALL), *settings])


@pytest.fixture
def trained(folder, tmp_path):
    """A checkpoint of the folder's model with other weights, and that model."""
    model, _ = modeling.load(folder, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    checkpoint.save(tmp_path, 3, tensors, {}, keep=1)
    return tmp_path / "step_00003", model


def test_the_plain_engine_samples_from_the_folder_or_from_the_checkpoint(folder, trained):
    engine, chat = folder_engine(folder, config(), bf16=False)
    prompt = [5, 6, 7]
    sampling = Sampling(8, stop_ids=chat.stop_ids)
    model, _ = modeling.load(folder, "cpu")
    expected = generate(HFEngine(model, 4), [prompt], sampling, [1])
    assert generate(engine, [prompt], sampling, [1]) == expected
    engine, _ = folder_engine(folder, config(), bf16=False, weights=trained[0])
    found = generate(engine, [prompt], sampling, [1])
    assert found != expected and found == generate(HFEngine(trained[1], 4), [prompt], sampling, [1])


def test_bf16_is_for_parameters_alone(folder):
    engine, _ = folder_engine(folder, config(), bf16=True)
    assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in engine.model.buffers()} == {torch.float32}


class MadeUp:
    """Notes what it was made with and what was pushed."""

    def __init__(self, folder, batch_size, context, dtype, *rest):
        self.folder, self.dtype, self.pushed = folder, dtype, []

    def push(self, model):
        self.pushed.append({name: p.detach().clone() for name, p in model.named_parameters()})


@pytest.mark.parametrize("bf16, dtype", [(True, torch.bfloat16), (False, torch.float32)])
def test_vllm_gets_the_folder_and_a_checkpoints_weights(folder, trained, monkeypatch, bf16, dtype):
    monkeypatch.setattr(rl.engines.vllm, "VLLMEngine", MadeUp)
    wanted = config("engine.name=vllm")
    engine, chat = folder_engine(folder, wanted, bf16)
    assert engine.folder == folder and engine.dtype == dtype and not engine.pushed and chat.stop_ids
    engine, _ = folder_engine(folder, wanted, bf16, weights=trained[0])
    (pushed,) = engine.pushed
    assert all(torch.equal(pushed[name], p) for name, p in trained[1].named_parameters())


@pytest.mark.parametrize("name", ["hf", "vllm"])
def test_a_damaged_folder_is_refused_before_an_engine_starts(folder, tmp_path, monkeypatch, name):
    monkeypatch.setattr(rl.engines.vllm, "VLLMEngine", None)
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:-8] + b"12345678")
    with pytest.raises(modeling.ModelError, match=r"copy is damaged: model\.safetensors"):
        folder_engine(copy, config(f"engine.name={name}"), bf16=False)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(modeling.ModelError, match="has no tokenizer"):
        folder_engine(copy, config(f"engine.name={name}"), bf16=False)
