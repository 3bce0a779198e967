"""From the program's fractions to whole options and whole tensors.

Options of blocks: independent rounding often breaks the memory rows, because the bytes that early blocks hold count in
all steps between their forward and their backward. Two rules avoid that: the error of each decision is carried to the
next similar block, so that every stretch of blocks gets its share of each option; and the bytes held by any prefix of
the blocks never exceed those of the relaxed solution.

Tensors: per parameter group the host's share, what stays through each gap between two uses, and the resident states
become sets of tensors whose sizes come nearest to the fractions, with the error carried to the next group. The program
moves a tensor in the step in which the cumulative curve of its flow passes the middle of the tensor. Of these times two
things are kept: when an updated weight is written back, as it takes room until then, and which tensors move together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from lt_offload.plan.iteration.decisions import Decisions, TensorDecision, stays_between, uses
from lt_offload.plan.iteration.timeline import timeline
from lt_offload.plan.planners.offmate.solution import Group, GroupFlows, Solution
from lt_offload.plan.planners.request import Allowed, held_bytes
from lt_offload.schema.plan import UpdatePlace
from lt_offload.schema.profile import OptionName, Profile

_SLACK = 1e-9
_QUANTA = 2000
"""Resolution of the subset sums: sizes are rounded to this part of the target's group."""
_NOTHING = 1e-6
_TINY = 1 / 4000
"""Tensors below this part of their group stay on the device, states included, if together they are at most ..."""
_ALL_TINY = 1 / 200
"""... this part of it."""


def round_options(
    fractions: Sequence[Sequence[float]], held: Sequence[Sequence[float]], kinds: Sequence[Hashable]
) -> tuple[int, ...]:
    """Return the index of the chosen option of every block.

    Args:
        fractions: per block, the relaxed weight of each of its options; they sum to 1.
        held: per block, the bytes each option holds on the device between forward and backward.
        kinds: per block, what its options are; the rounding error is carried between blocks of equal kind.

    The choice satisfies, for every prefix of the blocks, ``sum(held chosen) <= sum(fractions * held)``.
    """
    chosen: list[int] = []
    carry: dict[Hashable, NDArray[np.float64]] = {}
    relaxed_held = chosen_held = 0.0
    for weights, sizes, kind in zip(fractions, held, kinds, strict=True):
        share = np.clip(np.asarray(weights, dtype=np.float64), 0.0, None)
        share /= share.sum()
        size = np.asarray(sizes, dtype=np.float64)
        relaxed_held += float(share @ size)
        # Error diffusion: what this block gets too much or too little of, the next of its kind makes up for.
        wish = share + carry.get(kind, 0.0)
        allowed = chosen_held + size <= relaxed_held * (1 + _SLACK)
        # The smallest option always keeps the promise; the explicit term only guards against floating point.
        allowed[np.argmin(size)] = True
        best = int(np.argmax(np.where(allowed, wish, -np.inf)))
        wish[best] -= 1.0
        carry[kind] = wish
        chosen_held += float(size[best])
        chosen.append(best)
    return tuple(chosen)


def round_tensors(solution: Solution, profile: Profile) -> Decisions:
    """Return decisions as near to ``solution`` as whole tensors allow."""
    chosen: dict[int, TensorDecision] = {}
    carry = _Carry()
    for group, flows in zip(solution.groups, solution.flows, strict=True):
        chosen.update(_Rounding(group, flows, profile, carry).decisions())
    tensors = tuple(chosen[index] for index in range(len(profile.tensors)))
    return Decisions(tensors=tensors, options=solution.options)


