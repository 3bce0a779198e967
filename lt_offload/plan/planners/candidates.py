"""Turns proposals into plans that fit, checks and simulates them, and ranks them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lt_offload.errors import ConfigError
from lt_offload.plan.assembly.just_in_time import Misfit, just_in_time
from lt_offload.plan.assembly.plan import build
from lt_offload.plan.iteration.decisions import Decisions
from lt_offload.plan.planners.request import Proposal, Request
from lt_offload.plan.planners.slots import share_slots
from lt_offload.plan.verify.check import check
from lt_offload.plan.verify.simulate import simulate
from lt_offload.schema.plan import Alternative, Plan
from lt_offload.schema.trace import Trace
from lt_offload.units import format_bytes

_HOPELESS = 1.05
"""A proposal that takes so many times as long as the best plan is not scheduled with care."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A plan that fits."""

    proposal: Proposal
    plan: Plan
    trace: Trace

    @property
    def seconds(self) -> float:
        """Simulated time of an iteration."""
        return self.trace.iteration_time


@dataclass(frozen=True, kw_only=True, slots=True)
class Missed:
    """By how many bytes a proposal misses the device and the host budget; not positive if it fits."""

    device: int
    host: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedPlan:
    """Decisions with times, their plan and its simulation; gradients share no memory on the host yet."""

    decisions: Decisions
    plan: Plan
    trace: Trace


def timed_plan(
    planner: str, decisions: Decisions, request: Request, *, quick: bool = False, hopeless_s: float = math.inf
) -> TimedPlan | Misfit:
    """Return the plan of ``decisions`` with the schedule that :func:`just_in_time` finds for them, and what it says."""
    found = just_in_time(decisions, request.profile, request.capacity_bytes, quick=quick, hopeless_s=hopeless_s)
    if isinstance(found, Misfit):
        return found
    plan = build(
        found.decisions,
        request.profile,
        planner=planner,
        budget_bytes=request.budget_bytes,
        host_budget_bytes=request.host_budget_bytes,
        scheduled=found,
    )
    return TimedPlan(decisions=found.decisions, plan=plan, trace=simulate(plan, request.profile))


class Candidates:
    """Every proposal for one request so far: those that fit, and why the others did not."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.fitting: list[Candidate] = []
        self.failed: list[Alternative] = []
        self.out_of_time: ConfigError | None = None
        """Set if a program was given up; only worth raising if nothing fits."""

    def add(self, proposal: Proposal) -> Missed:
        """Schedule, build, check and simulate ``proposal``."""
        request, profile = self.request, self.request.profile
        excess = proposal.decisions.least_host_bytes(profile) - request.host_budget_bytes
        if excess > 0:
            self.fail(proposal.name, f"needs {format_bytes(excess)} more RAM")
            return Missed(device=0, host=excess)
        found = timed_plan(
            proposal.name.partition(",")[0],
            proposal.decisions,
            request,
            hopeless_s=_HOPELESS * self.fastest_s,
        )
        if isinstance(found, Misfit):
            self.fail(proposal.name, f"needs {format_bytes(found.bytes)} more device memory")
            return Missed(device=found.bytes, host=0)
        self._keep(Candidate(proposal=replace(proposal, decisions=found.decisions), plan=found.plan, trace=found.trace))
        return Missed(device=0, host=0)

    def estimate(self, proposal: Proposal) -> float | Missed:
        """Return about how long ``proposal`` would take, or by what it misses the budgets."""
        request = self.request
        excess = proposal.decisions.least_host_bytes(request.profile) - request.host_budget_bytes
        if excess > 0:
            self.fail(proposal.name, f"needs {format_bytes(excess)} more RAM")
            return Missed(device=0, host=excess)
        found = just_in_time(proposal.decisions, request.profile, request.capacity_bytes, quick=True)
        if isinstance(found, Misfit):
            self.fail(proposal.name, f"needs {format_bytes(found.bytes)} more device memory")
            return Missed(device=found.bytes, host=0)
        return found.seconds

    def _keep(self, found: Candidate) -> None:
        """Let its gradients share memory on the host, check it and add it to those that fit."""
        shared, trace = share_slots(found.plan, self.request.profile, found.trace)
        violations = check(shared, self.request.profile)
        assert not violations, f"{found.proposal.name}: {violations[:3]}"
        self.fitting.append(replace(found, plan=shared, trace=trace))

    def fail(self, name: str, reason: str) -> None:
        """Note that ``name`` has no plan."""
        self.failed.append(Alternative(planner=name, iteration_s=None, reason=reason))

    @property
    def fastest_s(self) -> float:
        """Time of the best plan; infinity if there is none."""
        return min((candidate.seconds for candidate in self.fitting), default=float("inf"))

    def ranked(self) -> list[Candidate]:
        """Return what fits, the fastest first."""
        return sorted(self.fitting, key=lambda candidate: candidate.seconds)

    def runners_up(self) -> tuple[Alternative, ...]:
        """Return everything but the best, with the reason why it was not chosen."""
        best, *others = self.ranked()
        slower = [
            Alternative(
                planner=other.proposal.name,
                iteration_s=other.seconds,
                reason=f"{other.seconds / best.seconds - 1:.1%} slower" if other.seconds > best.seconds else "as fast",
            )
            for other in others
        ]
        return (*slower, *self.failed)
