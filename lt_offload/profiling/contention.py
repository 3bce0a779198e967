"""Slowdown of lanes by each other, as measured, and the part of the host that each lane takes, as fitted to it.

Copies, updates on the host and, on the emulated device, computations share the bandwidth of the host's memory (and its
cores). Every lane does a piece of its work over and over, alone and beside others; what it loses beside them says how
much all of them ask for. See :class:`lt_offload.schema.profile.Contention`.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim import Optimizer

from lt_offload.errors import UnsupportedError
from lt_offload.machine.driver import in_what_room
from lt_offload.machine.numa import MemoryNode, memory_node_of
from lt_offload.machine.pages import map_pages
from lt_offload.machine.zero_copy import locked
from lt_offload.profiling.optimizer import trial_updates
from lt_offload.profiling.rates import LEAST_SIZE, MOST_SIZE, product_size
from lt_offload.schema.lanes import LaneName
from lt_offload.schema.profile import Contention, Slowdown

_log = logging.getLogger(__name__)

SHARING: tuple[LaneName, ...] = ("compute", "h2d", "d2h", "host")
"""The lanes that have a share."""
SETS: tuple[tuple[LaneName, ...], ...] = (*itertools.combinations(SHARING, 2), ("h2d", "d2h", "host"))
"""Lanes that run together: every two, and copies both ways beside updates."""

_COPY_BYTES = 16 << 20
"""Bytes of a copy; as few as the smallest matrix has where there is little room."""
_MATRIX = 384
"""Size of the matrices that the processor multiplies as the emulated device."""
_SLOT_S = 0.01
"""The least time for which lanes run together."""
_ROUNDS = 2
"""Number of measurements; iterations correct them anyway, so that more would gain nothing."""
_EQUAL = 0.04
"""A factor that is not farther from 1 than this, or than its scatter, counts as 1."""

Piece = Callable[[], object]
"""Does a piece of a lane's work and returns when it is done."""
Rates = Callable[[Sequence[LaneName]], Mapping[LaneName, float]]
"""Runs lanes at the same time and returns pieces per second for each."""


def measure_contention(optimizer: Optimizer, device: torch.device, *, host_threads: int = 0) -> Contention:
    """Measure how copies, updates and computations slow each other down on this machine, in half a second.

    Copies and products are smaller than usual if the device has little memory left.

    Args:
        optimizer: whose updates run on the host.
        device: where blocks run; the CPU stands for the emulated device.
        host_threads: threads of an update on the host; 0: as many as torch uses.
    """
    node = memory_node_of(device)
    updates = _updates(optimizer, device)

    def measure(size: int) -> Contention:
        with ExitStack() as stack:
            # Copies first: products are as large as they find room beside them.
            copies = _copies(device, node, stack, min(_COPY_BYTES, size * size * torch.float32.itemsize))
            pieces: dict[LaneName, Piece] = {"compute": _products(device, size), **copies, "host": updates}
            return contention_of(lambda lanes: _together({lane: pieces[lane] for lane in lanes}, node, host_threads))

    return in_what_room(measure, MOST_SIZE, least=LEAST_SIZE)


def contention_of(rates: Rates) -> Contention:
    """Return the slowdowns that ``rates`` shows, and the shares that explain them."""
    measured: defaultdict[tuple[LaneName, tuple[LaneName, ...]], list[float]] = defaultdict(list)
    for _ in range(_ROUNDS):
        alone = {lane: rates([lane])[lane] for lane in SHARING}
        for lanes in SETS:
            for lane, rate in rates(lanes).items():
                measured[lane, tuple(other for other in lanes if other != lane)].append(alone[lane] / rate)
    return fitted([_slowdown(lane, beside, factors) for (lane, beside), factors in measured.items()])


def _slowdown(lane: LaneName, beside: tuple[LaneName, ...], factors: Sequence[float]) -> Slowdown:
    factor = statistics.median(factors)
    scatter = (max(factors) - min(factors)) / 2 / factor
    return Slowdown(lane=lane, beside=beside, factor=factor, scatter=scatter)


# -- fitting ----------------------------------------------------------------------------------------------------------


def fitted(slowdowns: Sequence[Slowdown]) -> Contention:
    """Return the contention with the shares that come nearest to ``slowdowns``, in the squares of their logarithms.

    Where several do equally well, the smallest are taken: lanes that nothing slows down share nothing.
    """
    targets = np.array([_target(slowdown) for slowdown in slowdowns])
    cases = [[SHARING.index(lane) for lane in (s.lane, *s.beside)] for s in slowdowns]

    def errors(shares: NDArray[np.float64]) -> NDArray[np.float64]:
        total = np.zeros(len(shares))
        for together, target in zip(cases, targets, strict=True):
            total += (np.log(factors(shares[:, together])[:, 0]) - target) ** 2
        return total

    # A coarse grid first, as there may be several valleys; then smaller and smaller moves around its best point.
    grid = np.linspace(0.0, 1.0, 11)
    points = np.array(list(itertools.product(grid, repeat=len(SHARING))))
    size = points.sum(axis=1)
    misfit = errors(points)
    near = np.flatnonzero(misfit <= misfit.min() + 1e-9)
    best = points[near[np.argmin(size[near])]]
    width = 0.1
    moves = np.array([move for move in itertools.product((-1, 0, 1), repeat=len(SHARING)) if any(move)])
    while width > 1e-5:
        candidates = np.clip(best + width * moves, 0.0, 1.0)
        trial = errors(candidates)
        if trial.min() < errors(best[None])[0] - 1e-12:
            best = candidates[np.argmin(trial)]
        else:
            width /= 2
    compute, h2d, d2h, host = (round(float(share), 4) for share in best)
    return Contention(compute=compute, h2d=h2d, d2h=d2h, host=host, slowdowns=tuple(slowdowns))


