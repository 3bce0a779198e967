"""Experts to which a router sends no token: stored ones that are not read in host memory, and trained ones."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import lt_offload
from lt_offload.model.forms import store_weights
from lt_offload.schema.profile import Profile
from tests.support.profiles import budgets
from tests.support.trials import Trial

EXPERTS, CHOSEN, TOKENS = 16, 2, 5


def mixture() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    routed = {"moe_intermediate_size": 64, "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(vocab_size=64, num_hidden_layers=3, intermediate_size=64, **sizes, **routed)
    )


def model() -> nn.Module:
    import peft

    plain = mixture()
    store_weights(plain, "int8")
    with warnings.catch_warnings():  # peft asks transformers with a deprecated name
        warnings.simplefilter("ignore", FutureWarning)
        adapted = peft.get_peft_model(plain, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.02 * torch.randn_like(parameter)
    return adapted.train()


def batches() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(64, (3, 1, TOKENS), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in tokens]


TRIAL = Trial(model, batches)


def experts() -> list[int]:
    return [index for index, tensor in enumerate(TRIAL.profile.tensors) if ".experts." in tensor.name]


def test_a_batch_reads_the_experts_that_it_is_routed_to() -> None:
    for index in experts():
        tensor = TRIAL.profile.tensors[index]
        assert tensor.zero_copy is not None
        (read,) = tensor.zero_copy.reads
        assert read.forward_bytes == read.backward_bytes
        # At least those of one token, at most one for each choice.
        assert CHOSEN / EXPERTS <= read.forward_bytes / tensor.bytes <= TOKENS * CHOSEN / EXPERTS


def at_no_cost() -> Profile:
    """Return the profile with direct reads that take no time, whatever a busy machine has measured."""
    tensors = []
    for tensor in TRIAL.profile.tensors:
        direct = tensor.zero_copy
        if direct is not None:
            reads = tuple(replace(read, forward_s=0.0, backward_s=0.0) for read in direct.reads)
            direct = replace(direct, reads=reads)
        tensors.append(replace(tensor, zero_copy=direct))
    return replace(TRIAL.profile, tensors=tuple(tensors))


@pytest.mark.parametrize("activation_offload", [True, False], ids=["offloaded", "recomputing"])
@pytest.mark.parametrize("share", [0.9, 1.1, 1.6])
def test_experts_that_are_read_directly_train_as_plainly(share: float, activation_offload: bool) -> None:
    # Less than the least that needs copies: what is read takes no room on the device.
    memory = int(share * budgets.smallest(TRIAL.profile, "tight"))
    plan = lt_offload.solve(at_no_cost(), memory=memory, planner="memferry", activation_offload=activation_offload)
    read = {tensor for op in plan.ops for tensor in plan.zero_copy(op)}
    assert read & {*experts()}
    assert TRIAL.differences(plan=plan) == []


class Routed(nn.Module):
    """Experts that are modules: one that has no token is not called, and its weights have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x.detach()[:, :2] > 0).long() @ torch.tensor([1, 2])
        out = x.clone()
        for number in chosen.unique().tolist():
            rows = chosen == number
            out[rows] = out[rows] + self.experts[number](x[rows]).tanh()
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Routed() for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


def few_rows() -> list[dict[str, Tensor]]:
    """Batches whose rows choose one expert, another one, and both."""
    first, second = torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(4)).abs()
    second[:, 0] *= -1
    return [{"x": rows} for rows in (first, second, torch.cat([first, second]))]


TRAINED = {"together": Trial(mixture, batches), "apart": Trial(Net, few_rows)}


@pytest.mark.parametrize("budget", budgets.BUDGETS)
@pytest.mark.parametrize("experts", TRAINED)
def test_trained_experts_without_a_token_are_treated_as_plainly(experts: str, budget: str) -> None:
    trial = TRAINED[experts]
    assert trial.at(budget) == []
    idle = [p for p in trial.plain.model.parameters() if p not in trial.plain.optimizer.state]
    # Those of one tensor have a gradient of zeros, after which AdamW goes on with their averages.
    assert bool(idle) == (experts == "apart")
