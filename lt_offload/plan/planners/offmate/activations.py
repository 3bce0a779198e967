"""Rows for copies of saved activations that may run at any time between a block's forward and its backward, for bounds.

They go one after the other, whichever block they are of. What has been made and has not left takes device memory, and
so does what has come back and is not needed yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pulp

from lt_offload.plan.planners.lp import Pair, add, require, summed
from lt_offload.schema.plan import Timeline

Rows = Sequence[pulp.LpAffineExpression]
"""One per step."""


def pool_copies(
    problem: pulp.LpProblem,
    timeline: Timeline,
    offloaded: Mapping[int, list[Pair]],
    lanes: tuple[tuple[Rows, float], tuple[Rows, float]],
    memory: Rows,
    leaves_within: int | None,
) -> tuple[dict[int, list[Pair]], dict[int, list[Pair]]]:
    """Count the copies of all blocks together.

    Args:
        problem: where variables and rows are added.
        timeline: its steps.
        offloaded: by forward step, what its block sends.
        lanes: the work of the lanes to the host and to the device, and their rates.
        memory: device bytes; computations count what they make and need themselves.
        leaves_within: a step whose computation may begin before all that leaves in it has left; of others, what takes
            no room in a step has left before.

    Returns:
        By step, bytes that leave after its computation, and that arrive after it.
    """
    steps = len(timeline)
    left, arrived = ([problem.add_variable(f"{name}_{step:03d}", 0) for step in range(steps)] for name in ("out", "in"))
    made: list[Pair] = []
    gone: list[Pair] = []
    left_behind: dict[int, list[Pair]] = {}
    for step in range(steps):
        waiting, gone_before = made, gone
        made = total(problem, f"made_{step:03d}", [*made, *offloaded.get(step, [])])
        gone = total(problem, f"gone_{step:03d}", [*gone, (1, left[step])])
        require(problem, [*gone, *_less(made)], "<=" if step < steps - 1 else "==")
        if waiting:
            room = problem.add_variable(f"waits_{step:03d}", 0)
            leaves = gone if step == leaves_within else gone_before
            require(problem, [*waiting, *_less(leaves), (-1, room)], "<=")
            add(memory[step], [(1, room)])
        if offloaded.get(step):
            # What the step itself makes leaves last.
            left_behind[step] = [*gone, *_less(waiting)]
    back: list[Pair] = []
    needed: list[Pair] = []
    back_behind: dict[int, list[Pair]] = {}
    for step in range(steps):
        if timeline.is_backward(step):
            needed = [*needed, *offloaded.get(timeline.forward(timeline.block(step)), [])]
        needed = total(problem, f"needed_{step:03d}", needed)
        require(problem, [*back, *_less(needed)], ">=")
        before = back
        back = total(problem, f"there_{step:03d}", [*back, (1, arrived[step])])
        behind, room = (problem.add_variable(f"{name}_{step:03d}", 0) for name in ("behind", "back"))
        require(problem, [*before, *_less(needed), (-1, room)], "<=")
        require(problem, [*back, *_less(needed), (-1, behind), (-1, room)], "<=")
        add(memory[step], [(1, room)])
        back_behind[step] = [(1, behind)]
    for (rows, rate), flows in zip(lanes, (left, arrived), strict=True):
        for row, flow in zip(rows, flows, strict=True):
            add(row, [(1 / rate, flow)])
    return left_behind, back_behind


def _less(pairs: Sequence[Pair]) -> list[Pair]:
    return [(-factor, term) for factor, term in pairs]


def total(problem: pulp.LpProblem, name: str, pairs: list[Pair]) -> list[Pair]:
    """Return ``pairs``, as one variable if they are several."""
    return summed(problem, name, pairs) if len(pairs) > 1 else pairs
