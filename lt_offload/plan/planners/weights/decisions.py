"""From a profile to the abstract problem of weight offloading, and from its schedule to decisions about tensors."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from lt_offload.plan.iteration.decisions import BlockDecision, Decisions, Interval, TensorDecision, block_decisions
from lt_offload.plan.iteration.memory import aligned, framework_bytes, state_room
from lt_offload.plan.planners.weights.model import Gap, Phase, WeightChain
from lt_offload.plan.planners.weights.timing import Schedule
from lt_offload.schema.plan import UpdatePlace
from lt_offload.schema.profile import OptionName, Profile


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is decided before gaps are chosen."""

    profile: Profile
    options: tuple[OptionName, ...]
    """Activation option per block."""
    host: bool
    """Whether the host updates the layers whose weights leave."""

    @property
    def steps(self) -> int:
        """Steps of an iteration."""
        return 2 * len(self.options)

    @cached_property
    def tensors(self) -> tuple[tuple[int, ...], ...]:
        """Per block: the tensors that only it uses, which is what may leave."""
        found: list[list[int]] = [[] for _ in self.options]
        for index, tensor in enumerate(self.profile.tensors):
            if len(tensor.blocks) == 1:
                found[tensor.blocks[0]].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def blocks(self) -> tuple[BlockDecision, ...]:
        """The blocks' decisions: copies of activations run beside the computations next to theirs."""
        return block_decisions(self.profile, self.options, lag=1, lead=1)

    def place(self, tensor: int, *, leaves: bool) -> UpdatePlace:
        """Return where a tensor is updated whose layer's weight ``leaves`` in some gap, or never does.

        The first layer's next forward follows its update at once, so the host does not update it.
        """
        found = self.profile.tensors[tensor]
        if not found.trainable:
            return "none"
        if leaves and self.host and found.blocks[0]:
            return "host"
        return "paged" if leaves and found.state_bytes else "device"


def chain_of(setting: Setting, capacity_bytes: int) -> WeightChain:
    """Return the abstract problem: each block is a layer, and ``capacity_bytes`` are for everything that is decided."""
    profile = setting.profile
    tensors = profile.tensors
    places = tuple(setting.place(index, leaves=len(tensor.blocks) == 1) for index, tensor in enumerate(tensors))
    decisions = Decisions(tensors=tuple(TensorDecision(place=place) for place in places), blocks=setting.blocks)
    always = [index for index, tensor in enumerate(tensors) if len(tensor.blocks) != 1]
    fixed = sum(aligned(tensors[index].bytes) + state_room(tensors[index].state_bytes) for index in always)
    trained = [sum(tensors[index].bytes for index in owned if tensors[index].trainable) for owned in setting.tensors]
    forward, backward = [], []
    for index, block in enumerate(profile.blocks):
        option = block.option(setting.options[index])
        forward.append(option.forward_s)
        on_host = setting.host and index > 0
        update = 0.0 if on_host else trained[index] / profile.optimizer.device_bytes_per_s
        backward.append((option.backward_s if block.has_backward else 0.0) + update)
    return WeightChain(
        weights=tuple(sum(aligned(tensors[index].bytes) for index in owned) for owned in setting.tensors),
        seconds=(*forward, *reversed(backward)),
        # What the framework frees in one step is not there for weights in that step: the arena has one extent.
        working=(int(framework_bytes(decisions.usage, profile).max()) + fixed,) * setting.steps,
        memory=max(capacity_bytes, 1),
        h2d=profile.hardware.h2d_bytes_per_s,
        d2h=profile.hardware.d2h_bytes_per_s,
        changed=tuple(trained),
        states=tuple(sum(state_room(tensors[index].state_bytes) for index in owned) for owned in setting.tensors),
        states_return=tuple(not setting.host or index == 0 for index in range(len(setting.options))),
    )


