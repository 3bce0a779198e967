"""Copies through page-locked buffers, on a model of CUDA whose streams run as late as possible."""

import threading
from collections import deque
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_offload.machine.staging import BUFFERS, Staging


class Stream:
    def __init__(self):
        self.issued = deque()
        self.executed = 0

    def run_until(self, position):
        while self.executed < position:
            self.executed += 1
            self.issued.popleft()()


class Event:
    def __init__(self):
        self.stream = None

    def record(self, stream):
        self.stream, self.position = stream, stream.executed + len(stream.issued)

    def synchronize(self):
        assert self.stream is not None, "a wait for an event that was not recorded does nothing"
        self.stream.run_until(self.position)


class Gpu:
    """Asynchronous copies happen when somebody waits for them; no copy touches host memory beside the buffers."""

    def __init__(self, nbytes):
        self.memory = torch.full((nbytes,), 0xAB, dtype=torch.uint8) if nbytes else None
        self.current, self.pieces = None, []
        self.staging = Staging(self.memory, event=Event, use=self.use, copy=self.copy)

    @contextmanager
    def use(self, stream):
        self.current = stream
        yield
        self.current = None

    def copy(self, target, source):
        assert self.current is not None
        if self.memory is not None:
            self.pieces.append(sum(self.in_ring(tensor) for tensor in (target, source)))
        self.current.issued.append(lambda: target.copy_(source))

    def in_ring(self, tensor):
        low, at = self.memory.data_ptr(), tensor.data_ptr()
        return low <= at and at + tensor.nbytes <= low + self.memory.nbytes


DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.float64, torch.int16]


def some(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=12),
    dtype=st.sampled_from(DTYPES),
    buffer=st.integers(1, 64),
    seed=st.integers(0, 1000),
)
def test_bytes_arrive_whatever_the_sizes(sizes, dtype, buffer, seed):
    gpu, down, up = Gpu(2 * BUFFERS * buffer), Stream(), Stream()
    sources = [some((size,), dtype, seed + i) for i, size in enumerate(sizes)]
    expected = [source.clone() for source in sources]
    devices, back = [torch.empty_like(s) for s in sources], [torch.empty_like(s) for s in sources]
    for device, source in zip(devices, sources, strict=True):
        gpu.staging.to_device(device, source, down)
        source.fill_(1)  # has been read
    down.run_until(down.executed + len(down.issued))
    assert all(map(torch.equal, devices, expected))
    for host, device in zip(back, devices, strict=True):
        gpu.staging.to_host(host, device, up)
        assert torch.equal(host, device)  # without any further wait
    assert set(gpu.pieces) <= {1}


def test_shapes_and_scalars():
    gpu, stream = Gpu(600), Stream()
    for source in (torch.tensor(3.0), torch.arange(24.0).view(2, 3, 4), torch.ones(1, 0, 2)):
        target = torch.empty_like(source)
        gpu.staging.to_host(target, source, stream)
        assert torch.equal(target, source)


def test_the_processor_fills_a_buffer_while_another_is_on_the_link():
    gpu, stream = Gpu(2 * BUFFERS * 10), Stream()
    gpu.staging.to_device(torch.empty(10 * BUFFERS, dtype=torch.uint8), some((10 * BUFFERS,), torch.uint8, 0), stream)
    assert (stream.executed, len(stream.issued)) == (0, BUFFERS)  # nothing was waited for
    gpu.staging.to_device(torch.empty(10, dtype=torch.uint8), some((10,), torch.uint8, 0), stream)
    assert stream.executed == 1


def test_the_link_works_while_the_processor_empties_a_buffer():
    gpu, stream, under_way = Gpu(2 * BUFFERS * 10), Stream(), []
    source, target = some((100,), torch.uint8, 0), torch.empty(100, dtype=torch.uint8)
    happen = Event.synchronize

    class Watched(Event):
        def synchronize(self):
            happen(self)
            under_way.append(len(stream.issued))

    gpu.staging = Staging(gpu.memory, event=Watched, use=gpu.use, copy=gpu.copy)
    gpu.staging.to_host(target, source, stream)
    assert torch.equal(target, source)
    assert under_way == [BUFFERS - 1] * (10 - BUFFERS + 1) + list(range(BUFFERS - 1))[::-1]


@pytest.mark.parametrize("nbytes", [0, 2 * BUFFERS * 16])
def test_what_is_not_bytes_in_order_is_copied_too(nbytes):
    gpu, stream = Gpu(nbytes), Stream()
    source = some((8, 6), torch.float32, 0)
    for target in (torch.empty(8, 6, dtype=torch.bfloat16), torch.empty(6, 8).t(), torch.empty(8, 6)):
        gpu.staging.to_host(target, source, stream)
        assert torch.equal(target.float(), source)
        target.zero_()
        gpu.staging.to_device(target, source, stream)
        stream.run_until(stream.executed + len(stream.issued))
        assert torch.equal(target.float(), source)


def test_an_error_leaves_no_buffer_in_use():
    gpu, stream = Gpu(2 * BUFFERS * 10), Stream()
    source, fails = some((95,), torch.uint8, 0), iter([False] * 4 + [True])

    def copy(target, source):
        if next(fails, False):
            raise RuntimeError("the link is gone")
        gpu.copy(target, source)

    staging = Staging(gpu.memory, event=Event, use=gpu.use, copy=copy)
    for _ in range(2):
        target = torch.empty_like(source)
        try:
            staging.to_host(target, source, stream)
        except RuntimeError:
            continue
        assert torch.equal(target, source)


def test_both_directions_at_once():
    gpu = Gpu(2 * BUFFERS * 64)
    local = threading.local()

    @contextmanager
    def use(stream):
        local.stream = stream
        yield

    staging = Staging(
        gpu.memory, event=Event, use=use, copy=lambda t, s: local.stream.issued.append(lambda: t.copy_(s))
    )
    sources = [some((5000,), torch.int16, i) for i in range(2)]
    targets, streams = [torch.empty_like(s) for s in sources], [Stream(), Stream()]
    jobs = [
        threading.Thread(target=way, args=each)
        for way, *each in zip((staging.to_device, staging.to_host), targets, sources, streams, strict=True)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    streams[0].run_until(streams[0].executed + len(streams[0].issued))
    assert all(map(torch.equal, targets, sources))
