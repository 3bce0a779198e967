"""Offloaded training in a plain PyTorch loop, without Lightning: profile, plan, and an engine within a context."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from lt_offload import limits
from lt_offload.arguments import checked
from lt_offload.compat.torch import FORWARD_PRE_HOOKS, FORWARD_PRE_HOOKS_WITH_KWARGS
from lt_offload.errors import ConfigError, OverBudget, PlanError
from lt_offload.execute.engine import Engine
from lt_offload.execute.installed import First, install
from lt_offload.machine.driver import find_device
from lt_offload.model.blocks import Structure, as_called, find_blocks
from lt_offload.model.calls import plainly, switched_off
from lt_offload.model.compiled import hide_from_copies
from lt_offload.model.parts import check_micro_batches, extent
from lt_offload.model.tiles import tiled
from lt_offload.plan import Settings, check, make_plan
from lt_offload.plan.batch.choose import choose_parts
from lt_offload.plan.orders import compared
from lt_offload.profiling.hardware import check_host_memory, check_memory, free_memory
from lt_offload.profiling.measure import check_use
from lt_offload.profiling.measure import profile as measure
from lt_offload.profiling.step.first import Run
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from lt_offload.units import format_bytes

_log = logging.getLogger(__name__)


@checked
@contextmanager
def offloaded(
    model: nn.Module,
    optimizer: Optimizer,
    sample_batch: Any,
    *,
    memory: str | int | None = None,
    plan: Plan | None = None,
    accelerator: str = "auto",
    accumulate: int = 1,
    micro_batches: int | Literal["auto"] = 1,
    tile_tokens: int | None = None,
    blocks: str | None = None,
    run: Run | None = None,
    **switches: Any,
) -> Iterator[Engine]:
    """Train ``model`` in the loop you have, within ``memory`` bytes of device memory.

    Inside the context call the model, ``loss.backward()`` and ``optimizer.step()`` as always, once each per iteration;
    with ``accumulate=4`` the model and the backward four times. ``engine.accumulate = 3`` says between two iterations
    that the next ones have three, a last short group for example. Weights and optimizer states may be read and written
    between iterations as always, too. Weights are updated during the last backward; ``optimizer.step()`` only marks the
    end of the iteration, and ``param.grad`` afterwards holds an object that raises an error when it is used.

    Args:
        model: a model with a block sequence; returned with complete weights when the context ends.
        optimizer: any optimizer that updates each tensor on its own.
        sample_batch: a batch of the largest shape that will come: keyword arguments of the model.
        memory: device budget, e.g. ``"10GB"``; None: what is free.
        plan: a plan to replay instead of profiling and solving.
        accelerator: ``"auto"``, ``"cuda"``, ``"cuda:1"`` (that GPU is the current one within the context) or ``"cpu"``
            (the emulated device).
        accumulate: backwards per ``optimizer.step()``; what each adds to the gradients is up to the loss, as always.
            With ``delayed=True`` (see below) any number will do.
        micro_batches: parts of a batch that go through each block in turn, before the next block begins: weights travel
            once for all of them, and temporary tensors are those of one. The numbers are those of
            :func:`lt_offload.micro_batched_reference`. ``"auto"``: the number with which an iteration is fastest.
        tile_tokens: tokens at a time in the parts of blocks that treat each token on its own, for long sequences. The
            numbers are those of a model that :func:`lt_offload.tile_tokens` has changed, as this one is meanwhile.
        blocks: name of the ``nn.ModuleList`` or ``nn.Sequential`` that holds the layers, its path or the end of it
            (``"h"``); None: it is found by structure.
        run: computes the loss of a batch as the loop will, if that takes more than one call of the model, for example
            with and without gradients: ``run(sample_batch)``; None: ``model(**sample_batch)``.
        **switches: ``delayed=True`` lets updates wait for ``optimizer.step()``: between the last backward and that
            ``param.grad`` is the gradient, to be read and edited, and ``engine.clip_grad_norm_(1.0)`` can clip it;
            ``host_memory``, ``planner`` and what else :func:`lt_offload.solve` takes.

    Yields:
        The engine, for ``stats`` and ``trace()``.

    Raises:
        ConfigError, UnsupportedError, ModelError, InfeasibleError, PlanError: before anything is trained.
    """
    structure, torch_device = prepare(model, optimizer, blocks=blocks, accelerator=accelerator)
    check_micro_batches(micro_batches, auto=True)
    settings = Settings.named(memory, accumulate, switches)
    check_memory(settings.device.nbytes, torch_device)
    check_host_memory(settings.host.nbytes)
    with tiled(model, tile_tokens, blocks):
        if plan is None:
            measured = partial(
                measure, model, sample_batch, optimizer=optimizer, device=torch_device, structure=structure, run=run
            )
            planning = settings.within(partial(free_memory, torch_device))
            profile, plan = solved(lambda parts: measured(micro_batches=parts), planning, micro_batches)
            structure = as_called(model, profile.blocks)
        else:
            check_replay(plan, settings.device.nbytes, switches, micro_batches)
            structure = check_use(
                model,
                sample_batch,
                device=torch_device,
                optimizer=optimizer,
                structure=structure,
                run=run,
                micro_batches=plan.parts,
            )
        with installed(model, optimizer, plan, structure, torch_device) as engine:
            engine.accumulate = accumulate
            yield engine


def prepare(
    model: nn.Module, optimizer: Optimizer, *, blocks: str | None, accelerator: str
) -> tuple[Structure, torch.device]:
    """Refuse what cannot be trained, warn of what is switched off meanwhile, and return the blocks and their device.

    Raises:
        UnsupportedError, ModelError, ConfigError: naming the setting.
    """
    setup = limits.Setup(model=model, optimizers=[optimizer], blocks=blocks)
    limits.check("model", setup)
    limits.check("optimizer", setup)
    prepared = find_blocks(model, blocks), find_device(accelerator, setting="accelerator")
    for sentence in switched_off(model):
        _log.warning(sentence)
    return prepared


def solved(
    measured: Callable[[int], Profile], settings: Settings, micro_batches: int | Literal["auto"]
) -> tuple[Profile, Plan]:
    """Return a plan that has been checked, and the profile it was made for.

    Args:
        measured: returns the profile with so many parts per batch.
        settings: with the device budget.
        micro_batches: parts, or ``"auto"``.

    Raises:
        InfeasibleError, PlanError: if there is no plan that can be carried out.
    """
    if micro_batches == "auto":
        profile, plan = choose_parts(measured, settings)
    else:
        profile = measured(micro_batches)
        plan = make_plan(profile, settings)
    plan = compared(plan, profile, settings)
    problems = check(plan, profile)
    if problems:
        raise PlanError(f"the plan cannot be carried out: {problems[0]}")
    return profile, plan


@contextmanager
def installed(
    model: nn.Module,
    optimizer: Optimizer,
    plan: Plan,
    structure: Structure,
    torch_device: torch.device,
    first: First | None = None,
) -> Iterator[Engine]:
    """Carry out ``plan`` in every iteration within the context, beginning with the ``first`` step that was profiled."""
    begun = first is not None
    iteration = ExitStack()
    larger: list[tuple[int, int]] = []
    """Rows and length of the planned batch and of the batch that came, if that one is larger; else empty."""

    def begin(_model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            iteration.close()
            iteration.enter_context(device.accounting())
            known, came = (plan.batch_size, plan.sequence_length), extent(kwargs or args)
            larger[:] = [known, came] if came[0] * came[1] > known[0] * known[1] or came[1] > known[1] else []

    def hide(state: dict[str, Any]) -> None:
        ours = {key for key, hook in state[FORWARD_PRE_HOOKS].items() if hook is begin}
        for name in (FORWARD_PRE_HOOKS, FORWARD_PRE_HOOKS_WITH_KWARGS):
            state[name] = OrderedDict((key, value) for key, value in state[name].items() if key not in ours)

    with plainly(model), ExitStack() as undo:
        engine, remove = install(model, optimizer, plan, structure, torch_device, budget=plan.budget_bytes, first=first)
        undo.push(remove)
        first = None  # what it held goes when the step is over
        device = engine.device
        undo.callback(model.register_forward_pre_hook(begin, with_kwargs=True).remove)
        undo.callback(hide_from_copies(model, hide))
        engine.follow(optimizer, iteration.close)
        undo.callback(optimizer.register_step_post_hook(lambda *_: iteration.close()).remove)
        if begun:
            iteration.enter_context(device.accounting())
        try:
            with iteration:
                yield engine
        except BaseException as error:
            engine.abort(error)
            if isinstance(error, OverBudget) and larger:
                known, came = (f"{rows} x {length}" for rows, length in larger)
                raise OverBudget(
                    f"a batch of {came} came, and the plan is for {known}, as in sample_batch: "
                    f"memory={format_bytes(plan.budget_bytes)} is too small for it as planned; give as sample_batch "
                    "the largest batch that will come: the longest rows, filled up to one length"
                ) from error
            raise


def check_replay(
    plan: Plan, memory: int | None, switches: dict[str, Any], micro_batches: int | Literal["auto"]
) -> None:
    """Refuse arguments that contradict the plan."""
    if micro_batches not in ("auto", plan.parts):
        raise PlanError(
            f"the plan has micro_batches={plan.parts}, micro_batches={micro_batches} was given; give that of "
            "the plan or 'auto', or plan again"
        )
    if memory is not None and plan.budget_bytes > memory:
        raise PlanError(
            f"the plan needs memory={format_bytes(plan.budget_bytes)}, memory={format_bytes(memory)} was given; raise "
            "memory or plan again"
        )
    if switches:
        name, value = next(iter(switches.items()))
        raise ConfigError(f"{name}={value!r} is a setting of planning, and a plan was given; leave one of them out")
