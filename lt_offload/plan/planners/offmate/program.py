"""Solves the OFFMATE program: relaxation, rounding of the options, flows for the rounded options, branching if needed.

The result has whole options and fractional flows, which :mod:`lt_offload.plan.planners.offmate.rounding` turns into
whole tensors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pulp

from lt_offload.errors import ConfigError, InfeasibleError
from lt_offload.plan.iteration.memory import budget_for
from lt_offload.plan.planners.lp import Method, Outcome, Term, run
from lt_offload.plan.planners.offmate.config import OffmateConfig
from lt_offload.plan.planners.offmate.group import GroupTerms
from lt_offload.plan.planners.offmate.model import LinearProgram, Objective
from lt_offload.plan.planners.offmate.rounding import round_options
from lt_offload.plan.planners.offmate.solution import Flow, GroupFlows, Solution
from lt_offload.plan.planners.request import held_bytes
from lt_offload.schema.profile import OptionName, Profile

MakeProgram = Callable[[Profile, OffmateConfig, Objective], LinearProgram]
"""A model of the runtime."""
_BRANCHING_S = 20.0
_SNAP = 1e-6
_HEADROOM = 1e-6


def lower_bound(profile: Profile, config: OffmateConfig, program: MakeProgram = LinearProgram) -> float:
    """Return the seconds that no iteration can beat within the budgets, with transfers within reach of the uses.

    Solves the relaxation only; ``program`` is the model of the runtime, here and below.

    Raises:
        InfeasibleError: if the budgets are too small; what would do is not looked for.
        ConfigError: if the switches leave a block without options, or the time limit is too short.
    """
    search = ProgramSearch(profile, config, program)
    if not search.relax("value"):
        raise InfeasibleError(f"{profile.model} does not fit: its relaxed program has no solution")
    return search.bound * search.program.seconds_unit


def smallest_budget(profile: Profile, config: OffmateConfig, program: MakeProgram = LinearProgram) -> int:
    """Return the smallest device budget in bytes with which the program has a solution.

    ``config.budget_bytes`` is ignored.

    Raises:
        InfeasibleError: if the host budget is too small for any device budget.
    """
    search = ProgramSearch(profile, config, program, "device")
    if not search.run():
        raise InfeasibleError(f"{profile.model} does not fit: its host memory is too small with any device memory")
    # With headroom for a later solution.
    return budget_for(math.ceil(search.objective * search.program.bytes_unit * (1 + _HEADROOM)), profile)


class ProgramSearch:
    """One program on its way to whole options.

    After a successful :meth:`run` its variables hold the best solution found.
    """

    def __init__(
        self,
        profile: Profile,
        config: OffmateConfig,
        program: MakeProgram = LinearProgram,
        objective: Objective = "time",
    ) -> None:
        self.deadline = time.monotonic() + config.time_limit
        self.program = program(profile, config, objective)
        self.config = config
        self.bound = 0.0
        self._chosen = tuple(0 for _ in self.program.comp)

    def run(self) -> bool:
        """Find a solution with whole options; returns False if there is none."""
        if not self.relax():
            return False
        fractions = self.round()
        # The relaxation has whole options by itself, so that it is the optimum.
        if all(weights[index] > 1 - _SNAP for weights, index in zip(fractions, self._chosen, strict=True)):
            return True
        # Options are whole now, and everything that flows is found anew for them: a linear program without branching.
        rounded = self._solve_fixed(self._chosen)
        if rounded <= self.bound * (1 + self.config.gap):
            return True
        return self._branch(rounded)

    def round(self) -> list[list[float]]:
        """Choose options near to those of the relaxation; returns how much of each that has."""
        blocks, options = self.program.profile.blocks, self.program.options
        fractions = [[value_of(weight) for weight in weights] for weights in self.program.comp]
        held = [
            [held_bytes(block, option) for option in allowed] for block, allowed in zip(blocks, options, strict=True)
        ]
        kinds = [tuple(option.name for option in allowed) for allowed in options]
        self._chosen = round_options(fractions, held, kinds)
        return fractions

    def relax(self, method: Method = "interior") -> bool:
        """Solve the relaxation and set the bound; returns False if it is infeasible."""
        if not self._solved(self._solve(None, method)):
            return False
        # The traffic term of a solution is at most twice its time per unit of weight, because every step lasts at least
        # as long as its copies in each direction; so this is a bound of the time alone.
        weight = self.config.traffic_weight if self.program.objective == "time" else 0.0
        self.bound = min(pulp.value(self.program.problem.objective) / (1 + 2 * weight), self.objective)
        return True

    @property
    def options(self) -> tuple[OptionName, ...]:
        """The option of each block."""
        return tuple(options[index].name for options, index in zip(self.program.options, self._chosen, strict=True))

    @property
    def objective(self) -> float:
        """The value of the solution, in the program's units."""
        program = self.program
        if program.objective == "time":
            return float(sum(step.varValue for step in program.times))
        return float(pulp.value(program.problem.objective))

    def _solve(self, gap: float | None, method: Method = "interior") -> Outcome:
        remaining = self.deadline - time.monotonic()
        if gap is not None:
            remaining = min(remaining, _BRANCHING_S)
        return run(self.program.problem, time_limit=remaining, gap=gap, method=method)

    def _solved(self, outcome: Outcome) -> bool:
        if outcome == "stopped":
            raise ConfigError(
                f"solver_time_limit={self.config.time_limit:g} is too short to plan {len(self.program.comp)} blocks of "
                f"{self.program.profile.model}; 30 s are enough for 80 blocks on two cores"
            )
        return outcome == "solved"

    def _solve_fixed(self, chosen: tuple[int, ...]) -> float:
        for index, weights in zip(chosen, self.program.comp, strict=True):
            for position, weight in enumerate(weights):
                if not isinstance(weight, float):
                    # Options are fixed by bounds, which branching sets free again.
                    weight.lowBound = weight.upBound = float(position == index)
        return self.objective if self._solved(self._solve(None)) else math.inf

    def _branch(self, rounded: float) -> bool:
        """Solve with branching; keep the better of its options and the rounded ones, whose objective is ``rounded``."""
        for weight in (weight for weights in self.program.comp for weight in weights if not isinstance(weight, float)):
            weight.lowBound, weight.upBound = 0, 1
        outcome = self._solve(self.config.gap)
        branched = math.inf
        if outcome == "solved":
            best = tuple(int(np.argmax([value_of(weight) for weight in weights])) for weights in self.program.comp)
            branched = self._solve_fixed(best)
        # The variables hold the last program that was solved, so the
        # better options may have to be solved for once more.
        if branched < rounded:
            self._chosen = best
        elif rounded < math.inf:
            self._solve_fixed(self._chosen)
        elif outcome == "stopped":
            self._solved(outcome)
        return min(branched, rounded) < math.inf


