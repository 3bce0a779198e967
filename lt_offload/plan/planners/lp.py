"""Runs a PuLP problem with HiGHS or CBC and says in one word how it ended. Knows nothing of what the problem means."""

from __future__ import annotations

from typing import Literal

import highspy
import pulp

from lt_offload.errors import PlanError

SolverName = Literal["highs", "cbc"]
Outcome = Literal["solved", "infeasible", "stopped"]
"""``stopped``: the time limit came before any usable solution."""


def run(problem: pulp.LpProblem, *, solver: SolverName, time_limit: float, gap: float | None = None) -> Outcome:
    """Solve ``problem`` in place.

    Args:
        problem: the program; its variables receive their values unless the outcome is ``infeasible`` or ``stopped``.
        solver: which solver runs.
        time_limit: seconds.
        gap: relative gap at which branching may stop; None solves the continuous relaxation, to optimality.
    """
    if time_limit <= 0:
        return "stopped"
    return _highs(problem, time_limit, gap) if solver == "highs" else _cbc(problem, time_limit, gap)


def _highs(problem: pulp.LpProblem, time_limit: float, gap: float | None) -> Outcome:
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


def _cbc(problem: pulp.LpProblem, time_limit: float, gap: float | None) -> Outcome:
    command = pulp.COIN_CMD(
        path=pulp.PULP_CBC_CMD.pulp_cbc_path, msg=False, mip=gap is not None, gapRel=gap, timeLimit=time_limit
    )
    problem.solve(command)
    if problem.status == pulp.LpStatusInfeasible:
        return "infeasible"
    whole = (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible) if gap is not None else (pulp.LpSolutionOptimal,)
    return "solved" if problem.sol_status in whole else "stopped"
