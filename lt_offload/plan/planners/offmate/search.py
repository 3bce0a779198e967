"""Solves the OFFMATE program for several budgets, because a rounded plan needs another one than it was solved for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from lt_offload.errors import ConfigError, InfeasibleError
from lt_offload.plan.planners.candidates import Candidates
from lt_offload.plan.planners.offmate.config import OffmateConfig
from lt_offload.plan.planners.offmate.program import solve_offmate
from lt_offload.plan.planners.offmate.rounding import Slack, round_tensors
from lt_offload.plan.planners.request import Proposal
from lt_offload.units import format_bytes

_MOST_SOLVED = 6
_TOLERATED_GAP = 0.05
"""Loss by rounding below which the program is not solved by branching: another budget finds more in less time."""


def search_budgets(
    candidates: Candidates, config: OffmateConfig, *, lag: int, patience: float, done: Callable[[], bool]
) -> None:
    """Add the plans of the program for a series of budgets.

    Args:
        candidates: where they are added; what does not fit tells the next budget.
        config: the real budgets, and switches.
        lag: 1 while memory is not short: the program counts offloaded activations until their copies are done. With 0
            it counts them as gone at once, and fitting sees to what it can.
        patience: time (of ``time.monotonic``) after which no further budget is tried if there is a plan already.
        done: whether the best plan is good enough.
    """
    request = candidates.request
    search = _BudgetSearch(request.budget_bytes)
    ram = request.host_budget_bytes
    deadline = time.monotonic() + config.time_limit
    for turn in range(_MOST_SOLVED):
        began = time.monotonic()
        left = deadline - began
        if turn and left <= 1:
            return
        name = f"offmate, solved for {format_bytes(search.next)}"
        now = replace(
            config,
            budget_bytes=search.next,
            host_budget_bytes=ram,
            lag=lag,
            lookahead=lag,
            phi=1.0,
            gap=_TOLERATED_GAP,
            time_limit=left,
        )
        try:
            solution = solve_offmate(request.profile, now)
        except InfeasibleError as error:
            candidates.fail(name, "the program has no solution")
            if not search.raise_to(error.needed_bytes):
                return
            continue
        except ConfigError as error:
            candidates.out_of_time = error
            candidates.fail(name, f"the program was not solved within time_limit={request.settings.time_limit:g} s")
            return
        missed = candidates.add(Proposal(name=name, decisions=round_tensors(solution, request.profile, Slack())))
        ram -= max(missed.host, 0)
        if done() or not (missed.host > 0 or search.advance(missed.device)):
            return
        ended = time.monotonic()
        if ended + 0.2 * (ended - began) > (patience if candidates.fitting else deadline):
            return


class _BudgetSearch:
    """Which budget to solve the program for next: the largest one whose plan can be made to fit."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.next = int(0.97 * budget)
        self.fits = 0.0
        """The largest that fitted."""
        self.fails = 1.16 * budget
        """The smallest that did not, or was not worth trying."""

    def raise_to(self, needed: int | None) -> bool:
        """Go up to the smallest budget with a solution; returns False if that is too far or was tried."""
        if needed is None or not self.next < needed * 1.005 < self.fails:
            return False
        self.fits, self.next = needed, int(needed * 1.005)
        return True

    def advance(self, over: int) -> bool:
        """Choose the next budget after a plan that missed the real one by ``over`` bytes; False if pointless."""
        if over > 0:
            self.fails = self.next
            guess = self.next - max(over, 0.02 * self.budget)
        else:
            self.fits = self.next
            guess = 1.05 * self.next
        low, high = self.fits, self.fails
        if not low < guess < high or (low and high < 1.15 * self.budget):
            guess = (low + high) / 2
        self.next = int(guess)
        return high - low > 0.02 * self.budget
