"""An engine with its device, from its installation to the end."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from lt_offload.execute import open_device as open_device
from lt_offload.execute.device.base import Device
from lt_offload.execute.engine import Engine
from lt_offload.execute.training.survey import Survey
from lt_offload.machine.driver import current
from lt_offload.model.blocks import Structure
from lt_offload.model.tiles import check_tiles, tokens_of
from lt_offload.schema.plan import Plan

if TYPE_CHECKING:
    from lt_offload.distributed.ranks import Ranks


class First(Protocol):
    """A step that ran without a plan, and goes on with one."""

    device: Device
    watch: ExitStack
    """Holds the budget between iterations."""

    def leave(self) -> Survey:
        """Let the engine take over device and model; return the record of the step."""


def install(
    model: nn.Module,
    optimizer: Optimizer | None,
    plan: Plan | None,
    structure: Structure,
    torch_device: torch.device,
    *,
    budget: int,
    first: First | None = None,
    others: Ranks | None = None,
) -> tuple[Engine, ExitStack]:
    """Install an engine; closing the second result removes it and gives its device back.

    ``budget``: bytes of a device that is opened. ``first`` is the step that was profiled, whose device and whose graphs
    the engine takes over. Raises ``PlanError`` if the model runs in other tiles than those of the ``plan``.
    """
    if plan is not None:
        check_tiles(plan.tile_tokens, tokens_of(model))
    threads, context = (plan.host_threads, plan.context_bytes) if plan is not None else (0, 0)
    with ExitStack() as undo:
        if first is None:
            device = open_device(budget, str(torch_device), host_threads=threads or None, context=context)
            undo.callback(device.close)
        else:  # whoever made it closes it, up to here
            device = first.device
        device.expect(context)
        survey = None if first is None else first.leave()
        engine = Engine(model, optimizer, plan, device, structure=structure, others=others, survey=survey)
        undo.enter_context(current(torch_device))
        engine.install()
        if first is not None:
            undo.callback(device.close)
        undo.callback(engine.remove)
        undo.enter_context(device.between() if first is None else first.watch)
        return engine, undo.pop_all()
