"""Speeds of copies between host and device, of copies within either, and of matrix products, measured here.

Every lane does a piece of its work over and over, alone or beside others (:func:`paces`). Copies between host and
device are timed in memory like the engine's.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lt_offload.errors import UnsupportedError
from lt_offload.machine.driver import in_what_room
from lt_offload.machine.numa import MemoryNode
from lt_offload.machine.pages import map_pages
from lt_offload.machine.staging import STAGING_BYTES, Staging
from lt_offload.machine.zero_copy import locked
from lt_offload.schema.lanes import LaneName
from lt_offload.units import format_bytes

_log = logging.getLogger(__name__)

_COPY_BYTES, _LEAST_COPY_BYTES = 32 << 20, 1 << 20
"""Bytes of a copy, and the fewest where the device has no room for more."""
_COPIES = 4
"""Copies of a piece on a GPU, whose end is waited for once: a wait takes some time of its own."""
LOCKED_BYTES = 2 * _COPY_BYTES + STAGING_BYTES
"""Host memory that is page-locked for the measurement."""
_SLOT_S = 0.01
"""The least time for which lanes run together."""
_LINK_S, _RATE_S = 0.05, 0.2
"""The same for copies between host and device, and for products and copies within a memory."""

Piece = Callable[[], object]
"""Does a piece of a lane's work and returns when it is done."""


@dataclass(slots=True)
class _Count:
    """Pieces that a lane has done while all of them were running, but for the longest: a machine may stand still."""

    pieces: int = -1
    seconds: float = 0.0
    longest: float = 0.0

    def add(self, seconds: float) -> None:
        self.pieces += 1
        shorter, self.longest = sorted((seconds, self.longest))
        self.seconds += shorter


def paces(
    pieces: Mapping[LaneName, Piece], node: MemoryNode | None = None, *, host_threads: int = 0, least_s: float = _SLOT_S
) -> dict[LaneName, float]:
    """Run ``pieces`` at the same time, each on a thread of its own, for ``least_s`` at least; return pieces per second.

    Updates on the host run on ``node``, on ``host_threads`` threads; 0: as many as torch uses.
    """
    counts = {lane: _Count() for lane in pieces}
    ready = threading.Barrier(len(pieces))
    over = threading.Event()

    def work(lane: LaneName, piece: Piece) -> None:
        count = counts[lane]
        try:
            if lane == "host":
                (node or MemoryNode()).bind()
                if host_threads:
                    torch.set_num_threads(host_threads)
            # Once before all begin together, as the first one is slower.
            piece()
            ready.wait()
            now = time.perf_counter()
            while not over.is_set():
                piece()
                if over.is_set():  # it had the machine to itself for a while
                    break
                before, now = now, time.perf_counter()
                count.add(now - before)
                # Not before every lane has done two pieces, however long that takes the slowest.
                if count.seconds >= least_s and all(c.pieces > 0 for c in counts.values()):
                    over.set()
        except BaseException:
            over.set()
            ready.abort()
            raise

    before = torch.get_num_threads()
    with ThreadPoolExecutor(len(pieces), thread_name_prefix="lt_offload measures") as pool:
        done = [pool.submit(work, lane, piece) for lane, piece in pieces.items()]
    torch.set_num_threads(before)  # torch gives the worker's choice to threads that are yet to come
    # The barrier breaks for all others because of the first error, which is the one that says something.
    done.sort(key=lambda one: isinstance(one.exception(), threading.BrokenBarrierError))
    while done:  # emptied, or an error would hold itself, and the memory of all pieces
        done.pop(0).result()
    return {lane: count.pieces / count.seconds for lane, count in counts.items()}


def _on_stream(work: Piece, device: torch.device, times: int) -> Piece:
    """Return ``work``, so many times, on a stream of its own, with a wait for its end; without CUDA ``work`` itself."""
    if device.type != "cuda":
        return work
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run() -> None:
        stream.synchronize()  # nothing to wait for; makes the context this thread's, without which cuBLAS warns
        with torch.cuda.stream(stream):
            for _ in range(times):
                work()
        stream.synchronize()

    return run


# -- links ------------------------------------------------------------------------------------------------------------


