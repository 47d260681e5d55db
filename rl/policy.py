"""The policy as the learner computes it: a pack of rows in, log-probs of their completion tokens out.

Runs in the learner. The module is the root that FSDP splits up: all weights are used within its `forward`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch.utils.checkpoint import checkpoint

from rl import attention
from rl.batch import Pack, make_pack
from rl.config import ConfigError
from rl.logprobs import TokenValues, token_values


class Policy(torch.nn.Module):
    """A Hugging Face causal LM. It stays in eval mode: dropout would make the log-probs of two passes differ, and the
    ratio with them. recompute, compile: see rl/config.py, Train."""

    def __init__(
        self, model: torch.nn.Module, temperature: float = 1.0, recompute: bool = False, compile: bool = False
    ) -> None:
        """Raises ConfigError for a model whose logits are not its head applied to its last hidden states, or that
        doesn't keep packed rows apart."""
        super().__init__()
        self.model = model.eval()
        self.temperature = temperature
        attention.use_packed_attention(model)
        self._forwards: list[tuple[torch.nn.Module, Callable]] = []
        self.check()
        for layer in decoder_layers(model) if recompute or compile else []:
            forward = layer.forward
            if recompute:
                forward = functools.partial(checkpoint, forward, use_reentrant=False)
            self._forwards.append((layer, torch.compile(forward) if compile else forward))

    def forward(self, pack: Pack) -> TokenValues:
        """Values of the pack's targets under the sampling temperature (rl/logprobs.py).

        Prompts are most of a multi-turn row: logits are computed where a target is predicted, and only there.
        """
        with self._own_layers():
            hidden = self.model.base_model(**attention.arguments(pack)).last_hidden_state[0]
        head = self.model.get_output_embeddings().weight
        return token_values(hidden[pack.where].to(head.dtype), head, pack.targets, self.temperature)

    @contextlib.contextmanager
    def _own_layers(self) -> Iterator[None]:
        """Recompute and compile here only: an engine that samples from the same model has its own ways."""
        for layer, forward in self._forwards:
            layer.forward = forward
        try:
            yield
        finally:
            for layer, _ in self._forwards:
                del layer.forward

    @torch.no_grad()
    def check(self) -> None:
        """Compare two short packed rows with the model's own logits for each alone."""
        broken = [name for name, weight in self.model.named_parameters() if not weight.isfinite().all()]
        if broken:
            raise ConfigError(
                f"the model's weights hold NaN or inf, e.g. {broken[0]} ({len(broken)} of "
                f"{sum(1 for _ in self.model.parameters())}): its folder is damaged, or the training that wrote it "
                "diverged; get or make it anew"
            )
        device = next(self.parameters()).device
        rows = [[0, 1, 2, 3], [3, 1, 0]]
        got = self(make_pack(rows, [[1, 2, 3], [1, 2]], [0, 1], device)).logprobs
        own = []
        for row in rows:
            ids = torch.tensor([row], device=device)
            logits = self.model(input_ids=ids, use_cache=False).logits[0].float() / self.temperature
            own.append(logits.log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None]).squeeze(-1))
        if not torch.allclose(got, torch.cat(own), rtol=1e-3, atol=1e-3):
            raise ConfigError(
                f"{type(self.model).__name__} does more to its logits than its output head (soft-capping, scaling, a "
                "bias?) or doesn't attend within packed rows only: it can't be trained here; use a model with a plain "
                "head and plain attention, e.g. Qwen3 or Llama"
            )


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The model's repeated blocks, as its authors name them for splitting it up."""
    names = set(model._no_split_modules or [])
    return [module for module in model.modules() if type(module).__name__ in names]
