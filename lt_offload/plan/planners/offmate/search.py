"""Solves the OFFMATE program for several budgets, because a rounded plan needs another one than it was solved for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from lt_offload.errors import ConfigError, InfeasibleError
from lt_offload.plan.assembly.sets import Sets
from lt_offload.plan.iteration.decisions import Decisions
from lt_offload.plan.planners.candidates import Candidates, Missed
from lt_offload.plan.planners.offmate.config import OffmateConfig
from lt_offload.plan.planners.offmate.program import RelaxedPrograms
from lt_offload.plan.planners.offmate.rounding import round_tensors, with_less_ram
from lt_offload.plan.planners.offmate.solution import groups
from lt_offload.plan.planners.request import Proposal, Request, self_contained
from lt_offload.units import format_bytes

_SOLVED_BLOCKS = 200
_SOLVED = (6, 14)
"""Numbers of budgets whose plans are estimated, at least and at most; between them, as many as make this number of
blocks together."""
_TURNS = 2
"""The program is solved for that many times as many, as plans may not fit."""
_PHI = 1.0
"""``OffmateConfig.phi`` of the programs: copies start at the end of the step that makes what they copy."""
_SHORT = 0.003
"""A schedule is short of room if it takes longer than the program says by more than this part of it."""
_SCHEDULED = 2
"""Number of proposals, the fastest by estimate, that are scheduled with care."""
_OTHER_PHIS = (1.0, 0.5)
"""``OffmateConfig.phi`` of second searches."""
_MANY_BLOCKS = 20
"""Of fewer blocks, the tensors are so large that rounding decides, whatever is rounded."""
_WAITING = 2
"""Number of groups whose gradients have room on the host where a plan fills the RAM and a second one does not."""
_RAM_STEP = 0.005
"""The least part of the RAM by which it is lowered."""
_LEAST_S = 10.0
"""Seconds for the first program even if there is no time left, where nothing else has given a plan."""
_FIRST = 1.0
_LARGEST = 1.35
_STEP = 0.07
_NEAR = 0.01
"""Parts of a budget: where to begin and to end, how far to go, and what is too near to be tried. The program counts for
the whole step what is there for a part of it, so that it needs more than the real budget."""


def search_budgets(candidates: Candidates, config: OffmateConfig, *, enough: Callable[[float], bool]) -> None:
    """Add the best plans of the program for a series of budgets.

    Args:
        candidates: where they are added.
        config: the real budgets, and switches.
        enough: whether a plan that takes so many seconds is good enough; asked when there is one.
    """
    _search(candidates, replace(config, phi=_PHI), "solved", enough)


def search_again(
    candidates: Candidates, config: OffmateConfig, *, enough: Callable[[float], bool], far: Callable[[float], bool]
) -> None:
    """Add the best plans of other programs of the same model, as long as none is near.

    What else is a solution, or nearly one, may be rounded and scheduled with less loss.

    Args:
        candidates: where they are added; some plan has been found.
        config: as above.
        enough: as above.
        far: whether a plan that takes so many seconds is so far from what may be possible that a search is worth it.
    """
    if len(candidates.request.profile.blocks) < _MANY_BLOCKS:
        return
    for phi in _OTHER_PHIS:
        if far(candidates.fastest_s) and not candidates.request.late:
            _search(candidates, replace(config, phi=phi, compact=True), f"solved again, phi {phi:g},", enough)


def _search(candidates: Candidates, config: OffmateConfig, verb: str, enough: Callable[[float], bool]) -> None:
    """Add the best plans of one program for a series of budgets. ``verb`` is for their names."""
    request = candidates.request
    search = BudgetSearch(request.budget_bytes)
    ram = _RamSearch(request.host_budget_bytes)
    # The program leaves out what is on its way: the schedule finds room for that.
    planned = replace(
        config, budget_bytes=search.next, lag=0, lookahead=0, host_budget_bytes=ram.next, idle_states=False
    )
    programs = RelaxedPrograms(request.profile, planned)
    estimated: list[tuple[float, Proposal]] = []
    least, most = _SOLVED
    wanted = min(max(_SOLVED_BLOCKS // len(request.profile.blocks), least), most)
    for turn in range(_TURNS * wanted):
        left = request.deadline - time.monotonic()
        # The first program is solved even late if nothing else has fitted: any plan is better than none.
        if left <= 0 and (turn or candidates.fitting):
            candidates.cut_short("more budgets of the program" if turn else "the program")
            break
        if not candidates.fitting and not estimated:
            left = max(left, _LEAST_S)
        name = f"offmate, {verb} for {format_bytes(search.next)}"
        try:
            solution = programs.solution(search.next, ram.next, left)
        except InfeasibleError as error:
            candidates.fail(name, str(error))
            if not (ram.back() or search.raise_to(programs.needed_bytes())):
                break
            continue
        except ConfigError as error:
            candidates.out_of_time = error
            candidates.cut_short(name)
            break
        decisions = round_tensors(solution, request.profile)
        if not planned.idle_states and decisions.least_host_bytes(request.profile) > request.host_budget_bytes:
            # RAM binds, so that the program has to count all of it. Elsewhere it need not.
            planned = replace(planned, budget_bytes=search.next, idle_states=True)
            programs = RelaxedPrograms(request.profile, planned)
            continue
        proposal = Proposal(name=name, sets=Sets(_within_ram(decisions, request), request.profile))
        seconds = candidates.estimate(proposal)
        if isinstance(seconds, Missed):
            if not (ram.lower(seconds.host) or search.lower(seconds.device)):
                break
            continue
        estimated.append((seconds, proposal))
        # A schedule that takes longer than its program says was short of
        # room: with a smaller budget the plan may then be faster.
        if enough(seconds):
            break
        # Programs that go on from others are solved soon: it is the estimates that take the time.
        if not search.note(seconds, lost=seconds / solution.iteration_s - 1) or len(estimated) == wanted:
            break
    # Estimates tell neighbours apart well enough to schedule only the best of them with care.
    best = [proposal for _, proposal in sorted(estimated, key=lambda item: item[0])]
    best[1:1] = _with_more_room(best[0], request) if best else ()
    for proposal in best[:_SCHEDULED]:
        candidates.add(proposal)
        if enough(candidates.fastest_s):
            return


def _within_ram(decisions: Decisions, request: Request, *, spare: int = 0) -> Decisions:
    """Return ``decisions`` with so much less on the host that they leave ``spare`` bytes there.

    They are as they were if they do, or never would. Whole options may send more to the host than the fractions do that
    they were rounded from.
    """
    excess = decisions.least_host_bytes(request.profile) + spare - request.host_budget_bytes
    if excess <= 0:
        return decisions
    return with_less_ram(decisions, request.profile, self_contained(request.allowed), excess) or decisions


def _with_more_room(best: Proposal, request: Request) -> list[Proposal]:
    """Return the proposal ``best`` with less in the RAM, if it fills that; else nothing.

    A plan for which the RAM just suffices has room for the gradients of one step, so that each copy of them waits for
    the updates before. Estimates do not see that.
    """
    sizes = sorted(group.trainable_bytes for group in groups(request.profile) if group.trainable_bytes)
    less = _within_ram(best.decisions, request, spare=_WAITING * sizes[len(sizes) // 2] if sizes else 0)
    if less == best.decisions:
        return []
    return [Proposal(name=f"{best.name}, with room for gradients", sets=Sets(less, request.profile))]


class _RamSearch:
    """The RAM to solve the program for next: less where the rounded plan needs more than there is."""

    def __init__(self, budget: int) -> None:
        self.next = budget
        self._step = 0
        self._least_step = int(_RAM_STEP * budget)

    def lower(self, over: int) -> bool:
        """Note that the plan misses the real budget by ``over`` bytes; returns whether it does.

        Whole options may miss by the same again, so that steps grow.
        """
        if over > 0:
            self._step = max(over, 2 * self._step, self._least_step)
            self.next -= self._step
        return over > 0

    def back(self) -> bool:
        """Note that the program has no solution; returns whether half the last step is worth a trial."""
        self._step //= 2
        self.next += self._step
        return self._step >= self._least_step


class BudgetSearch:
    """The budget to solve the program for next: the one whose plan is the fastest within the real budget.

    A larger one gives faster plans, as long as they find room; the fastest is where that begins to fail.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.next = int(_FIRST * budget)
        self._least = 0
        """The program has no solution below."""
        self._tried: dict[float, float] = {_LARGEST * budget: math.inf}
        """By budget: the seconds of its plan, infinity if it does not fit."""
        self._short: set[float] = set()
        """Budgets whose plans lose time because room is short."""

    def raise_to(self, needed: int | None) -> bool:
        """Go up to the smallest budget with a solution; returns False if that is too far or was tried."""
        if needed is None or not self.next < needed * 1.005 < min(self._tried):
            return False
        self._least, self.next = needed, int(needed * 1.005)
        return True

    def lower(self, over: int) -> bool:
        """Note that the plan misses the real budget by ``over`` bytes; returns whether there is another one to try."""
        self._tried[self.next] = math.inf
        if min(self._tried.values()) < math.inf:
            return self._between()
        return self._go_to(self.next - max(over, 0.02 * self.budget))

    def note(self, seconds: float, *, lost: float) -> bool:
        """Note what the plan takes, and the part of it that it loses; returns whether there is another one to try."""
        self._tried[self.next] = seconds
        if lost > _SHORT:
            self._short.add(self.next)
        return self._between()

    def _between(self) -> bool:
        """Go on beside the best so far."""
        best = min(self._tried, key=lambda budget: self._tried[budget])
        above = min(budget for budget in self._tried if budget > best)
        below = max((budget for budget in self._tried if budget < best), default=0)
        # Only budgets beside the best are tried: plans get faster with the budget until they stop fitting.
        guesses = [(above - best, best + min(_STEP * best, (above - best) / 2))]
        if best in self._short:
            guesses.append((best - below, best - min(_STEP * best, (best - below) / 2)))
        room, guess = max(guesses)
        return room > _NEAR * self.budget and self._go_to(guess)

    def _go_to(self, guess: float) -> bool:
        if guess < self._least:
            # Below that no program has a solution; so halfway to the next one that was tried.
            guess = (self._least + min(budget for budget in self._tried if budget > self._least)) / 2
        self.next = int(guess)
        return all(abs(self.next - budget) > _NEAR / 2 * self.budget for budget in self._tried)
