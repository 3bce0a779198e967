"""Registered host memory, with a model of the driver in place of CUDA."""

import io
import logging
import mmap

import pytest
import torch

from lt_offload.execute.hostmem import LARGE_BYTES, SLAB_BYTES, HostMemory


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


def test_sizes_are_exact(memory):
    """A power of two would be 16 MiB here."""
    nbytes = LARGE_BYTES + 5
    tensor = memory.empty((nbytes,), torch.uint8)
    assert tensor.numel() == nbytes
    assert memory.nbytes == nbytes
    assert memory.mapped_bytes <= nbytes + mmap.PAGESIZE


def test_small_tensors_share_mappings_and_gaps_are_filled(memory):
    tensors = [memory.empty((LARGE_BYTES - 512,), torch.uint8) for _ in range(11)]
    tensors.append(memory.empty((SLAB_BYTES // 16,), torch.uint8))
    assert memory.nbytes == sum(t.nbytes for t in tensors)
    assert memory.mapped_bytes == 2 * SLAB_BYTES


def test_adopt_copies(memory, driver):
    source = torch.randn(5, 6).to(torch.bfloat16)
    for tensor in (source, source.t()):
        copy = memory.adopt(tensor)
        assert driver.covers(copy)
        assert copy.is_contiguous()
        assert torch.equal(copy, tensor)


def test_empty_tensors_need_no_memory(memory):
    assert memory.empty((0, 3), torch.float32).shape == (0, 3)
    assert memory.mapped_bytes == 0


def test_scalars(memory):
    assert memory.adopt(torch.tensor(3.0)).item() == 3.0


def test_saving_a_tensor_writes_its_bytes_only(memory):
    memory.empty((1000,), torch.float32)
    tensor = memory.adopt(torch.randn(10))
    file = io.BytesIO()
    torch.save(tensor, file)
    assert len(file.getvalue()) < 4096
    assert tensor.untyped_storage().nbytes() == 40


def test_what_is_refused_stays_pageable_and_is_said(caplog):
    driver = Driver(refuse=lambda nbytes: nbytes != SLAB_BYTES)
    memory = HostMemory(driver.register, driver.unregister)
    with caplog.at_level(logging.WARNING):
        small, large = memory.empty((10,), torch.float32), memory.empty((LARGE_BYTES,), torch.uint8)
    large.fill_(3)
    assert driver.covers(small)
    assert not driver.covers(large)
    assert memory.mapped_bytes == SLAB_BYTES + LARGE_BYTES
    assert "8.39 MB of host memory could not be page-locked (error 2)" in caplog.text
    memory.close()
    assert driver.ranges == {}


def test_a_large_tensor_returns_its_memory_when_it_dies(memory, driver):
    small = memory.empty((10,), torch.float32)
    for i in range(5):
        large = memory.empty((LARGE_BYTES,), torch.uint8)
        view = large[5:].fill_(i)
        del large
        assert driver.covers(view)
        assert memory.nbytes == LARGE_BYTES + small.nbytes
        del view
        assert memory.nbytes == small.nbytes
        assert memory.mapped_bytes == sum(end - start for start, end in driver.ranges.items()) == SLAB_BYTES


def test_close_unregisters_and_leaves_the_tensors_alone(driver):
    memory = HostMemory(driver.register, driver.unregister)
    tensors = [memory.adopt(torch.full((LARGE_BYTES // 4,), float(i))) for i in range(3)]
    memory.close()
    memory.close()
    assert driver.ranges == {}
    assert memory.mapped_bytes == 0
    for i, tensor in enumerate(tensors):
        assert (tensor == i).all()
