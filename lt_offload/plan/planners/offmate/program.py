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
from lt_offload.schema.profile import Profile
from lt_offload.units import format_bytes

MakeProgram = Callable[[Profile, OffmateConfig, Objective], LinearProgram]
"""A model of the runtime."""
_BRANCHING_S = 20.0
_SNAP = 1e-6
_HEADROOM = 1e-6


def solve_offmate(profile: Profile, config: OffmateConfig, program: MakeProgram = LinearProgram) -> Solution:
    """Return the best solution found of the program for ``profile``, with its bound.

    ``program`` is the model of the runtime, here and below.

    Raises:
        InfeasibleError: if the budgets are too small; says which ones would do.
        ConfigError: if the switches leave a block without options, or the time limit is too short for a first solution.
    """
    search = _ProgramSearch(profile, config, program)
    if not search.run():
        raise _infeasible(profile, config, program)
    return search.solution()


class RelaxedPrograms:
    """The relaxation for a series of budgets of one model.

    Only two bounds differ between them, so that each begins with the solution of the one before.
    """

    def __init__(self, profile: Profile, config: OffmateConfig) -> None:
        self._search = _ProgramSearch(profile, config, LinearProgram)
        self._method: Method = "interior"

    def solution(self, budget_bytes: int, host_budget_bytes: int | None, time_limit: float) -> Solution:
        """Return the relaxation's flows with rounded options: what a schedule needs that finds all times anew.

        Raises:
            InfeasibleError: if the budgets are too small; see :meth:`needed_bytes`.
            ConfigError: as :func:`solve_offmate`.
        """
        search = self._search
        search.limit(budget_bytes, host_budget_bytes, time_limit)
        # Interior points are faster from nothing; from a basis of almost the same program the simplex method is.
        method, self._method = self._method, "again"
        if not search.relax(method):
            raise InfeasibleError("the program has no solution")
        search.round()
        return search.solution()

    def needed_bytes(self) -> int | None:
        """Return the smallest device budget with which the last program would have a solution.

        None if none would, or if there is no time to find it.
        """
        with suppress(ConfigError, InfeasibleError):
            return smallest_budget(self._search.program.profile, self._search.config)
        return None


def lower_bound(profile: Profile, config: OffmateConfig, program: MakeProgram = LinearProgram) -> float:
    """Return the seconds that no iteration can beat within the budgets, with transfers within reach of the uses.

    Solves the relaxation only.

    Raises:
        InfeasibleError: if the budgets are too small; what would do is not looked for.
        ConfigError: as :func:`solve_offmate`.
    """
    search = _ProgramSearch(profile, config, program)
    if not search.relax("value"):
        raise InfeasibleError(f"{profile.model} does not fit: its relaxed program has no solution")
    return search.bound * search.program.seconds_unit


def smallest_budget(profile: Profile, config: OffmateConfig, program: MakeProgram = LinearProgram) -> int:
    """Return the smallest device budget in bytes with which the program has a solution.

    ``config.budget_bytes`` is ignored.

    Raises:
        InfeasibleError: if the host budget is too small for any device budget.
    """
    search = _ProgramSearch(profile, config, program, "device")
    if not search.run():
        least = smallest_host_budget(profile, replace(config, budget_bytes=None), program)
        raise InfeasibleError(
            f"host_memory={_format(config.host_budget_bytes)} is too small for {profile.model} with any device memory: "
            f"the host copy of its parameters alone takes {_at_least(least)}"
        )
    return budget_for(search.budget(), profile)


def smallest_host_budget(profile: Profile, config: OffmateConfig, program: MakeProgram = LinearProgram) -> int:
    """Return the smallest host budget in bytes with which the program has a solution.

    ``config.host_budget_bytes`` is ignored.

    Raises:
        InfeasibleError: if the device budget is too small for any host budget.
    """
    search = _ProgramSearch(profile, config, program, "host")
    if not search.run():
        raise InfeasibleError(
            f"memory={_format(config.budget_bytes)} is too small for {profile.model} with any host memory"
        )
    return search.budget() + profile.hardware.process_bytes


