"""Rows for copies of saved activations that may run at any time between a block's forward and its backward, for bounds.

They go one after the other, whichever block they are of. What has been made and has not left takes device memory, and
so does what has come back and is not needed yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pulp

from lt_offload.plan.planners.lp import Pair, add, require
from lt_offload.schema.plan import Timeline

Rows = Sequence[pulp.LpAffineExpression]
"""One per step."""


def pool_copies(
    problem: pulp.LpProblem,
    timeline: Timeline,
    offloaded: Mapping[int, list[Pair]],
    lanes: tuple[tuple[Rows, float], tuple[Rows, float]],
    memory: Rows,
) -> None:
    """Count the copies of all blocks together.

    Args:
        problem: where variables and rows are added.
        timeline: its steps.
        offloaded: by forward step, what its block sends.
        lanes: the work of the lanes to the host and to the device, and their rates.
        memory: device bytes; computations count what they make and need themselves.
    """
    steps = len(timeline)
    left, arrived = ([problem.add_variable(f"{name}_{step:03d}", 0) for step in range(steps)] for name in ("out", "in"))
    made: list[Pair] = []
    gone: list[Pair] = []
    for step in range(steps):
        waiting = made
        made = total(problem, f"made_{step:03d}", [*made, *offloaded.get(step, [])])
        gone = total(problem, f"gone_{step:03d}", [*gone, (1, left[step])])
        require(problem, [*gone, *_less(made)], "<=" if step < steps - 1 else "==")
        if waiting:
            # What leaves in the step itself may have left before the computation needs its room.
            room = problem.add_variable(f"waits_{step:03d}", 0)
            require(problem, [*waiting, *_less(gone), (-1, room)], "<=")
            add(memory[step], [(1, room)])
    there: list[Pair] = []
    needed: list[Pair] = []
    for step in range(steps):
        if timeline.is_backward(step):
            needed = [*needed, *offloaded.get(timeline.forward(timeline.block(step)), [])]
        needed = total(problem, f"needed_{step:03d}", needed)
        require(problem, [*there, *_less(needed)], ">=")
        add(memory[step], [*there, *_less(needed)])
        there = total(problem, f"there_{step:03d}", [*there, (1, arrived[step])])
    for (rows, rate), flows in zip(lanes, (left, arrived), strict=True):
        for row, flow in zip(rows, flows, strict=True):
            add(row, [(1 / rate, flow)])


def _less(pairs: Sequence[Pair]) -> list[Pair]:
    return [(-factor, term) for factor, term in pairs]


def total(problem: pulp.LpProblem, name: str, pairs: list[Pair]) -> list[Pair]:
    """Return a variable that equals the sum of ``pairs``, so that later rows need not repeat it."""
    if len(pairs) <= 1:
        return pairs
    total = problem.add_variable(name, 0)
    require(problem, [*pairs, (-1, total)], "==")
    return [(1, total)]
