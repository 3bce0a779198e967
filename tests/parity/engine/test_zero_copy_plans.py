"""Weights that computations read in host memory, and gradients that the backward writes there: still bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

import lt_offload
from lt_offload.errors import PlanError
from lt_offload.plan import check
from lt_offload.plan.iteration.decisions import Decisions, Interval, TensorDecision, uses
from lt_offload.plan.iteration.memory import device_bytes
from lt_offload.plan.planners.baselines import streaming_decisions
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import OptionName, Profile
from tests import sampling
from tests.support.engines import (
    Case,
    Result,
    batches,
    build,
    carried_out,
    changed,
    differences,
    make_optimizer,
    plain,
    trained_on,
)
from tests.support.hostile.device import HostileDevice
from tests.support.hostile.races import Race
from tests.support.profiles.by_hand import built

How = Callable[[int, tuple[int, ...], list[int]], list[int]]
"""Index of a tensor, its blocks, the steps that use it -> the steps that read it in host memory."""


def embedding(index: int, blocks: tuple[int, ...], steps: list[int]) -> list[int]:
    """The first forward and the last backward; the output projection of a tied table has a device copy."""
    return [steps[0], steps[-1]] if blocks[0] == 0 else []


def everything(index: int, blocks: tuple[int, ...], steps: list[int]) -> list[int]:
    return steps


def forwards(index: int, blocks: tuple[int, ...], steps: list[int]) -> list[int]:
    """Forward in host memory, backward on a device copy."""
    return [step for step in steps if step in blocks]


def mixture(index: int, blocks: tuple[int, ...], steps: list[int]) -> list[int]:
    backwards = [step for step in steps if step not in blocks]
    return ([], steps, forwards(index, blocks, steps), backwards)[index % 4]


def nothing(index: int, blocks: tuple[int, ...], steps: list[int]) -> list[int]:
    return []


def stays(steps: list[int]) -> tuple[Interval, ...]:
    """One per use; those that follow each other are one."""
    found: list[Interval] = []
    for step in steps:
        if found and found[-1].end >= step - 2:
            found[-1] = Interval(start=found[-1].start, end=step)
        else:
            found.append(Interval(start=step, end=step))
    return tuple(found)


def options(profile: Profile, case: Case) -> tuple[OptionName, ...]:
    """The options of ``case`` in turn; ``keep`` for blocks that do not offer them."""
    offers = [{option.name: option.name for option in block.options} for block in profile.blocks]
    return tuple(offer.get(case.options[i % len(case.options)], "keep") for i, offer in enumerate(offers))  # type: ignore[call-overload]


def decisions(profile: Profile, case: Case, how: How, *, grad_zero_copy: bool) -> Decisions:
    host = case.places == ("host",)
    base = streaming_decisions(profile, options(profile, case), host_update=host)
    tensors = []
    for index, (tensor, decision) in enumerate(zip(profile.tensors, base.tensors, strict=True)):
        steps = uses(tensor.blocks, profile)
        zero_copy = how(index, tensor.blocks, steps)
        if decision.place in ("device", "paged"):  # the update needs a device copy
            zero_copy = [step for step in zero_copy if step != steps[-1]]
        rest = [step for step in steps if step not in zero_copy]
        changed: TensorDecision = replace(decision, stays=stays(rest), zero_copy=tuple(zero_copy))
        if grad_zero_copy and decision.place == "host":
            changed = replace(changed, grad_zero_copy=True)
        tensors.append(changed)
    return replace(base, tensors=tuple(tensors))


@functools.cache
def profiled(case: Case) -> Profile:
    model = build(case)
    return lt_offload.profile(model, batches(case, model)[0], optimizer=make_optimizer(model, case.optimizer))


def planned(case: Case, how: How, *, grad_zero_copy: bool = False) -> tuple[Plan, int]:
    """Return the plan and what it needs on the device."""
    profile = profiled(case)
    made = decisions(profile, case, how, grad_zero_copy=grad_zero_copy)
    plan = built(made, profile, lead=1, lag=1)
    budget = int(device_bytes(plan, profile).max())
    plan = replace(plan, budget_bytes=budget)
    assert check(plan, profile) == []
    return plan, budget


def trained(case: Case, plan: Plan, budget: int, **device_options: Any) -> tuple[Result, int]:
    """Return the model trained on an emulated device, and the peak of device memory."""
    options = {"mode": case.mode, "seed": case.seed, "check": True} | device_options
    return trained_on(HostileDevice(budget, **options), case, plan)


HOST = ("host",)
CASES = [
    (Case(places=HOST), embedding, False),
    (Case(places=HOST, mode="random", dtype="bfloat16"), everything, False),
    (Case(places=HOST, mode="thread", dropout=0.1), everything, True),
    (Case(places=HOST), forwards, False),
    (Case(places=("paged",), mode="random"), forwards, False),
    (Case(places=("paged",), options=("recompute", "offload"), family="bloom"), mixture, False),
    (Case(places=HOST, mode="random", options=("keep", "recompute", "offload", "mixed"), dropout=0.1), mixture, True),
    (Case(places=HOST, family="llama-tied", mode="thread"), forwards, True),
    (Case(places=HOST, family="llama-tied", options=("offload",)), everything, True),
    (Case(places=HOST, family="llama-tied", mode="random", dtype="bfloat16"), embedding, False),
    (Case(places=HOST, family="bloom", mode="thread", options=("recompute", "offload"), dropout=0.1), embedding, True),
    (Case(places=HOST, family="phi", options=("mixed",)), everything, False),
    (Case(places=HOST, lora=True, mode="random", options=("recompute", "keep")), everything, True),
    (Case(places=HOST, lora=True, dropout=0.1), mixture, False),
    (Case(places=HOST, family="phi3", optimizer="sgd", mode="thread"), nothing, True),
]


@pytest.mark.parametrize(
    ("case", "how", "grad_zero_copy"), CASES, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_equal_to_plain_pytorch(case: Case, how: How, grad_zero_copy: bool) -> None:
    plan, budget = planned(case, how, grad_zero_copy=grad_zero_copy)
    actual, peak = trained(case, plan, budget)
    assert differences(plain(case), actual) == []
    assert changed(case, actual)
    assert peak <= budget


def test_what_is_read_in_host_memory_takes_none_on_the_device() -> None:
    case = Case(places=HOST)
    assert planned(case, everything)[0].arena_bytes == 0
    plan, budget = planned(case, everything, grad_zero_copy=True)
    held = planned(case, everything)[1]
    assert trained(case, plan, budget)[1] < held
    assert not [op for op in plan.ops if op.lane in ("h2d", "d2h")]


def test_a_tied_table_is_read_by_the_embedding_and_copied_for_the_projection() -> None:
    case = Case(places=HOST, family="llama-tied")
    profile, (plan, _) = profiled(case), planned(case, embedding)
    (table,) = [tensor for tensor in profile.tensors if len(tensor.blocks) > 1]
    index, last = profile.tensors.index(table), len(profile.blocks) - 1
    computed = [op for op in plan.ops if op.kind in ("forward", "backward") and op.block in table.blocks]
    assert [(op.block, index in op.zero_copy, op.bytes) for op in computed] == [
        (0, True, table.read(0).forward_bytes),
        (last, False, 0),
        (last, False, 0),
        (0, True, 0),
    ]
    assert 0 < table.read(0).forward_bytes < table.bytes
    (copy,) = [op for op in plan.ops if op.kind == "prefetch" and op.payload == "weight" and index in plan.tensors(op)]
    assert 0 < copy.step <= last


READ_TOO_EARLY = r'"compute" on compute reads .host weight .* not ordered after: "{}'
WRITTEN_TOO_EARLY = r"writes .host grad .* not ordered after: \"update|reads .host weight"
DEVICE = Case(places=("device",), optimizer="sgd-plain")
RACES: dict[str, tuple[Case, How, bool, Callable[[str, str], bool], str]] = {
    "a direct read waits for the update on the host": (
        Case(places=HOST),
        everything,
        False,
        lambda what, event: what == "compute" and event.startswith("update"),
        READ_TOO_EARLY.format("update"),
    ),
    "a direct read waits for a copy to the host": (
        DEVICE,
        forwards,
        False,
        lambda what, event: what == "compute" and event.startswith("offload weight"),
        READ_TOO_EARLY.format("offload weight"),
    ),
    "an update on the host waits for what the backward writes there": (
        Case(places=HOST),
        everything,
        True,
        lambda what, event: what.startswith("update") and event == "compute",
        r'"update \d+" on host reads .host grad .* not ordered after: "backward',
    ),
    "the backward writes after the last update has read": (
        Case(places=HOST),
        nothing,
        True,
        lambda what, event: event.startswith("update"),
        WRITTEN_TOO_EARLY,
    ),
}
"""A plan, a wait that is left out, and what the checker says then."""


@pytest.mark.parametrize("mode", ["lazy", "random", "thread"])
@pytest.mark.parametrize("law", RACES)
def test_accesses_in_host_memory_are_ordered(law: str, mode: str) -> None:
    case, how, grad_zero_copy, ignore, message = RACES[law]
    case = replace(case, mode=mode)
    plan, budget = planned(case, how, grad_zero_copy=grad_zero_copy)
    with pytest.raises(Race, match=message):
        trained(case, plan, budget, ignore=ignore)


def test_a_plan_that_would_read_an_outdated_copy_is_refused() -> None:
    """The device has updated the weight, and nobody has copied it to the host."""
    case = Case(places=("device",))
    profile = profiled(case)
    tensors = tuple(TensorDecision(place="device") for _ in profile.tensors)
    plan = built(Decisions(tensors=tensors, options=("keep",) * len(profile.blocks)), profile)
    nbytes = profile.tensors[0].read(0).forward_bytes
    spoilt = replace(plan, ops=(replace(plan.ops[0], zero_copy=(0,), bytes=nbytes), *plan.ops[1:]))
    assert any("outdated" in problem for problem in check(spoilt, profile))
    with pytest.raises(PlanError, match=r"op 0 reads weight .* in host memory, which is older than the device copy"):
        trained(case, spoilt, 1 << 30)


@pytest.mark.parametrize(("how", "mode"), sampling.grid([everything, mixture, embedding], ["lazy", "random", "thread"]))
def test_validation_reads_what_the_arena_has_no_room_for(how: How, mode: str) -> None:
    """Between two iterations, while updates on the host are under way."""
    case = Case(places=HOST, mode=mode)
    plan, budget = planned(case, how)
    losses: list[list[torch.Tensor]] = []
    for device in (None, HostileDevice(budget, mode, seed=case.seed, check=True)):
        model, seen = build(case), []
        optimizer = make_optimizer(model, case.optimizer)
        with carried_out(model, optimizer, plan, device) if device else nullcontext() as engine:
            for batch in batches(case, model):
                with engine.iteration() if engine else nullcontext():
                    model(**batch).loss.backward()
                    optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    seen.append(model(**batch).loss.clone())
        losses.append(seen)
    assert all(map(torch.equal, *losses))
