"""The OFFMATE linear program of one training iteration: variables and rows, nothing about how it is solved or rounded.

After "OFFMATE: full fine-tuning of LLMs on a single GPU by re-materialization and offloading" (2024), whose equation
numbers stand in brackets below, with its misprints corrected and the gradient copy separated from the weight copy. Step
``t`` of ``T = 2L`` runs the forward of block ``t`` or the backward of block ``T - 1 - t``; everything about a parameter
group is indexed by ``tau = (t - g) mod T``, counted from its last backward step ``g``, so ``tau = 0`` is the step of
its update and ``tau_f`` its first forward use. ``W``, ``Wg``, ``Z`` are the bytes of its parameters, of the trainable
ones and of their optimizer states, ``x = Wg / W``.

Variables, fractions in [0, 1]: ``comp`` option of a block (1); ``R`` resident, ``P`` prefetched and ``OW`` written
back, of W; ``S``, ``PS``, ``OS`` the same for the states, of Z (3); ``X`` updated on the host, ``OG`` gradients copied
to the host and ``OP`` updated there, of Wg (4); ``Time`` of a step (2).

- C1  every block has one option (1).
- C2  parameters are resident in every step that uses them (5); a tied group has several such forward and backward
  steps.
- C3  what is resident was resident or prefetched in the step before, cyclically (9, 10).
- C4  the states of the device's share are resident in the update step, and nothing of the host's share afterwards (6).
- C5  what is not resident has a current host copy, made in a strictly earlier step (7 and 8 sum up to t, too late).
  Frozen parameters always have one.
- C6  the host's share: all its gradients are copied, all of it is updated (12). In bounds, tensors that the device
  never has room to update are in it.
- C7  the host updates only what arrived in an earlier step (12).
- C8  what the host has still to update is neither resident nor prefetched before the forward (11, 13).
- C9  device memory in every step (14-17), with gradients, update scratch and workspaces, which the paper's program
  leaves out.
- C10 host memory, where nothing is given back (18) but the places of gradients: those of one step are there together.
  States always have a place there, which the paper's have once they travel.
- C11 a step lasts at least its computation, its device update and the copies that cannot overlap them (19, 20; the rate
  in the printed (20) is the host's by mistake).
- C12 and at least its copies to the device (21), C13 and to the host (22), with the activations that both equations
  forget,
- C14 and at least the host's updates; all launches together bound the iteration only, as updates run on other threads
  (in (23) they interrupt each other).
- C15 and at least what its computations, copies and updates need beside each other, because they share the bandwidth of
  the host's memory (:mod:`lt_offload.plan.planners.sharing`; the paper's model has no such limit).

A group whose first forward directly follows its last backward (``tau_f = 1``, the embedding) has no step between in
which the host could update it. The paper leaves it to the device, with states that may not fit; here its forward may
wait: ``OP`` and the fetch belong to that step and are counted in C11, C12 and C14.

Bounds (``optimistic``) are of the same program with fewer rules, each of which every plan keeps: what happens within
one step may happen in its order there. A step lasts from the start of its computation to the start of the next one, and
what has to wait for the end of the computation is counted by :mod:`lt_offload.plan.planners.offmate.between`; forwards
that run again may do so early (:mod:`lt_offload.plan.planners.offmate.pooled`), and gradients take what the check
counts at least (:mod:`lt_offload.plan.planners.offmate.peaks`).

Transfers are allowed in steps near the uses only (the ``reach``); between them one variable says what stays. This makes
the program small enough to solve in seconds and costs less than 0.1 % with the default. Steps after a use are as
necessary as those before: without them everything that leaves would have to leave within the step that uses it. In
bounds the host updates in steps near the gradients or near the next use (the ``update_reach``), and what may be done
between is counted of all groups together (:mod:`lt_offload.plan.planners.offmate.pooled`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pulp

from lt_offload.plan.iteration.computations import SAVED
from lt_offload.plan.iteration.memory import room_within
from lt_offload.plan.iteration.timeline import Pace, timeline
from lt_offload.plan.planners.lp import NameRows, Pair, Problem, Term, add, levels, pairs, require, totals
from lt_offload.plan.planners.offmate.activations import pool_copies
from lt_offload.plan.planners.offmate.between import Between
from lt_offload.plan.planners.offmate.config import OffmateConfig
from lt_offload.plan.planners.offmate.group import GroupBuilder, GroupTerms
from lt_offload.plan.planners.offmate.peaks import backward_peak, least_backward
from lt_offload.plan.planners.offmate.pooled import PooledWork, Rerun, pool_reruns, pool_work
from lt_offload.plan.planners.offmate.solution import Group, groups
from lt_offload.plan.planners.request import allowed_options, held_bytes
from lt_offload.plan.planners.sharing import sharing_rows
from lt_offload.plan.planners.tables import lookups
from lt_offload.schema.profile import BlockProfile, OptionProfile, Profile, TensorProfile

Objective = Literal["time", "device"]


class LinearProgram:
    """The program for one profile and configuration.

    With objective ``device``, its budget is a variable to minimise and time does not matter. The methods without
    underscore say how the engine executes; a subclass may describe another runtime.
    """

    late_update = True
    """True if the host may update a group whose next forward follows its last backward at once (the embedding); the
    forward then waits for the update."""

    def __init__(self, profile: Profile, config: OffmateConfig, objective: Objective = "time") -> None:
        self.profile, self.config, self.objective = profile, config, objective
        self.timeline = timeline(profile)
        self.steps = len(self.timeline)
        self.pace = Pace(profile)
        self.options = [_options(block, config) for block in profile.blocks]
        self.groups = groups(profile)
        self.lookups = lookups(profile) if config.lookups else ()
        # The solver sees units that make its absolute tolerances meaningful: the largest group and the mean step.
        self.bytes_unit = float(max([group.bytes for group in self.groups] + [1]))
        self.seconds_unit = sum(o[0].forward_s + o[0].backward_s for o in self.options) / self.steps or 1.0
        per_second = self.seconds_unit / self.bytes_unit
        self.h2d_rate = profile.hardware.h2d_bytes_per_s * per_second
        self.d2h_rate = profile.hardware.d2h_bytes_per_s * per_second
        self.host_rate = profile.optimizer.host_bytes_per_s * per_second
        self.device_rate = profile.optimizer.device_bytes_per_s * per_second

        self.problem = Problem("offmate")
        self.comp: list[list[Term]] = []
        self.terms: list[GroupTerms] = []
        # Left-hand sides per step: two pools of device memory, four resources, and what computations have to wait for.
        self.arena, self.other, self.compute, self.h2d, self.d2h, self.host, self.exposed = (
            [pulp.LpAffineExpression() for _ in range(self.steps)] for _ in range(7)
        )
        self.host_memory = pulp.LpAffineExpression()
        self.arriving: defaultdict[int, pulp.LpAffineExpression] = defaultdict(pulp.LpAffineExpression)
        """By step: bytes of its gradients that the host updates with."""
        self.launched = pulp.LpAffineExpression()
        self.work: dict[str, list[list[Pair]]] = {}
        """By lane and step: what it has to do, once all of it is known."""
        self.offloaded: dict[int, list[Pair]] = {}
        """By forward step; only if they are counted together."""
        self.between = Between(self.problem, self.steps) if config.optimistic else None
        self.gradient_slopes: dict[int, float] = {}
        """Of bounds, by backward step: bytes if the host gets all gradients of the block's own weights."""
        self.reruns: dict[int, list[Rerun]] = {}
        """Of bounds, by the step of their block's backward."""
        self._add_blocks()
        if self.between is not None and self.offloaded:
            self._pool_activations(self.between)
            pool_reruns(self.problem, self.reruns, self.compute, self.between.computing, self.other)
        for index, group in enumerate(self.groups):
            builder = GroupBuilder(
                self.problem,
                f"w{index:03d}",
                group,
                self._uses(group),
                self.steps,
                config,
                late_update=self.late_update,
            )
            self.terms.append(builder.terms)
            self._count_parameters(builder.terms)
            self._count_gradients(builder.terms)
            self._count_transfers(builder.terms)
            if config.optimistic:
                self._leave_to_host(builder.terms)
        self._pool_work()
        self.device_budget = self._limit_device()
        self.host_budget = self._limit_host()
        self.limit(config.budget_bytes, config.host_budget_bytes)
        self.times = self._limit_times()
        self._set_objective()

    def limit(self, budget_bytes: int | None, host_budget_bytes: int | None) -> None:
        """Fix the budgets that are not minimised; both are variables, so that a solved program can begin again."""
        fixed = [(self.host_budget, host_budget_bytes and host_budget_bytes - self.profile.hardware.process_bytes)]
        if self.objective != "device":
            fixed.append((self.device_budget, budget_bytes and room_within(budget_bytes, self.profile)))
        for budget, count in fixed:
            if budget is not None and count is not None:
                budget.lowBound = budget.upBound = self._size(count)

    def _size(self, count: float) -> float:
        return count / self.bytes_unit

    def _duration(self, seconds: float) -> float:
        return seconds / self.seconds_unit

    # Blocks

    def _add_blocks(self) -> None:
        held: Term = 0.0
        for index, (block, options) in enumerate(zip(self.profile.blocks, self.options, strict=True)):
            weights: list[Term] = [1.0]
            if len(options) > 1:
                names = [f"b{index:03d}_{option.name}" for option in options]
                weights = [self.problem.add_variable(name, 0, 1, cat=pulp.LpBinary) for name in names]
                require(self.problem, [(1, weight) for weight in weights], "==", 1)  # C1
            self.comp.append(weights)
            self._count_block(index, block, options, weights, held)
            # One variable per prefix of the blocks instead of a sum over the prefix in every step.
            own = [(self._size(held_bytes(block, o)), weight) for o, weight in zip(options, weights, strict=True)]
            before, held = held, self.problem.add_variable(f"h{index:03d}", 0)
            require(self.problem, [*own, (1, before), (-1, held)], "==")

    def _count_block(
        self, index: int, block: BlockProfile, options: Sequence[OptionProfile], weights: list[Term], held: Term
    ) -> None:
        forward, backward = self.timeline.forward(index), self.timeline.backward(index)
        interface = block.input_bytes + block.output_bytes
        add(self.other[forward], [(1, held), (self._size(interface), 1.0)])
        self.count_launch(forward, block)
        for option, weight in zip(options, weights, strict=True):
            saved = option.saved_bytes if block.has_backward else 0
            add(self.other[forward], [(self._size(saved + option.forward_peak_bytes), weight)])
            self._count_computation(forward, option.forward_s, weight)
        if not block.has_backward:
            return
        add(self.other[backward], [(1, held), (self._size(interface + block.input_bytes), 1.0)])
        self.count_launch(backward, block)
        reruns = self.reruns[backward] = []
        for option, weight in zip(options, weights, strict=True):
            again = _rerun_s(block, option) if self.between is not None else 0.0
            self._count_computation(backward, option.backward_s - again, weight)
            ahead = _rebuilt_bytes(block, option) if again else 0
            reruns.append(Rerun(self._duration(again), self._size(ahead), weight))
            add(self.host_memory, [(self._size(option.offload_bytes), weight)])
        peaks = [float(option.backward_peak_bytes) for option in options]
        if self.config.optimistic:
            line = backward_peak(self.profile, index, options, host_update=self.config.host_update)
            peaks, self.gradient_slopes[backward] = list(line.low), line.slope
        for option, peak, weight in zip(options, peaks, weights, strict=True):
            add(self.other[backward], [(self._size(option.saved_bytes + peak), weight)])
        offloaded = [(self._size(o.offload_bytes), w) for o, w in zip(options, weights, strict=True)]
        if self.config.optimistic:
            self.offloaded[forward] = offloaded
        else:
            self._count_copies(index, offloaded)

    def _pool_activations(self, between: Between) -> None:
        lanes = ((self.d2h, self.d2h_rate), (self.h2d, self.h2d_rate))
        # Between the last block's forward and the loss, copies give memory back.
        last, apart = len(self.profile.blocks) - 1, any(o.before_loss_bytes is not None for o in self.options[-1])
        loss = self.timeline.forward(last) if apart else None
        left, between.fetched = pool_copies(
            self.problem, self.timeline, self.offloaded, lanes, self.other, leaves_within=loss
        )
        for step, sent in left.items():
            add(between.d2h[step], [(factor / self.d2h_rate, term) for factor, term in sent])

    def _count_computation(self, step: int, seconds: float, weight: Term) -> None:
        add(self.compute[step], [(self._duration(seconds), weight)])
        if self.between is not None:
            add(self.between.computing[step], [(self._duration(seconds), weight)])

    def count_launch(self, step: int, block: BlockProfile) -> None:
        """Count the launch of a step's kernels. The host updates on threads of their own, which it does not stop."""
        add(self.launched, [(self._duration(block.launch_s), 1.0)])

    def _count_copies(self, index: int, offloaded: list[Pair]) -> None:
        """Count copies of saved activations, and the memory they take in other steps than the block's own two."""
        if not any(size for size, _ in offloaded):
            return
        forward, backward = self.timeline.forward(index), self.timeline.backward(index)
        latest = min(self.pace.later(forward, self.config.lag), backward - 1)
        earliest = max(self.pace.earlier(backward, self.config.lookahead), latest + 1)
        for step in (*range(forward + 1, latest + 1), *range(earliest, backward)):
            add(self.other[step], offloaded)
        for rows, rate, steps in (
            (self.d2h, self.d2h_rate, range(forward, latest + 1)),
            (self.h2d, self.h2d_rate, range(earliest, backward + 1)),
        ):
            flows = [self.problem.add_variable(f"a{index:03d}_{step:03d}", 0) for step in steps]
            require(self.problem, [*offloaded, *((-1, flow) for flow in flows)], "==")
            for step, flow in zip(steps, flows, strict=True):
                add(rows[step], [(1 / rate, flow)])

    # Parameter groups

    def _uses(self, group: Group) -> tuple[int, ...]:
        blocks = [block for block in group.blocks if not self._hardly_reads(block, group)] or group.blocks
        forward = {self.timeline.forward(block) for block in blocks}
        backward = {self.timeline.backward(block) for block in blocks if self.profile.blocks[block].has_backward}
        return tuple(sorted((step - group.last_backward) % self.steps for step in forward | backward))

    def _hardly_reads(self, block: int, group: Group) -> bool:
        """Return whether, for a bound, ``block`` needs no copy of the group: it can read some rows on the host."""
        if not self.config.optimistic:
            return False
        tensors = [self.profile.tensors[index] for index in group.tensors]
        return all(t.zero_copy is not None and t.read(block).forward_bytes < t.bytes for t in tensors)

    def _count_parameters(self, v: GroupTerms) -> None:
        size, states = self._size(self._copied_bytes(v.group)), self._size(v.group.state_bytes)
        for tau in range(self.steps):
            row = self.arena[(v.group.last_backward + tau) % self.steps]
            add(row, [(size, v.resident[tau])])
            if tau:
                add(row, [(states, v.state_resident[tau])])
            else:
                add(row, [(states, 1.0), (-states, v.host_share), (-states, v.state_prefetch[0])])
            if not self.config.optimistic:  # else what arrives may take the place of what leaves in the same step
                add(row, [(size, v.prefetch[tau]), (states, v.state_prefetch[tau] if tau else 0.0)])
        if self.between is not None:
            self.between.count_group(v, size, states)
        trained = self._size(v.group.trainable_bytes)
        add(self.host_memory, self._lasting_on_host(v))
        add(self.arriving[v.group.last_backward], [(trained, v.host_share)])

    def _lasting_on_host(self, v: GroupTerms) -> list[Pair]:
        """Return terms for the host memory of a group's weights and states, of one process.

        States that stay on the device have a copy, too. What several processes have in common counts by its part:
        frozen weights, and what the host updates.
        """
        group, part = v.group, 1 / self.profile.processes
        weights = self._size(part * (group.bytes - group.trainable_bytes) + group.trainable_bytes)
        lasting: list[Pair] = [(weights, 1.0), *self.states_on_host(v)]
        if self.profile.common_updates:
            sums = sum(self.profile.tensors[index].sum_bytes for index in group.tensors)
            in_common = self._size(group.trainable_bytes - sums) + self._size(group.state_bytes)
            lasting.append((-(1 - part) * in_common, v.host_share))
        return lasting

    def states_on_host(self, v: GroupTerms) -> list[Pair]:
        """Return terms for the host memory of a group's states."""
        return [(self._size(v.group.state_bytes), 1.0)]

    def _copied_bytes(self, group: Group) -> int:
        """Return the bytes of the group that its uses need on the device.

        For a bound, a tensor that every block hardly reads counts for none; if some do, as with a table that is tied to
        a projection, those are no uses.
        """
        if not self.config.optimistic:
            return sum(self.profile.tensors[index].bytes for index in group.tensors if index not in self.lookups)
        if any(self._hardly_reads(block, group) for block in group.blocks):
            return 0 if all(self._hardly_reads(block, group) for block in group.blocks) else group.bytes
        tensors = [self.profile.tensors[index] for index in group.tensors]
        return sum(t.bytes for t in tensors if not (t.zero_copy and _hardly_read(t)))

    def _late_bytes(self, group: Group) -> int:
        """Return the bytes that a forward needs whose weights the host has updated right before it."""
        return min(self._copied_bytes(group), group.trainable_bytes)

    def gradient_peak(self, group: Group) -> float:
        """Return the peak of a group's gradient bytes in its update step over its trainable bytes.

        It is that of the largest tensor: each is updated as soon as its gradient is complete.
        """
        tensors = [self.profile.tensors[index] for index in group.tensors]
        return max(tensor.bytes for tensor in tensors if tensor.trainable) / group.trainable_bytes

    def _scratch_ratio(self, group: Group) -> float:
        """Return the most that an update of a tensor takes for a moment, per byte of the largest tensor's gradient."""
        trained = [index for index in group.tensors if self.profile.tensors[index].trainable]
        return max(map(self.profile.scratch, trained)) / max(self.profile.tensors[index].bytes for index in trained)

    def _count_gradients(self, v: GroupTerms) -> None:
        """Count gradients and update scratch.

        Gradients for the host are there until the end of the step in which they leave. With the device's, the peak in
        the update step is interpolated between "each tensor is updated at once" and "all wait". Gradients of tied
        parameters are complete in the last backward use only, and wait for it from the first one on.
        """
        if not v.group.trainable_bytes:
            return
        size, update = self._size(v.group.trainable_bytes), v.group.last_backward
        backwards = [self.timeline.backward(block) for block in reversed(v.group.blocks)]
        peak, scratch = self.gradient_peak(v.group), self._scratch_ratio(v.group)
        if not self.config.optimistic:
            add(self.other[update], [(size * peak, 1.0), (size * (1 - peak), v.host_share)])
            add(self.other[update], [(size * peak * scratch, 1.0), (-size * peak * scratch, v.host_share)])
        elif len(backwards) == 1:
            add(self.other[update], [(self._size(self.gradient_slopes[update]), v.host_share)])
        for tau in range(1, min(self.config.gradient_reach, v.first_use - 2)):
            left = [(-size, flow) for flow in v.grad_offload[:tau]]
            add(self.other[(update + tau) % self.steps], [(size, v.host_share), *left])
        for step in range(backwards[0] + self.config.optimistic, update):
            add(self.other[step], [(size, 1.0)])
        if len(backwards) > 1:
            add(self.other[update], [(size, 1.0)])
            for step in backwards[1:-1] if not self.config.optimistic else ():
                add(self.other[step], [(size * peak, 1.0)])

    def _leave_to_host(self, v: GroupTerms) -> None:
        """Have the host update what the device never has the room to update.

        A part of a tensor may find room there, but a plan updates a tensor in one place, with all its states beside it.
        Programs for plans do without: rounded, they are better in some cases and worse in others.
        """
        if self.config.budget_bytes is None or isinstance(v.host_share, float):
            return
        block, room = v.group.blocks[0], room_within(self.config.budget_bytes, self.profile)
        room -= least_backward(self.profile, block, self.options[block], host_update=self.config.host_update)
        trained = [tensor for index in v.group.tensors if (tensor := self.profile.tensors[index]).trainable]
        too_large = sum(tensor.bytes for tensor in trained if tensor.bytes + tensor.state_bytes > room)
        v.host_share.lowBound = too_large / v.group.trainable_bytes

    def _count_transfers(self, v: GroupTerms) -> None:
        copied = self._copied_bytes(v.group)
        size, trained, states = (self._size(n) for n in (copied, v.group.trainable_bytes, v.group.state_bytes))
        for tau in range(self.steps):
            step = (v.group.last_backward + tau) % self.steps
            fetched = [(size, v.prefetch[tau]), (states, v.state_prefetch[tau])]
            left = [(size, v.write_back[tau]), (trained, v.grad_offload[tau]), (states, v.state_offload[tau])]
            add(self.h2d[step], [(bytes_ / self.h2d_rate, flow) for bytes_, flow in fetched])
            add(self.d2h[step], [(bytes_ / self.d2h_rate, flow) for bytes_, flow in left])
            if not v.late or self.between is None:
                add(self.host[step], [(trained / self.host_rate, v.host_update[tau])])
            if tau == 0 and self.between is not None:
                self._count_behind(self.between, step, v)
            if tau == 0:
                on_device = trained / self.device_rate
                add(self.compute[step], [(on_device, 1.0), (-on_device, v.host_share)])
                add(self.exposed[step], [(self.config.phi * bytes_ / self.d2h_rate, flow) for bytes_, flow in left])
            if tau == v.first_use and v.late and self.between is None:
                fetched_late = self._size(self._late_bytes(v.group)) / self.h2d_rate
                waits = self.config.phi * (trained / self.host_rate + fetched_late)
                add(self.exposed[step], [(waits, v.host_share)])
                add(self.h2d[step], [(fetched_late, v.host_share)])

    def _count_behind(self, between: Between, step: int, v: GroupTerms) -> None:
        """Count what a group copies in the step of its update: behind the backward, unless that writes gradients."""
        written = any(self.profile.tensors[index].zero_copy for index in v.group.tensors)
        copied = [(self._copied_bytes(v.group), v.write_back[0]), (v.group.state_bytes, v.state_offload[0])]
        copied += [] if written else [(v.group.trainable_bytes, v.grad_offload[0])]
        add(between.d2h[step], [(self._size(nbytes) / self.d2h_rate, flow) for nbytes, flow in copied])
        if not v.late:
            return
        # Its next forward begins the next step, so that the host's update and the fetch belong to this one.
        trained, fetched = (self._size(n) for n in (v.group.trainable_bytes, self._late_bytes(v.group)))
        seconds = trained / self.host_rate, fetched / self.h2d_rate
        add(self.host[step], [(seconds[0], v.host_share)])
        add(self.h2d[step], [(seconds[1], v.host_share)])
        add(between.host[step], [(seconds[0], v.host_share)])
        between.fetched.setdefault(step, []).append((fetched, v.host_share))
        if len(v.group.tensors) == 1 and not written:
            # One after the other, as it is one tensor.
            add(between.host[step], [(trained / self.d2h_rate + seconds[1], v.host_share)])

    # Rows over all blocks and groups

    def _pool_work(self) -> None:
        """Count gradients and updates of all groups that are in steps without a variable of their own."""
        reach, backward = self.config.update_reach or 0, self.steps // 2
        for lane, rows, rate in (("d2h", self.d2h, self.d2h_rate), ("host", self.host, self.host_rate)):
            works = []
            for v in self.terms:
                term, last = v.grad_offload_between, v.first_use - 1
                if lane == "host":
                    term, last = v.host_update_between, last - reach
                if not isinstance(term, float):
                    amount, made = self._size(v.group.trainable_bytes) / rate, v.group.last_backward - backward
                    works.append(PooledWork((amount, term), made + reach, made + last))
            pool_work(self.problem, f"pooled_{lane}", works, [*rows[backward:], *rows[:backward]])

    def _limit_device(self) -> pulp.LpVariable | None:
        """Add C9; return what the budget leaves a plan, None without limit."""
        budget: pulp.LpVariable | None = None
        if self.objective == "device":
            budget = self.problem.add_variable("budget", 0)
        elif self.config.budget_bytes is not None:
            budget = self.problem.add_variable("budget")
        if budget is None:
            return None
        self.limit_pools(budget)
        return budget

    def limit_pools(self, budget: pulp.LpVariable) -> None:
        """Limit the two pools of device memory: an arena of fixed extent, and what is left of ``budget``."""
        extent = self.problem.add_variable("extent", 0)
        for arena, other in zip(self._named("arena", self.arena, levels), self.other, strict=True):
            require(self.problem, [*arena, (-1, extent)], "<=")
            require(self.problem, [*pairs(other), (1.0, extent), (-1, budget)], "<=")
        if self.between is not None:
            self.between.limit_arena(extent)

    def _named(self, name: str, rows: Sequence[pulp.LpAffineExpression], way: NameRows) -> list[list[Pair]]:
        """Return what equals ``rows``: in bounds, variables that keep the matrix small."""
        return way(self.problem, name, rows) if self.config.optimistic else [pairs(row) for row in rows]

    def _limit_host(self) -> pulp.LpVariable | None:
        """Add C10; return the budget like :meth:`_limit_device`."""
        if self.config.host_budget_bytes is None:
            return None
        budget = self.problem.add_variable("host_budget")
        gradients = self.gradients_on_host()
        require(self.problem, [*pairs(self.host_memory), *gradients, (-1, budget)], "<=")  # C10
        return budget

    def gradients_on_host(self) -> list[Pair]:
        """Return terms for the host memory of gradients: those of different steps take turns in it."""
        most = self.problem.add_variable("gradients", 0)
        for row in self.arriving.values():
            require(self.problem, [*pairs(row), (-1, most)], "<=")
        return [(1, most)]

    def _limit_times(self) -> list[pulp.LpVariable]:
        if self.objective != "time":
            return []
        times = [self.problem.add_variable(f"t{step:03d}", 0) for step in range(self.steps)]
        lanes = {"compute": self.compute, "h2d": self.h2d, "d2h": self.d2h, "host": self.host}
        self.work = {lane: self._named(lane, rows, totals) for lane, rows in lanes.items()}
        computed = [[*own, *pairs(waits)] for own, waits in zip(self.work["compute"], self.exposed, strict=True)]
        copied = [self.work[lane] for lane in ("h2d", "d2h", "host")]
        direct = self.config.optimistic and any(tensor.zero_copy for tensor in self.profile.tensors)
        for factors in sharing_rows(self.profile.contention, direct=direct):
            used = [(factor, self.work[lane]) for lane, factor in factors.items() if lane in self.work]
            copied.append([[(f * a, x) for f, rows in used for a, x in rows[t]] for t in range(self.steps)])
        for rows in (computed, *copied):  # C11 to C15
            for row, time in zip(rows, times, strict=True):
                require(self.problem, [*row, (-1, time)], "<=")
        require(self.problem, [*pairs(self.launched), *((-1, time) for time in times)], "<=")
        if self.between is not None:
            self.between.limit_times(times, self.h2d_rate)
        return times

    def _set_objective(self) -> None:
        goal = pulp.LpAffineExpression()
        if self.objective == "time":
            add(goal, [(1, time) for time in self.times])
            for row in (*self.work["h2d"], *self.work["d2h"]):
                add(goal, [(self.config.traffic_weight * factor, term) for factor, term in row])
        else:
            assert self.device_budget is not None
            add(goal, [(1, self.device_budget)])
        self.problem.setObjective(goal)