class CopyPair:
    """Buffers in host memory like the engine's and on the device, of ``nbytes`` each, for a copy each way."""

    def __init__(self, device: torch.device, node: MemoryNode, nbytes: int) -> None:
        self._device, self._nbytes = device, nbytes
        self._on_device = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        pages = [map_pages(nbytes) for _ in range(2)]
        for buffer in pages:
            node.run(buffer.touch)
        self._on_host = [buffer.bytes() for buffer in pages]

    def lock(self, stack: ExitStack) -> None:
        """Page-lock the host memory as long as ``stack`` is entered; raises ``UnsupportedError``."""
        for host in self._on_host if self._device.type == "cuda" else ():
            stack.enter_context(locked(host))

    def pieces(self) -> dict[LaneName, Piece]:
        """Return copies in both directions."""
        near, far = self._on_device, self._on_host
        return {
            "h2d": _on_stream(lambda: near[0].copy_(far[0], non_blocking=True), self._device, _COPIES),
            "d2h": _on_stream(lambda: far[1].copy_(near[1], non_blocking=True), self._device, _COPIES),
        }

    def staged(self, memory: Tensor | None) -> dict[LaneName, Piece]:
        """Return copies of memory that is not page-locked, through buffers in ``memory``, if there is any."""
        staging = Staging(
            memory,
            event=partial(torch.cuda.Event, blocking=True),
            use=torch.cuda.stream,
            copy=partial(Tensor.copy_, non_blocking=True),
        )
        streams = [torch.cuda.Stream(self._device) for _ in range(2)]  # type: ignore[no-untyped-call]
        return {
            "h2d": partial(staging.to_device, self._on_device[0], self._on_host[0], streams[0]),
            "d2h": partial(staging.to_host, self._on_host[1], self._on_device[1], streams[1]),
        }


def measure_links(device: torch.device, *, pinned: bool = True, node: MemoryNode | None = None) -> dict[str, Any]:
    """Return speeds of copies, each way alone and both at once: fields of ``HardwareProfile``.

    Without CUDA they are between two buffers in RAM; smaller ones than usual, if the device has little memory left.
    ``pinned``: ``LOCKED_BYTES`` of host memory can be page-locked; it should be on ``node``.
    """
    measure = partial(_measure_links, device, pinned, node or MemoryNode())
    return in_what_room(measure, _COPY_BYTES, least=_LEAST_COPY_BYTES)


def _measure_links(device: torch.device, pinned: bool, node: MemoryNode, nbytes: int) -> dict[str, Any]:
    with ExitStack() as stack:
        copies, staged = CopyPair(device, node, nbytes), 0.0
        cuda = device.type == "cuda"
        if cuda:
            memory = stack.enter_context(locked(map_pages(STAGING_BYTES).bytes())) if pinned else None
            staged = nbytes * min(paces(copies.staged(memory), least_s=_LINK_S).values())
            torch.cuda.synchronize(device)
        if pinned:
            copies.lock(stack)
        pieces, each = copies.pieces(), nbytes * (_COPIES if cuda else 1)
        alone = {lane: each * paces({lane: piece}, least_s=_LINK_S)[lane] for lane, piece in pieces.items()}
        both = {lane: each * pace for lane, pace in paces(pieces, least_s=_LINK_S).items()}
    speeds = {f"{lane}_alone_bytes_per_s": speed for lane, speed in alone.items()}
    return speeds | {f"{lane}_bytes_per_s": speed for lane, speed in both.items()} | {"staged_bytes_per_s": staged}


def copies_beside(device: torch.device, node: MemoryNode, stack: ExitStack, nbytes: int) -> dict[LaneName, Piece]:
    """Return copies of ``nbytes`` each way, of page-locked memory as long as ``stack`` is entered, if possible."""
    copies = CopyPair(device, node, nbytes)
    try:
        copies.lock(stack)
    except UnsupportedError as error:
        # The engine's memory would not be locked either, and its copies be of this kind.
        _log.info("how lanes slow each other down is measured with pageable copies: %s", error)
    return copies.pieces()


# -- host memory that kernels read -------------------------------------------------------------------------------------

LEAST_SPEED = 0.5
"""Least speed of kernels that read host memory, as part of the speed of copies: slower ones are of no use."""
_DIRECT_BYTES, _LEAST_DIRECT_BYTES = 64 << 20, 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectSpeeds:
    """Bytes per second between a device and page-locked host memory, nothing else going on."""

    copy_in: float
    """The speed of a copy to the device."""
    read: float
    """The speed of kernels that read there."""
    write: float
    """The speed of copies that the compute stream writes there."""

    @property
    def too_slow(self) -> str:
        """Reason why kernels had better not read there; empty if they may."""
        if self.read >= LEAST_SPEED * self.copy_in:
            return ""
        return (
            f"kernels read it at {format_bytes(self.read)}/s, less than {LEAST_SPEED:.0%} of the "
            f"{format_bytes(self.copy_in)}/s of copies"
        )


