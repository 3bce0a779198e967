"""Every planner's plan trains, bit for bit as plain PyTorch, dropout included: small models, and parts of the
quickstart's; with ``--full`` all of it."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

import lt_offload
from lt_offload.errors import InfeasibleError, UnsupportedError
from lt_offload.plan.papers.pofo.propose import propose_pofo
from lt_offload.plan.planners.offmate.config import OffmateConfig
from lt_offload.plan.planners.request import NotApplicable, Request, allowed_options
from lt_offload.plan.settings import Settings
from lt_offload.schema.plan import Plan, PlannerName
from lt_offload.schema.profile import Profile
from tests import sampling
from tests.support import models
from tests.support.engines import Result, differences, make_optimizer, trained_by
from tests.support.hostile.device import HostileDevice
from tests.support.user_nets import ordinary

PLANNERS: tuple[PlannerName, ...] = ("offmate", "stream", "greedy", "l2l", "memferry", "pofo", "resident")
pofo_keeps = pytest.mark.own_plan("POFO plans for blocks that may keep their activations", planner="pofo")
ROOT = Path(__file__).resolve().parents[3]
STEPS = 3


@dataclass
class Task:
    """A model, a batch and what plain training makes of them."""

    start: nn.Module
    batches: list[dict[str, torch.Tensor]]
    end: Result
    random: torch.Tensor
    """State of the generator after training."""
    profile: Profile


def task(start: nn.Module, batch: dict[str, torch.Tensor]) -> Task:
    profiled, end = copy.deepcopy(start), copy.deepcopy(start)
    profile = lt_offload.profile(profiled, batch, optimizer=make_optimizer(profiled, "adamw-fused"))
    optimizer = make_optimizer(end, "adamw-fused")
    torch.manual_seed(7)
    losses = ordinary(end, optimizer, [batch] * STEPS)
    return Task(start, [batch] * STEPS, Result(losses, end, optimizer), torch.get_rng_state(), profile)


def require_equal(task: Task, plan: Plan) -> None:
    """Carry out ``plan`` and compare."""
    model = copy.deepcopy(task.start)
    optimizer = make_optimizer(model, "adamw-fused")
    device = HostileDevice(plan.budget_bytes, mode="lazy", check=True)
    result, peak = trained_by(device, plan, model, optimizer, task.batches, seed=7)
    assert torch.equal(torch.get_rng_state(), task.random)
    assert peak <= plan.predicted.device_peak_bytes <= plan.budget_bytes
    assert differences(task.end, result) == []


def smallest(profile: Profile, planner: PlannerName) -> Plan:
    """The plan of ``planner`` for the smallest of a series of budgets that it finds one for.

    POFO's begins where weights and states leave room for anything else: each refusal takes it seconds.
    """
    states = sum(t.state_bytes for t in profile.tensors) if planner == "pofo" else 0
    budget = sum(t.bytes for t in profile.tensors) // (1 if states else 3) + states
    while True:
        try:
            return lt_offload.solve(profile, memory=budget, planner=planner, solver_time_limit=2.0)
        except (InfeasibleError, UnsupportedError) as error:
            assert budget < 10**9
            budget = max(int(1.2 * budget), getattr(error, "needed_bytes", None) or 0)


@cache
def small(family: str, layers: int = 6, sequence_length: int = 12) -> Task:
    model = models.build(family, layers=layers, dropout=0.1)
    return task(model, models.batch(model, sequence_length=sequence_length))


@pofo_keeps
@pytest.mark.parametrize(("planner", "family"), sampling.grid(PLANNERS, ["llama", "bloom"]))
def test_small_models(planner: PlannerName, family: str) -> None:
    made = small(family)
    plan = smallest(made.profile, planner)
    print(f"{plan.planner} in {plan.budget_bytes} bytes, options {sorted(set(plan.options))}")
    require_equal(made, plan)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("part", [0, 0.1, 0.5])
def test_frozen_embeddings_larger_than_the_memory_stay_on_the_host(part: float, recompute: bool) -> None:
    start = models.build(layers=6, dropout=0.1)
    assert isinstance(start, LlamaForCausalLM)
    start.set_input_embeddings(nn.Embedding(20_000, models.HIDDEN).requires_grad_(False))
    made = task(start, models.batch(start))
    table = max(made.profile.tensors, key=lambda tensor: tensor.bytes)
    assert table.name == "model.embed_tokens.weight"
    with pytest.raises(InfeasibleError) as caught:
        lt_offload.solve(made.profile, memory=10_000, recompute=recompute)
    memory = int(part * table.bytes) or caught.value.needed_bytes
    plan = lt_offload.solve(made.profile, memory=memory, recompute=recompute)
    assert not part or plan.planner == "offmate"
    assert [op.kind for op in plan.ops if made.profile.tensors.index(table) in plan.zero_copy(op)] == ["forward"]
    require_equal(made, plan)


def smallest_without_copies(profile: Profile) -> int:
    """The budget from which on POFO finds a plan that offloads nothing."""
    config = OffmateConfig(budget_bytes=None, activation_offload=False)
    allowed = tuple(allowed_options(block, config) for block in profile.blocks)
    low, high = 0, 10**8
    while high - low > low // 100:
        middle = (low + high) // 2
        try:
            propose_pofo(
                Request(
                    profile=profile,
                    budget_bytes=middle,
                    host_budget_bytes=profile.hardware.host_bytes,
                    allowed=allowed,
                    settings=Settings(activation_offload=False),
                )
            )
            high = middle
        except NotApplicable:
            low = middle
    return high


@pytest.mark.slow
@pytest.mark.own_plan("POFO chooses between all options")
@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_forwards_of_several_blocks_run_again(family: str) -> None:
    """POFO where activations are most of the memory and may not travel: not even all inputs can be saved."""
    made = small(family, layers=10, sequence_length=64)
    budget = smallest_without_copies(made.profile)
    plan = lt_offload.solve(made.profile, memory=budget, planner="pofo", activation_offload=False)
    again = [op.block for op in plan.ops if op.save is not None]
    print(f"{plan.budget_bytes} bytes, forwards again: {again}, options {plan.options}")
    assert "discard" in plan.options
    assert again
    require_equal(made, plan)


@cache
def quickstart(**other: int) -> Task:
    """SmolLM2-135M with ``other`` sizes, random weights, dropout, on sequences short enough for a test."""
    config = json.loads((ROOT / "configs/models/smollm2-135m.json").read_text(encoding="utf-8")) | other
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config, attention_dropout=0.1, use_cache=False))
    ids = torch.randint(0, config["vocab_size"], (2, 48))
    return task(model.train(), {"input_ids": ids, "labels": ids.clone()})


@pytest.mark.long
def test_the_quickstart_model() -> None:
    """A table of 49152 rows, and fewer of its layers, in two thirds of what they take."""
    made = quickstart(**({} if sampling.FULL else {"num_hidden_layers": 3}))
    everything = sum(2 * t.bytes + t.state_bytes for t in made.profile.tensors)
    plan = lt_offload.solve(made.profile, memory=2 * everything // 3 if not sampling.FULL else "430MB")
    print(plan.explain())
    require_equal(made, plan)


@pytest.mark.slow
@pofo_keeps
@pytest.mark.parametrize("planner", PLANNERS)
def test_large_tensors(planner: PlannerName) -> None:
    made = quickstart(num_hidden_layers=2, vocab_size=8192)
    plan = smallest(made.profile, planner)
    print(plan.explain())
    require_equal(made, plan)
