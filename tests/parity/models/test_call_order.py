"""Blocks are what is called in turn: whatever list it stands in, and in whatever order it is registered."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import lt_offload
from tests import sampling
from tests.support.engines import Result, differences
from tests.support.profiles.budgets import BUDGETS
from tests.support.trainers import Stepping, stepped
from tests.support.trials import Trial
from tests.support.user_nets import adamw

VOCAB, HIDDEN = 61, 16
Make = Callable[[], nn.Module]


def text() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    names = ("input_ids", "labels")
    return [{n: torch.randint(5, VOCAB, (2, 9), generator=generator) for n in names} for _ in range(3)]


def pictures() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    shapes = {"x": (2, 5, 8), "y": (2, 3, 6), "t": (2, 4)}
    return [{n: torch.randn(shape, generator=generator) for n, shape in shapes.items()} for _ in range(3)]


# -- of transformers --------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def config(name: str, **settings: Any) -> Any:
    return getattr(transformers, name)(**SIZES | settings)


def gemma4() -> Any:
    """Each layer has embeddings of its own, whose projection is registered behind the layers."""
    inputs = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
    return config(
        "Gemma4TextConfig", num_kv_shared_layers=0, global_head_dim=8, sliding_window=16, use_cache=False, **inputs
    )


def gemma4_e2b() -> Any:
    """Later layers take the keys and values of earlier ones; what is there for pictures and sounds is not called."""
    inputs = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "global_head_dim": 16}
    kinds = ["sliding_attention", "full_attention"] * 3
    sharing = {"num_hidden_layers": 6, "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "layer_types": kinds}
    capped = {"final_logit_softcapping": 30.0, "sliding_window": 4, "use_cache": False, "num_key_value_heads": 1}
    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    pictures = {"head_dim": 8, "num_key_value_heads": 2, "position_embedding_size": 16, "use_clipped_linears": True}
    sounds = {"output_proj_dims": 16, "subsampling_conv_channels": [4, 4]}
    return transformers.Gemma4Config(
        text_config=SIZES | inputs | sharing | capped, vision_config=tower | pictures, audio_config=tower | sounds
    )


def gemma4_12b() -> Any:
    """Layers of one kind have their keys for values; what takes pictures and sounds is not called."""
    kinds = ["sliding_attention", "full_attention"] * 2
    text = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 16, "layer_types": kinds}
    text |= {"final_logit_softcapping": 30.0, "sliding_window": 4, "use_cache": False}
    pictures = {"mm_embed_dim": 16, "output_proj_dims": 16, "mm_posemb_size": 8}
    return transformers.Gemma4UnifiedConfig(
        text_config=SIZES | text, vision_config=pictures, audio_config={"audio_embed_dim": 16}
    )


def olmo_hybrid() -> Any:
    """Two classes of layers take turns."""
    linear = {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
    linear |= {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
    kinds = ["linear_attention", "full_attention"] * 2
    return config("OlmoHybridConfig", layer_types=kinds, use_cache=False, **linear)


def prophetnet() -> Any:
    """Its decoder multiplies with the weights of embeddings that it does not call."""
    sides = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    sides = {f"num_{name}": count for name, count in sides.items()} | {"num_decoder_layers": 3, "num_buckets": 8}
    sides |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "relative_max_distance": 16}
    sizes = {name: size for name, size in SIZES.items() if name != "num_hidden_layers"}
    return transformers.ProphetNetConfig(is_decoder=True, use_cache=False, **sizes | sides)


def blenderbot() -> Any:
    """A decoder alone, whose first norm is registered behind the layers."""
    sizes = {"decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "d_model": 32}
    return config("BlenderbotSmallConfig", is_decoder=True, use_cache=False, scale_embedding=True, **sizes)


CAUSAL = {make.__name__: make for make in (gemma4, gemma4_e2b, gemma4_12b, olmo_hybrid, prophetnet, blenderbot)}
MASKED = {"bert": lambda: config("BertConfig"), "esm": lambda: config("EsmConfig", mask_token_id=3)}


def made_by(auto: Any, make: Callable[[], Any]) -> Any:
    return auto.from_config(make())


def causal(name: str) -> Make:
    return lambda: made_by(transformers.AutoModelForCausalLM, CAUSAL[name])


def masked(name: str) -> Make:
    return lambda: made_by(transformers.AutoModelForMaskedLM, MASKED[name])


# -- as people write them ---------------------------------------------------------------------------------------------


class Modulated(nn.Module):
    """A layer that is given a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.modulation = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.modulation(F.silu(condition)).unsqueeze(1).chunk(2, -1)
        return x + torch.tanh(self.inner(x * (1 + scale) + shift))