def with_host_gaps(setting: Setting, gaps: Iterable[Gap]) -> tuple[Gap, ...]:
    """Return ``gaps`` and those that updates on the host imply: after the backward the weight is of no more use."""
    chosen = dict.fromkeys(gaps)
    if setting.host:
        trained = [any(setting.profile.tensors[t].trainable for t in owned) for owned in setting.tensors]
        chosen |= dict.fromkeys(Gap(layer, "backward") for layer, _ in tuple(chosen) if layer and trained[layer])
    return tuple(chosen)


def greedy_decisions(setting: Setting, gaps: Iterable[Gap], planned: Schedule) -> Decisions:
    """Return the decisions that carry out ``planned``; copies begin in the step in which they begin there."""
    phases: dict[int, set[Phase]] = {}
    for gap in gaps:
        phases.setdefault(gap.layer, set()).add(gap.after)
    decisions = [TensorDecision(place=setting.place(t, leaves=False)) for t in range(len(setting.profile.tensors))]
    times = _Times(setting.steps, planned)
    for layer, gone in phases.items():
        for t in setting.tensors[layer]:
            decisions[t] = times.decision(setting, t, gone)
    return Decisions(tensors=tuple(decisions), blocks=setting.blocks)


class _Times:
    """The steps in which copies begin and end, counted through all iterations."""

    def __init__(self, steps: int, planned: Schedule) -> None:
        self.steps = steps
        # What begins in the iteration before the last one may end in the last.
        self.first = len(planned.computations) - 2 * steps
        starts = [start for start, _ in planned.computations]
        self.fetched = {c.at: planned.step_at(c.start) for c in planned.copies if c.to == "device"}
        self.uploaded = {c.at: planned.step_at(c.start) - 1 for c in planned.copies if c.to == "host"}
        self.released = {r.at: bisect_left(starts, r.time) - 1 for r in planned.releases}

    def decision(self, setting: Setting, tensor: int, gone: set[Phase]) -> TensorDecision:
        """Return the decisions about a tensor whose layer's weight is absent after the phases ``gone``."""
        layer = setting.profile.tensors[tensor].blocks[0]
        place = setting.place(tensor, leaves=True)
        forward, backward = self.first + layer, self.first + self.steps - 1 - layer
        following = forward + self.steps
        moves: dict[Phase, tuple[int, int]] = {}
        if "forward" in gone:
            moves["forward"] = self._move(backward, self.released[forward])
        if "backward" in gone:
            end = backward if place == "host" else self.released[backward]
            moves["backward"] = self._move(following, end)
        decision = TensorDecision(
            place=place, intervals=self._intervals(moves, setting.profile.blocks[layer].has_backward)
        )
        last = self.first + self.steps - 1
        if place == "host":
            return replace(decision, grad_release_after=self._step(min(self.released[backward], last)))
        if place == "none":
            return decision
        leaves = backward if "backward" in gone else min(max(self.uploaded[following], backward), following)
        decision = replace(decision, write_back=self._step(leaves))
        if place == "device":
            return decision
        start = self.fetched[backward]
        end = min(self.released[backward], start + self.steps - 1, last)
        interval = Interval(start=self._step(start), end=self._step(end))
        return replace(decision, state_interval=interval, state_offload_after=self._step(backward))

    def _move(self, following: int, released: int) -> tuple[int, int]:
        """Return the last step before an absence and the first one after it; at least, they are not the same."""
        end = min(released, following - 1)
        return end, max(min(self.fetched[following], following), end + 1)

    def _intervals(self, moves: dict[Phase, tuple[int, int]], has_backward: bool) -> tuple[Interval, ...]:
        if len(moves) == 1:
            ((end, fetch),) = moves.values()
            return (Interval(start=self._step(fetch), end=self._step(end)),)
        forward, backward = moves["forward"], moves["backward"]
        first = Interval(start=self._step(backward[1]), end=self._step(forward[0]))
        # A block without backward is not used between its forwards.
        return (
            (first, Interval(start=self._step(forward[1]), end=self._step(backward[0]))) if has_backward else (first,)
        )

    def _step(self, counted: int) -> int:
        return counted % self.steps
