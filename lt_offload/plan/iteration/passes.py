"""The passes of a window one after the other, as one cyclic list of ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lt_offload.schema.plan import ADDING, Op, Pass, Plan

_SHOWN = 2
"""In longer windows every pass that adds up but the first is like the second."""


def shown_passes(plan: Plan) -> tuple[Pass, ...]:
    """Return the passes that stand for a window of ``plan``."""
    adding: list[Pass] = ["accumulating"] * min(plan.adding, _SHOWN)
    if adding:
        adding[0] = plan.passes[0]
    return (*adding, plan.passes[-1])


def more_passes(plan: Plan) -> int:
    """Return the number of passes like the second, besides the shown ones."""
    return max(plan.adding - _SHOWN, 0)


def unrolled(plan: Plan, passes: Sequence[Pass]) -> tuple[tuple[Op, ...], tuple[int, ...]]:
    """Return the ops of ``passes`` in the order of issue, numbered anew, and the op of ``plan`` behind each.

    In ``after``, an id that is not smaller than the op's own means the passes before, as in a plan. Nothing is said
    about ops that none of ``passes`` carries out. Machines add up in the last pass that adds only.
    """
    if not plan.adds_up:
        return plan.ops, tuple(range(len(plan.ops)))
    last_adding = max((at for at, which in enumerate(passes) if which in ADDING), default=-1)
    issued = [
        op for at, which in enumerate(passes) for op in plan.program(which) if op.lane != "network" or at == last_adding
    ]
    last = {op.id: new for new, op in enumerate(issued)}
    latest: dict[int, int] = {}
    """By op of the plan: its latest issue so far."""
    ops = []
    for new, op in enumerate(issued):
        # Not issued yet in this round means that of the round before, where its last issue is the one that counts.
        after = {latest.get(other, last.get(other)) for other in op.after}
        ops.append(replace(op, id=new, after=tuple(sorted(number for number in after if number is not None))))
        latest[op.id] = new
    return tuple(ops), tuple(op.id for op in issued)
