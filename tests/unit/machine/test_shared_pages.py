"""Memory that several processes map: writes in common are seen by all, writes of one's own by nobody else."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lt_offload.machine.pages import SharedPages, drop_own, make_file, spread

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
