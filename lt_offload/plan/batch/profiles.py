"""A profile at a batch size that was not profiled, from one or two that were.

Bytes and seconds are taken as ``c0 + c1 * batch_size``. Of bytes that is nearly exact. Of seconds it is not: kernels of
small batches do not fill a device, so seconds found here are good between two sizes that are near each other.
"""

from __future__ import annotations

import math
from dataclasses import replace

from lt_offload.schema.profile import BlockProfile, OptionProfile, Profile, ReadProfile, TensorProfile, ZeroCopyProfile


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

    def inner(self, low: int | None, high: int | None) -> int | None:
        """A peak of which a part does not grow is below the line between two of its values, but above it beyond."""
        return None if low is None or high is None or self.at > 1 else self.size(low, high)

    def block(self, low: BlockProfile, high: BlockProfile) -> BlockProfile:
        others = {option.name: option for option in high.options}
        return replace(
            low,
            input_bytes=self.size(low.input_bytes, high.input_bytes),
            output_bytes=self.size(low.output_bytes, high.output_bytes),
            launch_s=self.value(low.launch_s, high.launch_s),
            options=tuple(self.option(option, others[option.name]) for option in low.options if option.name in others),
        )

    def option(self, low: OptionProfile, high: OptionProfile) -> OptionProfile:
        return replace(
            low,
            forward_s=self.value(low.forward_s, high.forward_s),
            backward_s=self.value(low.backward_s, high.backward_s),
            saved_bytes=self.size(low.saved_bytes, high.saved_bytes),
            offload_bytes=self.size(low.offload_bytes, high.offload_bytes),
            forward_peak_bytes=self.size(low.forward_peak_bytes, high.forward_peak_bytes),
            backward_peak_bytes=self.size(low.backward_peak_bytes, high.backward_peak_bytes),
            held_peak_bytes=self.inner(low.held_peak_bytes, high.held_peak_bytes),
            passing_peak_bytes=self.inner(low.passing_peak_bytes, high.passing_peak_bytes),
            before_loss_bytes=self.inner(low.before_loss_bytes, high.before_loss_bytes),
        )

    def tensor(self, low: TensorProfile, high: TensorProfile) -> TensorProfile:
        if low.zero_copy is None or high.zero_copy is None:
            return replace(low, zero_copy=None)
        zero_copy = ZeroCopyProfile(
            reads=tuple(self.read(a, b) for a, b in zip(low.zero_copy.reads, high.zero_copy.reads, strict=True)),
            grad_s=self.value(low.zero_copy.grad_s, high.zero_copy.grad_s),
        )
        return replace(low, zero_copy=zero_copy)

    def read(self, low: ReadProfile, high: ReadProfile) -> ReadProfile:
        return ReadProfile(
            forward_s=self.value(low.forward_s, high.forward_s),
            backward_s=self.value(low.backward_s, high.backward_s),
            forward_bytes=self.size(low.forward_bytes, high.forward_bytes),
            backward_bytes=self.size(low.backward_bytes, high.backward_bytes),
        )


def _empty(profile: Profile) -> Profile:
    """Return ``profile`` with nothing in its batch."""
    return replace(
        profile,
        batch_size=0,
        blocks=tuple(
            replace(
                block,
                input_bytes=0,
                output_bytes=0,
                options=tuple(
                    replace(
                        option,
                        forward_s=0.0,
                        backward_s=0.0,
                        saved_bytes=0,
                        offload_bytes=0,
                        # One chunk of logits, and gradients of weights.
                        forward_peak_bytes=option.forward_peak_bytes if option.name == "chunked" else 0,
                        backward_peak_bytes=0,
                        held_peak_bytes=None,
                        passing_peak_bytes=None,
                        before_loss_bytes=None,
                    )
                    for option in block.options
                ),
            )
            for block in profile.blocks
        ),
    )