def _target(slowdown: Slowdown) -> float:
    """Return the logarithm of the factor to come near to."""
    excess = slowdown.factor - 1
    return 0.0 if excess <= max(_EQUAL, slowdown.scatter) else math.log(slowdown.factor)


def factors(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the slowdown of each of several lanes that run together: max-min fairness on a resource of 1.

    Args:
        shares: of each lane at full speed, one row per case.
    """
    granted = np.zeros_like(shares)
    left = np.ones(len(shares))
    order = np.argsort(shares, axis=1, kind="stable")
    count = shares.shape[1]
    for position in range(count):  # the most modest lane first: what it does not take is shared by the others
        lane = order[:, position : position + 1]
        wanted = np.take_along_axis(shares, lane, axis=1)[:, 0]
        part = np.minimum(wanted, left / (count - position))
        np.put_along_axis(granted, lane, part[:, None], axis=1)
        left = left - part
    return np.divide(shares, granted, out=np.ones_like(shares), where=granted > 0)


# -- work -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Count:
    """Pieces that a lane has done while all of them were running."""

    pieces: int = 0
    seconds: float = 0.0


def _together(pieces: Mapping[LaneName, Piece], node: MemoryNode, host_threads: int) -> dict[LaneName, float]:
    """Run ``pieces`` at the same time, each on a thread of its own; return pieces per second."""
    counts = {lane: _Count() for lane in pieces}
    ready = threading.Barrier(len(pieces))
    over = threading.Event()
    errors: list[BaseException] = []

    def work(lane: LaneName, piece: Piece, count: _Count) -> None:
        try:
            if lane == "host":
                node.bind()
                if host_threads:
                    torch.set_num_threads(host_threads)
            # Once before all begin together, as the first one is slower.
            piece()
            ready.wait()
            start = time.perf_counter()
            while not over.is_set():
                piece()
                if over.is_set():  # it had the machine to itself for a while
                    break
                count.pieces += 1
                count.seconds = time.perf_counter() - start
                # Not before every lane has done a piece, however long that takes the slowest.
                if count.seconds >= _SLOT_S and all(c.pieces for c in counts.values()):
                    over.set()
        except BaseException as error:  # raised again by the calling thread
            errors.append(error)
            over.set()
            ready.abort()

    before = torch.get_num_threads()
    threads = [
        threading.Thread(target=work, args=(lane, piece, counts[lane]), name=f"lt_offload measures {lane}")
        for lane, piece in pieces.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(before)  # torch gives the worker's choice to threads that are yet to come
    try:
        if errors:
            # The barrier breaks for all others because of the first error, which is the one that says something.
            raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    finally:
        errors.clear()  # or the error would hold itself, and the memory of all pieces
    return {lane: count.pieces / count.seconds for lane, count in counts.items()}


def _copies(device: torch.device, node: MemoryNode, stack: ExitStack, nbytes: int) -> dict[LaneName, Piece]:
    """Return copies of ``nbytes`` each way, between host memory like the engine's and the device."""
    devices = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    pages = [map_pages(nbytes) for _ in range(2)]
    for buffer in pages:
        node.run(buffer.touch)
    hosts = [buffer.bytes() for buffer in pages]
    if device.type == "cuda":
        try:
            for host in hosts:
                stack.enter_context(locked(host))
        except UnsupportedError as error:
            # The engine's memory would not be locked either, and its copies be of this kind.
            _log.info("how lanes slow each other down is measured with pageable copies: %s", error)
    return {
        "h2d": _on_stream(lambda: devices[0].copy_(hosts[0], non_blocking=True), device),
        "d2h": _on_stream(lambda: hosts[1].copy_(devices[1], non_blocking=True), device),
    }


def _products(device: torch.device, most: int) -> Piece:
    """Return products on the device, of matrices of at most ``most`` rows."""
    size, times = (_MATRIX, 1) if device.type == "cpu" else product_size(torch.float32, device, most=most)
    a, b = (torch.ones(size, size, device=device) for _ in range(2))
    out = torch.empty_like(a)

    def work() -> None:
        for _ in range(times):
            torch.mm(a, b, out=out)

    return _on_stream(work, device)


def _updates(optimizer: Optimizer, device: torch.device) -> Piece:
    """Return updates on the host that walk through more memory than caches hold."""
    updates = itertools.cycle(trial_updates(optimizer, mapped=device.type == "cuda"))
    return lambda: next(updates)()


def _on_stream(work: Piece, device: torch.device) -> Piece:
    """Return ``work`` on a stream of its own, with a wait for its end; without CUDA ``work`` itself."""
    if device.type != "cuda":
        return work
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run() -> None:
        stream.synchronize()  # nothing to wait for; makes the context this thread's, without which cuBLAS warns
        with torch.cuda.stream(stream):
            work()
        stream.synchronize()

    return run
