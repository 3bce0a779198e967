"""Variables and rows of one parameter group in the OFFMATE program; their names are those of its model, model.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pulp

from lt_offload.plan.planners.lp import Pair, Term, require, summed
from lt_offload.plan.planners.offmate.config import OffmateConfig
from lt_offload.plan.planners.offmate.solution import Group

_WRITTEN_OUT = 6
"""In bounds, sums of more terms become variables: they would fill the matrix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTerms:
    """Variables, or constants where nothing is to be decided, per tau."""

    group: Group
    uses: tuple[int, ...]
    """Steps that need all parameters, as tau, ascending."""
    late: bool
    """The host updates its share while the next forward waits."""
    host_share: Term
    resident: list[Term]
    prefetch: list[Term]
    write_back: list[Term]
    grad_offload: list[Term]
    host_update: list[Term]
    state_resident: list[Term]
    state_prefetch: list[Term]
    state_offload: list[Term]
    grad_offload_between: Term = 0.0
    """In steps that have no variable, all together."""
    host_update_between: Term = 0.0

    @property
    def first_use(self) -> int:
        """``tau_f``, the first forward use."""
        return 2 * self.group.blocks[0] + 1


class GroupBuilder:
    """Adds the variables and rows of one group to a problem."""

    def __init__(
        self,
        problem: pulp.LpProblem,
        name: str,
        group: Group,
        uses: tuple[int, ...],
        steps: int,
        config: OffmateConfig,
        *,
        late_update: bool,
    ) -> None:
        self.problem, self.name, self.steps, self.config = problem, name, steps, config
        trainable, paged = group.trainable_bytes > 0, group.state_bytes > 0
        self.share = group.trainable_bytes / group.bytes if group.bytes else 0.0
        self.same = int(config.optimistic)
        """1: what happens within one step may happen in its order there, because steps are no barriers."""
        first_use = 2 * group.blocks[0] + 1
        # The host needs a step to receive gradients, one to update and one to send the result back.
        on_host = config.host_update and trainable and first_use >= 3
        late = config.host_update and late_update and trainable and first_use < 3
        release = config.reach + config.gradient_reach if trainable else 0
        resident, fetched = self._residency("R", uses, release)
        state, state_fetched = self._residency("S", (0,), release) if paged else ([0.0] * steps, [])
        # What has no variable of its own is counted in bounds only, which must not leave out what a plan may do.
        between = config.update_reach or first_use
        far = [f"{name}_{flow}" for flow, count in (("OG", 1), ("OP", 2)) if first_use > count * between]
        pooled = {far_name: problem.add_variable(far_name, 0, 1) for far_name in far if on_host and self.same}
        self.terms = GroupTerms(
            group=group,
            uses=uses,
            late=late,
            host_share=problem.add_variable(f"{name}_X", 0, 1) if on_host or late else 0.0,
            resident=resident,
            prefetch=self._flow("P", {*fetched, *((0,) * self.same if on_host else ())}),
            write_back=self._flow("OW", self._write_backs(uses, release) if trainable else ()),
            grad_offload=self._flow("OG", range(1 if late else self._gradient_steps(first_use) * on_host)),
            host_update=self._flow("OP", (first_use,) if late else self._update_steps(first_use) if on_host else ()),
            state_resident=state,
            state_prefetch=self._flow("PS", [*state_fetched, *((0,) * self.same if paged else ())]),
            state_offload=self._flow("OS", range(min(release, steps - 1)) if paged else ()),
            grad_offload_between=pooled.get(f"{name}_OG", 0.0),
            host_update_between=pooled.get(f"{name}_OP", 0.0),
        )
        self._require_weights()
        if on_host:
            self._require_host_update()
        elif late:
            self._require_all_on_host()
        if paged:
            self._require_states()

    def _gradient_steps(self, first_use: int) -> int:
        if self.config.optimistic:
            return min(self.config.update_reach or first_use, first_use)
        return min(self.config.gradient_reach, first_use - 2)

    def _update_steps(self, first_use: int) -> list[int]:
        steps = range(first_use) if self.config.optimistic else range(1, first_use - 1)
        # All of an update's bytes are updated in some step, so that those in the middle are the least needed.
        reach = self.config.update_reach or len(steps)
        return [tau for at, tau in enumerate(steps) if at < reach or at >= len(steps) - reach]

    def _flow(self, name: str, taus: Iterable[int]) -> list[Term]:
        flow: list[Term] = [0.0] * self.steps
        for tau in taus:
            flow[tau] = self.problem.add_variable(f"{self.name}_{name}_{tau:03d}", 0, 1)
        return flow

    def _residency(self, name: str, uses: tuple[int, ...], release: int) -> tuple[list[Term], list[int]]:
        """Return the residency per tau, 1 at uses (C2), and the taus of possible prefetches.

        There is a variable for each of the ``release`` steps after a use and the ``reach - 1`` steps before the next
        one, and a common one for all steps between.
        """
        resident: list[Term] = [1.0] * self.steps
        fetched: list[int] = []
        for use, following in zip(uses, (*uses[1:], uses[0] + self.steps), strict=True):
            gap = [tau % self.steps for tau in range(use + 1, following)]
            late = gap[max(0, len(gap) - self.config.reach + 1) :]
            fetched += late
            middle: Term | None = None
            for position, tau in enumerate(gap):
                explicit = position < release or position >= len(gap) - len(late)
                if explicit or middle is None:
                    resident[tau] = self.problem.add_variable(f"{self.name}_{name}_{tau:03d}", 0, 1)
                    middle = middle if explicit else resident[tau]
                else:
                    resident[tau] = middle
        return resident, fetched

    def _write_backs(self, uses: tuple[int, ...], release: int) -> list[int]:
        """Return the taus in which updated weights may leave: after the update, and around every further use."""
        taus = set(range(release))
        for use in uses[1:]:
            taus.update(range(use - self.config.reach, use + self.config.reach))
        return sorted(taus & set(range(self.steps - 1)))

    def _require_weights(self) -> None:
        v, problem = self.terms, self.problem
        covered: set[int] = set()
        for tau in range(self.steps):
            following = (tau + 1) % self.steps
            now, then = v.resident[tau], v.resident[following]
            if tau not in v.uses and now is not then:
                require(problem, [(1, then), (-1, now), (-1, v.prefetch[tau])], "<=")  # C3
            if self.share and tau not in v.uses and id(now) not in covered:
                covered.add(id(now))
                copies = [(1.0, flow) for flow in v.write_back[:tau]]
                require(problem, [(1, now), *copies, (self.share, v.host_share)], ">=", self.share)  # C5
        if self.share:
            require(problem, [(1, flow) for flow in v.write_back], "<=", self.share)  # C5

    def _require_all_on_host(self) -> None:
        v = self.terms
        for flows in ((*v.grad_offload, v.grad_offload_between), (*v.host_update, v.host_update_between)):
            require(self.problem, [(-1, v.host_share), *((1, flow) for flow in flows)], "==")  # C6

    def _require_host_update(self) -> None:
        v, problem, last = self.terms, self.problem, self.terms.first_use - 1
        self._require_all_on_host()
        arriving = last + 1 if self.config.optimistic else min(self.config.gradient_reach, last)
        updated = self._so_far("U", v.host_update[: last + 1])
        arrived = self._so_far("A", v.grad_offload[: arriving - 1 + self.same])
        reach = self.config.update_reach or v.first_use
        for sums, between in ((arrived, v.grad_offload_between), (updated, v.host_update_between)):
            if not isinstance(between, float):
                # When in between it is done is left open: it counts as done from the beginning.
                sums[reach + 1 :] = [[*terms, (1.0, between)] for terms in sums[reach + 1 :]]
        for tau in range(1 - self.same, arriving):
            if isinstance(v.host_update[tau], float):
                continue  # nothing is updated: the row before implies it
            require(problem, [*updated[tau + 1], *((-f, flow) for f, flow in arrived[tau + self.same])], "<=")  # C7
        # C8. What the host updates has to be fetched anew, in a bound perhaps within the step of the backward.
        at_once = [(-1.0, v.prefetch[0]), (1.0, v.prefetch[1])] if not self.same else [(-1.0, v.prefetch[0])]
        require(problem, [(1, v.resident[1]), *at_once, (self.share, v.host_share)], "<=", 1)
        for tau in range(2, last + 1):
            # Without a prefetch, C3 and the row of tau = 1 imply it.
            if not isinstance(v.prefetch[tau], float):
                stale = [(self.share, flow) for flow in v.host_update[tau : last + 1]]
                if self.same:
                    stale = [(self.share, v.host_share), *((-self.share * f, flow) for f, flow in updated[tau + 1])]
                require(problem, [(1, v.resident[tau]), (1, v.prefetch[tau]), *stale], "<=", 1)  # C8

    def _so_far(self, name: str, flow: Sequence[Term]) -> list[list[Pair]]:
        """Return, per position and behind the last, terms for the sum of ``flow`` before it."""
        sums: list[list[Pair]] = [[]]
        for tau, term in enumerate(flow):
            total = sums[-1] if isinstance(term, float) else [*sums[-1], (1.0, term)]
            if self.same and len(total) > _WRITTEN_OUT:
                total = summed(self.problem, f"{self.name}_{name}_{tau:03d}", total, 1)
            sums.append(total)
        return sums

    def _require_states(self) -> None:
        v, problem, end = self.terms, self.problem, self.steps - 1
        arrived = [(1.0, v.state_prefetch[end]), (1.0, v.state_prefetch[0])]
        require(problem, [(1, v.state_resident[end]), *arrived, (1, v.host_share)], ">=", 1)  # C4
        require(problem, [(1, v.state_resident[1]), (1, v.host_share)], "<=", 1)  # C4
        covered: set[int] = set()
        for tau in range(1, self.steps):
            now = v.state_resident[tau]
            if tau < end and now is not v.state_resident[tau + 1]:
                require(problem, [(1, v.state_resident[tau + 1]), (-1, now), (-1, v.state_prefetch[tau])], "<=")  # C3
            if id(now) not in covered:
                covered.add(id(now))
                copies = [(1.0, flow) for flow in v.state_offload[:tau]]
                require(problem, [(1, now), *copies, (1, v.host_share)], ">=", 1)  # C5
