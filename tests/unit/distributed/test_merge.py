"""One profile of several."""

from __future__ import annotations

from dataclasses import replace

from lt_offload.distributed.merge import largest
from tests.support.profiles.small import small_profile


def test_the_largest_has_what_any_needs_and_the_options_of_all() -> None:
    short = replace(small_profile(3), iterations=(1,))
    block = short.blocks[1]
    keep, *others = block.options
    padded = replace(block, options=(replace(keep, saved_bytes=keep.saved_bytes + 7), *others[1:]), graphed=True)
    shorter = replace(short, sequence_length=short.sequence_length - 1, shared_bytes=short.shared_bytes + 5)
    shorter = replace(shorter, blocks=(short.blocks[0], padded, *short.blocks[2:]), iterations=(4, 5))
    for found in (largest([short, shorter]), largest([shorter, short])):
        assert found.sequence_length == short.sequence_length
        assert found.shared_bytes == short.shared_bytes + 5
        assert found.blocks[1].options[0].saved_bytes == keep.saved_bytes + 7
        assert [option.name for option in found.blocks[1].options] == [option.name for option in padded.options]
        assert found.blocks[1].graphed
        assert found.blocks[2:] == short.blocks[2:]
        assert sorted(found.iterations) == [1, 4, 5]
