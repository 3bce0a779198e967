"""Speeds of copies between host and device, of copies within either, and of matrix products, measured here.

Copies between host and device are timed in memory like the engine's, each direction alone and both at once.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lt_offload.machine.driver import in_what_room
from lt_offload.machine.numa import MemoryNode
from lt_offload.machine.pages import map_pages
from lt_offload.machine.staging import STAGING_BYTES, Staging
from lt_offload.machine.zero_copy import locked

_COPY_BYTES, _LEAST_COPY_BYTES = 32 << 20, 1 << 20
"""Bytes of a copy, and the fewest where the device has no room for more."""
_STREAM_REPEATS, _THREAD_REPEATS = 16, 3
LOCKED_BYTES = 2 * _COPY_BYTES + STAGING_BYTES
"""Host memory that is page-locked for the measurement."""
_Pair = tuple[Tensor, Tensor]
"""Target and source."""
_Copy = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """Copy speeds between host and device, in bytes per second."""

    h2d_alone: float
    d2h_alone: float
    h2d: float
    """While the other direction is busy."""
    d2h: float
    """While the other direction is busy."""
    staged: float
    """The slower direction while both are busy, for host memory that is not page-locked; 0 without CUDA."""


def measure_links(device: torch.device, *, pinned: bool = True, node: MemoryNode | None = None) -> Links:
    """Measure copies, each way alone and both at once; without CUDA between two buffers in RAM.

    Smaller ones than usual, if the device has little memory left.

    Args:
        device: where to copy to and from.
        pinned: whether ``LOCKED_BYTES`` of host memory can be page-locked.
        node: where host memory should be.
    """
    measure = partial(_measure_links, device, pinned, node or MemoryNode())
    return in_what_room(measure, _COPY_BYTES, least=_LEAST_COPY_BYTES)


def _measure_links(device: torch.device, pinned: bool, node: MemoryNode, nbytes: int) -> Links:
    with ExitStack() as stack:
        devices = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        pages = [map_pages(nbytes) for _ in range(2)]
        for buffer in pages:
            node.run(buffer.touch)
        hosts = [buffer.bytes() for buffer in pages]
        down, up = (devices[0], hosts[0]), (hosts[1], devices[1])
        if device.type != "cuda":
            return _links(partial(_on_threads, [Tensor.copy_, Tensor.copy_]), down, up)
        staged = _staged(device, down, up, stack if pinned else None)
        if pinned:
            for host in hosts:
                stack.enter_context(locked(host))
        return _links(partial(_on_streams, device), down, up, staged=staged)


def _links(copy: Callable[[Sequence[_Pair]], list[float]], down: _Pair, up: _Pair, *, staged: float = 0.0) -> Links:
    # A round that does not count, as the first copies of a process are slower.
    copy([down, up])
    (h2d_alone,), (d2h_alone,) = copy([down]), copy([up])
    h2d, d2h = copy([down, up])
    return Links(h2d_alone=h2d_alone, d2h_alone=d2h_alone, h2d=h2d, d2h=d2h, staged=staged)


def _staged(device: torch.device, down: _Pair, up: _Pair, stack: ExitStack | None) -> float:
    """Return the speed of pageable copies; ``stack`` page-locks the buffers, None if that is not possible."""
    memory = None if stack is None else stack.enter_context(locked(map_pages(STAGING_BYTES).bytes()))
    staging = Staging(
        memory,
        event=partial(torch.cuda.Event, blocking=True),
        use=torch.cuda.stream,
        copy=partial(Tensor.copy_, non_blocking=True),
    )
    streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
    copies = [partial(staging.to_device, stream=streams[0]), partial(staging.to_host, stream=streams[1])]
    speeds = _on_threads(copies, [down, up])
    torch.cuda.synchronize(device)
    return min(speeds)


def _on_streams(device: torch.device, pairs: Sequence[_Pair]) -> list[float]:
    """Return the speed of copying every pair over and over, on a stream of its own."""
    ends: list[list[Any]] = [[] for _ in pairs]
    starts: list[Any] = []
    streams = [torch.cuda.Stream(device) for _ in pairs]  # type: ignore[no-untyped-call]
    # Or what runs before would be in the times of the first copies.
    torch.cuda.synchronize(device)
    for stream in streams:
        starts.append(torch.Event("cuda", enable_timing=True))
        starts[-1].record(stream)
    for _ in range(_STREAM_REPEATS):
        for (target, source), stream, mine in zip(pairs, streams, ends, strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            mine.append(torch.Event("cuda", enable_timing=True))
            mine[-1].record(stream)
    torch.cuda.synchronize(device)
    seconds = [[start.elapsed_time(end) / 1e3 for end in mine] for start, mine in zip(starts, ends, strict=True)]
    return _speeds(seconds, pairs[0][0].nbytes)


def _on_threads(copies: Sequence[_Copy], pairs: Sequence[_Pair]) -> list[float]:
    """Return the speed of copying every pair over and over, on a thread of its own."""
    ends: list[list[float]] = [[] for _ in pairs]
    together = threading.Barrier(len(pairs))

    def work(mine: list[float], copy: _Copy, target: Tensor, source: Tensor) -> None:
        # All start at once, or the first would be timed while it has the link to itself.
        together.wait()
        start = time.perf_counter()
        for _ in range(_THREAD_REPEATS):
            copy(target, source)
            mine.append(time.perf_counter() - start)

    with ThreadPoolExecutor(len(pairs)) as pool:
        jobs = [pool.submit(work, mine, copy, *pair) for mine, copy, pair in zip(ends, copies, pairs, strict=False)]
    for job in jobs:
        job.result()  # or an error of a thread would be lost
    return _speeds(ends, pairs[0][0].nbytes)


def _speeds(ends: Sequence[Sequence[float]], nbytes: int) -> list[float]:
    """Return bytes per second from the times at which copies ended, as long as all of them were copying."""
    first_end = min(mine[-1] for mine in ends)
    speeds: list[float] = []
    for mine in ends:
        # Behind the first end fewer share the link: those copies would look faster than both ways at once are.
        counted = [end for end in mine if end <= first_end] or mine[:1]
        speeds.append(len(counted) * nbytes / counted[-1])
    return speeds


_SIZE = 1024
"""Size of the matrices that the processor multiplies."""
LEAST_SIZE, MOST_SIZE = 256, 8192
"""The least and the greatest size for a GPU; its speed and its room decide between them."""
_LONG_ENOUGH = 1e-3
"""Products of so many seconds are long beside what it takes to launch the first and to wait for the last."""
_MOST_TIMES = 256
_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Speeds of computing and of moving memory on one device and on the host, each by itself."""

    flops_per_s: dict[str, float]
    """The speed of matrix products on the device, by dtype."""
    device_bytes_per_s: float
    host_bytes_per_s: float


