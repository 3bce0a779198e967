"""A plan as the engine's parts ask for it: every index that they need is made of its ops here, once.

The parts know tensors and the ops that are handed to them. Which ops there are, and in which order, only this file and
``interpreter.py`` know, which carries the ops out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.optim import Optimizer

from lt_offload.errors import PlanError, UnsupportedError
from lt_offload.model.blocks import Structure
from lt_offload.model.compiled import is_compiled
from lt_offload.schema.accesses import IN_ARENA, writes
from lt_offload.schema.plan import Op, Pass, Plan, Timeline, deadlines
from lt_offload.schema.profile import RECORDED, fingerprint
from lt_offload.units import dtype_name


@dataclass(slots=True)
class StepOps:
    """Ops around one forward or backward, but for those that gradients drive: see ``updates/gradients.py``."""

    before: list[Op] = field(default_factory=list)
    """Prefetches."""
    again: list[Op] = field(default_factory=list)
    """Forwards that run again before the backward."""
    compute: Op | None = None
    updates: list[Op] = field(default_factory=list)
    """Ops of the host that use gradients."""
    reduced: list[Op] = field(default_factory=list)
    """Ops that add sums up over machines."""
    settled: list[Op] = field(default_factory=list)
    """Updates on the device that no gradient drives."""
    after: list[Op] = field(default_factory=list)
    """Other offloads, then drops."""


class Program:
    """A plan for one model.

    Raises ``PlanError`` if no op takes a gradient.
    """

    def __init__(self, plan: Plan, structure: Structure) -> None:
        self._plan, self._structure, ops = plan, structure, plan.ops
        self.delayed, self.adds_up, self.window = plan.delayed, plan.adds_up, plan.accumulate
        self.passes: tuple[Pass, ...] = plan.passes
        self.timeline = Timeline(plan.timeline)
        self.groups, self.initial = plan.groups, plan.initial
        self.update_places = plan.update_places
        self.arena_bytes, self.process_bytes = plan.arena_bytes, plan.process_bytes
        self.host_budget_bytes = plan.host_budget_bytes
        self.blocks = len(plan.options)
        """Number of blocks."""
        self.size = len(ops)
        """Number of ops."""
        self.tensors = [plan.tensors(op) for op in ops]
        """By op: the tensors of its groups."""
        self.computations = [op for op in ops if op.computes]
        self.read_on_host = {op.id: frozenset(plan.zero_copy(op)) for op in self.computations}
        """By computation: the weights that it reads in host memory."""
        self.moves = [op for op in ops if op.payload in IN_ARENA]
        """Copies and drops of weights, states and sums."""
        self.activations = [op for op in ops if op.payload == "activation"]
        """Copies of activations."""
        self.sends = [op for op in ops if op.sends_gradients and not plan.begins_sums(op)]
        """Copies of gradients to host memory that they share."""
        self.begins = {op.id: op for op in ops if plan.begins_sums(op)}
        """Copies of gradients to where their sums are."""
        self.written = [tensor for op in ops if op.writes_gradients for tensor in plan.tensors(op)]
        """Tensors whose gradients the backward writes to host memory."""
        self.on_host_lane = {op.id for op in ops if op.lane == "host"}
        self.updated_on_host = {tensor for op in ops if op.updates_on_host for tensor in plan.tensors(op)}
        self.steps: dict[Pass, list[StepOps]] = {which: self._steps(which) for which in plan.passes}
        self.takers: dict[Pass, dict[int, Op]] = {
            which: self._takers(which) for which in plan.passes if which != "settling"
        }
        """By trainable tensor: the op that takes its gradient, an offload or what uses it on the device."""
        self.used_on_device = {op.id for op in ops if op.uses_gradients and op.lane != "host"}
        """Ops that use gradients there."""
        self.of_last_block = {which: self._of_last_block(which) for which in plan.passes}
        """By table in two parts: the op that sends the last block's gradient."""
        self.deadlines = deadlines(ops)
        self.changes = self._changes()
        """By tensor and whether it is its states: the first op from which on its host copy is another one."""
        self.options, self.chunk_tokens, self.parts = plan.options, plan.chunk_tokens, plan.parts
        self.deferred_forwards, self.graphed = plan.deferred_forwards, plan.graphed
        self.recomputed, self.repeated = {op.block for op in ops if op.save is not None}, repeated(plan)
        """Blocks that the plan runs again before their backward, and all that run twice, whatever their option."""
        self.steady = self._steady()
        """Blocks whose weights stay at one address from the forward to the backward."""

    def _steps(self, which: Pass) -> list[StepOps]:
        steps = [StepOps() for _ in self._plan.timeline]
        for op in self._plan.program(which):
            step = steps[op.step]
            if op.save is not None:
                step.again.append(op)
            elif op.computes:
                step.compute = op
            elif op.kind == "prefetch":
                (step.before if step.compute is None else step.after).append(op)
            elif op.uses_gradients:
                # On the device, gradients drive what uses them, within the backward, and `settled` is for passes
                # without.
                (step.updates if op.lane == "host" else step.settled).append(op)
            elif op.kind == "reduce":
                step.reduced.append(op)
            # Copies of gradients are issued by `send`, as gradients are complete.
            elif op.payload != "grad":
                step.after.append(op)
        return steps

    def _takers(self, which: Pass) -> dict[int, Op]:
        takers = {
            tensor: op
            for op in self._plan.program(which)
            if (op.payload == "grad" and op.rows != "others") or (op.uses_gradients and op.lane != "host")
            for tensor in self.tensors[op.id]
        }
        for index, (name, param) in enumerate(self._structure.tensors):
            if param.requires_grad and index not in takers:
                # It would never be updated.
                raise PlanError(f"no op of the plan takes the gradient of weight {name}; plan again")
        return takers

    def _of_last_block(self, which: Pass) -> dict[int, int]:
        sends = [op for op in self._plan.program(which) if op.payload == "grad" and op.rows == "others"]
        return {tensor: op.id for op in sends for tensor in self.tensors[op.id]}

    def _changes(self) -> dict[tuple[int, bool], int]:
        changes: dict[tuple[int, bool], int] = {}
        for op in self._plan.program(self._plan.passes[-1]):
            states = [payload == "state" for payload in writes(op, "host") if payload in ("weight", "state")]
            for key in itertools.product(self.tensors[op.id], states):
                changes.setdefault(key, op.id)
        return changes

    def _steady(self) -> set[int]:
        # An offload without a release is a write-back: the device copy stays where it is.
        moves = [op for op in self.moves if op.payload == "weight"]
        moves = [op for op in moves if op.kind != "offload" or op.release_after is not None]
        moving = {tensor for op in moves for tensor in self.tensors[op.id]}
        zero_copy = {op.block for op in self._plan.ops if op.zero_copy}
        blocks = enumerate(self._structure.blocks)
        return {index for index, block in blocks if index not in zero_copy and moving.isdisjoint(block.tensors)}

    def addresses(self, op: Op) -> tuple[int, int]:
        """Return where gradients that ``op`` copies begin and end in the host memory that they share."""
        (group,) = (self.groups[number] for number in op.groups)
        assert group.host_offset is not None
        return group.host_offset, group.host_offset + group.bytes


def repeated(plan: Plan) -> set[int]:
    """Return the blocks that run a second time for their backward."""
    again = {op.block for op in plan.ops if op.save is not None}
    return {index for index, option in enumerate(plan.options) if option not in RECORDED} | again


def owners(blocks: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Return, per tensor, the blocks that use it, ascending."""
    users: dict[int, list[int]] = {}
    for block, tensors in enumerate(blocks):
        for tensor in tensors:
            users.setdefault(tensor, []).append(block)
    return users


def check_match(structure: Structure, optimizer: Optimizer | None, plan: Plan | None) -> None:
    """Raise unless ``plan`` was made for the model of ``structure`` and ``optimizer`` can carry it out.

    Raises ``PlanError`` if the plan belongs to another model, or takes a compiled block apart, and ``UnsupportedError``
    if there is a plan and no optimizer.
    """
    if plan is None:
        return
    used = owners([block.tensors for block in structure.blocks])
    rows = [
        (tuple(p.shape), dtype_name(p.dtype), p.requires_grad, tuple(used[i]))
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
