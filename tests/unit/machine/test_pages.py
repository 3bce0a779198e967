"""Memory by the page, of one process, and of several that map it in common or write to pages of their own."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_offload.machine.pages import SharedPages, drop_own, make_file, map_pages, resident_bytes, spread


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


def test_pages_of_a_file_take_ram_when_they_have_been_read(tmp_path: Path) -> None:
    nbytes = 1 << 22
    (tmp_path / "weights").write_bytes(bytes(nbytes))
    mapped = torch.from_file(str(tmp_path / "weights"), size=nbytes, dtype=torch.uint8)
    own = torch.ones(1000, dtype=torch.uint8)
    sizes = {own.data_ptr(): 1000, mapped.data_ptr(): nbytes // 2, mapped[nbytes // 2 :].data_ptr(): nbytes // 2}
    assert resident_bytes(sizes) == 1000
    assert not mapped.any()
    assert resident_bytes(sizes) == 1000 + nbytes


PAGE = mmap.PAGESIZE
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # torch has threads


def mapped(nbytes: int) -> SharedPages:
    descriptor = make_file(nbytes, "test")
    pages = SharedPages(fd=descriptor, start=0, nbytes=nbytes)
    pages.map()
    os.close(descriptor)
    return pages


def in_another_process(work: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_another_process_sees_what_is_written_in_common() -> None:
    pages = mapped(3 * PAGE)

    def write() -> bool:
        pages.common.bytes()[PAGE] = 7
        return bool(pages.own.bytes()[PAGE] == 7)

    assert in_another_process(write)
    assert pages.common.bytes()[PAGE] == 7
    assert pages.own.bytes()[PAGE] == 7


def test_what_is_written_of_ones_own_stays_until_it_is_dropped() -> None:
    pages = mapped(3 * PAGE)
    own, common = pages.own.bytes(), pages.common.bytes()
    own[PAGE : PAGE + 8] = 1
    assert not common.any()
    assert in_another_process(lambda: not pages.common.bytes().any())
    common[PAGE + 8], common[0] = 3, 4  # the one is a neighbour in a page that was copied, the other is not
    assert own[PAGE + 8] == 0
    assert own[0] == 4
    drop_own(own[PAGE : PAGE + 8])
    assert torch.equal(own, common)


def test_nothing_is_in_dev_shm_and_nothing_is_left_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    pages = mapped(8 * PAGE)
    assert set(os.listdir("/dev/shm")) == before
    assert "memfd:lt_offload test" in Path("/proc/self/maps").read_text()
    del pages
    assert "memfd:lt_offload test" not in Path("/proc/self/maps").read_text()


def test_parts_of_a_file_begin_where_caches_keep_them_apart() -> None:
    sizes = [64 * PAGE] * 8
    starts, end = spread(sizes)
    assert all(start % PAGE == 0 for start in starts)
    assert all(b - a >= 64 * PAGE for a, b in zip(starts, [*starts[1:], end], strict=True))
    assert len({start // PAGE % 64 for start in starts}) == len(sizes)
