"""Registered host memory, with a model of the driver in place of CUDA, on the node that a made-up sysfs says."""

import logging
import mmap
import os
from _thread import interrupt_main
from collections import deque
from operator import call
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_offload.machine.host_memory import LARGE_BYTES, SLAB_BYTES, HostMemory
from lt_offload.machine.numa import MemoryNode, memory_node_near


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


def test_ctrl_c_comes_through_while_tensors_die(memory, driver):
    """Python ignores what is raised in a finalizer."""
    held = [memory.empty((LARGE_BYTES,), torch.uint8)]
    with pytest.raises(KeyboardInterrupt):
        deque(map(call, [interrupt_main, held.clear]), maxlen=0)  # nothing between the two that would notice
    assert memory.locked_bytes == 0  # what nobody uses is given back first
    assert not driver.ranges


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
        assert said == locked <= total
    memory.close()
    assert driver.ranges == {}
    assert memory.locked_bytes == 0


GPU = "0000:65:00.0"


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    for number, cores in enumerate(["0-3,8-11", "4-7,12-15"]):
        node = tmp_path / f"devices/system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cores}\n")
    pci = tmp_path / "bus/pci/devices" / GPU
    pci.mkdir(parents=True)
    (pci / "numa_node").write_text("1\n")
    return tmp_path


def test_the_node_of_the_gpu(sysfs: Path) -> None:
    place = memory_node_near(GPU, sysfs, allowed=frozenset(range(16)))
    assert place == MemoryNode(cores=frozenset({4, 5, 6, 7, 12, 13, 14, 15}), about="node 1 of 2, 8 of 16 cores")
    assert memory_node_near(GPU, sysfs, allowed=frozenset({0, 5})).cores == {5}


def test_cores_that_a_process_may_not_use(sysfs: Path) -> None:
    place = memory_node_near(GPU, sysfs, allowed=frozenset({0, 1}))
    assert place == MemoryNode(about="node 1 of 2, but this process may use none of its cores")


@pytest.mark.parametrize("node", ["-1\n", "\n", None, "7\n"])
def test_a_system_that_does_not_say(sysfs: Path, node: str | None) -> None:
    path = sysfs / "bus/pci/devices" / GPU / "numa_node"
    path.unlink()
    if node is not None:
        path.write_text(node)
    place = memory_node_near(GPU, sysfs, allowed=frozenset(range(16)))
    assert not place.cores
    assert "of 2" in place.about


def test_one_node_or_no_sysfs(sysfs: Path, tmp_path: Path) -> None:
    assert memory_node_near(GPU, tmp_path / "none", allowed=frozenset({0})) == MemoryNode(
        about="unknown: the system does not say"
    )
    for path in (sysfs / "devices/system/node/node1").iterdir():
        path.unlink()
    (sysfs / "devices/system/node/node1").rmdir()
    assert memory_node_near(GPU, sysfs, allowed=frozenset({0})) == MemoryNode(about="one node")


def test_work_is_done_there_and_nobody_else_is_moved() -> None:
    mine = os.sched_getaffinity(0)
    core = frozenset({max(mine)})
    seen: list[set[int]] = []
    MemoryNode(cores=core).run(lambda: seen.append(os.sched_getaffinity(0)))
    assert seen == [core]
    assert os.sched_getaffinity(0) == mine


def test_a_failure_reaches_the_caller() -> None:
    def fail() -> None:
        raise MemoryError("no pages")

    for place in (MemoryNode(), MemoryNode(cores=frozenset(os.sched_getaffinity(0)))):
        with pytest.raises(MemoryError, match="no pages"):
            place.run(fail)
