"""Work of the lanes for the sets of a proposal, on a machine: seconds, each lane alone."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate
from typing import NamedTuple

from lt_offload.plan.assembly.sets import Sets
from lt_offload.plan.iteration.computations import computations
from lt_offload.schema.lanes import MACHINE_LANES, LaneName
from lt_offload.schema.profile import Profile


class HostUpdate(NamedTuple):
    """Gradients that arrive together, and the update on the host that they are for."""

    tensors: list[int]
    bytes: int
    copy_s: float
    update_s: float
    wait: int
    """Steps until the first use of what is updated."""


class LaneWork:
    """The work of ``sets`` with the speeds of ``profile``, which may be other ones than those of the proposal."""

    def __init__(self, sets: Sets, profile: Profile) -> None:
        self.sets, self.profile = sets, profile
        self.seconds = [0.0] * sets.steps
        """Per step: of its computations and of the updates on the device. That launches may last longer is left to the
        simulation."""
        self.reads = [0.0] * sets.steps
        """Per step: seconds for which direct reads of host memory occupy the link."""
        self._add_computations()
        self.gradients = [
            [self._host_update(tensors, step) for tensors in parts] for step, parts in enumerate(sets.gradients)
        ]
        """Per step: gradients that are copied behind it."""
        self.written = [
            self._host_update(tensors, step) if tensors else None for step, tensors in enumerate(sets.written)
        ]
        """Per step: gradients that its backward writes to the host."""
        self.seconds_after = [*accumulate(reversed(self.seconds[1:]), initial=0.0)][::-1]
        """Per step: of all steps behind it."""

    def _host_update(self, tensors: list[int], step: int) -> HostUpdate:
        sets, profile = self.sets, self.profile
        nbytes = sum(profile.tensors[t].bytes for t in tensors)
        uses = [stay.need for t in tensors for stay in sets.of_tensor.get(("weight", t), ())]
        return HostUpdate(
            tensors=tensors,
            bytes=nbytes,
            copy_s=nbytes / profile.hardware.d2h_bytes_per_s,
            update_s=nbytes / profile.optimizer.host_bytes_per_s,
            wait=min(((need - step) % sets.steps or sets.steps for need in uses), default=sets.steps),
        )

    @property
    def least_s(self) -> float:
        """Lower bound of schedules: the time of the busiest lane, or of the use of what all lanes share."""
        shares, busy_s = self.profile.contention, self.busy_s
        shared = (shares.of(lane.name) * seconds for lane, seconds in zip(MACHINE_LANES, busy_s, strict=True))
        return max(*busy_s, sum(shared))

    @property
    def busy_s(self) -> tuple[float, ...]:
        """The seconds of work of each lane of a machine, alone, in their order; 0 where sets have nothing."""
        sets, profile = self.sets, self.profile
        out = sum(sets.offloaded(block) for block in range(len(profile.blocks)))
        for parts in (*sets.gradients, *sets.write_backs, sets.written):
            out += sum(profile.tensors[t].bytes for tensors in parts for t in tensors)
        for parts in sets.state_offloads:
            out += sum(profile.tensors[t].state_bytes for tensors in parts for t in tensors)
        on_host = sum(
            tensor.bytes
            for tensor, decision in zip(profile.tensors, sets.decisions.tensors, strict=True)
            if decision.place == "host"
        )
        work: dict[LaneName, float] = {
            "compute": sum(self.seconds),
            "h2d": sum(self.reads) + sum(self.transfer_s(stay.bytes) for stay in sets.stays),
            "d2h": out / profile.hardware.d2h_bytes_per_s,
            "host": on_host / profile.optimizer.host_bytes_per_s,
        }
        return tuple(work.get(lane.name, 0.0) for lane in MACHINE_LANES)

    def transfer_s(self, nbytes: int) -> float:
        """Return the seconds of a copy to the device."""
        return nbytes / self.profile.hardware.h2d_bytes_per_s

    def _add_computations(self) -> None:
        profile, decisions, seconds = self.profile, self.sets.decisions, self.seconds
        direct: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, decision in enumerate(decisions.tensors):
            for step in decision.zero_copy:
                for block in profile.tensors[index].blocks:
                    direct[step, block].append(index)
        for computation in computations(decisions.options, decisions.recomputations, profile):
            tensors = [] if computation.idle else direct[computation.step, computation.block]
            nbytes, longer = computation.zero_copy(tensors, profile)
            seconds[computation.step] += computation.seconds + longer
            self.reads[computation.step] += self.transfer_s(nbytes)
        for index, step in self.sets.update_step.items():
            tensor, decision = profile.tensors[index], decisions.tensors[index]
            if decision.place in ("device", "paged"):
                seconds[step] += tensor.bytes / profile.optimizer.device_bytes_per_s
            # Written over the link while the backward runs, which takes as much longer; the host's update is on its own
            # lane.
            elif decision.grad_zero_copy and tensor.zero_copy is not None:
                seconds[step] += tensor.zero_copy.grad_s
