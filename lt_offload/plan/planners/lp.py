"""Linear programs: rows in PuLP's terms, and a run of HiGHS that says in one word how it ended."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import highspy
import pulp

from lt_offload.errors import PlanError

Term: TypeAlias = pulp.LpVariable | float
Pair: TypeAlias = tuple[float, Term]
Outcome = Literal["solved", "infeasible", "stopped"]
"""``stopped``: the time limit came before any usable solution."""


_SENSE = {"<=": pulp.LpConstraintLE, ">=": pulp.LpConstraintGE, "==": pulp.LpConstraintEQ}


def add(row: pulp.LpAffineExpression, pairs: Iterable[Pair]) -> None:
    """Add products of a number and a variable (or constant) to ``row``."""
    for factor, term in pairs:
        if isinstance(term, float):
            row.constant += factor * term
        elif factor:
            row.addterm(term, factor)


def require(
    problem: pulp.LpProblem,
    pairs: Iterable[Pair],
    relation: Literal["<=", ">=", "=="],
    right: float = 0.0,
) -> None:
    """Add the row ``sum(pairs) relation right`` to ``problem``."""
    row = pulp.LpAffineExpression()
    add(row, pairs)
    problem.addConstraint(pulp.LpConstraint(row, sense=_SENSE[relation], rhs=right))


def pairs(row: pulp.LpAffineExpression) -> list[Pair]:
    """Return the terms of ``row``, its constant included."""
    return [*((factor, term) for term, factor in row.items()), (row.constant, 1.0)]


def run(problem: pulp.LpProblem, *, time_limit: float, gap: float | None = None) -> Outcome:
    """Solve ``problem`` in place.

    Args:
        problem: the program; its variables receive their values unless the outcome is ``infeasible`` or ``stopped``.
        time_limit: seconds.
        gap: relative gap at which branching may stop; None solves the continuous relaxation, to optimality.
    """
    if time_limit <= 0:
        return "stopped"
    # The interior point method is several times faster than the simplex method on these staircase programs. The number
    # of threads is left to HiGHS: it has one scheduler per process and refuses to run when asked for another number.
    options = {"solver": "ipm"} if gap is None else {}
    try:
        problem.solve(pulp.HiGHS(msg=False, mip=gap is not None, gapRel=gap, timeLimit=time_limit, **options))
    except IndexError as error:  # HiGHS has refused the matrix, and PuLP looks for its rows
        raise PlanError(
            "no program can be solved for this profile: its sizes and times differ by more than numbers can hold; "
            "measure or estimate it again"
        ) from error
    status = problem.solverModel.getModelStatus()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return "infeasible"
    if status == highspy.HighsModelStatus.kOptimal:
        return "solved"
    # PuLP reports a stopped run as optimal. Of a relaxation that is useless; of a branching it may hold a whole
    # solution.
    feasible = problem.solverModel.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    return "solved" if gap is not None and feasible else "stopped"
