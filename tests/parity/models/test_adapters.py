"""Adapters of PEFT beside LoRA train exactly, at every budget: what they draw, and what they leave out at random."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.sampling import grid
from tests.support import models
from tests.support.profiles import budgets
from tests.support.trials import Trial

TARGETS: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoHa": ("LoHaConfig", {"r": 4, "rank_dropout": 0.1, "module_dropout": 0.3, **TARGETS}),
    "LoKr": ("LoKrConfig", {"r": 4, "rank_dropout": 0.1, "module_dropout": 0.3, **TARGETS}),
    "LoRA on experts": (
        "LoraConfig",
        {"r": 4, "target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
    "IA3": ("IA3Config", {"target_modules": ["v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
}


def experts() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}
    routed = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    shape = {"vocab_size": models.VOCAB, "hidden_size": models.HIDDEN, "num_hidden_layers": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **sizes, **routed))


def adapted(kind: str) -> nn.Module:
    import peft

    model = experts() if "experts" in kind else models.build(layers=2)
    name, settings = KINDS[kind]
    torch.manual_seed(1)
    with warnings.catch_warnings():  # peft asks transformers with a deprecated name
        warnings.simplefilter("ignore", FutureWarning)
        model = peft.get_peft_model(model, getattr(peft, name)(**settings))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.02 * torch.randn_like(parameter)
    return model.train()


def batches() -> list[dict[str, torch.Tensor]]:
    return [models.batch(nn.Linear(1, 1))] * 3


TRIALS = {kind: Trial(partial(adapted, kind), batches) for kind in KINDS}


@pytest.mark.parametrize(("kind", "budget"), grid(KINDS, budgets.BUDGETS, count=12))
def test_adapters_train_as_plainly(kind: str, budget: str) -> None:
    assert TRIALS[kind].at(budget) == []
