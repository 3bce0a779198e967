"""Linear programs: variables and rows, and a run of HiGHS that says in one word how it ended.

Rows go to HiGHS as arrays: a modelling language in between would take as long as the solver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

import highspy
import numpy as np
from numpy.typing import NDArray

from lt_offload.errors import PlanError


class Variable:
    """A variable of a program, with the value that the last run has given it."""

    __slots__ = ("high", "index", "low", "name", "value", "whole")

    def __init__(self, name: str, low: float | None, high: float | None, *, whole: bool) -> None:
        self.name, self.low, self.high, self.whole = name, low, high, whole
        self.index, self.value = -1, 0.0


class Row(dict[Variable, float]):
    """A sum of variables times numbers, and of ``constant``."""

    __slots__ = ("constant",)

    def __init__(self) -> None:
        super().__init__()
        self.constant = 0.0

    @property
    def value(self) -> float:
        """The sum with the values of the last run."""
        return sum((variable.value * factor for variable, factor in self.items()), self.constant)


Term: TypeAlias = Variable | float
Pair: TypeAlias = tuple[float, Term]
Outcome = Literal["solved", "infeasible", "stopped"]
"""``stopped``: the time limit came before any usable solution."""
Method = Literal["interior", "value", "again"]

_CANCELLED = 1e-12
"""Differences of coefficients below this are rounding errors."""


class Problem:
    """A program whose objective is to be as small as possible."""

    def __init__(self) -> None:
        self.variables: list[Variable] = []
        self.objective = Row()
        self.rows: list[tuple[Row, float, float]] = []
        """Rows, their constants left out, with the least and the most that they may be."""
        self.solver: _Silent | None = None
        """Holds the program as it was last solved."""

    def add_variable(
        self, name: str, low: float | None = None, high: float | None = None, *, whole: bool = False
    ) -> Variable:
        """Return a new variable between ``low`` and ``high``; None: without that limit."""
        variable = Variable(name, low, high, whole=whole)
        self.variables.append(variable)
        return variable

    @property
    def limits(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The least and the most of all variables."""
        infinity = highspy.kHighsInf
        return (
            np.array([-infinity if variable.low is None else variable.low for variable in self.variables]),
            np.array([infinity if variable.high is None else variable.high for variable in self.variables]),
        )

    def load(self, *, relaxed: bool) -> _Silent:
        """Return a new solver that holds the program; no variable may be added afterwards.

        ``relaxed``: without the rule that variables are whole numbers.
        """
        # Of several solutions the solver takes one by the order of columns, which names say, not the way of building.
        self.variables.sort(key=lambda variable: variable.name)
        for index, variable in enumerate(self.variables):
            variable.index = index
        starts = [0]
        columns: list[int] = []
        factors: list[float] = []
        for row, _, _ in self.rows:
            entries = [(variable.index, factor) for variable, factor in row.items() if factor]
            columns += [column for column, _ in entries]
            factors += [factor for _, factor in entries]
            starts.append(len(columns))
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        self.solver = _Silent()  # type: ignore[no-untyped-call]
        status = self.solver.passModel(
            len(self.variables),
            len(self.rows),
            len(columns),
            int(highspy.MatrixFormat.kRowwise),
            int(highspy.ObjSense.kMinimize),
            0.0,
            np.array([self.objective.get(variable, 0.0) for variable in self.variables]),
            *self.limits,
            np.array([low for _, low, _ in self.rows]),
            np.array([high for _, _, high in self.rows]),
            np.array(starts, dtype=np.int32),
            np.array(columns, dtype=np.int32),
            np.array(factors),
            np.array([int(kinds[variable.whole and not relaxed]) for variable in self.variables], dtype=np.int32),
        )
        if status == highspy.HighsStatus.kError:
            raise PlanError(
                "no program can be solved for this profile: its sizes and times differ by more than numbers can hold; "
                "measure or estimate it again"
            )
        return self.solver


NameRows: TypeAlias = Callable[[Problem, str, Sequence[Row]], list[list[Pair]]]
"""Adds variables, with a name, that equal rows; returns them."""


def add(row: Row, pairs: Iterable[Pair]) -> None:
    """Add products of a number and a variable (or constant) to ``row``."""
    for factor, term in pairs:
        # A number may stand for a variable where nothing is to be decided, and rows stay the same.
        if isinstance(term, float):
            row.constant += factor * term
        elif factor:
            row[term] = row.get(term, 0.0) + factor


