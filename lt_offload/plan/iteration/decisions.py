"""Decisions about whole tensors, before they become ops: the product of every planner, and the input of scheduling.

They are sets: which weights stay through which gap between two uses, what is read directly, who updates what, which
option a block has. When copies start and where they go is found in one way for all (``assembly/schedule.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lt_offload.plan.iteration.computations import Recomputation as Recomputation
from lt_offload.plan.iteration.memory import Usage, backward_steps, least_host_bytes
from lt_offload.plan.iteration.timeline import timeline
from lt_offload.schema.plan import UpdatePlace
from lt_offload.schema.profile import OptionName, Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Steps on the device, from ``start`` to the end of ``end``; cyclic."""

    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDecision:
    """The treatment of one tensor. With place ``paged``, its states come for its update and go after it."""

    place: UpdatePlace
    stays: tuple[Interval, ...] = ()
    """The stays of its weight on the device, each from a first use to a last one, or to ``write_back``, which is later.
    Empty: always, or never if it is read directly."""
    zero_copy: tuple[int, ...] = ()
    """Steps whose computation reads it in host memory; the stays cover the others that use it."""
    write_back: int | None = None
    """Step after whose computation the updated weight is copied to the host; None: never. Until then it takes room."""
    grad_zero_copy: bool = False
    """Host update: the backward writes the gradient to host memory itself."""
    apart: tuple[int, ...] = ()
    """Weights of a block that differ in this travel in copies of their own, though they be small."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decisions:
    """One iteration, decided."""

    tensors: tuple[TensorDecision, ...]
    options: tuple[OptionName, ...]
    """The option for the activations of each block."""
    recomputations: Mapping[int, tuple[Recomputation, ...]] = field(default_factory=dict)
    """By backward step: the forwards that run again before its backward, in order."""

    def usage(self, profile: Profile) -> Usage:
        """Return the use of the framework's memory if all leaves at once and comes at the last moment."""
        travels = [block for block in range(len(self.options)) if self.offloaded(block, profile)]
        return Usage(
            options=self.options,
            places=tuple(tensor.place for tensor in self.tensors),
            grad_release_after={
                t: backward_steps(profile.tensors[t].blocks, profile)[-1]
                for t, decision in enumerate(self.tensors)
                if decision.place == "host" and not decision.grad_zero_copy
            },
            grad_zero_copy={t for t, decision in enumerate(self.tensors) if decision.grad_zero_copy},
            left={block: timeline(profile).forward(block) for block in travels},
            fetched={block: self.activations_needed(block, profile) for block in travels},
            recomputations=self.recomputations,
        )

    def least_host_bytes(self, profile: Profile) -> int:
        """Return the bytes of RAM with which a plan can carry them out, and below which none can."""
        places = tuple(tensor.place for tensor in self.tensors)
        written = [t for t, decision in enumerate(self.tensors) if decision.grad_zero_copy]
        return least_host_bytes(self.options, places, written, profile)

    def offloaded(self, block: int, profile: Profile) -> int:
        """Return the bytes of the activations of ``block`` that travel to the host and back."""
        costs = profile.blocks[block]
        return costs.option(self.options[block]).offload_bytes if costs.has_backward else 0

    def activations_needed(self, block: int, profile: Profile) -> int:
        """Return the step in which ``block`` first needs its offloaded activations: a rerun's, or its backward's."""
        again = [
            step
            for step, forwards in self.recomputations.items()
            if any(recomputation.block == block for recomputation in forwards)
        ]
        return min([timeline(profile).backward(block), *again])


def uses(
    blocks: tuple[int, ...], profile: Profile, recomputations: Mapping[int, tuple[Recomputation, ...]] | None = None
) -> list[int]:
    """Return the steps that compute with a tensor of ``blocks``, ascending."""
    again = {
        step
        for step, reruns in (recomputations or {}).items()
        if any(recomputation.block in blocks for recomputation in reruns)
    }
    forwards = [timeline(profile).forward(block) for block in blocks]
    return sorted({*forwards, *backward_steps(blocks, profile), *again})


def stays_between(gaps: Sequence[tuple[int, int]], steps: int) -> tuple[Interval, ...]:
    """Return the stays from the end of each gap to the beginning of the next, cyclically.

    ``gaps``: by the use after which it goes and the use for which it returns, ascending; ``steps``: of an iteration.
    """
    return tuple(
        Interval(start=following % steps, end=gaps[(at + 1) % len(gaps)][0] % steps)
        for at, (_, following) in enumerate(gaps)
    )


def hosted(decisions: Decisions, profile: Profile) -> Decisions:
    """Return ``decisions`` with all updates on the host: no weight stays on the device from its update on."""

    def on_host(tensor: TensorDecision, blocks: tuple[int, ...]) -> TensorDecision:
        if tensor.place == "none":
            return tensor
        needed = [step for step in uses(blocks, profile, decisions.recomputations) if step not in tensor.zero_copy]
        return replace(tensor, place="host", write_back=None, grad_zero_copy=False, stays=_renewed(tensor, needed))

    pairs = zip(decisions.tensors, profile.tensors, strict=True)
    return replace(decisions, tensors=tuple(on_host(decision, tensor.blocks) for decision, tensor in pairs))


def _renewed(tensor: TensorDecision, needed: Sequence[int]) -> tuple[Interval, ...]:
    """Return the stays of ``tensor``; a stay from its last use, of ``needed``, to its first one is cut in two."""
    if not needed:
        return tensor.stays
    first, last = needed[0], needed[-1]
    stays: list[Interval] = []
    for stay in tensor.stays or (Interval(start=first, end=last),):
        around = stay.end < stay.start
        if around and stay.end >= first:
            stays.append(Interval(start=first, end=stay.end))
        # What a copy to the host has kept for longer may go.
        stays.append(Interval(start=stay.start, end=last if around else min(stay.end, last)))
    return tuple(stays)


def resident_tensors(profile: Profile) -> tuple[TensorDecision, ...]:
    """Return the decisions by which all weights and states stay on the device."""
    return tuple(TensorDecision(place="device" if tensor.trainable else "none") for tensor in profile.tensors)
