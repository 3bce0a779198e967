"""Registered host memory, with a model of the driver in place of CUDA."""

import logging
import mmap
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_offload.machine.host_memory import LARGE_BYTES, SLAB_BYTES, HostMemory
from lt_offload.machine.numa import MemoryNode


class Driver:
    """Registers what does not overlap; refuses when told to."""

    def __init__(self, refuse=lambda nbytes: False):
        self.ranges = {}
        self.refuse = refuse

    def register(self, address, nbytes):
        assert address % mmap.PAGESIZE == 0
        assert nbytes > 0
        assert all(end <= address or address + nbytes <= start for start, end in self.ranges.items())
        if self.refuse(nbytes):
            return 2
        self.ranges[address] = address + nbytes
        return 0

    def unregister(self, address):
        return 0 if self.ranges.pop(address, None) else 713

    def covers(self, tensor):
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(low <= start and end <= high for low, high in self.ranges.items())

    def touches(self, tensor):
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(start < high and low < end for low, high in self.ranges.items())


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def memory(driver):
    memory = HostMemory(driver.register, driver.unregister)
    yield memory
    memory.close()


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


def test_tensors_are_aligned_disjoint_and_inside_one_registration(memory, driver):
    tensors = [memory.empty((3, 7 + i), dtype) for i in range(50) for dtype in DTYPES]
    tensors.append(memory.empty((LARGE_BYTES // 4 + 1,), torch.float32))
    assert all(driver.covers(t) for t in tensors)
    assert all(t.data_ptr() % 512 == 0 for t in tensors)
    for i, tensor in enumerate(tensors):
        tensor.fill_(i % 2)
    for i, tensor in enumerate(tensors):
        assert (tensor == i % 2).all()
    assert memory.nbytes == sum(t.nbytes for t in tensors)


def limited(total):
    """A driver that registers ``total`` bytes."""
    driver = Driver()
    driver.refuse = lambda nbytes: sum(end - start for start, end in driver.ranges.items()) + nbytes > total
    return driver


@pytest.mark.parametrize(
    ("total", "level", "message"),
    [
        (1 << 40, logging.INFO, "copies use page-locked host memory: 75.5 MB, with tensors of 8.39 MB"),
        (
            SLAB_BYTES,
            logging.WARNING,
            "only 67.1 MB of 75.5 MB of host memory could be page-locked (error 2): the rest",
        ),
        (0, logging.WARNING, "only 0 B of 75.5 MB of host memory could be page-locked (error 2): the rest"),
    ],
)
def test_the_user_is_told_once_how_copies_go(caplog, total, level, message):
    driver = limited(total)
    memory = HostMemory(driver.register, driver.unregister)
    tensors = [memory.empty((10,), torch.float32), memory.empty((LARGE_BYTES,), torch.uint8)]
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            for tensor in tensors:
                memory.is_pageable(tensor)
    (record,) = caplog.records
    assert record.levelno == level
    assert message in record.getMessage()
    memory.close()


def test_a_driver_that_has_refused_is_not_asked_for_as_much_again():
    asked = []
    driver = limited(5 * LARGE_BYTES)
    memory = HostMemory(lambda *args: asked.append(args[1]) or driver.register(*args), driver.unregister)
    tensors = [memory.empty((LARGE_BYTES,), torch.uint8) for _ in range(9)]
    assert len(asked) == 6
    assert [memory.is_pageable(t) for t in tensors] == [False] * 5 + [True] * 4
    del tensors[0]
    tensors.append(memory.empty((LARGE_BYTES,), torch.uint8))
    assert not memory.is_pageable(tensors[-1])
    memory.close()


def test_memory_is_touched_where_it_should_be():
    touched = []

    class Here(MemoryNode):
        def run(self, work):
            touched.append(torch.get_num_threads())
            work()

    driver = Driver()
    memory = HostMemory(driver.register, driver.unregister, node=Here(cores=frozenset({0})))
    memory.empty((10,), torch.float32)
    memory.empty((LARGE_BYTES,), torch.uint8)
    assert len(touched) == 2
    memory.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # torch has threads
def test_a_child_does_not_unregister(driver):
    memory = HostMemory(driver.register, driver.unregister)
    tensor = memory.empty((10,), torch.float32)
    child = os.fork()
    if child == 0:
        memory.close()
        os._exit(len(driver.ranges))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    memory.close()
    assert driver.ranges == {}
    assert tensor.numel() == 10


REQUEST = st.one_of(
    st.tuples(st.just("empty"), st.integers(0, 2 * LARGE_BYTES)),
    st.tuples(st.just("group"), st.lists(st.integers(0, LARGE_BYTES), max_size=5)),
    st.tuples(st.just("drop"), st.integers(0, 20)),
)


@settings(deadline=None, max_examples=30)
@given(requests=st.lists(REQUEST, max_size=12), total=st.integers(0, 3 * SLAB_BYTES))
def test_every_tensor_and_group_lies_in_one_registration_or_in_none(requests, total):
    driver = limited(total)
    memory = HostMemory(driver.register, driver.unregister)
    held = []
    for what, size in requests:
        if what == "empty":
            held.append([memory.empty((size,), torch.uint8)])
        elif what == "group":
            span, tensors = memory.group([((nbytes,), torch.uint8) for nbytes in size])
            held.append([span, *tensors])
        elif held:
            held.pop(size % len(held))
        for tensor in (tensor for each in held for tensor in each if tensor.numel()):
            assert driver.covers(tensor) != memory.is_pageable(tensor)
            assert driver.covers(tensor) or not driver.touches(tensor)
        said = memory.locked_bytes
        locked = sum(end - start for start, end in driver.ranges.items())
        assert said == locked <= min(total, memory.mapped_bytes)
    memory.close()
    assert driver.ranges == {}
    assert memory.mapped_bytes == memory.locked_bytes == 0
