"""Solves the OFFMATE program for several budgets and links: a rounded plan needs others than it was solved for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from lt_offload.errors import ConfigError, InfeasibleError
from lt_offload.plan.assembly.just_in_time import Missed
from lt_offload.plan.assembly.sets import Sets
from lt_offload.plan.iteration.decisions import Decisions
from lt_offload.plan.iteration.durations import with_faster_link
from lt_offload.plan.planners.candidates import Candidates
from lt_offload.plan.planners.offmate.config import OffmateConfig
from lt_offload.plan.planners.offmate.program import RelaxedPrograms
from lt_offload.plan.planners.offmate.rounding import round_tensors, with_less_ram
from lt_offload.plan.planners.offmate.solution import groups
from lt_offload.plan.planners.request import Proposal, Request, self_contained
from lt_offload.plan.planners.slots import TOLERATED
from lt_offload.plan.planners.tables import with_lookups
from lt_offload.schema.profile import Profile
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
_LINK_RATIO = 1.25
"""Ratio of the speeds of the link in the series."""
_SLOWER = 0.95
"""The part of the real speed from which on a link counts as slower."""
_LINKS = 2
"""Speeds below the real one that are tried, at most."""
_MORE = 3
"""Number of budgets whose plans are estimated with another speed."""
_WAITING = 2
"""Number of groups whose gradients have room on the host where a plan fills the RAM and a second one does not."""
_RAM_STEP = 0.005
"""The least part of the RAM by which it is lowered."""
_LEAST_S = 10.0
"""Seconds for the first program even if there is no time left, where nothing else has given a plan."""
_LARGEST = 1.35
"""Part of a budget where to end. The program counts for the whole step what is there for a part of it, so that it needs
more than the real budget."""
_RATIO = 1.01
"""Ratio of budgets of the series, of which coarse steps go to each ..."""
_COARSE = 8
"""... of these numbers' multiples."""


def search_programs(
    candidates: Candidates, config: OffmateConfig, *, enough: Callable[[float], bool], far: Callable[[float], bool]
) -> None:
    """Add the best plans of a series of programs: for several budgets, and for links slower than the real one.

    The program times no copy within a step, so that it asks more of the link than a schedule can have of it. Budgets
    and speeds are each of a fixed geometric series: what changes a little is planned from the same programs. The RAM is
    no part of the problem unless the best plan needs more than there is: a number that does not bind changes nothing.

    Args:
        candidates: where they are added.
        config: the real budgets, and switches.
        enough: whether a plan that takes so many seconds is good enough; asked when there is one.
        far: whether it is so far from what may be possible that programs with slower links are worth their time.
    """
    config = replace(config, phi=_PHI, lag=0, lookahead=0)
    search = _ProgramSeries(candidates, replace(config, host_budget_bytes=None), enough, far)
    search.run()
    if config.host_budget_bytes is not None and search.best is not None and not search.best.fits_ram:
        search = search.with_ram(config)
        search.run()
    search.add_best()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Estimated:
    """A proposal that fits the device's memory."""

    seconds: float
    budget: int
    """The device budget of its program ..."""
    link: float
    """... and its link, relative to the real one."""
    fits_ram: bool
    proposal: Proposal


