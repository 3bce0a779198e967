import mmap
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_offload.machine.pages import map_pages


@settings(deadline=None)
@given(st.integers(1, 5 << 20))
def test_memory_comes_by_the_page(nbytes: int) -> None:
    pages = map_pages(nbytes)
    assert nbytes <= pages.nbytes < nbytes + mmap.PAGESIZE
    assert pages.address % mmap.PAGESIZE == 0
    assert pages.bytes().data_ptr() == pages.address
    assert pages.bytes().numel() == pages.nbytes
    assert not pages.bytes().any()


def test_tensors_have_storages_of_their_own() -> None:
    pages = map_pages(8192)
    first, second = pages.view(torch.float32, 16, 0), pages.view(torch.bfloat16, 16, 512)
    assert second.data_ptr() - first.data_ptr() == 512
    assert (first.untyped_storage().nbytes(), second.untyped_storage().nbytes()) == (64, 32)
    pages.bytes().fill_(1)
    assert first.view(torch.uint8).eq(1).all()


def test_tensors_of_one_size_do_not_lie_at_a_distance_of_a_power_of_two() -> None:
    """They would be in one another's way in some processors' caches."""
    nbytes = 64 << 20
    tensors = [map_pages(nbytes).view(torch.uint8, 1, 0) for _ in range(16)]
    distances = {(a.data_ptr() - b.data_ptr()) % (64 * mmap.PAGESIZE) for a in tensors for b in tensors if a is not b}
    assert 0 not in distances


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # torch has threads
def test_a_child_sees_what_the_parent_writes_after_the_fork() -> None:
    """Registered memory must stay where it is: a private mapping would move when it is written."""
    value = map_pages(1).view(torch.uint8, 1, 0)
    ready, answer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(ready, 1)
        os._exit(value.item())
    value.fill_(7)
    os.write(answer, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
