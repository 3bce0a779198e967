"""A plan's ops sorted by step, the way the engine walks them, and whether they fit the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.optim import Optimizer

from lt_offload.errors import PlanError, UnsupportedError
from lt_offload.execute.optimizer import check_optimizer
from lt_offload.model.blocks import Structure
from lt_offload.model.compiled import is_compiled
from lt_offload.schema.plan import Op, Plan
from lt_offload.schema.profile import fingerprint


@dataclass(slots=True)
class StepOps:
    """What happens around one forward or backward, besides what gradients drive: see ``gradients.py``."""

    before: list[Op] = field(default_factory=list)
    """Prefetches."""
    again: list[Op] = field(default_factory=list)
    """Forwards that run again before the backward."""
    compute: Op | None = None
    updates: list[Op] = field(default_factory=list)
    """Updates on the host."""
    after: list[Op] = field(default_factory=list)
    """Other offloads, then drops."""


def program(plan: Plan) -> list[StepOps]:
    """Return the steps of ``plan``.

    Raises:
        PlanError: if an op stands where the issue order does not allow it.
    """
    steps = [StepOps() for _ in plan.timeline]
    for op in plan.ops:
        if not 0 <= op.step < len(steps):
            raise PlanError(f"op {op.id} is at step {op.step}; the plan has steps 0 to {len(steps) - 1}")
        step = steps[op.step]
        if op.save is not None:
            _check_again(op, plan, step)
            step.again.append(op)
        elif op.kind in ("forward", "backward"):
            step.compute = op
        elif op.kind == "prefetch":
            (step.before if step.compute is None else step.after).append(op)
        elif op.updates_on_host:
            step.updates.append(op)
        elif op.kind != "update" and op.payload != "grad":
            step.after.append(op)
    for index, step in enumerate(steps):
        if step.compute is None:
            raise PlanError(f"step {index} of the plan has no computation")
    return steps


def _check_again(op: Op, plan: Plan, step: StepOps) -> None:
    during = plan.timeline[op.step]
    if op.kind != "forward" or during.kind == "forward" or op.block > during.block or step.compute is not None:
        raise PlanError(
            f"op {op.id} has save={op.save!r} and is the {op.kind} of block {op.block} in step {op.step}; a forward "
            "runs again in a backward step, before its backward, and is of that block or an earlier one"
        )


def owners(blocks: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Return, per tensor, the blocks that use it, ascending."""
    found: dict[int, list[int]] = {}
    for block, tensors in enumerate(blocks):
        for tensor in tensors:
            found.setdefault(tensor, []).append(block)
    return found


def check_match(structure: Structure, optimizer: Optimizer | None, plan: Plan | None) -> None:
    """Raise unless ``plan`` was made for the model of ``structure`` and ``optimizer`` can carry it out.

    Raises:
        PlanError: if the plan belongs to another model, or takes a compiled block apart.
        ConfigError: if the optimizer cannot update tensor by tensor, or does not have every trainable parameter.
    """
    if plan is None:
        return
    used = owners([block.tensors for block in structure.blocks])
    rows = [
        (tuple(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad, tuple(used[i]))
        for i, (_, p) in enumerate(structure.tensors)
    ]
    if fingerprint(rows, len(structure.blocks)) != plan.fingerprint:
        raise PlanError(
            f"the plan was made for another model ({plan.model}, {len(plan.options)} blocks, {len(plan.update_places)} "
            f"tensors); this one has {len(structure.blocks)} blocks and {len(rows)} tensors, or other shapes, dtypes "
            "or frozen parameters. Plan again for this model"
        )
    if optimizer is None:
        raise UnsupportedError("a plan without an optimizer: training needs the optimizer that the plan was made for")
    for block, option in zip(structure.blocks, plan.options, strict=True):
        if option == "mixed" and is_compiled(block.module):
            raise PlanError(
                f"the plan handles block {block.name} with option 'mixed', which takes its operations apart, but the "
                "block is compiled. Plan again with the blocks compiled, or leave compile() out"
            )
    check_optimizer(optimizer)
    managed = {p for group in optimizer.param_groups for p in group["params"]}
    lost = [name for name, p in structure.tensors if p.requires_grad and p not in managed]
    if lost:
        raise UnsupportedError(
            f"{len(lost)} trainable parameters are not in the optimizer (first: {lost[0]}); give them to it or set "
            "requires_grad=False before the plan is made"
        )
