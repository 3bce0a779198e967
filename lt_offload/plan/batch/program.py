"""The OFFMATE program with the batch size as one more variable.

After "OFFMATE" (2024), appendix A: everything is counted per sample. With ``r = 1 / batch_size``, every flow of weights
(a fraction of them per iteration) becomes that fraction times ``r``, what an iteration costs once becomes a constant
times ``r``, and what it costs per sample becomes a constant. The objective is the time per sample.

The rows are not written down again. The program is built for two batch sizes ``b``; a coefficient or right-hand side
that differs between them is ``c0 + c1 * b``, and a row divided by ``b`` has ``c0 * r + c1`` in its place. A choice of
an option whose coefficient has a part that is not proportional to ``b`` (kernels that do not fill the device) would be
multiplied by ``r``: that product is a variable of its own, in its convex hull with the two. So the result bounds the
throughput of every batch size for which the two profiles speak; it also says which one is best.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import pulp

from lt_offload.errors import ConfigError, InfeasibleError
from lt_offload.plan.batch.profiles import common, scaled
from lt_offload.plan.planners.lp import run
from lt_offload.plan.planners.offmate.config import OffmateConfig
from lt_offload.plan.planners.offmate.model import Program
from lt_offload.schema.profile import Profile

_SLACK = 1e-7
"""Relative difference below which two coefficients are equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BestBatch:
    """What the relaxation says."""

    batch_size: float
    """The best one."""
    seconds_per_sample: float
    """With it; no batch size can do with less."""
    smallest: float
    """The smallest batch size that is as good, within the tolerance that was asked for."""


def best_batch(
    low: Profile,
    high: Profile | None,
    config: OffmateConfig,
    *,
    most: int,
    least: int = 1,
    tolerance: float = 0.005,
    program: type[Program] = Program,
) -> BestBatch:
    """Return the batch size between ``least`` and ``most`` with the highest throughput, and a bound of that.

    Args:
        low: profile of the model at some batch size.
        high: at a larger one; None: what depends on the batch size is proportional to it, see :func:`scaled`.
        config: budgets and switches of the program.
        most: largest batch size to consider.
        least: smallest batch size to consider.
        tolerance: relative loss of throughput that a smaller batch may cost, for ``smallest``.
        program: the model of the runtime.

    Raises:
        InfeasibleError: if no batch size in this range fits.
        ConfigError: if the time limit is too short.
    """
    low, high = common(low, high or scaled(low, 2 * low.batch_size))
    per_sample = _PerSample(program(low, config), high, least=least, most=most)
    outcome = per_sample.solve()
    if outcome == "infeasible":
        raise InfeasibleError(
            f"{low.model} with sequence_length={low.sequence_length} does not fit with batch_size={least} or more"
        )
    if outcome == "stopped":
        raise ConfigError(f"solver_time_limit={config.time_limit:g} is too short to choose a batch size")
    best, seconds = per_sample.batch_size, per_sample.seconds_per_sample
    smallest = best
    if per_sample.prefer_small(tolerance) == "solved":
        smallest = min(best, per_sample.batch_size)
    return BestBatch(batch_size=best, seconds_per_sample=seconds, smallest=smallest)


@dataclass(frozen=True, slots=True)
class _Row:
    terms: dict[str, float]
    constant: float
    sense: int


