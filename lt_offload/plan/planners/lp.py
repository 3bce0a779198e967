"""Linear programs: rows in PuLP's terms, and a run of HiGHS that says in one word how it ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

import highspy
import numpy as np
import pulp
from numpy.typing import NDArray

from lt_offload.errors import PlanError

Term: TypeAlias = pulp.LpVariable | float
Pair: TypeAlias = tuple[float, Term]
NameRows: TypeAlias = Callable[["Problem", str, Sequence[pulp.LpAffineExpression]], list[list[Pair]]]
"""Adds variables, with a name, that equal rows; returns them."""
Outcome = Literal["solved", "infeasible", "stopped"]
"""``stopped``: the time limit came before any usable solution."""
Method = Literal["interior", "value", "again"]

_SENSE = {"<=": pulp.LpConstraintLE, ">=": pulp.LpConstraintGE, "==": pulp.LpConstraintEQ}

_CANCELLED = 1e-12
"""Differences of coefficients below this are rounding errors."""


def add(row: pulp.LpAffineExpression, pairs: Iterable[Pair]) -> None:
    """Add products of a number and a variable (or constant) to ``row``."""
    for factor, term in pairs:
        # A number may stand for a variable where nothing is to be decided, and rows stay the same.
        if isinstance(term, float):
            row.constant += factor * term
        elif factor:
            row.addterm(term, factor)


def require(problem: Problem, pairs: Iterable[Pair], relation: Literal["<=", ">=", "=="], right: float = 0.0) -> None:
    """Add the row ``sum(pairs) relation right`` to ``problem``."""
    row = pulp.LpAffineExpression()
    add(row, pairs)
    problem.addConstraint(pulp.LpConstraint(row, sense=_SENSE[relation], rhs=right))


def pairs(row: pulp.LpAffineExpression) -> list[Pair]:
    """Return the terms of ``row``, its constant included."""
    return [*((factor, term) for term, factor in row.items()), (row.constant, 1.0)]


def summed(problem: pulp.LpProblem, name: str, pairs: Iterable[Pair], high: float | None = None) -> list[Pair]:
    """Return a variable that equals the sum of ``pairs``, so that other rows need not repeat it."""
    total = problem.add_variable(name, 0, high)
    require(problem, [*pairs, (-1, total)], "==")
    return [(1, total)]


def totals(problem: pulp.LpProblem, name: str, rows: Sequence[pulp.LpAffineExpression]) -> list[list[Pair]]:
    """Return, per step, a variable that equals its row, which is never negative: for rows that others name."""
    named = []
    for step, row in enumerate(rows):
        terms = pairs(row)
        named.append(summed(problem, f"{name}_{step:03d}", terms) if len(row) > 1 else terms)
    return named


def levels(problem: Problem, name: str, rows: Sequence[pulp.LpAffineExpression]) -> list[list[Pair]]:
    """Return, per step, a variable that equals its row, for rows that are alike.

    Each is the one before and what has changed since, so that a term is named where it begins and where it ends only.
    """
    named: list[list[Pair]] = []
    before = pulp.LpAffineExpression()
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


class Problem(pulp.LpProblem):  # type: ignore[misc]
    """A program that collects its variables once: PuLP does so from all rows, several times in every run."""

    def __init__(self, name: str) -> None:
        super().__init__(name, pulp.LpMinimize)
        self._collected: list[pulp.LpVariable] = []
        self.rows: list[pulp.LpConstraint] = []

    def addConstraint(self, constraint: pulp.LpConstraint, name: str | None = None) -> None:
        """Add a row; PuLP has several forms to ask for them, by version."""
        super().addConstraint(constraint, name)
        self.rows.append(constraint)

    def variables(self) -> list[pulp.LpVariable]:
        """Return the variables, ordered by name; no row may be added afterwards."""
        self._collected = self._collected or super().variables()
        return self._collected


class _Solver(pulp.HiGHS):  # type: ignore[misc]
    """PuLP's HiGHS, to which a program is handed over as arrays: row by row that takes as long as it is solved."""

    def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:
        lp.solverModel = _Silent()  # type: ignore[no-untyped-call]
        for name, value in {"time_limit": self.timeLimit, **self.optionsDict}.items():
            lp.solverModel.setOptionValue(name, value)

    def buildSolverModel(self, lp: Problem) -> None:
        variables, rows, infinity = lp.variables(), lp.rows, highspy.kHighsInf
        for index, variable in enumerate(variables):
            variable.index = index
        entries = [[(x.index, factor) for x, factor in row.items() if factor] for row in rows]
        flat = [entry for row in entries for entry in row]
        lows, highs = [row.getLb() for row in rows], [row.getUb() for row in rows]
        kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
        whole = [bool(self.mip and variable.cat == pulp.LpInteger) for variable in variables]
        status = lp.solverModel.passModel(
            len(variables),
            len(rows),
            len(flat),
            int(highspy.MatrixFormat.kRowwise),
            int(highspy.ObjSense.kMinimize),
            0.0,
            np.array([lp.objective.get(variable, 0.0) for variable in variables]),
            *_limits(variables),
            np.array([-infinity if low is None else low for low in lows]),
            np.array([infinity if high is None else high for high in highs]),
            np.cumsum([0, *map(len, entries)], dtype=np.int32),
            np.array([column for column, _ in flat], dtype=np.int32),
            np.array([factor for _, factor in flat], dtype=np.float64),
            np.array([int(kinds[one]) for one in whole], dtype=np.int32),
        )
        if status == highspy.HighsStatus.kError:
            raise PlanError(
                "no program can be solved for this profile: its sizes and times differ by more than numbers can hold; "
                "measure or estimate it again"
            )

    def findSolutionValues(self, lp: pulp.LpProblem) -> tuple[int, int]:
        for variable, value in zip(lp.variables(), lp.solverModel.getSolution().col_value, strict=False):
            variable.varValue = value
        return pulp.LpStatusOptimal, pulp.LpSolutionOptimal  # `run` asks HiGHS


