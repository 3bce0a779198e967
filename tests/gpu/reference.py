"""Plain training to compare with: everything on one device, but for the updates that a plan gives to the host."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from lt_offload.model.blocks import find_blocks
from lt_offload.schema.plan import Plan
from tests.support.engines import Case, Result, batches, build, make_optimizer, scheduler


def trained_plainly(
    case: Case,
    plan: Plan,
    device: torch.device,
    window: int = 1,
    *,
    change: Callable[[nn.Module], None] = lambda _model: None,
) -> Result:
    """Return the model trained without the engine, with an update per ``window`` batches and one after the last.

    Forward and backward run on ``device``. Weights whose place is the host have their gradients moved there, are
    updated there by the same optimizer, and moved back. ``change`` is done to the model first.
    """
    master = build(case)
    twin = build(case).to(device)  # a copy would have forgotten that its blocks are compiled
    change(twin)
    places = {name: place for (name, _), place in zip(find_blocks(master).tensors, plan.update_places, strict=True)}
    on_host = {name for name, place in places.items() if place == "host"}
    weights, masters = dict(twin.named_parameters()), dict(master.named_parameters())
    updated = [masters[name] if name in on_host else weight for name, weight in weights.items()]
    optimizer = make_optimizer(cast(Any, SimpleNamespace(parameters=lambda: updated)), case.optimizer)
    schedule = scheduler(optimizer)
    torch.manual_seed(case.seed + 1)
    losses = []
    made = batches(case, master, device)
    for number, batch in enumerate(made, start=1):
        loss = twin(**batch).loss
        loss.backward()
        losses.append(loss.detach())
        if number % window and number < len(made):
            continue
        for name in on_host:
            gradient, weights[name].grad = weights[name].grad, None
            masters[name].grad = None if gradient is None else gradient.cpu()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name in on_host:
                weights[name].copy_(masters[name])
        schedule.step()
    return Result(losses, twin, optimizer)
