"""Decisions about whole tensors, before they become ops: what every planner produces and ``build`` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lt_offload.plan.iteration.computations import Recomputation as Recomputation
from lt_offload.plan.iteration.memory import Usage, backward_steps, least_host_bytes
from lt_offload.plan.iteration.timeline import Pace, timeline
from lt_offload.schema.plan import UpdatePlace
from lt_offload.schema.profile import OptionName, Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A device copy from its prefetch, before the computation of step ``start``, to the end of step ``end``; cyclic."""

    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDecision:
    """What happens to one tensor."""

    place: UpdatePlace
    intervals: tuple[Interval, ...] = ()
    """When its weight is on the device; empty: always, or never if it is read directly."""
    zero_copy: tuple[int, ...] = ()
    """Steps whose computation reads it in host memory; the stays cover the others that use it."""
    write_back: int | None = None
    """Step after whose computation the updated weight is copied to the host; None: never."""
    grad_release_after: int | None = None
    """Host update: the step at whose end the gradient's device memory is free; None if ``grad_zero_copy``."""
    grad_zero_copy: bool = False
    """Host update: the backward writes the gradient to host memory itself."""
    state_interval: Interval | None = None
    """When its states are on the device (place ``paged``)."""
    state_offload_after: int | None = None
    """Step after whose computation its states are copied to the host (place ``paged``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockDecision:
    """What happens to one block's activations."""

    option: OptionName
    release_after: int | None = None
    """Step at whose end offloaded activations have left; None: none are offloaded."""
    prefetch_at: int | None = None
    """Step in which they are fetched back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decisions:
    """One iteration, decided."""

    tensors: tuple[TensorDecision, ...]
    blocks: tuple[BlockDecision, ...]
    recomputations: Mapping[int, tuple[Recomputation, ...]] = field(default_factory=dict)
    """By backward step: the forwards that run again before its backward, in order."""

    @property
    def usage(self) -> Usage:
        """What decides about the framework's memory."""
        return Usage(
            options=tuple(block.option for block in self.blocks),
            places=tuple(tensor.place for tensor in self.tensors),
            grad_release_after={
                t: c.grad_release_after for t, c in enumerate(self.tensors) if c.grad_release_after is not None
            },
            grad_zero_copy={t for t, c in enumerate(self.tensors) if c.grad_zero_copy},
            left={i: c.release_after for i, c in enumerate(self.blocks) if c.release_after is not None},
            fetched={i: c.prefetch_at for i, c in enumerate(self.blocks) if c.prefetch_at is not None},
            recomputations=self.recomputations,
        )

    def least_host_bytes(self, profile: Profile) -> int:
        """Return the bytes of RAM with which a plan can carry them out, and below which none can."""
        used = self.usage
        return least_host_bytes(used.options, used.places, used.grad_zero_copy, profile)

    def activations_needed(self, block: int, profile: Profile) -> int:
        """Return the step in which ``block`` first needs what it has offloaded: to run again, or for its backward."""
        again = [
            step
            for step, found in self.recomputations.items()
            if any(recomputation.block == block for recomputation in found)
        ]
        return min([timeline(profile).backward(block), *again])


def uses(
    blocks: tuple[int, ...], profile: Profile, recomputations: Mapping[int, tuple[Recomputation, ...]] | None = None
) -> list[int]:
    """Return the steps that compute with a tensor of ``blocks``, ascending."""
    again = {
        step
        for step, found in (recomputations or {}).items()
        if any(recomputation.block in blocks for recomputation in found)
    }
    forwards = [timeline(profile).forward(block) for block in blocks]
    return sorted({*forwards, *backward_steps(blocks, profile), *again})


def copy_uses(tensor: int, decisions: Decisions, profile: Profile) -> list[int]:
    """Return the steps that need a device copy of the weight of ``tensor``, ascending: uses that are not direct."""
    blocks, decision = profile.tensors[tensor].blocks, decisions.tensors[tensor]
    found = {step for step in uses(blocks, profile, decisions.recomputations) if step not in decision.zero_copy}
    if decision.place in ("device", "paged"):
        found.add(backward_steps(blocks, profile)[-1])
    return sorted(found)


def resident_tensors(profile: Profile) -> tuple[TensorDecision, ...]:
    """Return the tensors' choices if all weights and states stay on the device."""
    return tuple(TensorDecision(place="device" if tensor.trainable else "none") for tensor in profile.tensors)


def block_decisions(
    profile: Profile, options: tuple[OptionName, ...], *, lag: int = 0, lead: int = 0
) -> tuple[BlockDecision, ...]:
    """Return the blocks' choices: offloaded activations leave ``lag`` steps late and return ``lead`` steps early.

    Both cost the activations' memory for a step and let the copy run beside a computation. Where forward and backward
    are too close, as for the last blocks, they are less.
    """
    pace = Pace(profile)
    found = []
    for index, (block, option) in enumerate(zip(profile.blocks, options, strict=True)):
        if not block.has_backward or not block.option(option).offload_bytes:
            found.append(BlockDecision(option=option))
            continue
        forward, backward = timeline(profile).forward(index), timeline(profile).backward(index)
        release_after = min(pace.later(forward, lag), backward - 1)
        found.append(
            BlockDecision(
                option=option,
                release_after=release_after,
                prefetch_at=max(pace.earlier(backward, lead), release_after + 1),
            )
        )
    return tuple(found)
