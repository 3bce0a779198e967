"""Host copies in memory that processes have in common, page-locked, and in a mapping of one's own where users write."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import lt_offload
from lt_offload.execute.engine import Engine
from lt_offload.plan import Plan, solve
from tests.gpu.target import Target
from tests.parity.test_beside_backward import Neighbours
from tests.support import models
from tests.support.engines import Case, batches, build, make_optimizer, scheduler

CASE = Case(shapes=((2, 12),) * 3)


class Alone(Neighbours):
    """The other processes of one that has none."""

    @property
    def machine(self) -> Alone:
        return self

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """There is nothing to add."""

    def add_up_rows(self, rows: Sequence[Sequence[torch.Tensor]], *, op: int | None = None) -> None:
        """There is nothing to add."""


def planned(*, waits: bool) -> Plan:
    """Return a plan whose updates run on the host, and wait for all gradients or not."""
    model = build(CASE)
    batch = models.batch(model, batch_size=2, sequence_length=12, seed=99)
    profile = lt_offload.profile(model, batch, optimizer=make_optimizer(model, CASE.optimizer), device="cpu")
    return solve(profile, memory="1GB", planner="l2l", delayed=waits)


def trained(target: Target, plan: Plan, others: Alone | None) -> list[torch.Tensor]:
    """Train, and write weights and states between steps; return all of them."""
    device = target.open(seed=0)
    model = build(CASE)
    optimizer = make_optimizer(model, CASE.optimizer)
    schedule = scheduler(optimizer)
    engine = Engine(model, optimizer, plan, device, others=others)
    try:
        engine.install()
        engine.follow(optimizer)
        for batch in batches(CASE, model, device.torch_device):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.99)
                    optimizer.state[param]["exp_avg"].mul_(0.5)
                if others is not None:
                    assert engine.weights[0].common is not None
                    assert not torch.equal(engine.weights[0].common, engine.weights[0].host)
                    assert engine.weights[0].common.is_pinned() == target.cuda
    finally:
        engine.remove()
        device.close()
    return [*model.state_dict().values(), *(v for p in model.parameters() for v in optimizer.state[p].values())]


@pytest.mark.quick
@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "beside"])
def test_they_train_like_ones_own(target: Target, waits: bool) -> None:
    plan = planned(waits=waits)
    alone, common = trained(target, plan, None), trained(target, plan, Alone())
    assert len(alone) == len(common)
    assert all(map(torch.equal, alone, common))
