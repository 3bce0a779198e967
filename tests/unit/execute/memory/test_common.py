"""Who owns which weights of those that processes have in common."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lt_offload.execute.memory.common import share_out


@given(st.lists(st.integers(0, 1000)), st.integers(1, 5))
def test_nobody_has_more_than_the_largest_tensor_above_others(sizes: list[int], count: int) -> None:
    owners = share_out(sizes, count)
    held = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(count)]
    assert sum(held) == sum(sizes)
    assert max(held) - min(held) <= max(sizes, default=0)