class _ProgramSearch:
    """One program on its way to whole options.

    After a successful :meth:`run` its variables hold the best solution found.
    """

    def __init__(
        self, profile: Profile, config: OffmateConfig, program: MakeProgram, objective: Objective = "time"
    ) -> None:
        self.deadline = time.monotonic() + config.time_limit
        self.program = program(profile, config, objective)
        self.config = config
        self.bound = 0.0
        self.chosen = tuple(0 for _ in self.program.comp)

    def run(self) -> bool:
        """Find a solution with whole options; returns False if there is none."""
        if not self.relax():
            return False
        fractions = self.round()
        # The relaxation has whole options by itself, so that it is the optimum.
        if all(weights[index] > 1 - _SNAP for weights, index in zip(fractions, self.chosen, strict=True)):
            return True
        # Options are whole now, and everything that flows is found anew for them: a linear program without branching.
        rounded = self._solve_fixed(self.chosen)
        if rounded <= self.bound * (1 + self.config.gap):
            return True
        return self._branch(rounded)

    def round(self) -> list[list[float]]:
        """Choose options near to those of the relaxation; returns how much of each that has."""
        fractions = [[_value(weight) for weight in weights] for weights in self.program.comp]
        self.chosen = self._round(fractions)
        return fractions

    def limit(self, budget_bytes: int, host_budget_bytes: int | None, time_limit: float) -> None:
        """Set other budgets and a new time limit."""
        self.config = replace(
            self.config, budget_bytes=budget_bytes, host_budget_bytes=host_budget_bytes, time_limit=time_limit
        )
        self.deadline = time.monotonic() + time_limit
        self.program.limit(budget_bytes, host_budget_bytes)

    def relax(self, method: Method = "interior") -> bool:
        """Solve the relaxation and set the bound; returns False if it is infeasible."""
        if not self._solved(self._solve(None, method)):
            return False
        # The traffic term of a solution is at most twice its time per unit of weight, because every step lasts at least
        # as long as its copies in each direction; so this is a bound of the time alone.
        weight = self.config.traffic_weight if self.program.objective == "time" else 0.0
        self.bound = min(pulp.value(self.program.problem.objective) / (1 + 2 * weight), self._objective())
        return True

    def solution(self) -> Solution:
        """Return the solution that the variables hold."""
        program = self.program
        step_s = tuple(_value(step, high=math.inf) * program.seconds_unit for step in program.times)
        return Solution(
            groups=program.groups,
            flows=tuple(_flows(terms) for terms in program.terms),
            options=tuple(options[index].name for options, index in zip(program.options, self.chosen, strict=True)),
            step_s=step_s,
            iteration_s=sum(step_s),
            bound_s=self.bound * program.seconds_unit,
            budget_bytes=self.config.budget_bytes if self.config.budget_bytes is not None else self._device_bytes(),
        )

    def budget(self) -> int:
        """Return the minimised budget (of device memory: what it leaves a plan), with headroom for a later solution."""
        return math.ceil(self._objective() * self.program.bytes_unit * (1 + _HEADROOM))

    def _device_bytes(self) -> int:
        """Return the peak of the counted device bytes."""
        program = self.program
        arena, other = ([row.value() or 0.0 for row in rows] for rows in (program.arena, program.other))
        capacity_bytes = math.ceil(max(a + o for a, o in zip(arena, other, strict=True)) * program.bytes_unit)
        return budget_for(capacity_bytes, program.profile)

    def _objective(self) -> float:
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

    def _round(self, fractions: list[list[float]]) -> tuple[int, ...]:
        blocks, options = self.program.profile.blocks, self.program.options
        held = [
            [held_bytes(block, option) for option in allowed] for block, allowed in zip(blocks, options, strict=True)
        ]
        return round_options(fractions, held, [tuple(option.name for option in allowed) for allowed in options])

    def _solve_fixed(self, chosen: tuple[int, ...]) -> float:
        """Solve with these options and return the objective, infinity if that is infeasible."""
        for index, weights in zip(chosen, self.program.comp, strict=True):
            for position, weight in enumerate(weights):
                if not isinstance(weight, float):
                    # Options are fixed by bounds, which branching sets free again.
                    weight.lowBound = weight.upBound = float(position == index)
        return self._objective() if self._solved(self._solve(None)) else math.inf

    def _branch(self, rounded: float) -> bool:
        """Solve with branching; keep the better of its options and the rounded ones, whose objective is ``rounded``."""
        for weight in (weight for weights in self.program.comp for weight in weights if not isinstance(weight, float)):
            weight.lowBound, weight.upBound = 0, 1
        outcome = self._solve(self.config.gap)
        branched = math.inf
        if outcome == "solved":
            best = tuple(int(np.argmax([_value(weight) for weight in weights])) for weights in self.program.comp)
            branched = self._solve_fixed(best)
        # The variables hold the last program that was solved, so the
        # better options may have to be solved for once more.
        if branched < rounded:
            self.chosen = best
        elif rounded < math.inf:
            self._solve_fixed(self.chosen)
        elif outcome == "stopped":
            self._solved(outcome)
        return min(branched, rounded) < math.inf


def _value(term: Term, high: float = 1.0) -> float:
    """Return the value of a variable or constant, without the solver's rounding errors."""
    if isinstance(term, float):
        return term
    value = float(term.varValue)
    if value < _SNAP:
        return 0.0
    return high if value > high - _SNAP else value


def _flows(terms: GroupTerms) -> GroupFlows:
    def flow(values: Sequence[Term]) -> Flow:
        return np.array([_value(value) for value in values])

    state = flow(terms.state_resident)
    share = _value(terms.host_share)
    if terms.group.state_bytes:
        # In the update step the states of the device's share are resident by definition, not by a variable.
        state[0] = 1 - share
    return GroupFlows(
        host_share=share,
        resident=flow(terms.resident),
        prefetch=flow(terms.prefetch),
        write_back=flow(terms.write_back),
        grad_offload=flow(terms.grad_offload),
        host_update=flow(terms.host_update),
        state_resident=state,
        state_prefetch=flow(terms.state_prefetch),
        state_offload=flow(terms.state_offload),
    )


def _infeasible(profile: Profile, config: OffmateConfig, program: MakeProgram) -> InfeasibleError:
    needed: int | None = None
    ways: list[str] = []
    with suppress(InfeasibleError):
        needed = smallest_budget(profile, config, program)
        ways.append(f"memory={_at_least(needed)} with this host memory")
    if config.host_budget_bytes is not None:
        with suppress(InfeasibleError):
            ways.append(
                f"host_memory={_at_least(smallest_host_budget(profile, config, program))} with this device memory"
            )
    return InfeasibleError(
        f"{profile.model} with batch_size={profile.batch_size} and sequence_length={profile.sequence_length} does not "
        f"fit in memory={_format(config.budget_bytes)} with host_memory={_format(config.host_budget_bytes)}; "
        + (f"the smallest that fits: {' or '.join(ways)}" if ways else "more of both is needed"),
        needed_bytes=needed,
    )


def _format(budget: int | None) -> str:
    return "unlimited" if budget is None else format_bytes(budget)


def _at_least(count: int) -> str:
    """Return ``count`` bytes rounded up, as the setting accepts it."""
    return f"{math.ceil(count / 1e6)}MB" if count >= 1e8 else f"{math.ceil(count / 1e3)}KB"
