"""The program of OFFMATE (2024) with the paper's runtime, solved for whole options and flows of every kind.

Plans need less of it: see :mod:`lt_offload.plan.planners.offmate.program`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pulp

from lt_offload.errors import InfeasibleError
from lt_offload.plan.planners.lp import Pair, Term, add, pairs, require
from lt_offload.plan.planners.offmate.config import OffmateConfig
from lt_offload.plan.planners.offmate.group import GroupTerms
from lt_offload.plan.planners.offmate.model import LinearProgram
from lt_offload.plan.planners.offmate.program import MakeProgram, ProgramSearch, value_of
from lt_offload.plan.planners.offmate.solution import Flow, Group
from lt_offload.schema.profile import BlockProfile, Profile

PAPER: dict[str, Any] = {"phi": 1.0, "lag": 0, "lookahead": 0}
"""How the paper's runtime copies, as arguments of OffmateConfig."""


class PaperProgram(LinearProgram):
    """The program of the paper's runtime, which differs from the engine's in what it does on the host."""

    late_update = False

    def count_launch(self, step: int, block: BlockProfile) -> None:
        """Count it in the step's time on the host, which cannot update meanwhile (23)."""
        add(self.host[step], [(self._duration(block.launch_s), 1.0)])

    def gradient_peak(self, group: Group) -> float:
        """Return 1: the update follows the whole backward of the block."""
        return 1.0

    def gradients_on_host(self) -> list[Pair]:
        """Return terms for the host memory of gradients: each has its own."""
        return [pair for row in self.arriving.values() for pair in pairs(row)]

    def states_on_host(self, v: GroupTerms) -> list[Pair]:
        """Return terms for the host memory of states: they have a place there once they travel."""
        states = self._size(v.group.state_bytes)
        return [(states, v.host_share), *((states, flow) for flow in v.state_offload)]

    def limit_pools(self, budget: pulp.LpVariable) -> None:
        """Limit device memory, which is one pool."""
        for arena, other in zip(self.arena, self.other, strict=True):
            require(self.problem, [*pairs(other), *pairs(arena), (-1, budget)], "<=")


@dataclass(frozen=True, kw_only=True, slots=True)
class SolvedFlows:
    """Fractions in [0, 1] for one group, per tau; see the model for their symbols."""

    host_share: float
    resident: Flow
    prefetch: Flow
    write_back: Flow
    grad_offload: Flow
    host_update: Flow
    state_resident: Flow
    state_prefetch: Flow
    state_offload: Flow


@dataclass(frozen=True, kw_only=True, slots=True)
class SolvedProgram:
    """The best solution found, with its bound."""

    groups: tuple[Group, ...]
    flows: tuple[SolvedFlows, ...]
    options: tuple[str, ...]
    """One per block."""
    step_s: tuple[float, ...]
    iteration_s: float
    bound_s: float
    """Value of the relaxation: a lower bound for every rounding of the program."""


def solve_offmate(profile: Profile, config: OffmateConfig, program: MakeProgram = LinearProgram) -> SolvedProgram:
    """Return the best solution found for ``profile``; raises ``InfeasibleError`` if the budgets are too small."""
    search = ProgramSearch(profile, config, program)
    if not search.run():
        raise InfeasibleError(f"{profile.model} does not fit")
    solved = search.program
    step_s = tuple(value_of(step, high=math.inf) * solved.seconds_unit for step in solved.times)
    return SolvedProgram(
        groups=solved.groups,
        flows=tuple(_flows(terms) for terms in solved.terms),
        options=search.options,
        step_s=step_s,
        iteration_s=sum(step_s),
        bound_s=search.bound * solved.seconds_unit,
    )


def _flows(terms: GroupTerms) -> SolvedFlows:
    def flow(values: Sequence[Term]) -> Flow:
        return np.array([value_of(value) for value in values])

    states, share = flow(terms.state_resident), value_of(terms.host_share)
    if terms.group.state_bytes:
        # In the update step the states of the device's share are resident by definition, not by a variable.
        states[0] = 1 - share
    return SolvedFlows(
        host_share=share,
        resident=flow(terms.resident),
        prefetch=flow(terms.prefetch),
        write_back=flow(terms.write_back),
        grad_offload=flow(terms.grad_offload),
        host_update=flow(terms.host_update),
        state_resident=states,
        state_prefetch=flow(terms.state_prefetch),
        state_offload=flow(terms.state_offload),
    )