def with_less_ram(decisions: Decisions, profile: Profile, allowed: Allowed, excess: int) -> Decisions | None:
    """Return ``decisions`` with other options for some blocks, so that they need ``excess`` bytes of RAM less.

    Blocks send less, or nothing, and compute more instead: those first where a byte of RAM costs the least time, and of
    equal ones some here and some there, as a lane has to carry what is left. None if nothing is left to be changed.
    Inputs that were sent may then stay on the device.
    """
    swaps: dict[tuple[float, int, str], list[int]] = defaultdict(list)
    for index, (block, options) in enumerate(zip(profile.blocks, allowed, strict=True)):
        now = block.option(decisions.options[index])
        for other in options if block.has_backward else ():
            freed = now.offload_bytes - other.offload_bytes
            more = held_bytes(block, other) - held_bytes(block, now)
            # An input that left with the activations may stay; more than that would break the device's budget.
            if freed > 0 and more <= block.input_bytes:
                seconds = other.forward_s + other.backward_s - now.forward_s - now.backward_s
                swaps[seconds / freed, freed, other.name].append(index)
    chosen = list(decisions.options)
    changed: set[int] = set()
    for (_, freed, name), blocks in sorted(swaps.items()):
        left = [index for index in blocks if index not in changed]
        count = min(len(left), math.ceil(excess / freed))
        for index in (left[(2 * turn + 1) * len(left) // (2 * count)] for turn in range(count)):
            chosen[index] = cast(OptionName, name)
            changed.add(index)
        excess -= count * freed
        if excess <= 0:
            return replace(decisions, options=tuple(chosen))
    return None


def nearest_subset(sizes: Sequence[int], target: float) -> list[int]:
    """Return the positions of a subset of ``sizes`` whose sum is nearest to ``target``, up to a small quantum."""
    total = sum(sizes)
    if target >= total or not total:
        return list(range(len(sizes))) if target > 0 else []
    quanta = [round(size * _QUANTA / total) for size in sizes]
    # last[q]: the item that first made the sum q reachable, -1 if none did.
    last = np.full(sum(quanta) + 1, -1, dtype=np.int64)
    last[0] = len(sizes)
    for item, quantum in enumerate(quanta):
        reachable = np.flatnonzero(last[: len(last) - quantum] >= 0)
        reachable = reachable[last[reachable] != item] + quantum
        last[reachable[last[reachable] < 0]] = item
    sums = np.flatnonzero(last >= 0)
    # Walk back from the reachable sum nearest to the target, item by item.
    left = int(sums[np.abs(sums - target * _QUANTA / total).argmin()])
    chosen: list[int] = []
    while left:
        chosen.append(int(last[left]))
        left -= quanta[chosen[-1]]
    return sorted(chosen)


@dataclass(slots=True)
class _Carry:
    """Rounding errors in bytes that the next group makes up for."""

    host: float = 0.0
    states: float = 0.0
    gaps: dict[int, float] = field(default_factory=dict)
    """By the ordinal of the gap in the group's iteration."""


class _Rounding:
    """The decisions for one group. ``tau`` counts steps since the group's last backward."""

    def __init__(self, group: Group, flows: GroupFlows, profile: Profile, carry: _Carry) -> None:
        self.group, self.flows, self.profile, self.carry = group, flows, profile, carry
        self.steps = len(timeline(profile))
        self.update = group.last_backward
        self.uses = sorted((step - self.update) % self.steps for step in uses(group.blocks, profile))
        tiny = frozenset(t for t in group.tensors if profile.tensors[t].bytes < _TINY * group.bytes)
        self.tiny = tiny if self._bytes(tiny) <= _ALL_TINY * group.bytes else frozenset[int]()
        self.host = self._host_set()
        self.resident_states = self._state_set()
        self.gaps = list(zip(self.uses, [*self.uses[1:], self.uses[0] + self.steps], strict=True))
        """Between two uses that follow each other."""
        self.staying = self._stay_sets()

    def decisions(self) -> dict[int, TensorDecision]:
        moves = self._moves()
        write_back = self._write_backs({t: taus[0] for t, taus in moves.items()})
        decided = {}
        for t in self.group.tensors:
            if not self._trainable(t):
                place: UpdatePlace = "none"
            elif t in self.host:
                place = "host"
            else:
                place = "paged" if self._states(t) and t not in self.resident_states else "device"
            decided[t] = replace(self._decision(t, place, write_back.get(t)), apart=tuple(moves.get(t, ())))
        return decided

    def _decision(self, tensor: int, place: UpdatePlace, write_back: int | None) -> TensorDecision:
        """Return a decision with stays from the end of each gap that it is gone through to the next of them."""
        gone = [gap for gap, stay in zip(self.gaps, self.staying, strict=True) if tensor not in stay]
        if gone and write_back is not None:  # it has been updated since it came
            gone[0] = max(gone[0][0], write_back), gone[0][1]
        back = None if write_back is None else self._step(write_back)
        gaps = [(self.update + use, self.update + following) for use, following in gone]
        return TensorDecision(place=place, stays=stays_between(gaps, self.steps), write_back=back)

    def _write_backs(self, release: Mapping[int, int]) -> dict[int, int]:
        """Return, per tensor that is updated on the device and leaves, the tau after whose computation it is copied.

        ``release``: by tensor, the tau in which the program lets it go for the first time, which the copy precedes.
        """
        leaving = [t for t in self.group.tensors if t in release and self._trainable(t) and t not in self.host]
        leaving.sort(key=release.__getitem__)
        middles = _midpoints(self._sizes(leaving), self.flows.write_back)
        # A copy that runs during a tau is queued after the computation before.
        return {t: max(min(middle, release[t]) - 1, 0) for t, middle in zip(leaving, middles, strict=True)}

    def _moves(self) -> dict[int, list[int]]:
        """Return, per tensor that leaves, the taus in which the program lets it go and brings it, gap by gap.

        Tensors that move at different times travel in different copies.
        """
        moves: dict[int, list[int]] = defaultdict(list)
        for (use, following), staying in zip(self.gaps, self.staying, strict=True):
            stale = self._stale(use)
            inside = self.flows.resident.take(range(use + 1, following), mode="wrap")
            gone = np.clip(-np.diff(np.concatenate([[1.0], np.minimum.accumulate(inside)])), 0, None)
            arrives = self.flows.prefetch.take(range(use, following), mode="wrap")
            arrives[0] = 0.0
            # What the host updates is stale at once; its copy waits for the update and comes last.
            leaving = [t for t in self.group.tensors if t not in staying and t not in stale]
            moving = [*leaving, *(t for t in self.group.tensors if t not in staying and t in stale)]
            first = dict(zip(leaving, _midpoints(self._sizes(leaving), gone), strict=True))
            back = _midpoints(self._sizes(moving), arrives, default=following - use - 1)
            for t, later in zip(moving, back, strict=True):
                release = min(use + first[t], max(following - 2, use)) if t in first else use
                moves[t] += [release, max(min(use + later, following - 1), release + 1)]
        return moves

    # -- sets --------------------------------------------------------------------------------------------------------

    def _host_set(self) -> frozenset[int]:
        tensors = [t for t in self.group.tensors if self._trainable(t) and t not in self.tiny]
        if self.flows.host_share <= _NOTHING or not tensors:
            return frozenset()
        target = self.flows.host_share * self.group.trainable_bytes + self.carry.host
        chosen = self._subset(tensors, target)
        self.carry.host = target - self._bytes(chosen)
        return chosen

    def _state_set(self) -> frozenset[int]:
        tensors = [t for t in self.group.tensors if self._trainable(t) and t not in self.host and self._states(t)]
        share = float(self.flows.state_resident[1:].min())
        if share >= 1 - self.flows.host_share - _NOTHING:
            return frozenset(tensors)
        if share <= _NOTHING:
            return self.tiny & frozenset(tensors)
        sizes = [self._states(t) for t in tensors]
        target = share * self.group.state_bytes + self.carry.states
        chosen = nearest_subset(sizes, target)
        self.carry.states = target - sum(sizes[i] for i in chosen)
        return self.tiny & frozenset(tensors) | {tensors[i] for i in chosen}

    def _stay_sets(self) -> list[frozenset[int]]:
        staying: list[frozenset[int]] = []
        for ordinal, (use, following) in enumerate(self.gaps):
            before = staying[-1] if staying else frozenset[int]()
            staying.append(self._gap_set(ordinal, use, following, before))
        return staying

    def _stale(self, use: int) -> frozenset[int]:
        """Return what cannot stay after ``use``: the host updates it."""
        return frozenset() if use else self.host

    def _gap_set(self, ordinal: int, use: int, following: int, before: frozenset[int]) -> frozenset[int]:
        """Return the tensors that stay on the device from ``use`` to ``following``.

        Tensors that stayed through the gap before are preferred: a tensor that always stays needs no copy to the host.
        """
        stale = self._stale(use)
        candidates = [t for t in self.group.tensors if t not in stale]
        if following - use <= 2:
            return frozenset(candidates)  # gone for less than a step: nothing is gained
        inside = self.flows.resident.take(range(use + 1, following), mode="wrap")
        share = float(inside.min())
        if share <= _NOTHING:
            return self.tiny
        # What the host updates, the program could not keep either.
        stale_share = 0.0 if use else self.flows.host_share * self.group.trainable_bytes / self.group.bytes
        if share >= 1 - stale_share - _NOTHING:
            return frozenset(candidates)
        target = share * self.group.bytes + self.carry.gaps.get(ordinal, 0.0)
        preferred = [t for t in candidates if t in before]
        others = [t for t in candidates if t not in before]
        # Only once all of those stay may others join them.
        staying = self._subset(preferred, target)
        if len(staying) == len(preferred):
            staying |= self._subset(others, target - self._bytes(preferred))
        # What is kept too much or too little through one gap, the same gap of the next group makes up for.
        self.carry.gaps[ordinal] = target - self._bytes(staying)
        return staying | self.tiny

    def _subset(self, tensors: Sequence[int], target: float) -> frozenset[int]:
        return frozenset(tensors[i] for i in nearest_subset(self._sizes(tensors), target))

    def _step(self, tau: int) -> int:
        return (self.update + tau) % self.steps

    # -- tensors -----------------------------------------------------------------------------------------------------

    def _trainable(self, tensor: int) -> bool:
        return self.profile.tensors[tensor].trainable

    def _states(self, tensor: int) -> int:
        return self.profile.tensors[tensor].state_bytes

    def _sizes(self, tensors: Sequence[int]) -> list[int]:
        return [self.profile.tensors[t].bytes for t in tensors]

    def _bytes(self, tensors: Sequence[int] | frozenset[int]) -> int:
        return sum(self.profile.tensors[t].bytes for t in tensors)


def _midpoints(sizes: Sequence[int], flow: NDArray[np.float64], default: int = 0) -> list[int]:
    """Return, per size in order, the index at which the cumulative ``flow`` passes the middle of the size's share."""
    total = float(flow.sum())
    if total <= _NOTHING:
        return [default] * len(sizes)
    ends = np.cumsum(np.asarray(sizes, dtype=np.float64))
    middles = (ends - np.asarray(sizes) / 2) / max(float(ends[-1]) if len(ends) else 1.0, 1.0)
    curve = np.cumsum(flow) / total
    return [int(tau) for tau in np.minimum(np.searchsorted(curve, middles), len(curve) - 1)]