def _hardly_read(tensor: TensorProfile) -> bool:
    reads = tensor.zero_copy.reads if tensor.zero_copy is not None else ()
    return any(read.forward_bytes < tensor.bytes for read in reads)


def _rerun_s(block: BlockProfile, option: OptionProfile) -> float:
    """Return the seconds of ``option``'s backward that may be spent earlier, on a forward that runs again."""
    keep = _kept(block, option)
    return 0.0 if keep is None else max(0.0, option.backward_s - keep.backward_s)


def _rebuilt_bytes(block: BlockProfile, option: OptionProfile) -> int:
    """Return what ``block`` holds more as soon as its forward has run again."""
    keep = _kept(block, option)
    return 0 if keep is None else max(0, held_bytes(block, keep) - held_bytes(block, option))


def _kept(block: BlockProfile, option: OptionProfile) -> OptionProfile | None:
    if SAVED[option.name] == "all":
        return None
    return next((other for other in block.options if other.name == "keep"), None)


def _options(block: BlockProfile, config: OffmateConfig) -> tuple[OptionProfile, ...]:
    """Return the options that the program chooses from.

    It runs nothing again but the block whose backward it is. For a bound, what is dropped and comes from other blocks'
    forwards costs the least that it can: one forward of its own. One that runs again early costs what ``keep`` does.
    """
    offers = []
    for option in allowed_options(block, config, discard=config.optimistic):
        seconds = option.backward_s + option.forward_s if option.name == "discard" else option.backward_s
        keep = _kept(block, option) if config.optimistic else None
        if keep is not None:
            seconds = min(seconds, keep.forward_s + keep.backward_s)
        offers.append(option if seconds == option.backward_s else replace(option, backward_s=seconds))
    return tuple(offers)