def require(problem: Problem, pairs: Iterable[Pair], relation: Literal["<=", ">=", "=="], right: float = 0.0) -> None:
    """Add the row ``sum(pairs) relation right`` to ``problem``."""
    row, infinity = Row(), highspy.kHighsInf
    add(row, pairs)
    right -= row.constant
    problem.rows.append((row, -infinity if relation == "<=" else right, infinity if relation == ">=" else right))


def pairs(row: Row) -> list[Pair]:
    """Return the terms of ``row``, its constant included."""
    return [*((factor, term) for term, factor in row.items()), (row.constant, 1.0)]


def totals(problem: Problem, name: str, rows: Sequence[Row]) -> list[list[Pair]]:
    """Return, per step, a variable that equals its row, which is never negative: for rows that others name."""
    named = []
    for step, row in enumerate(rows):
        terms = pairs(row)
        if len(row) > 1:
            total = problem.add_variable(f"{name}_{step:03d}", 0)
            require(problem, [*terms, (-1, total)], "==")
            terms = [(1, total)]
        named.append(terms)
    return named


def levels(problem: Problem, name: str, rows: Sequence[Row]) -> list[list[Pair]]:
    """Return, per step, a variable that equals its row, for rows that are alike.

    Each is the one before and what has changed since, so that a term is named where it begins and where it ends only.
    """
    named: list[list[Pair]] = []
    before = Row()
    for step, row in enumerate(rows):
        level = problem.add_variable(f"{name}_{step:03d}")
        changes = [(row.get(x, 0.0) - before.get(x, 0.0), x) for x in {**row, **before}]
        changed = [(factor, x) for factor, x in changes if abs(factor) > _CANCELLED]
        constant = row.constant - before.constant
        require(problem, [*changed, (constant, 1.0), *(named[-1] if named else ()), (-1, level)], "==")
        named.append([(1, level)])
        before = row
    return named


class _Silent(highspy.Highs):
    """HiGHS without a word; since 1.16 it writes its licence when callbacks are enabled, which its constructor does."""

    def enableCallbacks(self) -> None:
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]


def run(problem: Problem, *, time_limit: float, gap: float | None = None, method: Method = "interior") -> Outcome:
    """Solve ``problem`` in place.

    Args:
        problem: the program; its variables receive their values unless the outcome is ``infeasible`` or ``stopped``.
        time_limit: seconds.
        gap: relative gap at which branching may stop; None solves the continuous relaxation, to optimality.
        method: for the relaxation: the interior point method; ``value``: without a basis in the end, where only the
            objective matters; ``again``: the dual simplex method, which goes on from the basis in which the last run
            has ended, for a problem with the same rows but other limits of variables. It has little to do then, see
            Koberstein, "The dual simplex method, techniques for a fast and stable implementation" (2005).
    """
    if time_limit <= 0:
        return "stopped"
    # The number of threads is left to HiGHS: it has one scheduler per process and refuses to run when asked for another
    # number.
    options: dict[str, Any]
    if method == "again" and gap is None:
        assert problem.solver is not None
        solver = problem.solver
        solver.changeColsBounds(len(problem.variables), np.arange(len(problem.variables)), *problem.limits)
        options = {"solver": "simplex", "time_limit": solver.getRunTime() + time_limit}
    else:
        solver = problem.load(relaxed=gap is None)
        options = {"time_limit": float(time_limit), "mip_rel_gap": gap}
        if gap is None:
            # The search for a basis, "crossover", may take longer than the method itself.
            crossover = "off" if method == "value" else "on"
            options = {"time_limit": float(time_limit), "solver": "ipm", "run_crossover": crossover}
    for name, value in options.items():
        solver.setOptionValue(name, value)
    solver.run()
    status = solver.getModelStatus()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return "infeasible"
    feasible = solver.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    # Of a relaxation that was stopped a solution is useless; of a branching it may hold a whole one.
    if status != highspy.HighsModelStatus.kOptimal and (gap is None or not feasible):
        return "stopped"
    for variable, value in zip(problem.variables, solver.getSolution().col_value, strict=True):
        variable.value = value
    return "solved"