def _limits(variables: Sequence[pulp.LpVariable]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    infinity = highspy.kHighsInf
    lows, highs = [variable.lowBound for variable in variables], [variable.upBound for variable in variables]
    return (
        np.array([-infinity if low is None else low for low in lows]),
        np.array([infinity if high is None else high for high in highs]),
    )


class _Again(_Solver):
    """HiGHS, going on from the basis in which the last run of the same rows has ended.

    Bounds of variables may have changed since. The dual simplex method has little to do then, see Koberstein, "The dual
    simplex method, techniques for a fast and stable implementation" (2005).
    """

    def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:
        model = lp.solverModel
        model.setOptionValue("solver", "simplex")
        model.setOptionValue("time_limit", model.getRunTime() + self.timeLimit)

    def buildSolverModel(self, lp: pulp.LpProblem) -> None:
        variables = lp.variables()
        lp.solverModel.changeColsBounds(len(variables), np.arange(len(variables)), *_limits(variables))


def run(problem: Problem, *, time_limit: float, gap: float | None = None, method: Method = "interior") -> Outcome:
    """Solve ``problem`` in place.

    Args:
        problem: the program; its variables receive their values unless the outcome is ``infeasible`` or ``stopped``.
        time_limit: seconds.
        gap: relative gap at which branching may stop; None solves the continuous relaxation, to optimality.
        method: for the relaxation: the interior point method; ``value``: without a basis in the end, where only the
            objective matters; ``again``: the dual simplex method, for a problem that has been solved before and has the
            same rows, but other bounds of variables.
    """
    if time_limit <= 0:
        return "stopped"
    # The number of threads is left to HiGHS: it has one scheduler per process and refuses to run when asked for another
    # number.
    if method == "again" and gap is None:
        solver: _Solver = _Again(mip=False, timeLimit=time_limit)
    elif gap is None:
        # The search for a basis, "crossover", may take longer than the method itself.
        crossover = "off" if method == "value" else "on"
        solver = _Solver(mip=False, timeLimit=time_limit, solver="ipm", run_crossover=crossover)
    else:
        solver = _Solver(mip=True, timeLimit=time_limit, mip_rel_gap=gap)
    problem.solve(solver)
    status = problem.solverModel.getModelStatus()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return "infeasible"
    if status == highspy.HighsModelStatus.kOptimal:
        return "solved"
    # PuLP reports a stopped run as optimal. Of a relaxation that is useless; of a branching it may hold a whole
    # solution.
    feasible = problem.solverModel.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    return "solved" if gap is not None and feasible else "stopped"