class _ProgramSeries:
    """Programs of one request, and what their plans take by estimate."""

    def __init__(
        self,
        candidates: Candidates,
        config: OffmateConfig,
        enough: Callable[[float], bool],
        far: Callable[[float], bool],
    ) -> None:
        self._candidates, self._config, self._enough, self._far = candidates, config, enough, far
        self._request = candidates.request
        self.estimated: list[_Estimated] = []

    @property
    def best(self) -> _Estimated | None:
        return min(self.estimated, key=lambda each: each.seconds, default=None)

    @property
    def _fastest_s(self) -> float:
        return self.best.seconds if self.best else math.inf

    def run(self) -> None:
        """Estimate the plans of programs with the real link, then with slower ones while plans are far away."""
        blocks = len(self._request.profile.blocks)
        least, most = _SOLVED
        self._run(1.0, min(max(_SOLVED_BLOCKS // blocks, least), most))
        link = self._request.profile.hardware.h2d_bytes_per_s
        element = math.floor(math.log(_SLOWER * link, _LINK_RATIO))
        for slower in range(_LINKS):
            if not self._far(self._fastest_s):
                return
            self._run(_LINK_RATIO ** (element - slower) / link, _MORE)

    def _run(self, link: float, wanted: int) -> None:
        """Estimate the plans of ``wanted`` programs with ``link`` times the real link's speed."""
        candidates, request = self._candidates, self._request
        search = BudgetSearch(request.budget_bytes, self.best.budget if self.best else None)
        ram = _RamSearch(self._config.host_budget_bytes)
        programs = RelaxedPrograms(_with_link(request.profile, link), self._config)
        before = len(self.estimated)
        for turn in range(_TURNS * wanted):
            left = request.deadline - time.monotonic()
            # The first program is solved even late if nothing else has fitted: any plan is better than none.
            first = not (candidates.fitting or self.estimated)
            if left <= 0 and (turn or not first):
                candidates.cut.append("more budgets of the program" if self.estimated else "the program")
                return
            name = self._name(search.next, link)
            try:
                solution = programs.solution(search.next, ram.next, max(left, _LEAST_S) if first else left)
            except InfeasibleError as error:
                candidates.fail(name, str(error))
                if not (ram.back() or search.raise_to(programs.needed_bytes())):
                    return
                continue
            except ConfigError as error:
                candidates.out_of_time = error
                candidates.cut.append(name)
                return
            decisions = round_tensors(solution, request.profile)
            if self._config.lookups:
                decisions = with_lookups(decisions, request.profile)
            seconds = self._estimate(decisions, search.next, link)
            if isinstance(seconds, Missed):
                if not (ram.lower(seconds.host) or search.lower(seconds.device)):
                    return
                continue
            # A schedule that takes longer than its program says was short of
            # room: with a smaller budget the plan may then be faster.
            lost = seconds / solution.iteration_s - 1
            enough = self._enough(seconds) or len(self.estimated) == before + wanted
            if not search.note(seconds, lost=lost) or enough:
                return

    def _estimate(self, decisions: Decisions, budget: int, link: float) -> float | Missed:
        """Estimate a plan of a program with this budget and link, and keep it if it fits."""
        if self._config.host_budget_bytes is not None:
            decisions = _within_ram(decisions, self._request)
        proposal = Proposal(name=self._name(budget, link), sets=Sets(decisions, self._request.profile))
        seconds = self._candidates.estimate(proposal, any_ram=self._config.host_budget_bytes is None)
        if not isinstance(seconds, Missed):
            fits_ram = decisions.least_host_bytes(self._request.profile) <= self._request.host_budget_bytes
            estimated = _Estimated(seconds=seconds, budget=budget, link=link, fits_ram=fits_ram, proposal=proposal)
            self.estimated.append(estimated)
        return seconds

    def with_ram(self, config: OffmateConfig) -> _ProgramSeries:
        """Return a series within the RAM of ``config``, which has of this one what fits, or can be made to."""
        series = _ProgramSeries(self._candidates, config, self._enough, self._far)
        series.estimated = [each for each in self.estimated if each.fits_ram]
        for each in sorted(self.estimated, key=lambda each: each.seconds)[:_SCHEDULED]:
            if not each.fits_ram:
                series._estimate(each.proposal.decisions, each.budget, each.link)
        return series

    def _name(self, budget: int, link: float) -> str:
        slower = "" if link == 1 else f", a link of {link:.0%}"
        ram = "" if self._config.host_budget_bytes is None else ", little RAM"
        tables = ", embeddings on the host" if self._config.lookups else ""
        return f"offmate, solved for {format_bytes(budget)}{slower}{ram}{tables}"

    def add_best(self) -> None:
        """Add the plans of the fastest to the candidates, scheduled with care."""
        # Estimates tell neighbours apart well enough to schedule only the best of them with care.
        candidates, best = self._candidates, sorted(self.estimated, key=lambda each: each.seconds)[:_SCHEDULED]
        for each in best:
            candidates.add(each.proposal)
            if self._enough(candidates.fastest_s):
                return
        # What takes longer than its estimate lacks RAM: care alone makes no plan slower.
        if best and candidates.fastest_s > TOLERATED * best[0].seconds:
            for proposal in _with_more_room(best[0].proposal, self._request):
                candidates.add(proposal)


def _with_link(profile: Profile, factor: float) -> Profile:
    """Return ``profile`` with a link ``factor`` times as fast, which takes as much less of the RAM's bandwidth."""
    shares = profile.contention
    slower = replace(shares, h2d=factor * shares.h2d, d2h=factor * shares.d2h)
    return replace(with_faster_link(profile, factor), contention=slower)


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
    """The RAM to solve the program for next, None without a limit: less where the rounded plan needs more."""

    def __init__(self, budget: int | None) -> None:
        self.next = budget
        self._step = 0
        self._least_step = int(_RAM_STEP * (budget or 0)) + 1

    def lower(self, over: int) -> bool:
        """Note that the plan misses the real budget by ``over`` bytes; returns whether it does.

        Whole options may miss by the same again, so that steps grow.
        """
        if over > 0 and self.next is not None:
            self._step = max(over, 2 * self._step, self._least_step)
            self.next -= self._step
        return over > 0

    def back(self) -> bool:
        """Note that the program has no solution; returns whether half the last step is worth a trial."""
        if self.next is None:
            return False
        self._step //= 2
        self.next += self._step
        return self._step >= self._least_step


class BudgetSearch:
    """The budget to solve the program for next: the one whose plan is the fastest within the real budget.

    A larger one gives faster plans, as long as they find room; the fastest is where that begins to fail. All budgets
    are of one geometric series, coarse steps first, so that neighbouring budgets have most of their trials in common.
    """

    def __init__(self, budget: int, first: int | None = None) -> None:
        """``first``: where to begin, if that is known."""
        self._least = 0
        """The program has no solution below this element of the series."""
        self._at = -(-_element(budget) // _COARSE) * _COARSE if first is None else _element(first + 1)
        self._tried: dict[int, float] = {_element(_LARGEST * budget): math.inf}
        """By element: the seconds of its plan, infinity if it does not fit."""
        self._short: set[int] = set()
        """Elements whose plans lose time because room is short."""

    @property
    def next(self) -> int:
        """The budget in bytes."""
        return int(_RATIO**self._at)

    def raise_to(self, needed: int | None) -> bool:
        """Go up to the smallest budget with a solution; returns False if that is too far or was tried."""
        if needed is None or not self._at < _element(needed) + 1 < min(self._tried):
            return False
        self._least = self._at = _element(needed) + 1
        return True

    def lower(self, over: int) -> bool:
        """Note that the plan misses the real budget by ``over`` bytes; returns whether there is another one to try."""
        self._tried[self._at] = math.inf
        if min(self._tried.values()) < math.inf:
            return self._between()
        return self._go_to(min(_element(max(self.next - over, 1)), self._at - _COARSE // 2) // 2 * 2)

    def note(self, seconds: float, *, lost: float) -> bool:
        """Note what the plan takes, and the part of it that it loses; returns whether there is another one to try."""
        self._tried[self._at] = seconds
        if lost > _SHORT:
            self._short.add(self._at)
        return self._between()

    def _between(self) -> bool:
        """Go on beside the best so far."""
        best = min(self._tried, key=lambda element: self._tried[element])
        above = min(element for element in self._tried if element > best)
        below = max((element for element in self._tried if element < best), default=0)
        # Only budgets beside the best are tried: plans get faster with the budget until they stop fitting.
        guesses = [(above - best, best + _halfway(above - best))]
        if best in self._short:
            guesses.append((best - below, best - _halfway(best - below)))
        _, guess = max(guesses)
        return self._go_to(guess)

    def _go_to(self, guess: int) -> bool:
        if guess < self._least:
            # Below that no program has a solution; so halfway to the next one that was tried.
            guess = (self._least + min(element for element in self._tried if element > self._least)) // 2
        self._at = guess
        return guess not in self._tried


def _element(budget: float) -> int:
    """Return the number of the largest element of the series that is at most ``budget``."""
    return math.floor(math.log(budget) / math.log(_RATIO) + 1e-9)


def _halfway(distance: int) -> int:
    return min(_COARSE, max(distance // 2, 0))
