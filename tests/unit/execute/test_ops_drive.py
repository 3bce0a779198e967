"""The engine does what the ops of a plan say, and nothing beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lt_offload.errors import PlanError
from lt_offload.execute.engine import Engine
from lt_offload.model.blocks import find_blocks
from lt_offload.schema.plan import Op, Plan
from tests.support import models, plans
from tests.support.hostile.device import HostileDevice

BUDGET = 1 << 30


def trained(change: Any, place: str = "device") -> dict[str, bool]:
    """Train one iteration by a changed plan; return, by tensor, whether its weight has changed."""
    model = models.build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    structure = find_blocks(model)
    plan = change(plans.streamed(structure, optimizer, options=("keep",), places=(place,)))
    device = HostileDevice(BUDGET, "lazy")
    engine = Engine(model, optimizer, plan, device, structure=structure)
    before = {name: param.detach().clone() for name, param in structure.tensors}
    try:
        engine.install()
        with engine.iteration():
            model(**models.batch(model)).loss.backward()
        engine.drain()
    finally:
        engine.remove()
        device.close()
    return {name: not torch.equal(param, before[name]) for name, param in structure.tensors}


def updates(plan: Plan) -> list[Op]:
    return [op for op in plan.ops if op.kind == "update"]


def without_update(plan: Plan) -> Plan:
    """The first update op names one group less."""
    op = updates(plan)[0]
    ops = list(plan.ops)
    ops[op.id] = replace(op, groups=op.groups[1:])
    return replace(plan, ops=tuple(ops))


def test_a_weight_without_an_update_op_on_the_device_is_refused() -> None:
    with pytest.raises(PlanError, match="no op of the plan takes the gradient of weight "):
        trained(without_update)


def test_places_alone_change_nothing() -> None:
    """What is updated where is what the ops say; the plan's list of places is for people."""
    changed = trained(lambda plan: replace(plan, update_places=("none",) * len(plan.update_places)))
    assert all(changed.values())


@pytest.mark.parametrize(("processor", "runs"), [("cpu", True), ("cuda", False)])
def test_beside_a_gpu_updates_stay_where_they_are(processor: str, runs: bool) -> None:
    """Its updates differ from the host's in the last bits; which plan takes over depends on what clocks have shown."""
    model = models.build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    structure = find_blocks(model)
    here, same, there = (
        plans.streamed(structure, optimizer, options=("keep",), places=(place,))
        for place in ("device", "paged", "host")
    )
    device = HostileDevice(BUDGET, "lazy")
    engine = Engine(model, optimizer, here, device, structure=structure)
    engine.install()
    try:
        device.torch_device = torch.device(processor)
        assert engine.handover.may_run(same)
        assert engine.handover.may_run(there) == runs
    finally:
        device.torch_device = torch.device("cpu")
        engine.remove()
        device.close()
