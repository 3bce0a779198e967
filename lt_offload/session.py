"""Offloaded training in a plain PyTorch loop. Orders calls of the three rooms; holds no logic of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lt_offload import limits
from lt_offload.errors import PlanError
from lt_offload.execute import open_device
from lt_offload.execute.engine import Engine
from lt_offload.plan import check, solve
from lt_offload.plan.schedule import Plan
from lt_offload.profile.blocks import find_blocks
from lt_offload.profile.caches import caches_off
from lt_offload.profile.measure import profile as measure


@contextmanager
def offloaded(
    model: nn.Module,
    optimizer: Optimizer,
    sample_batch: Any,
    *,
    memory: str | int | None = None,
    plan: Plan | None = None,
    accelerator: str = "auto",
    **switches: Any,
) -> Iterator[Engine]:
    """Train ``model`` in the loop you have, within ``memory`` bytes of device memory.

    Inside the context call the model, ``loss.backward()`` and ``optimizer.step()`` as always. Weights are updated
    during the backward; ``optimizer.step()`` only marks the end of the iteration, and gradients are ``None``
    afterwards.

    Args:
        model: a model with a block sequence; returned with complete weights when the context ends.
        optimizer: any optimizer that updates each tensor on its own.
        sample_batch: a batch of the largest shape that will come: keyword arguments of the model.
        memory: device budget, e.g. ``"10GB"``; None: what is free.
        plan: a plan to replay instead of profiling and solving.
        accelerator: ``"auto"``, ``"cuda"`` or ``"cpu"`` (the emulated device).
        **switches: further arguments of :func:`lt_offload.solve`.

    Yields:
        The engine, for ``stats``, ``trace()`` and ``drain()`` (call it before you read weights in the middle of
        training).

    Raises:
        UnsupportedError, ModelError, InfeasibleError, PlanError: before anything is trained.
    """
    run = limits.Run(model=model, optimizers=[optimizer])
    limits.check("model", run)
    limits.check("optimizer", run)
    structure = find_blocks(model)
    threads = 0
    if plan is None:
        profile = measure(model, sample_batch, optimizer=optimizer)
        threads = profile.optimizer.host_threads
        plan = solve(profile, memory=memory, **switches)
        problems = check(plan, profile)
        if problems:
            raise PlanError(f"the plan cannot be carried out: {problems[0]}")
    device = open_device(plan.budget_bytes, accelerator, host_threads=threads or None)
    engine = Engine(model, optimizer, plan, device, structure=structure)
    iteration = ExitStack()

    def begin(*_: object) -> None:
        if torch.is_grad_enabled():
            iteration.close()
            iteration.enter_context(device.accounting())

    def finish(*_: object) -> None:
        engine.finish()
        iteration.close()

    hooks = [model.register_forward_pre_hook(begin), optimizer.register_step_post_hook(finish)]
    try:
        engine.install()
        with caches_off(model), device.between(), iteration:
            yield engine
    except BaseException:
        engine.abort()
        raise
    finally:
        for hook in hooks:
            hook.remove()
        engine.remove()
        device.close()