def measure_rates(device: torch.device, *, on_progress: Callable[[str], None]) -> Rates:
    """Measure matrix products on ``device`` and copies within its memory and within the host's."""
    on_progress("measuring matrix products")
    flops = {name: _flops(getattr(torch, name), device) for name in ("float32", "bfloat16")}
    on_progress("measuring memory")
    on_host = _copy_rate(torch.device("cpu"))
    on_device = _copy_rate(device) if device.type == "cuda" else on_host
    return Rates(flops_per_s=flops, device_bytes_per_s=on_device, host_bytes_per_s=on_host)


def _flops(dtype: torch.dtype, device: torch.device) -> float:
    size, times = (_SIZE, 1) if device.type == "cpu" else product_size(dtype, device)
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)

    def work() -> None:
        for _ in range(times):
            torch.mm(a, b, out=out)

    return times * 2 * size**3 / _seconds(work, device)


def product_size(dtype: torch.dtype, device: torch.device, *, most: int = MOST_SIZE) -> tuple[int, int]:
    """Return the size of matrices whose product on a CUDA ``device`` takes a millisecond, and a number.

    Where those would be larger than ``most``, or than the device has room for, it takes that number of smaller ones.

    Raises:
        torch.OutOfMemoryError: if there is no room for the smallest.
    """
    size, seconds = LEAST_SIZE, _product_seconds(LEAST_SIZE, dtype, device)
    # From small to large, as the largest would keep a slow card busy for seconds.
    while seconds < _LONG_ENOUGH and 2 * size <= most:
        try:
            seconds = _product_seconds(2 * size, dtype, device)
        except torch.OutOfMemoryError:
            break
        size *= 2
    return size, math.ceil(min(max(1.0, _LONG_ENOUGH / seconds), _MOST_TIMES))


def _product_seconds(size: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)  # loads the kernel
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    torch.mm(a, b, out=out)
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _copy_rate(device: torch.device) -> float:
    """Return bytes read and written per second by a copy within ``device``."""

    def measure(nbytes: int) -> float:
        source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return 2 * nbytes / _seconds(lambda: target.copy_(source), device)

    return in_what_room(measure, _COPY_BYTES, least=_LEAST_COPY_BYTES)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the duration of ``work``, averaged over a fifth of a second, after a warm-up."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    synchronize()
    start, runs = time.perf_counter(), 0
    while time.perf_counter() - start < _SECONDS:
        work()
        synchronize()
        runs += 1
    return (time.perf_counter() - start) / runs
