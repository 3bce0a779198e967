"""The timeline of an iteration while it is planned: the steps of each block, and their durations."""

from __future__ import annotations

from functools import cache

from lt_offload.schema.plan import Timeline, one_batch
from lt_offload.schema.profile import Profile


@cache
def _of(blocks: int) -> Timeline:
    return Timeline(one_batch(blocks))


def timeline(profile: Profile) -> Timeline:
    """Return the timeline of an iteration of the model of ``profile``: one batch, every block once each way."""
    return _of(len(profile.blocks))


_NEGLIGIBLE = 0.05
"""Part of the mean duration of a step below which one does not count."""


class Pace:
    """Counts the steps of an iteration of ``profile`` that last long enough for copies to hide behind.

    Copies are started or awaited some steps before or after a use. A step without work of its own, such as that of a
    final norm, would hide nothing and does not count.
    """

    def __init__(self, profile: Profile) -> None:
        forward = [min(option.forward_s for option in block.options) for block in profile.blocks]
        backward = [
            min(option.backward_s for option in block.options) if block.has_backward else 0.0
            for block in profile.blocks
        ]
        seconds = [*forward, *reversed(backward)]
        least = _NEGLIGIBLE * sum(seconds) / max(len(seconds), 1)
        self._lasts = [duration >= least for duration in seconds]

    def later(self, step: int, count: int) -> int:
        """Return the first step by whose end ``count`` steps that last have passed since ``step``."""
        while count > 0 and step < len(self._lasts) - 1:
            step += 1
            count -= self._lasts[step]
        return step

    def earlier(self, step: int, count: int) -> int:
        """Return the last step from whose beginning ``count`` steps that last have passed until ``step``."""
        while count > 0 and step > 0:
            step -= 1
            count -= self._lasts[step]
        return step
