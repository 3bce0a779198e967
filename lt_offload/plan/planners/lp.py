"""Linear programs: variables and rows, and a run of HiGHS that says in one word how it ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

import highspy
import numpy as np
from numpy.typing import NDArray

from lt_offload.errors import PlanError

Relation = Literal["<=", ">=", "=="]
Outcome = Literal["solved", "infeasible", "stopped"]
"""``stopped``: the time limit came before any usable solution."""
Method = Literal["interior", "value", "again"]

_CANCELLED = 1e-12
"""Differences of coefficients below this are rounding errors."""


class Variable:
    """A number between two bounds that a run finds."""

    __slots__ = ("high", "index", "low", "name", "value", "whole")

    def __init__(self, name: str, low: float | None = None, high: float | None = None, *, whole: bool = False) -> None:
        """``low`` and ``high``: None for no bound; ``whole``: a branching makes it a whole number."""
        self.name, self.low, self.high, self.whole = name, low, high, whole
        self.value, self.index = 0.0, 0


Term: TypeAlias = Variable | float
Pair: TypeAlias = tuple[float, Term]
NameRows: TypeAlias = "Callable[[Problem, str, Sequence[Row]], list[list[Pair]]]"
"""Adds variables, with a name, that equal rows; returns them."""


class Row(dict[Variable, float]):
    """A sum of variables by their factors, and a constant."""

    __slots__ = ("constant",)

    def __init__(self) -> None:
        super().__init__()
        self.constant = 0.0

    @property
    def value(self) -> float:
        """The sum for the values that the last run has found."""
        total = self.constant
        for variable, factor in self.items():
            total += variable.value * factor
        return total


def add(row: Row, pairs: Iterable[Pair]) -> None:
    """Add products of a number and a variable (or constant) to ``row``."""
    for factor, term in pairs:
        # A number may stand for a variable where nothing is to be decided, and rows stay the same.
        if isinstance(term, float):
            row.constant += factor * term
        elif factor:
            row[term] = row.get(term, 0.0) + factor


def require(problem: Problem, pairs: Iterable[Pair], relation: Relation, right: float = 0.0) -> None:
    """Add the row ``sum(pairs) relation right`` to ``problem``."""
    row = Row()
    add(row, pairs)
    problem.rows.append((row, relation, right - row.constant))


def pairs(row: Row) -> list[Pair]:
    """Return the terms of ``row``, its constant included."""
    return [*((factor, term) for term, factor in row.items()), (row.constant, 1.0)]


def totals(problem: Problem, name: str, rows: Sequence[Row]) -> list[list[Pair]]:
    """Return, per step, a variable that equals its row, which is never negative: for rows that others name."""
    named = []
    for step, row in enumerate(rows):
        terms = pairs(row)
        if len(row) > 1:
            total = Variable(f"{name}_{step:03d}", 0)
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
        level = Variable(f"{name}_{step:03d}")
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


class Problem:
    """Rows over variables, and a row to be minimised. Only variables that some row names are part of a run."""

    def __init__(self) -> None:
        self.rows: list[tuple[Row, Relation, float]] = []
        self.objective = Row()
        self._variables: list[Variable] = []
        self._model: highspy.Highs | None = None

    def begin(self, *, whole: bool, **options: float | str) -> highspy.Highs:
        """Hand the program over to a solver, as arrays: row by row that takes as long as it is solved."""
        used = dict.fromkeys(
            variable for row in (self.objective, *(row for row, _, _ in self.rows)) for variable in row
        )
        self._variables = sorted(used, key=lambda variable: variable.name)
        for index, variable in enumerate(self._variables):
            variable.index = index
        self._model = model = _Silent()  # type: ignore[no-untyped-call]
        for name, value in options.items():
            model.setOptionValue(name, value)
        infinity = highspy.kHighsInf
        entries = [[(x.index, factor) for x, factor in row.items() if factor] for row, _, _ in self.rows]
        flat = [entry for row in entries for entry in row]
        kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
        status = model.passModel(
            len(self._variables),
            len(self.rows),
            len(flat),
            int(highspy.MatrixFormat.kRowwise),
            int(highspy.ObjSense.kMinimize),
            0.0,
            np.array([self.objective.get(variable, 0.0) for variable in self._variables]),
            *self._limits(),
            np.array([-infinity if relation == "<=" else right for _, relation, right in self.rows]),
            np.array([infinity if relation == ">=" else right for _, relation, right in self.rows]),
            np.cumsum([0, *map(len, entries)], dtype=np.int32),
            np.array([column for column, _ in flat], dtype=np.int32),
            np.array([factor for _, factor in flat], dtype=np.float64),
            np.array([int(kinds[whole and variable.whole]) for variable in self._variables], dtype=np.int32),
        )
        if status == highspy.HighsStatus.kError:
            raise PlanError(
                "no program can be solved for this profile: its sizes and times differ by more than numbers can hold; "
                "measure or estimate it again"
            )
        return model

    def go_on(self, time_limit: float) -> highspy.Highs:
        """Go on from the basis in which the last run of the same rows has ended; bounds of variables may have changed.

        The dual simplex method has little to do then, see Koberstein, "The dual simplex method, techniques for a fast
        and stable implementation" (2005).
        """
        model, count = self._model, len(self._variables)
        assert model is not None, "it has not been run before"
        model.setOptionValue("solver", "simplex")
        model.setOptionValue("time_limit", model.getRunTime() + time_limit)
        model.changeColsBounds(count, np.arange(count), *self._limits())
        return model

    def take(self, values: Iterable[float]) -> None:
        """Give the variables the ``values`` that a solver has found."""
        for variable, value in zip(self._variables, values, strict=False):
            variable.value = value

    def _limits(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the least and the most of all variables."""
        infinity = highspy.kHighsInf
        lows, highs = [x.low for x in self._variables], [x.high for x in self._variables]
        return (
            np.array([-infinity if low is None else low for low in lows]),
            np.array([infinity if high is None else high for high in highs]),
        )


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
        model = problem.go_on(time_limit)
    elif gap is None:
        # The search for a basis, "crossover", may take longer than the method itself.
        crossover = "off" if method == "value" else "on"
        model = problem.begin(whole=False, time_limit=time_limit, solver="ipm", run_crossover=crossover)
    else:
        model = problem.begin(whole=True, time_limit=time_limit, mip_rel_gap=gap)
    model.run()
    problem.take(model.getSolution().col_value)
    status = model.getModelStatus()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return "infeasible"
    if status == highspy.HighsModelStatus.kOptimal:
        return "solved"
    # What a stopped run has found is useless of a relaxation; of a branching it may be a whole solution.
    feasible = model.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    return "solved" if gap is not None and feasible else "stopped"