class RelaxedPrograms(ProgramSearch):
    """The relaxation for a series of budgets of one model.

    Only two bounds differ between them, so that each begins with the solution of the one before.
    """

    _method: Method = "interior"

    def solution(self, budget_bytes: int, host_budget_bytes: int | None, time_limit: float) -> Solution:
        """Return the relaxation's flows with rounded options: what a schedule needs that finds all times anew.

        Raises:
            InfeasibleError: if the budgets are too small; see :meth:`needed_bytes`.
            ConfigError: if the switches leave a block without options, or the time limit is too short.
        """
        program, self.deadline = self.program, time.monotonic() + time_limit
        self.config = replace(self.config, host_budget_bytes=host_budget_bytes, time_limit=time_limit)
        program.limit(budget_bytes, host_budget_bytes)
        # Interior points are faster from nothing; from a basis of almost the same program the simplex method is.
        method, self._method = self._method, "again"
        if not self.relax(method):
            raise InfeasibleError("the program has no solution")
        self.round()
        return Solution(
            groups=program.groups,
            flows=tuple(_flows(terms) for terms in program.terms),
            options=self.options,
            iteration_s=sum(value_of(step, high=math.inf) * program.seconds_unit for step in program.times),
        )

    def needed_bytes(self) -> int | None:
        """Return the smallest device budget with which the last program would have a solution.

        None if none would, or if there is no time to find it.
        """
        with suppress(ConfigError, InfeasibleError):
            return smallest_budget(self.program.profile, self.config)
        return None


def value_of(term: Term, high: float = 1.0) -> float:
    """Return the value of a variable or constant, without the solver's rounding errors."""
    if isinstance(term, float):
        return term
    value = float(term.varValue)
    if value < _SNAP:
        return 0.0
    return high if value > high - _SNAP else value


def _flows(terms: GroupTerms) -> GroupFlows:
    def flow(values: Sequence[Term]) -> Flow:
        return np.array([value_of(value) for value in values])

    return GroupFlows(
        host_share=value_of(terms.host_share),
        resident=flow(terms.resident),
        prefetch=flow(terms.prefetch),
        write_back=flow(terms.write_back),
        state_resident=flow(terms.state_resident),
    )
