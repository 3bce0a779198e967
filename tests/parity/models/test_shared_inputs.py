"""Tensors that several blocks use: encoders, skips. Their gradients are added use by use, as plain PyTorch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import lt_offload
from lt_offload.plan import solve
from tests import sampling
from tests.parity.windows.training import budgets
from tests.support.trials import Trial
from tests.support.user_nets import adamw

VOCAB = 61


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    config = transformers.T5Config(vocab_size=VOCAB, dropout_rate=0.1, use_cache=False, **sizes)
    return transformers.T5ForConditionalGeneration(config)


def bart() -> nn.Module:
    sizes = {"d_model": 32, "max_position_embeddings": 32, "decoder_start_token_id": 1}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 48}
    config = transformers.BartConfig(vocab_size=VOCAB, dropout=0.1, use_cache=False, **sizes)
    return transformers.BartForConditionalGeneration(config)


class Mixing(nn.Module):
    """Uses what it is given several times, and a second tensor, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        out = x + torch.tanh(self.first(x)) * self.second(x)
        return out if skip is None else out + torch.sin(skip) * self.first(skip)


class Skips(nn.Module):
    """As a U-Net: later layers see what early ones have returned."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList([Mixing() for _ in range(6)])
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embedding(input_ids)
        kept = []
        for layer in self.layers[:3]:
            x = layer(x)
            kept.append(x)
        for layer in self.layers[3:]:
            x = layer(x, skip=kept.pop() if layer is not self.layers[3] else kept[0])
        return transformers.modeling_outputs.CausalLMOutput(
            loss=nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        )


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {n: torch.randint(0, VOCAB, (2, 9), generator=generator) for n in ("input_ids", "labels")} for _ in range(3)
    ]


TRIALS = {make: Trial(make, batches) for make in (t5, bart, Skips)}


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        *sampling.some([(t5, {}), (bart, {"recompute": False})], 1),
        *sampling.some([(Skips, {}), (Skips, {"recompute": False}), (Skips, {"activation_offload": False})], 2),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_tensors_that_several_blocks_use(make: Any, settings: dict[str, Any]) -> None:
    profile = TRIALS[make].profile
    for memory in budgets(profile, **settings):
        assert TRIALS[make].differences(plan=solve(profile, memory=memory, **settings)) == []


class LossBeside(Skips):
    """Its loss uses a tensor that layers use, too, and more than once."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = middle = self.layers[0](self.embedding(input_ids))
        for layer in self.layers[1:]:
            x = layer(x, skip=middle)
        return {"loss": self.head(x).square().mean() + middle.square().mean()}


def test_a_loss_that_uses_such_a_tensor_is_refused_before_training() -> None:
    model = LossBeside()
    with pytest.raises(lt_offload.UnsupportedError, match=r"output of block layers\.0 is used in several places"):
        lt_offload.profile(model, batches()[0], optimizer=adamw(model))
