"""Turns proposals into plans that fit, checks and simulates them, and ranks them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lt_offload.errors import ConfigError
from lt_offload.plan.assembly.just_in_time import Missed
from lt_offload.plan.assembly.ops import TiedTable
from lt_offload.plan.assembly.plan import build
from lt_offload.plan.assembly.sets import Sets
from lt_offload.plan.assembly.timetable import Timetable
from lt_offload.plan.iteration.decisions import hosted
from lt_offload.plan.planners.request import Proposal, Request, far_behind
from lt_offload.plan.planners.slots import share_slots
from lt_offload.plan.planners.timed_plan import PlanScheduler, TimedPlan
from lt_offload.plan.verify.check import check
from lt_offload.schema.plan import Alternative, Pass, Plan
from lt_offload.schema.profile import Profile
from lt_offload.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate(TimedPlan):
    """A plan that fits."""

    proposal: Proposal

    def written(
        self,
        profile: Profile,
        passes: tuple[Pass, ...],
        timetable: Timetable | None = None,
        table: TiedTable | None = None,
    ) -> Plan:
        """Return the plan with other kinds of passes, or a table in two parts; ``timetable``: also at other times."""
        return build(
            timetable or self.timetable,
            profile.with_host_threads(self.plan.host_threads),
            planner=self.plan.planner,
            budget_bytes=self.plan.budget_bytes,
            host_budget_bytes=self.plan.host_budget_bytes,
            passes=passes,
            like=self.plan,
            table=table,
        )


class Candidates:
    """Every proposal for one request so far: those that fit, and why the others did not."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.fitting: list[Candidate] = []
        self.slower_ones: list[tuple[str, float]] = []
        """Names and times of those that were slower than another one when they came."""
        self.failed: list[Alternative] = []
        self._started: dict[str, PlanScheduler] = {}
        """By name: proposals that have been estimated only."""
        self.cut: list[str] = []
        """Searches that were not begun, or not brought to their end, for lack of time."""
        self.out_of_time: ConfigError | None = None
        """Set if a program was given up; only worth raising if nothing fits."""

    def add(self, proposal: Proposal, *, careful: bool = True) -> None:
        """Schedule, build and simulate ``proposal``; ``careful``: look for the best schedule if it may win."""
        request = self.request
        proposal = self._allowed(proposal)
        if self._needs_more_ram(proposal):
            return
        # A proposal that was estimated has schedules already, and is gone on with.
        search = self._started.pop(proposal.name, None) or self._start(proposal)
        if isinstance(search, Missed):
            return
        if careful and far_behind(search.seconds, self.fastest_s):
            self.slower_ones.append((proposal.name, search.seconds))
            return
        timed = search.finish(self.fastest_s) if careful else search.simulated()
        if careful and request.late:
            self.cut.append(f"schedules of {proposal.name}")
        self._keep(proposal, timed)

    def _needs_more_ram(self, proposal: Proposal) -> int:
        """Return the bytes of RAM that are missing, which is noted; 0 if it suffices."""
        excess = proposal.decisions.least_host_bytes(self.request.profile) - self.request.host_budget_bytes
        if excess > 0:
            self.fail(proposal.name, f"needs {format_bytes(excess)} more RAM")
        return max(excess, 0)

    def _start(self, proposal: Proposal, *, allow_no_prefetch: bool = True) -> PlanScheduler | Missed:
        search = PlanScheduler(proposal.name.partition(",")[0], proposal.sets, self.request)
        missed = search.start(allow_no_prefetch=allow_no_prefetch)
        if missed is None:
            return search
        self.fail(proposal.name, f"needs {format_bytes(missed.device)} more device memory")
        return missed

    def estimate(self, proposal: Proposal, *, any_ram: bool = False) -> float | Missed:
        """Return about how long ``proposal`` would take, or by what it misses the budgets.

        ``any_ram``: also if it needs more RAM than there is.
        """
        proposal = self._allowed(proposal)
        # RAM first: what lasts on the host is known from decisions, and spares the schedule.
        if not any_ram and (excess := self._needs_more_ram(proposal)):
            return Missed(host=excess)
        search = self._start(proposal, allow_no_prefetch=False)
        if isinstance(search, Missed):
            return search
        self._started[proposal.name] = search
        return search.simulated().seconds

    def _allowed(self, proposal: Proposal) -> Proposal:
        """Return ``proposal`` with all updates on the host, if that is where they have to be."""
        if not self.request.settings.hosted:
            return proposal
        decisions = hosted(proposal.decisions, self.request.profile)
        return replace(proposal, sets=Sets(decisions, self.request.profile))

    def _keep(self, proposal: Proposal, timed: TimedPlan) -> None:
        """Add a plan to those that fit if it is the fastest; its gradients then share memory on the host."""
        if timed.seconds > self.fastest_s:
            self.slower_ones.append((proposal.name, timed.seconds))
            return
        # Copies may have to wait for the memory that others leave, so that the plan may be slower than it was.
        plan, trace = share_slots(timed.plan, self.request.profile, timed.trace)
        self.fitting.append(Candidate(proposal=proposal, timetable=timed.timetable, plan=plan, trace=trace))

    def fail(self, name: str, reason: str) -> None:
        """Note that ``name`` has no plan."""
        self.failed.append(Alternative(planner=name, iteration_s=None, reason=reason))

    @property
    def fastest_s(self) -> float:
        """Time of the best plan; infinity if there is none."""
        return min((candidate.seconds for candidate in self.fitting), default=float("inf"))

    def best(self) -> Candidate:
        """Return the fastest that fits, checked."""
        best = self.ranked()[0]
        violations = check(best.plan, self.request.profile)
        assert not violations, f"{best.proposal.name}: {violations[:3]}"
        return best

    def ranked(self) -> list[Candidate]:
        """Return what fits, the fastest first."""
        return sorted(self.fitting, key=lambda candidate: candidate.seconds)

    def runners_up(self) -> tuple[Alternative, ...]:
        """Return everything but the best, with the reason why it was not chosen."""
        best, *others = self.ranked()
        slower = [*self.slower_ones, *((other.proposal.name, other.seconds) for other in others)]
        return (
            *(
                Alternative(
                    planner=name,
                    iteration_s=seconds,
                    reason=f"{seconds / best.seconds - 1:.1%} slower" if seconds > best.seconds else "as fast",
                )
                for name, seconds in sorted(slower, key=lambda item: item[1])
            ),
            *self.failed,
        )
