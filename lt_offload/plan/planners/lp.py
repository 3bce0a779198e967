"""Linear programs: variables, rows, and a run of HiGHS that says in one word how it ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, nan
from typing import Literal, TypeAlias

import highspy
import numpy as np
from numpy.typing import NDArray

from lt_offload.errors import PlanError

Outcome = Literal["solved", "infeasible", "stopped"]
"""``stopped``: the time limit came before any usable solution."""
Method = Literal["interior", "value", "again"]

_CANCELLED = 1e-12
"""Differences of coefficients below this are rounding errors."""


@dataclass(eq=False, slots=True)
class Variable:
    """What a program decides; its rows say which it has, and their names the order."""

    name: str
    low: float = -inf
    high: float = inf
    whole: bool = False
    """When branching."""
    value: float = nan


Term: TypeAlias = Variable | float
Pair: TypeAlias = tuple[float, Term]


class Row(dict[Variable, float]):
    """A sum: the factor of each variable, and a constant."""

    constant: float = 0.0

    @property
    def value(self) -> float:
        """The sum for the values of its variables."""
        return sum((factor * x.value for x, factor in self.items()), self.constant)


NameRows: TypeAlias = Callable[["Problem", str, Sequence[Row]], list[list[Pair]]]
"""Adds variables, with a name, that equal rows; returns them."""


class Problem:
    """An objective to minimise, and rows between a least and a most; no row is added once it has been solved."""

    model: highspy.Highs

    def __init__(self) -> None:
        self.objective = Row()
        self.rows: list[tuple[Row, float, float]] = []

    @cached_property
    def variables(self) -> list[Variable]:
        """All that the objective and the rows name."""
        named = {x: None for row in (self.objective, *(row for row, _, _ in self.rows)) for x in row}
        return sorted(named, key=lambda x: x.name)

    def limits(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the least of each variable, and the most."""
        return np.array([float(x.low) for x in self.variables]), np.array([float(x.high) for x in self.variables])


def add(row: Row, pairs: Iterable[Pair]) -> None:
    """Add products of a number and a variable (or constant) to ``row``."""
    for factor, term in pairs:
        # A number may stand for a variable where nothing is to be decided, and rows stay the same.
        if isinstance(term, float):
            row.constant += factor * term
        elif factor:
            row[term] = row.get(term, 0.0) + factor


def require(
    problem: Problem,
    pairs: Iterable[Pair],
    relation: Literal["<=", ">=", "=="],
    right: float = 0.0,
) -> None:
    """Add the row ``sum(pairs) relation right`` to ``problem``."""
    row = Row()
    add(row, pairs)
    limit = right - row.constant
    problem.rows.append((row, -inf if relation == "<=" else limit, inf if relation == ">=" else limit))


def pairs(row: Row) -> list[Pair]:
    """Return the terms of ``row``, its constant included."""
    return [*((factor, term) for term, factor in row.items()), (row.constant, 1.0)]


def summed(problem: Problem, name: str, pairs: Iterable[Pair], high: float = inf) -> list[Pair]:
    """Return a variable that equals the sum of ``pairs``, so that other rows need not repeat it."""
    total = Variable(name, 0, high)
    require(problem, [*pairs, (-1, total)], "==")
    return [(1, total)]


def totals(problem: Problem, name: str, rows: Sequence[Row]) -> list[list[Pair]]:
    """Return, per step, a variable that equals its row, which is never negative: for rows that others name."""
    named = []
    for step, row in enumerate(rows):
        terms = pairs(row)
        named.append(summed(problem, f"{name}_{step:03d}", terms) if len(row) > 1 else terms)
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


def _pass(problem: Problem, *, whole: bool) -> None:
    """Hand ``problem`` over as arrays: row by row that takes as long as it is solved."""
    variables, rows = problem.variables, problem.rows
    columns = {variable: index for index, variable in enumerate(variables)}
    entries = [[(columns[x], factor) for x, factor in row.items() if factor] for row, _, _ in rows]
    flat = [entry for row in entries for entry in row]
    kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
    status = problem.model.passModel(
        len(variables),
        len(rows),
        len(flat),
        int(highspy.MatrixFormat.kRowwise),
        int(highspy.ObjSense.kMinimize),
        0.0,
        np.array([problem.objective.get(variable, 0.0) for variable in variables]),
        *problem.limits(),
        np.array([low for _, low, _ in rows]),
        np.array([high for _, _, high in rows]),
        np.cumsum([0, *map(len, entries)], dtype=np.int32),
        np.array([column for column, _ in flat], dtype=np.int32),
        np.array([factor for _, factor in flat], dtype=np.float64),
        np.array([int(kinds[whole and x.whole]) for x in variables], dtype=np.int32),
    )
    if status == highspy.HighsStatus.kError:
        raise PlanError(
            "no program can be solved for this profile: its sizes and times differ by more than numbers can hold; "
            "measure or estimate it again"
        )


def run(problem: Problem, *, time_limit: float, gap: float | None = None, method: Method = "interior") -> Outcome:
    """Solve ``problem`` in place.

    Args:
        problem: the program; its variables receive their values unless the outcome is ``infeasible`` or ``stopped``.
        time_limit: seconds.
        gap: relative gap at which branching may stop; None solves the continuous relaxation, to optimality.
        method: for the relaxation: the interior point method; ``value``: without a basis in the end, where only the
            objective matters; ``again``: the dual simplex method from the basis in which the last run of the same rows
            has ended, of which it changes little if only bounds of variables have changed since, see Koberstein, "The
            dual simplex method, techniques for a fast and stable implementation" (2005).
    """
    if time_limit <= 0:
        return "stopped"
    # The number of threads is left to HiGHS: it has one scheduler per process and refuses to run when asked for another
    # number.
    again = method == "again" and gap is None
    if gap is not None:
        options: dict[str, str | float] = {"mip_rel_gap": gap}
    elif again:
        options = {"solver": "simplex"}
    else:
        # The search for a basis, "crossover", may take longer than the method itself.
        options = {"solver": "ipm", "run_crossover": "off" if method == "value" else "on"}
    if not again:
        problem.model = _Silent()  # type: ignore[no-untyped-call]
    model = problem.model
    # HiGHS counts the time of all runs of a model.
    for name, value in {"time_limit": model.getRunTime() + time_limit, **options}.items():
        model.setOptionValue(name, value)
    if again:
        model.changeColsBounds(len(problem.variables), np.arange(len(problem.variables)), *problem.limits())
    else:
        _pass(problem, whole=gap is not None)
    model.run()
    # Without a solution there are no values.
    for variable, value in zip(problem.variables, model.getSolution().col_value, strict=False):
        variable.value = value
    status = model.getModelStatus()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return "infeasible"
    if status == highspy.HighsModelStatus.kOptimal:
        return "solved"
    # A relaxation that was stopped is useless; a branching may hold a whole solution.
    feasible = model.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    return "solved" if gap is not None and feasible else "stopped"
