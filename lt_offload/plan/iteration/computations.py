"""The computations of an iteration in the order of issue, each with its costs.

Between the first forward of a block and its backward the plan may run the forward again. What the last run has saved
decides what the next run, or the backward, finds: nothing, the input, or all that the backward needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lt_offload.plan.iteration.timeline import timeline
from lt_offload.schema.lanes import OpKind
from lt_offload.schema.plan import Save
from lt_offload.schema.profile import BlockProfile, OptionName, OptionProfile, Profile

SAVED: Mapping[OptionName, Save] = {
    "keep": "all",
    "offload": "all",
    "mixed": "all",
    "recompute": "input",
    "reload": "input",
    "discard": "nothing",
    "fused": "all",
    "chunked": "all",
}
"""Tensors that the first forward of a block saves, by option."""

_REBUILDS = ("recompute", "reload", "mixed")
"""Options whose backward runs (part of) the forward again itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recomputation:
    """A forward that runs again within a backward step."""

    block: int
    save: Save


@dataclass(frozen=True, kw_only=True, slots=True)
class Computation:
    """A forward, a forward that runs again, or a backward."""

    kind: OpKind
    step: int
    block: int
    save: Save | None
    """Tensors that a forward which runs again saves; None for others."""
    option: OptionProfile
    """The option with its figures."""
    idle: bool = False
    """True: it does nothing, as the backward of a frozen block before the first trainable parameter."""

    @property
    def seconds(self) -> float:
        """Device seconds, if every weight it reads is on the device."""
        if self.idle:
            return 0.0
        return self.option.forward_s if self.kind == "forward" else self.option.backward_s

    def zero_copy(self, tensors: Iterable[int], profile: Profile) -> tuple[int, float]:
        """Return bytes over the link and additional seconds, if it reads ``tensors`` in host memory.

        A backward that runs the forward again reads twice.
        """
        forward = self.kind == "forward" or self.option.name in _REBUILDS
        nbytes, seconds = 0, 0.0
        for tensor in tensors:
            cost = profile.tensors[tensor].read(self.block)
            if forward:
                nbytes, seconds = nbytes + cost.forward_bytes, seconds + cost.forward_s
            if self.kind == "backward":
                nbytes, seconds = nbytes + cost.backward_bytes, seconds + cost.backward_s
        return nbytes, seconds


def computations(
    options: Sequence[OptionName], recomputations: Mapping[int, Sequence[Recomputation]], profile: Profile
) -> list[Computation]:
    """Return the computations of ``profile``'s model in an iteration, in the order of issue."""
    blocks, steps = profile.blocks, timeline(profile)
    issued = [
        Computation(kind="forward", step=steps.forward(index), block=index, save=None, option=block.option(name))
        for index, (block, name) in enumerate(zip(blocks, options, strict=True))
    ]
    saved: dict[int, Save] = {}
    for index in reversed(range(len(blocks))):
        block, step = blocks[index], steps.backward(index)
        for again in recomputations.get(step, ()):
            # What counts for a backward is the last run of its block, which may be in the step of a later block's
            # backward.
            saved[again.block] = again.save
            cost = rerun_option(blocks[again.block], again.save)
            issued.append(Computation(kind="forward", step=step, block=again.block, save=again.save, option=cost))
        cost = _backward_option(block, options[index], saved.get(index))
        idle = not block.has_backward
        issued.append(Computation(kind="backward", step=step, block=index, save=None, option=cost, idle=idle))
    return issued


def rerun_option(block: BlockProfile, save: Save) -> OptionProfile:
    """Return the figures of a forward of ``block`` that runs again; raises ``KeyError`` if there are none."""
    return block.option("keep") if save == "all" else _rebuilding(block)


def _rebuilding(block: BlockProfile) -> OptionProfile:
    if any(option.name == "recompute" for option in block.options):
        return block.option("recompute")
    # Not measured: the backward runs the forward and holds all that `keep` would save, so that moves from saved to
    # peak.
    keep = block.option("keep")
    return replace(
        keep,
        name="recompute",
        backward_s=keep.forward_s + keep.backward_s,
        saved_bytes=0,
        keeps_input=True,
        forward_peak_bytes=keep.saved_bytes + keep.forward_peak_bytes,
        backward_peak_bytes=keep.saved_bytes + keep.backward_peak_bytes,
        held_peak_bytes=None if keep.held_peak_bytes is None else keep.saved_bytes + keep.held_peak_bytes,
        before_loss_bytes=None,
        passing_peak_bytes=None if keep.passing_peak_bytes is None else keep.saved_bytes + keep.passing_peak_bytes,
    )


def _backward_option(block: BlockProfile, option: OptionName, saved: Save | None) -> OptionProfile:
    """Return the figures of a backward; ``saved`` by the last forward that ran again, None if there was none."""
    if not block.has_backward or saved is None or (saved == "input" and option != "discard"):
        return block.option(option)
    return rerun_option(block, saved)
