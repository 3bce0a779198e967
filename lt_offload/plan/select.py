"""Generates plans, simulates them and keeps the best. The one entry to planning; knows every planner, and no torch."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import get_args

from lt_offload.errors import ConfigError, InfeasibleError, UnsupportedError
from lt_offload.plan.baselines import Allowed, option_sets, resident_choices, smallest, streaming_choices
from lt_offload.plan.build import build, place_copies
from lt_offload.plan.check import check
from lt_offload.plan.choices import Choices
from lt_offload.plan.discretise import Slack, discretise
from lt_offload.plan.fit import fit
from lt_offload.plan.infeasible import explain_infeasible, smallest_ram
from lt_offload.plan.memory import fixed_bytes, framework_bytes, host_bytes
from lt_offload.plan.offmate import OffmateConfig, lower_bound, no_offload_s, solve_offmate
from lt_offload.plan.offmate_config import allowed_options
from lt_offload.plan.schedule import Alternative, Plan, PlannerName, Prediction
from lt_offload.plan.simulate import simulate
from lt_offload.plan.trace import Trace
from lt_offload.profile.types import Profile
from lt_offload.units import format_bytes, parse_bytes

PLANNERS: tuple[PlannerName, ...] = ("auto", "offmate", "resident")
"""The planners of this release."""
_GOOD_GAP = 0.01
_FAIR_GAP = 0.05
_MOST_SOLVED = 6
_MANY_BLOCKS = 50
"""Above, the program gets shorter transfer windows, so that it is solved in time."""


def solve(
    profile: Profile,
    *,
    memory: str | int | None = None,
    host_memory: str | int | None = None,
    planner: PlannerName = "auto",
    host_update: bool = True,
    activation_offload: bool = True,
    recompute: bool = True,
    time_limit: float = 30.0,
) -> Plan:
    """Return the fastest plan found for ``profile`` within the budgets, checked and simulated.

    Args:
        profile: what model and machine cost.
        memory: device budget, context included, e.g. ``"10GB"``; None: all the device has.
        host_memory: RAM budget; None: all that the profile says may be taken.
        planner: ``auto``: the best of all; ``offmate``: the linear program only; ``resident``: nothing travels.
        host_update: whether the host may update parameters.
        activation_offload: whether activations may be copied to the host.
        recompute: whether activations may be computed again.
        time_limit: seconds after which no further candidate is generated.

    Raises:
        InfeasibleError: if no plan fits; says what would.
        UnsupportedError: if ``planner`` is not one of this release.
    """
    if planner not in PLANNERS:
        known = "does not exist" if planner not in get_args(PlannerName) else "is not in this release"
        raise UnsupportedError(f"planner={planner!r} {known}; choose one of {', '.join(PLANNERS)}")
    hardware = profile.hardware
    budget = hardware.device_bytes if memory is None else parse_bytes(memory)
    ram = hardware.host_bytes if host_memory is None else parse_bytes(host_memory, setting="host_memory")
    config = OffmateConfig(
        budget_bytes=budget,
        host_budget_bytes=ram,
        host_update=host_update,
        activation_offload=activation_offload,
        recompute=recompute,
        time_limit=time_limit,
        window=6 if len(profile.blocks) <= _MANY_BLOCKS else 4,
    )
    return _Selection(profile, config, planner).run()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    name: str
    plan: Plan
    trace: Trace


class _Selection:
    """One search for the best plan."""

    def __init__(self, profile: Profile, config: OffmateConfig, planner: PlannerName) -> None:
        assert config.budget_bytes is not None
        assert config.host_budget_bytes is not None
        self.profile, self.config, self.planner = profile, config, planner
        self.budget, self.ram = config.budget_bytes, config.host_budget_bytes
        self.room = self.budget - fixed_bytes(profile)
        self.allowed: Allowed = tuple(allowed_options(block, config) for block in profile.blocks)
        self.started = time.monotonic()
        # Larger programs take longer than in proportion.
        self.patience = min(config.time_limit, max(2.0, 9.5 * (len(profile.blocks) / 40) ** 1.5))
        self.bound = 0.0
        self.candidates: list[_Candidate] = []
        self.failed: list[Alternative] = []

    def run(self) -> Plan:
        """Return the best plan."""
        if smallest_ram(self.profile, self.allowed) > self.ram:
            raise explain_infeasible(self.profile, self.config, self.allowed, self.planner)
        if not self._bound():
            least = smallest(self.profile, self.allowed, host_update=self.config.host_update, host_budget=self.ram)
            if least is None or least.device_bytes > self.budget:
                raise explain_infeasible(self.profile, self.config, self.allowed, self.planner)
        if self.planner in ("auto", "resident"):
            self._add_resident()
        if self.planner in ("auto", "offmate") and not self._good_enough():
            self._add_programs()
        if self.planner == "auto":
            self._add_streaming()
        if not self.candidates and self.planner == "auto":
            self._add_smallest()
        if not self.candidates:
            raise explain_infeasible(self.profile, self.config, self.allowed, self.planner)
        return self._best()

    # -- candidates --------------------------------------------------------------------------------------------------

    def _add_resident(self) -> None:
        for choices, needed in resident_choices(self.profile, self.allowed):
            if needed <= self.budget:
                self._add("resident", choices)
                return
        self._fail("resident", "weights and optimizer states do not fit on the device")

    def _add_streaming(self) -> None:
        """Stream everything, as other runtimes do: to compare with, and for budgets below the program's smallest."""
        for host_update in (True, False) if self.config.host_update else (False,):
            options = option_sets(self.profile, self.allowed)[0]
            choices = streaming_choices(self.profile, options, host_update=host_update, lead=1, lag=1)
            name = f"stream all, update on the {'host' if host_update else 'device'}"
            peak = int(framework_bytes(choices.usage, self.profile).max()) + place_copies(choices, self.profile).extent
            if self.candidates and peak > self.room:
                self._fail(name, f"needs {format_bytes(peak - self.room)} more device memory")
            else:
                self._add(name, choices)

    def _add_smallest(self) -> None:
        found = smallest(self.profile, self.allowed, host_update=self.config.host_update, host_budget=self.ram)
        if found is not None:
            self._add("least memory", found.choices)

    def _add_programs(self) -> None:
        """Solve the program for several budgets: rounded, its plans need another one than it was solved for.

        While memory is not short, the program counts offloaded activations until their copies are done. Otherwise it
        counts them as gone at once, and ``fit`` sees to what it can.
        """
        self._search_budget(lag=1)
        if not self._fastest() <= self.bound * (1 + _FAIR_GAP):
            self._search_budget(lag=0)

    def _search_budget(self, lag: int) -> None:
        search = _BudgetSearch(self.budget)
        ram = self.ram
        for _ in range(_MOST_SOLVED):
            began = time.monotonic()
            left = self.config.time_limit - (began - self.started)
            if left <= 1:
                return
            name = f"offmate, solved for {format_bytes(search.next)}"
            config = replace(
                self.config,
                budget_bytes=search.next,
                host_budget_bytes=ram,
                lag=lag,
                lookahead=lag,
                phi=1.0,
                time_limit=left,
            )
            try:
                solution = solve_offmate(self.profile, config)
            except InfeasibleError as error:
                self._fail(name, "the program has no solution")
                if not search.raise_to(error.needed_bytes):
                    return
                continue
            except ConfigError:
                self._fail(name, f"the program was not solved within time_limit={self.config.time_limit:g} s")
                return
            over, excess = self._add(name, discretise(solution, self.profile, Slack()))
            ram -= max(excess, 0)
            if self._good_enough() or not (excess > 0 or search.advance(over)):
                return
            now = time.monotonic()
            patience = self.patience if self.candidates else self.config.time_limit
            if now - self.started + 1.2 * (now - began) > patience:
                return

    def _add(self, name: str, choices: Choices) -> tuple[int, int]:
        """Build a candidate; return by how many bytes it misses the device and the host budget."""
        used = choices.usage
        excess = host_bytes(used.options, used.places, self.profile) - self.ram
        if excess > 0:
            self._fail(name, f"needs {format_bytes(excess)} more RAM")
            return 0, excess
        fitted = fit(choices, self.profile, self.room)
        if fitted.over > 0:
            self._fail(name, f"needs {format_bytes(fitted.over)} more device memory")
            return fitted.over, excess
        plan = build(
            fitted.choices,
            self.profile,
            planner=name.partition(",")[0],
            budget_bytes=self.budget,
            host_budget_bytes=self.ram,
            placement=fitted.placement,
        )
        violations = check(plan, self.profile)
        assert not violations, f"{name}: {violations[:3]}"
        self.candidates.append(_Candidate(name=name, plan=plan, trace=simulate(plan, self.profile)))
        return fitted.over, excess

    def _fail(self, name: str, reason: str) -> None:
        self.failed.append(Alternative(planner=name, iteration_s=None, reason=reason))

    # -- choice ------------------------------------------------------------------------------------------------------

    def _bound(self) -> bool:
        """Bound the time of every plan: all memory in one pool, copies that overlap with everything.

        Returns False if even that has no solution; the bound is then that of the computations alone.
        """
        self.bound = sum(min(o.forward_s + o.backward_s for o in options) for options in self.allowed)
        try:
            self.bound = lower_bound(self.profile, replace(self.config, pools="shared", phi=0.0, lag=0, lookahead=0))
        except InfeasibleError:
            return False
        except ConfigError:
            pass  # not solved in time
        return True

    def _fastest(self) -> float:
        return min((candidate.trace.iteration_time for candidate in self.candidates), default=float("inf"))

    def _good_enough(self) -> bool:
        return self._fastest() <= self.bound * (1 + _GOOD_GAP)

    def _best(self) -> Plan:
        ranked = sorted(self.candidates, key=lambda candidate: candidate.trace.iteration_time)
        best, *others = ranked
        seconds = best.trace.iteration_time
        alternatives = [
            Alternative(
                planner=other.name,
                iteration_s=other.trace.iteration_time,
                reason=f"{other.trace.iteration_time / seconds - 1:.1%} slower",
            )
            for other in others
        ]
        prediction = Prediction(
            iteration_s=seconds,
            lower_bound_s=min(self.bound, seconds),
            no_offload_s=no_offload_s(self.profile),
            device_peak_bytes=best.trace.device_peak,
            host_peak_bytes=best.trace.host_peak,
        )
        notes = list(best.plan.notes)
        pinnable = self.profile.hardware.pinnable_bytes
        if best.trace.host_peak > pinnable:
            notes.append(
                f"only {format_bytes(pinnable)} of RAM may be pinned; copies of the rest are slower than predicted"
            )
        return replace(best.plan, predicted=prediction, notes=tuple(notes), alternatives=(*alternatives, *self.failed))


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