def measure_direct(device: torch.device, view_of: Callable[[Tensor], Tensor]) -> DirectSpeeds:
    """Measure how fast ``device`` reads and writes host memory, which ``view_of`` returns as a tensor on it."""

    def measure(nbytes: int) -> DirectSpeeds:
        with locked(map_pages(nbytes).bytes()) as memory:
            host = memory.view(torch.float32)
            seen, near = view_of(host), torch.zeros(host.shape, device=device)

            def rate(work: Piece) -> float:
                piece = _on_stream(work, device, 1)
                # The best: a speed that something else has cut in half would forbid direct reads for the whole run.
                return host.nbytes * max(paces({"compute": piece})["compute"] for _ in range(3))

            return DirectSpeeds(
                copy_in=rate(lambda: near.copy_(host, non_blocking=True)),
                read=rate(lambda: torch.add(seen, 1, out=near)),
                write=rate(lambda: seen.copy_(near)),
            )

    return in_what_room(measure, _DIRECT_BYTES, least=_LEAST_DIRECT_BYTES)


# -- products and memory ----------------------------------------------------------------------------------------------

_SIZE, _SMALL_SIZE = 1024, 384
"""Sizes of the matrices that the processor multiplies: for a rate, and beside other lanes."""
LEAST_SIZE, MOST_SIZE = 256, 8192
"""The least and the greatest size for a GPU; its speed and its room decide between them."""
_LONG_ENOUGH = 1e-3
"""Products of so many seconds are long beside what it takes to launch the first and to wait for the last."""
_MOST_TIMES = 256


def measure_rates(device: torch.device, *, on_progress: Callable[[str], None]) -> dict[str, Any]:
    """Return speeds of matrix products on ``device`` and of copies within a memory: fields of ``HardwareProfile``."""
    on_progress("measuring matrix products")
    flops = {name: _flops(getattr(torch, name), device) for name in ("float32", "bfloat16")}
    on_progress("measuring memory")
    host = _copy_rate(torch.device("cpu"))
    near = _copy_rate(device) if device.type == "cuda" else host
    return {"flops_per_s": flops, "device_memory_bytes_per_s": near, "host_memory_bytes_per_s": host}


def _flops(dtype: torch.dtype, device: torch.device) -> float:
    size, times = (_SIZE, 1) if device.type == "cpu" else product_size(dtype, device)
    return times * 2 * size**3 * paces({"compute": _products(size, times, dtype, device)}, least_s=_RATE_S)["compute"]


def products_beside(device: torch.device, most: int) -> Piece:
    """Return products on the device, of matrices of at most ``most`` rows."""
    size, times = (_SMALL_SIZE, 1) if device.type == "cpu" else product_size(torch.float32, device, most=most)
    return _products(size, times, torch.float32, device)


def _products(size: int, times: int, dtype: torch.dtype, device: torch.device) -> Piece:
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return _on_stream(lambda: torch.mm(a, b, out=out), device, times)


def product_size(dtype: torch.dtype, device: torch.device, *, most: int = MOST_SIZE) -> tuple[int, int]:
    """Return the size of matrices whose product on a CUDA ``device`` takes a millisecond, and a number.

    Where those would be larger than ``most``, or than the device has room for, it takes that number of smaller ones.
    Raises ``torch.OutOfMemoryError`` if there is no room for the smallest.
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
    product = _products(size, 1, dtype, device)
    times = [time.perf_counter()]
    for _ in range(3):
        product()
        times.append(time.perf_counter())
    # The first loads the kernel; of the others one may be disturbed.
    return min(times[2] - times[1], times[3] - times[2])


def _copy_rate(device: torch.device) -> float:
    def measure(nbytes: int) -> float:
        source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy = _on_stream(lambda: target.copy_(source), device, 1)
        return 2 * nbytes * paces({"compute": copy}, least_s=_RATE_S)["compute"]

    return in_what_room(measure, _COPY_BYTES, least=_LEAST_COPY_BYTES)
