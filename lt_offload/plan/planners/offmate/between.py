"""Room for the time between two computations, for bounds.

A step lasts from the start of its computation to the start of the next one. What the computation uses stays on the
device to its end, and what it makes or updates leaves after that. So what the next computation finds in the arena and
finds no room for beside the present one's arrives between both, as do activations that take memory of the framework
only then; and the copies of what has just been made or updated run there, as far as they end with the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import pulp

from lt_offload.plan.planners.lp import Pair, Term, add, levels, pairs, require
from lt_offload.plan.planners.offmate.group import GroupTerms


class Between:
    """Left-hand sides per step, and the rows that are made of them; bytes and seconds in the program's units."""

    def __init__(self, problem: pulp.LpProblem, steps: int) -> None:
        self._problem, self._steps = problem, steps
        self.computing, self.arena, self.d2h, self.host = (
            [pulp.LpAffineExpression() for _ in range(steps)] for _ in range(4)
        )
        """Seconds of the step's own forward or backward; bytes at its end, with what the next one finds; seconds of
        copies and updates that cannot begin before."""
        self.arriving = [problem.add_variable(f"late_{step:03d}", 0) for step in range(steps)]
        """Bytes of the arena that arrive after the computation."""
        self.fetched: dict[int, list[Pair]] = {}
        """By step: bytes of activations that arrive then."""

    def count_group(self, v: GroupTerms, weight: float, states: float) -> None:
        """Count what a group has in the arena; its ``weight``, as far as uses need it, and ``states`` in bytes."""
        for tau in range(self._steps):
            row, following = self.arena[(v.group.last_backward + tau) % self._steps], (tau + 1) % self._steps
            add(row, [(weight, 1.0 if tau in v.uses else v.resident[following])])
            if tau == 0 or not following:
                # The update comes behind the backward, with all states of the device's share.
                add(row, [(states, 1.0), (-states, v.host_share)])
                add(row, [(-states, v.state_prefetch[0])] if tau else ())
            else:
                add(row, [(states, v.state_resident[following])])

    def limit_arena(self, extent: Term) -> None:
        """Require room at the ends of computations."""
        for row, arriving in zip(levels(self._problem, "ends", self.arena), self.arriving, strict=True):
            require(self._problem, [*row, (-1, arriving), (-1, extent)], "<=")

    def limit_times(self, times: Sequence[Term], h2d_rate: float) -> None:
        """Require that each step lasts as long as its computation and the copies behind it."""
        for step, time in enumerate(times):
            computing = pairs(self.computing[step])
            arriving = [(1.0, self.arriving[step]), *self.fetched.get(step, ())]
            lanes = [[(factor / h2d_rate, term) for factor, term in arriving]]
            lanes += [pairs(rows[step]) for rows in (self.d2h, self.host) if rows[step]]
            for lane in lanes:
                require(self._problem, [*computing, *lane, (-1, time)], "<=")
