"""Sizes of batches that a plan has room for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lt_offload.model.batch import Size
from lt_offload.strategy.first.planning import Growth
from tests.support.samples import make_plan, make_profile


def test_a_plan_is_for_the_most_of_all_batches_that_have_shown_something() -> None:
    """A padded batch says nothing of a longer one without padding, nor both of a long one with it."""
    growth, profile, plan = Growth(), make_profile(), make_plan(make_profile())
    long, padded, both = Size(200, 20, False), Size(100, 10, True), Size(200, 20, True)
    first = growth.add(long, replace(profile, shared_bytes=7), profile)
    found = growth.add(padded, replace(profile, shared_bytes=5, slack_bytes=profile.slack_bytes + 3), first)
    assert (found.shared_bytes, found.slack_bytes) == (7, profile.slack_bytes + 3)
    sizes = iter([long, padded, both])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lt_offload.strategy.first.planning.shape", lambda batch: "one")
        patch.setattr(Size, "of", lambda batch, padded: next(sizes))
        assert [growth.outgrown(plan, None) is None for _ in range(3)] == [True, True, False]
    other = replace(profile, tensors=profile.tensors[:-1])
    assert growth.add(padded, other, found) is other
    assert growth.sizes == [padded]
