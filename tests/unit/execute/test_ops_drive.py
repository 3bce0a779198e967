"""The engine does what the ops of a plan say, and nothing beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from lt_offload.errors import PlanError
from lt_offload.model.blocks import find_blocks
from lt_offload.schema.plan import Plan
from tests.support import models, plans
from tests.support.engines import installed
from tests.support.profiles.small import with_op


def streamed(model: nn.Module, place: str) -> tuple[torch.optim.Optimizer, Plan]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, plans.streamed(find_blocks(model), optimizer, options=("keep",), places=(place,))


def trained(change: Callable[[Plan], Plan]) -> list[bool]:
    """Train one iteration by a changed plan; return, by tensor, whether its weight has changed."""
    model = models.build("llama")
    before = [param.detach().clone() for param in model.parameters()]
    optimizer, plan = streamed(model, "device")
    with installed(model, optimizer, change(plan)):
        model(**models.batch(model)).loss.backward()
        optimizer.step()
    return [not torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True)]


def without_update(plan: Plan) -> Plan:
    """The first update op names one group less."""
    op = next(op for op in plan.ops if op.kind == "update")
    return with_op(plan, op, groups=op.groups[1:])


def test_a_weight_without_an_update_op_on_the_device_is_refused() -> None:
    with pytest.raises(PlanError, match="no op of the plan takes the gradient of weight "):
        trained(without_update)


def test_places_alone_change_nothing() -> None:
    """What is updated where is what the ops say; the plan's list of places is for people."""
    assert all(trained(lambda plan: replace(plan, update_places=("none",) * len(plan.update_places))))


@pytest.mark.parametrize(("processor", "runs"), [("cpu", True), ("cuda", False)])
def test_beside_a_gpu_updates_stay_where_they_are(processor: str, runs: bool) -> None:
    """Its updates differ from the host's in the last bits; which plan takes over depends on what clocks have shown."""
    model = models.build("llama")
    (optimizer, here), (_, same), (_, there) = (streamed(model, place) for place in ("device", "paged", "host"))
    with installed(model, optimizer, here) as engine:
        engine.device.torch_device = torch.device(processor)
        assert engine.handover.may_run(same)
        assert engine.handover.may_run(there) == runs
        engine.device.torch_device = torch.device("cpu")