class _PerSample:
    """The program per ``unit`` samples; its ``r`` is ``unit / batch_size``."""

    def __init__(self, first: Program, high: Profile, *, least: int, most: int) -> None:
        """Derive it from the program ``first`` and the same one for the profile ``high``."""
        self.sizes = first.profile.batch_size, high.batch_size
        self.unit = high.batch_size
        self.config = first.config
        second = type(first)(high, first.config, pace=first.pace)
        self.seconds_unit = first.seconds_unit
        self.problem = pulp.LpProblem("batch", pulp.LpMinimize)
        self.r = self.problem.add_variable("r", self.unit / most, self.unit / least)
        self.decisions: dict[str, pulp.LpVariable] = {}
        self.products: dict[str, pulp.LpVariable] = {}
        self.flows: dict[str, pulp.LpVariable] = {}
        self._add_variables(first)
        rows = zip(_rows(first, 1.0), _rows(second, second.seconds_unit / self.seconds_unit), strict=True)
        for one, two in rows:
            assert one.sense == two.sense
            self._add_row(one, two)
        self.times = [self.flows[time.name] for time in first.times]
        goals = (
            _row(p.problem.objective, pulp.LpConstraintLE, p, u)
            for p, u in ((first, 1.0), (second, second.seconds_unit / self.seconds_unit))
        )
        self.goal = self._combined(*goals)
        self._link_products()
        self.problem.setObjective(self.goal)

    def solve(self) -> str:
        """Look for the highest throughput."""
        return run(self.problem, time_limit=self.config.time_limit)

    def prefer_small(self, tolerance: float) -> str:
        """After :meth:`solve`, look for the smallest batch of nearly the same throughput."""
        limit = pulp.value(self.goal) * (1 + tolerance)
        self.problem.addConstraint(self.goal <= limit)
        self.problem.setObjective(-1 * self.r)
        return self.solve()

    @property
    def batch_size(self) -> float:
        """The one in the solution."""
        return self.unit / float(self.r.varValue)

    @property
    def seconds_per_sample(self) -> float:
        """The bound; why traffic is taken off says ``_ProgramSearch.relax``."""
        whole = min(
            pulp.value(self.goal) / (1 + 2 * self.config.traffic_weight),
            float(sum(time.varValue for time in self.times)),
        )
        return float(whole * self.seconds_unit / self.unit)

    # -- columns -----------------------------------------------------------------------------------------------------

    def _add_variables(self, program: Program) -> None:
        for variable in program.problem.variables():
            name = variable.name
            if variable.cat == pulp.LpInteger:
                self.decisions[name] = self.problem.add_variable(name, 0, 1)
                continue
            assert variable.lowBound == 0
            self.flows[name] = self.problem.add_variable(name, 0)
            if variable.upBound is not None:
                self.problem.addConstraint(self.flows[name] <= variable.upBound * self.r)

    def _product(self, name: str) -> pulp.LpVariable:
        """Return ``r`` times the choice ``name``."""
        if name not in self.products:
            decision, low, high = self.decisions[name], self.r.lowBound, self.r.upBound
            product = self.products[name] = self.problem.add_variable(f"{name}_r", 0, high)
            for row in (
                product >= low * decision,
                product <= high * decision,
                product >= self.r - high * (1 - decision),
                product <= self.r - low * (1 - decision),
            ):
                self.problem.addConstraint(row)
        return self.products[name]

    def _link_products(self) -> None:
        """The products of a block's options sum up to ``r``, wherever one of them is used."""
        for names in self.alternatives:
            if any(name in self.products for name in names):
                self.problem.addConstraint(pulp.lpSum(self._product(name) for name in names) == self.r)

    # -- rows --------------------------------------------------------------------------------------------------------

    def _add_row(self, one: _Row, two: _Row) -> None:
        if one.terms.keys() <= self.decisions.keys():  # one option per block, whatever the batch size
            row = pulp.LpAffineExpression({self.decisions[name]: factor for name, factor in one.terms.items()})
            row.constant = one.constant
        else:
            row = self._combined(one, two)
        self.problem.addConstraint(pulp.LpConstraint(row, sense=one.sense))

    @property
    def alternatives(self) -> list[list[str]]:
        """Names of the choices, per block."""
        blocks: dict[str, list[str]] = {}
        for name in self.decisions:
            blocks.setdefault(name.partition("_")[0], []).append(name)
        return list(blocks.values())

    def _combined(self, one: _Row, two: _Row) -> pulp.LpAffineExpression:
        row = pulp.LpAffineExpression()
        for name in {**one.terms, **two.terms}:
            a, b = one.terms.get(name, 0.0), two.terms.get(name, 0.0)
            if name in self.flows:
                assert _close(a, b), f"{name}: {a} and {b}"
                row.addterm(self.flows[name], a)
                continue
            once, each = self._parts(a, b)
            if each:
                row.addterm(self.decisions[name], each * self.unit)
            if once:
                row.addterm(self._product(name), once)
        once, each = self._parts(one.constant, two.constant)
        row.addterm(self.r, once)
        row.constant = each * self.unit
        return row

    def _parts(self, a: float, b: float) -> tuple[float, float]:
        """Return what is there once and what is there per sample of values at the two batch sizes."""
        low, high = self.sizes
        each = (b - a) / (high - low)
        once = a - each * low
        return (0.0 if abs(once) <= _SLACK * abs(a) else once), each


def _rows(program: Program, unit: float) -> Iterator[_Row]:
    for row in program.problem.constraints():
        yield _row(row, row.sense, program, unit)


_Expression: TypeAlias = pulp.LpAffineExpression | pulp.LpConstraint


def _row(row: _Expression, sense: int, program: Program, unit: float) -> _Row:
    """Return a row with seconds in another unit: rows of seconds are those with the time of a step."""
    times = {time.name for time in program.times}
    terms = {variable.name: float(factor) for variable, factor in row.items()}
    factor = unit if times & terms.keys() else 1.0
    return _Row(
        {name: value if name in times else value * factor for name, value in terms.items()},
        float(row.constant) * factor,
        sense,
    )


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= _SLACK * max(abs(a), abs(b))
