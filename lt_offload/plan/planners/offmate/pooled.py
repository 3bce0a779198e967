"""Rows for work of groups that may be done in many steps, pooled over groups, for bounds.

A gradient leaves, and the host updates, in any step between the backward and the next forward: with a variable for each
of them the program would be several times as large. Near both ends there is one, as it decides there when weights
arrive. For what is done in between there is one per group, and one per step for all groups together: at each moment no
more has been done than there was, and no less than was due. That allows for more than the variables of all steps would,
so that a bound stays one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulp

from lt_offload.plan.planners.lp import Pair, add, require
from lt_offload.plan.planners.offmate.activations import total


@dataclass(frozen=True, slots=True)
class PooledWork:
    """What one group does on a lane within some steps."""

    amount: Pair
    """Seconds of the lane, in the program's unit."""
    first: int
    last: int
    """Steps, counted from the first backward on."""


def pool_work(
    problem: pulp.LpProblem, name: str, works: Sequence[PooledWork], rows: Sequence[pulp.LpAffineExpression]
) -> None:
    """Count ``works`` in a lane's ``rows``, one per step from the first backward on."""
    if not works:
        return
    begun: list[Pair] = []
    due: list[Pair] = []
    done: list[Pair] = []
    end = max(work.last for work in works)
    for step in range(min(work.first for work in works), end + 1):
        flow = problem.add_variable(f"{name}_{step:03d}", 0)
        add(rows[step], [(1, flow)])
        done = total(problem, f"{name}_done_{step:03d}", [*done, (1, flow)])
        begun = [*begun, *(work.amount for work in works if work.first == step)]
        begun = total(problem, f"{name}_begun_{step:03d}", begun)
        due = total(problem, f"{name}_due_{step:03d}", [*due, *(work.amount for work in works if work.last == step)])
        require(problem, [*done, *((-factor, x) for factor, x in begun)], "<=")
        require(problem, [*done, *((-factor, x) for factor, x in due)], ">=" if step < end else "==")
