"""A profile at a batch size that was not profiled, from one or two that were.

Bytes and seconds are taken as ``c0 + c1 * batch_size``. Of bytes that is nearly exact. Of seconds it is not: kernels of
small batches do not fill a device, so seconds found here are good between two sizes that are near each other.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

from lt_offload.schema.profile import COLLECTED_BELOW, BlockProfile, OptionProfile, Profile, TensorProfile

Part = TypeVar("Part")


def scaled(profile: Profile, batch_size: int, other: Profile | None = None) -> Profile:
    """Return ``profile`` as it would be with ``batch_size`` sequences.

    Args:
        profile: of the model at some batch size.
        batch_size: the one that is wanted.
        other: of the same model at another batch size: what lies between the two is linear, and so is what lies beyond
            them. Nothing is less in a larger batch than in a smaller one: where the two say so, they differ by chance,
            and count as equal. None: activations, and the seconds of computations, are proportional to the batch size;
            launch times, and all that concerns weights, do not depend on it.
    """
    assert other is None or other.batch_size != profile.batch_size, "two profiles of one batch size"
    low, high = sorted((profile, other or _empty(profile)), key=lambda one: one.batch_size)
    if batch_size in (profile.batch_size, profile.batch_size if other is None else other.batch_size):
        return profile if batch_size == profile.batch_size else high if high is not profile else low
    line = _StraightLine((batch_size - low.batch_size) / (high.batch_size - low.batch_size))
    pairs = zip(low.blocks, high.blocks, strict=True)
    return replace(
        profile,
        batch_size=batch_size,
        shared_bytes=line.size(low.shared_bytes, high.shared_bytes),
        slack_bytes=line.size(low.slack_bytes, high.slack_bytes),
        blocks=tuple(line.block(a, b) for a, b in pairs),
        tensors=tuple(line.tensor(a, b) for a, b in zip(low.tensors, high.tensors, strict=True)),
    )


class _StraightLine:
    """The point at ``at`` of a line from a low (0) to a high (1) value."""

    def __init__(self, at: float) -> None:
        self.at = at

    def value(self, low: float, high: float) -> float:
        return max(0.0, low + self.at * (max(low, high) - low))

    def size(self, low: int, high: int) -> int:
        # Rounded before it is rounded up: 0.1 + 0.2 would take a byte more than 0.3.
        return math.ceil(round(self.value(low, high), 3))

    def all_of(self, low: Part, high: Part, **others: object) -> Part:
        """Return ``low`` with all of its own seconds and bytes on the line, and ``others``."""
        points: dict[str, Any] = {}
        for name, optional in _numbers(low).items():
            a, b = getattr(low, name), getattr(high, name)
            # A peak of which a part does not grow is below the line between two of its values, but above it beyond.
            unknown = a is None or b is None or (optional and self.at > 1)
            points[name] = None if unknown else self.value(a, b) if name.endswith("_s") else self.size(a, b)
        whole: Any = replace(low, **points, **others)  # type: ignore[type-var]
        return cast("Part", whole)

    def block(self, low: BlockProfile, high: BlockProfile) -> BlockProfile:
        others = {option.name: option for option in high.options}
        both = ((option, others[option.name]) for option in low.options if option.name in others)
        return self.all_of(low, high, options=tuple(self.all_of(a, b) for a, b in both))

    def tensor(self, low: TensorProfile, high: TensorProfile) -> TensorProfile:
        mine, other = low.zero_copy, high.zero_copy
        if mine is None or other is None:
            return replace(low, zero_copy=None)
        reads = tuple(self.all_of(a, b) for a, b in zip(mine.reads, other.reads, strict=True))
        return replace(low, zero_copy=self.all_of(mine, other, reads=reads))


def _numbers(measured: Any) -> dict[str, bool]:
    """Return the names of the seconds and bytes of a part of a profile: True where they may be unknown."""
    return {one.name: one.default is None for one in fields(measured) if one.name.endswith(("_s", "_bytes"))}


def _empty(profile: Profile) -> Profile:
    def nothing(option: OptionProfile) -> OptionProfile:
        zeros: dict[str, Any] = {name: None if optional else 0 for name, optional in _numbers(option).items()}
        # One chunk of logits, and gradients of weights.
        kept = {"forward_peak_bytes": option.forward_peak_bytes} if option.name == "chunked" else {}
        return replace(option, **(zeros | kept))

    blocks = (
        replace(block, input_bytes=0, output_bytes=0, options=tuple(map(nothing, block.options)))
        for block in profile.blocks
    )
    return replace(profile, batch_size=0, blocks=tuple(blocks))


def in_parts(profile: Profile, count: int) -> Profile:
    """Return ``profile`` as it would be about if the batch went through each block in ``count`` parts.

    Memory that one part at a time needs shrinks with it; the gradients of a block stay until its last part is over. The
    output projection takes the whole batch.
    """
    if count == profile.parts:
        return profile
    blocks = tuple(
        block if block.kind == "head" else _in_parts(block, profile, index, count)
        for index, block in enumerate(profile.blocks)
    )
    return replace(profile, parts=count, blocks=blocks)


def _in_parts(block: BlockProfile, profile: Profile, index: int, count: int) -> BlockProfile:
    ratio = profile.parts / count
    sizes = [tensor.bytes for tensor in profile.tensors if tensor.trainable and index in tensor.blocks]
    large = [size for size in sizes if size >= COLLECTED_BELOW]
    # Large gradients leave one by one; with several parts all are complete with the last, and are there together.
    together = sum(large) - max(large, default=0)
    gradients = together * ((count > 1) - (profile.parts > 1))

    saved = max((option.saved_bytes for option in block.options if option.name == "keep"), default=0)

    def cut(option: OptionProfile) -> OptionProfile:
        moved = option.offload_bytes if option.name in ("offload", "mixed") else 0

        def peak(size: int, *, rebuilt: int = 0, more: int = 0) -> int:
            fixed = min(moved + rebuilt, size)  # is there for all parts
            return max(0, fixed + math.ceil((size - fixed) * ratio) + more)

        return replace(
            option,
            forward_peak_bytes=peak(option.forward_peak_bytes),
            backward_peak_bytes=peak(
                option.backward_peak_bytes, rebuilt=saved if option.name == "discard" else 0, more=gradients
            ),
            held_peak_bytes=None,
            passing_peak_bytes=None,
            before_loss_bytes=None,
        )

    return replace(block, launch_s=block.launch_s / ratio, options=tuple(map(cut, block.options)))


def layer_major(profile: Profile, window: int) -> Profile:
    """Return the profile of one batch that has all samples of ``window`` micro-batches, taken in as many parts."""
    return in_parts(scaled(profile, profile.batch_size * window), profile.parts * window)


def micro_batch_major(profile: Profile) -> Profile:
    """Return the profile of one part of the batch of ``profile``, as a batch of its own."""
    size = math.ceil(profile.batch_size / profile.parts)
    return scaled(in_parts(profile, 1), size)