class Joint(nn.Module):
    """A layer of two streams."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = Modulated(), Modulated()

    def forward(self, x: Tensor, y: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        return self.x(x, condition), self.y(y, condition)


class Transformer(nn.Module):
    """Two lists in a row, and a condition for all; ``guided``: two conditions by the same module (Flux)."""

    def __init__(self, *, guided: bool = False) -> None:
        super().__init__()
        self.guided = guided
        self.joint = nn.ModuleList(Joint() for _ in range(2))
        self.single = nn.ModuleList(Modulated() for _ in range(3))
        self.time = nn.Sequential(nn.Linear(4, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))
        self.x_in, self.y_in = nn.Linear(8, HIDDEN), nn.Linear(6, HIDDEN)
        self.unused = nn.Linear(300, 300)
        self.last, self.out = Modulated(), nn.Linear(HIDDEN, 8)

    def forward(self, x: Tensor, y: Tensor, t: Tensor) -> dict[str, Tensor]:
        condition = self.time(t)
        if self.guided:
            condition = condition + self.time(2 * t)
        inner, other = self.x_in(x), self.y_in(y)
        for layer in self.joint:
            inner, other = layer(inner, other, condition)
        inner = torch.cat([other, inner], 1)
        for layer in self.single:
            inner = layer(inner, condition)
        inner = self.last(inner[:, y.shape[1] :], condition)
        return {"loss": (self.out(inner) - x).square().mean()}


class Refining(nn.Module):
    """Short lists of layers before the long one (Z-Image)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Modulated() for _ in range(4))
        self.x_refiner, self.y_refiner = (nn.ModuleList(Modulated() for _ in range(2)) for _ in range(2))
        self.time, self.y_in = nn.Linear(4, HIDDEN), nn.Linear(6, HIDDEN)
        self.x_in, self.out = nn.Linear(8, HIDDEN), nn.Linear(HIDDEN, 8)
        self.pad = nn.Parameter(torch.ones(1, HIDDEN))

    def forward(self, x: Tensor, y: Tensor, t: Tensor) -> dict[str, Tensor]:
        condition = self.time(t)
        inner = torch.stack([self.x_in(row) for row in x]) + self.pad  # once per sample
        for layer in self.x_refiner:
            inner = layer(inner, condition)
        other = self.y_in(y)
        for layer in self.y_refiner:
            other = layer(other, condition)
        inner = torch.cat([inner, other], 1)
        for layer in self.layers:
            inner = layer(inner, condition)
        return {"loss": (self.out(inner[:, : x.shape[1]]) - x).square().mean()}


KINDS: list[tuple[str, Make, Any, int]] = [
    ("gemma4", causal("gemma4"), text, 10),
    ("gemma4_e2b", causal("gemma4_e2b"), text, 12),
    ("gemma4_12b", causal("gemma4_12b"), text, 7),
    ("olmo_hybrid", causal("olmo_hybrid"), text, 7),
    ("prophetnet", causal("prophetnet"), text, 6),
    ("blenderbot", causal("blenderbot"), text, 7),
    ("bert", masked("bert"), text, 6),
    ("esm", masked("esm"), text, 7),
    ("lists in a row", Transformer, pictures, 10),
    ("a module for all", lambda: Transformer(guided=True), pictures, 9),
    ("short lists first", Refining, pictures, 11),
]


TRIALS = {name: Trial(make, batches) for name, make, batches, _ in KINDS}
COUNTS = {name: count for name, *_, count in KINDS}


@pytest.mark.parametrize(("name", "budget"), sampling.some([*itertools.product(TRIALS, BUDGETS)], 8))
def test_blocks_are_what_is_called(name: str, budget: str) -> None:
    assert TRIALS[name].at(budget) == []


def fitted(strategy: Any, model: nn.Module, batches: list[dict[str, Tensor]]) -> Result:
    return stepped(strategy, Stepping(model, adamw), batches)


@pytest.mark.parametrize(("name", "budget"), sampling.some([*itertools.product(TRIALS, ("tight", "resident"))], 4))
def test_the_first_step_finds_them(name: str, budget: str) -> None:
    """It counts: nothing is run to find them before, and what has turned out to be no block has run as one."""
    trial = TRIALS[name]
    expected = fitted("auto", trial.model(), trial.batches())
    strategy = lt_offload.OffmateStrategy(memory=trial.planned(budget).budget_bytes + 8192)
    assert differences(expected, fitted(strategy, trial.model(), trial.batches())) == []
    assert strategy.profile is not None
    assert [block.name for block in strategy.profile.blocks] == [f"model.{b.name}" for b in trial.profile.blocks]


@pytest.mark.parametrize("name", TRIALS)
def test_the_sequence_is_in_the_order_of_calls(name: str) -> None:
    model, profile = TRIALS[name].model(), TRIALS[name].profile
    names = [block.name for block in profile.blocks]
    called: list[str] = []
    for block in names:
        model.get_submodule(block).register_forward_pre_hook(lambda module, args, block=block: called.append(block))
    model(**TRIALS[name].batches()[0])
    assert called == names
    assert len(names) == COUNTS[name]
    assert sum(block.kind == "layer" for block in profile.blocks) >= 3


@pytest.mark.parametrize("name", CAUSAL)
def test_a_configuration_gives_the_same_sequence(name: str) -> None:
    profile = TRIALS[name].profile
    settings: dict[str, Any] = {"batch_size": 2, "sequence_length": 9, "hardware": "rtx-3060-12gb"}
    found = lt_offload.profile_config(CAUSAL[name](), **settings)
    assert [block.name for block in found.blocks] == [block.name for block in profile.blocks]
    assert found.fingerprint == profile.fingerprint
