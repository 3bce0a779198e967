"""The least that a block's backward takes on the device, whichever of its gradients the host gets: for bounds.

:mod:`lt_offload.plan.iteration.memory` counts gradients tensor by tensor, a program knows the host's part of them only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lt_offload.plan.iteration.computations import SAVED
from lt_offload.plan.iteration.memory import backward_steps
from lt_offload.plan.iteration.timeline import timeline
from lt_offload.schema.profile import COLLECTED_BELOW, BlockProfile, OptionProfile, Profile


@dataclass(frozen=True, slots=True)
class BackwardPeak:
    """Bytes above saved ones, input, output and the gradient of the input: ``low`` of the option, and the host's."""

    low: tuple[float, ...]
    """By option."""
    slope: float
    """Bytes for all of the block's own gradients, that is, those of weights that no other block uses."""


@dataclass(frozen=True, slots=True)
class _GradientShares:
    """One way to divide the gradients of a backward."""

    share: float
    """The host's part."""
    new: int
    """Bytes that are there to the end, at least."""
    passing: int
    """The most that comes and goes at once, with what its use takes."""
    scratch: int
    """Bytes of ``passing`` that are no gradient."""


def backward_peak(profile: Profile, block: int, options: Sequence[OptionProfile], *, host_update: bool) -> BackwardPeak:
    """Return a line below the peaks of the backward of ``block``, over the host's part of its own gradients.

    ``host_update``: whether the host may update any.
    """
    ways = list(_ways(profile, block))
    if not host_update:
        ways = [way for way in ways if not way.share]
    peaks = [[_peak(profile.blocks[block], option, way) for way in ways] for option in options]
    all_here, all_there = (min(ways, key=lambda way: way.share), max(ways, key=lambda way: way.share))
    ends = [(own[ways.index(all_here)], own[ways.index(all_there)]) for own in peaks]
    slope = max(0.0, min(on_host - on_device for on_device, on_host in ends)) if host_update else 0.0
    low = tuple(min(peak - slope * way.share for peak, way in zip(own, ways, strict=True)) for own in peaks)
    return BackwardPeak(low, slope)


def least_backward(profile: Profile, block: int, options: Sequence[OptionProfile], *, host_update: bool) -> int:
    """Return the bytes that the framework takes in the backward of ``block`` at least, whichever option it has."""
    step, own = timeline(profile).backward(block), profile.blocks[block]
    low = backward_peak(profile, block, options, host_update=host_update).low
    least = min(option.saved_bytes + peak for option, peak in zip(options, low, strict=True))
    tensors = [tensor for tensor in profile.tensors if tensor.trainable and block in tensor.blocks]
    waiting = sum(tensor.bytes for tensor in tensors if backward_steps(tensor.blocks, profile)[0] < step)
    return 2 * own.input_bytes + own.output_bytes + int(least) + waiting


def _ways(profile: Profile, block: int) -> Iterator[_GradientShares]:
    """Yield the divisions of gradients between which all others are.

    Of those that stay on the device, one passes with the most bytes; all that would pass with more go to the host. Of
    the rest none or all do.
    """
    step = timeline(profile).backward(block)
    own: list[tuple[int, int, int, int]] = []
    first, later = 0, 0
    for index, tensor in enumerate(profile.tensors):
        if not tensor.trainable or block not in tensor.blocks or not tensor.bytes:
            continue
        if len(tensor.blocks) > 1:
            # It waits for the last block that uses it, and what comes later passes until it has been added.
            begins = backward_steps(tensor.blocks, profile)[0] == step
            first, later = first + begins * tensor.bytes, max(later, (not begins) * tensor.bytes)
            continue
        # Small ones are collected, and what their use takes comes later.
        scratch = profile.scratch(index) if tensor.bytes >= COLLECTED_BELOW else 0
        # The backward may write to host memory what can be read there, which leaves nothing behind.
        own.append((tensor.bytes + scratch, scratch, tensor.bytes, 0 if tensor.zero_copy else tensor.bytes))
    own.sort(reverse=True)
    total, stays = sum(size for _, _, size, _ in own), sum(new for *_, new in own)
    sent, sent_new = 0, 0
    for passing, scratch, size, new in own:
        yield _GradientShares(sent / total, first + sent_new, max(passing, later), scratch)
        yield _GradientShares((total - size) / total, first + stays - new, max(passing, later), scratch)
        sent, sent_new = sent + size, sent_new + new
    yield _GradientShares(1.0, first + stays, later, 0)
    if not own:
        yield _GradientShares(0.0, first, later, 0)


def _peak(block: BlockProfile, option: OptionProfile, way: _GradientShares) -> float:
    """Return what the backward of ``block`` takes; if its forward runs again, early or late, what is rebuilt too."""
    peak = _least(option, way)
    keep = next((other for other in block.options if other.name == "keep"), None)
    if keep is not None and SAVED[option.name] != "all":
        peak = min(peak, keep.saved_bytes + _least(keep, way) - option.saved_bytes)
    return peak


def _least(option: OptionProfile, way: _GradientShares) -> float:
    held = math.inf if option.held_peak_bytes is None else option.held_peak_bytes + way.scratch
    passing = math.inf if option.passing_peak_bytes is None else option.passing_peak_bytes + way.new + way.scratch
    return min(option.backward_peak_bytes + way.new + way.passing, held, passing)
