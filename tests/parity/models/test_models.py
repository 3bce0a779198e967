"""Models that are not language models of decoder layers: whatever is a sequence of blocks trains exactly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import lt_offload
from lt_offload.errors import ModelError
from tests import sampling
from tests.support.engines import differences
from tests.support.profiles.budgets import BUDGETS
from tests.support.trainers import Stepping, stepped
from tests.support.trials import Trial
from tests.support.user_nets import adamw

HIDDEN, VOCAB, WORDS = 32, 61, 8
Batch = dict[str, Tensor]


class Attention(nn.Module):
    """A block as people write it themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.c_attn, self.c_proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 48), nn.GELU(), nn.Linear(48, HIDDEN), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(self.ln_1(x)).unflatten(-1, (3, 4, -1)).transpose(1, 3).unbind(2)
        heads = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.c_proj(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Written by hand: containers of containers, a tied head, and another list that is larger than the layers."""

    def __init__(self, *, other: bool = False) -> None:
        super().__init__()
        parts = {"wte": nn.Embedding(VOCAB, HIDDEN), "wpe": nn.Embedding(WORDS, HIDDEN)}
        layers = nn.ModuleList(Attention() for _ in range(3))
        self.transformer = nn.ModuleDict({**parts, "h": layers, "ln_f": nn.LayerNorm(HIDDEN)})
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight
        if other:
            self.probes = nn.ModuleList(nn.Linear(200, 200) for _ in range(2)).requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.transformer["wte"](ids) + self.transformer["wpe"](torch.arange(ids.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Stack(nn.Module):
    """Layers in one ``nn.Sequential``, and operations without weights between them."""

    def __init__(self) -> None:
        super().__init__()
        middle = [part for _ in range(3) for part in (nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU()), nn.ReLU())]
        self.net = nn.Sequential(nn.Linear(8, HIDDEN), *middle, nn.Linear(HIDDEN, 5))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.net(x), labels)}


def vit() -> nn.Module:
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "hidden_size": HIDDEN}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=16, patch_size=4, num_labels=5, **sizes)
    )


def language_model(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        common = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 3, "intermediate_size": 48}
        config = getattr(transformers, f"{name}Config")(use_cache=False, **common | options)
        model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
        return model

    return make


def images(generator: torch.Generator) -> Batch:
    labels = torch.randint(5, (2,), generator=generator)
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": labels}


def vectors(generator: torch.Generator) -> Batch:
    return {"x": torch.randn(4, 8, generator=generator), "labels": torch.randint(5, (4,), generator=generator)}


def words(name: str) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        ids = torch.randint(VOCAB, (2, WORDS), generator=generator)
        return {name: ids, "labels": ids.roll(1, 1)}

    return make


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Batch]]] = {
    "ViT": (vit, images),
    "GPT": (GPT, words("ids")),
    "Sequential": (Stack, vectors),
    "Mamba": (language_model("Mamba", state_size=8), words("input_ids")),
    "MoE": (language_model("Mixtral", num_local_experts=4, num_experts_per_tok=2, **HEADS), words("input_ids")),
}


def batches(name: str) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [MODELS[name][1](generator) for _ in range(3)]


TRIALS = {name: Trial(make, partial(batches, name)) for name, (make, _) in MODELS.items()}


@pytest.mark.parametrize(("name", "budget"), sampling.grid(MODELS, BUDGETS, count=12))
def test_every_kind_of_model_equals_plain_pytorch(name: str, budget: str) -> None:
    assert sum(block.kind == "layer" for block in TRIALS[name].profile.blocks) == 3
    assert TRIALS[name].at(budget) == []


OTHER = Trial(partial(GPT, other=True), partial(batches, "GPT"))


def test_layers_by_name() -> None:
    with pytest.raises(ModelError, match=r"has called none of its layers, probes\.0, probes\.1"):
        OTHER.offloaded(memory="10MB", blocks="probes")
    for name in ("h", "transformer.h", None):  # without a name the larger list comes first, which nobody calls
        assert OTHER.differences(memory="10MB", blocks=name) == []
    model = OTHER.model()
    profile = lt_offload.profile(model, batches("GPT")[0], optimizer=adamw(model), device="cpu", blocks="h")
    assert [block.name for block in profile.blocks if block.kind == "layer"] == [f"transformer.h.{i}" for i in range(3)]


@pytest.mark.parametrize("memory", ["450KB", "10MB"])
def test_layers_by_name_under_a_trainer(memory: str) -> None:
    strategies = "auto", lt_offload.OffmateStrategy(memory=memory, blocks="h")
    results = [stepped(strategy, Stepping(OTHER.model(), adamw), batches("GPT")) for strategy in strategies]
    assert differences(*results) == []
