"""Rows for work of groups that may be done in many steps, pooled over groups, for bounds.

A gradient leaves, and the host updates, in any step between the backward and the next forward: with a variable for each
of them the program would be several times as large. Near both ends there is one, as it decides there when weights
arrive. For what is done in between there is one per group, and one per step for all groups together: at each moment no
more has been done than there was, and no less than was due. That allows for more than the variables of all steps would,
so that a bound stays one.

Forwards that run again may do so before the step of their backward, too, whatever other blocks run in between. What has
been rebuilt and is not needed yet takes memory, no less per second of such forwards than with the block that holds the
least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pulp

from lt_offload.plan.planners.lp import Pair, Term, add, require
from lt_offload.plan.planners.offmate.activations import Rows, total


@dataclass(frozen=True, slots=True)
class PooledWork:
    """Work of one group on a lane within some steps."""

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


@dataclass(frozen=True, slots=True)
class Rerun:
    """A forward that runs again if its block has one of some options."""

    seconds: float
    """In the program's unit."""
    ahead_bytes: float
    """In the program's unit: what its block holds more from then on to its backward."""
    weight: Term
    """The part of the option that the block has."""


def pool_reruns(
    problem: pulp.LpProblem, reruns: Mapping[int, Sequence[Rerun]], compute: Rows, own: Rows, memory: Rows
) -> None:
    """Count ``reruns`` in rows, one per step.

    Args:
        problem: where variables and rows are added.
        reruns: by the step of their block's backward.
        compute: seconds of all computations.
        own: seconds of the step's forward or backward, with what runs again within it.
        memory: device bytes.
    """
    lasting = [rerun for several in reruns.values() for rerun in several if rerun.seconds]
    if not lasting:
        return
    rate = min(rerun.ahead_bytes / rerun.seconds for rerun in lasting)
    done: list[Pair] = []
    due: list[Pair] = []
    for step in sorted(reruns):
        within, early, ahead = (problem.add_variable(f"{name}_{step:03d}", 0) for name in ("again", "early", "ahead"))
        now = [(rerun.seconds, rerun.weight) for rerun in reruns[step] if rerun.seconds]
        due = total(problem, f"again_due_{step:03d}", [*due, *now])
        less = [(-factor, x) for factor, x in due]
        require(problem, [*done, *less, (-1, ahead)], "<=")
        add(memory[step], [(rate, ahead)])
        require(problem, [*done, (1, within), *less], ">=")
        done = total(problem, f"again_done_{step:03d}", [*done, (1, within), (1, early)])
        add(own[step], [(1, within)])
        add(compute[step], [(1, within), (1, early)])
