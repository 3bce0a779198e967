"""The timeline of an iteration while it is planned."""

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
