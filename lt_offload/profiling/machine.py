"""Measurements before the first step: the machine, with what has been loaded by then, and updates by the optimizer.

And the slowdown of lanes by each other, with the part of the host that each takes, as fitted to it. Copies, updates on
the host and, on the emulated device, computations share the bandwidth of the host's memory (and its cores). Every lane
does a piece of its work over and over, alone and beside others; what it loses beside them says how much all of them ask
for. See :class:`lt_offload.schema.profile.Contention`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from lt_offload.machine.accounting import tensors_in
from lt_offload.machine.driver import current, in_what_room, use_expandable_segments
from lt_offload.machine.numa import memory_node_of
from lt_offload.machine.pages import resident_bytes
from lt_offload.model import optimizers as states
from lt_offload.model.quantized import tensors_of
from lt_offload.profiling.hardware import measure_hardware, taken_host_bytes
from lt_offload.profiling.optimizer import measure_optimizer, trial_updates
from lt_offload.profiling.rates import LEAST_SIZE, MOST_SIZE, Piece, copies_beside, paces, products_beside
from lt_offload.schema.lanes import LaneName
from lt_offload.schema.profile import Contention, HardwareProfile, OptimizerProfile, Slowdown


class MeasuredMachine(NamedTuple):
    """The machine that steps are measured on."""

    hardware: HardwareProfile
    updates: OptimizerProfile
    """Cost of updates by the optimizer."""
    contention: Contention
    """Slowdown of lanes by each other."""


def measure_machine(
    model: nn.Module,
    optimizer: Optimizer,
    device: torch.device,
    *,
    hardware: HardwareProfile | None = None,
    updates: OptimizerProfile | None = None,
    say: Callable[[str], None],
) -> MeasuredMachine:
    """Measure the machine, updates and the slowdown of lanes by each other, as far as they are not known."""
    if device.type == "cuda":
        use_expandable_segments(device)  # as the device does: what the allocator wastes is measured
    machine = hardware or _with_model(measure_hardware(device, on_progress=say), model, optimizer)
    contention = Contention()
    with current(device):
        if updates is None:
            say("measuring the optimizer")
            updates = measure_optimizer(optimizer, device)
        if hardware is None:
            say("measuring how copies, updates and computations slow each other down")
            contention = measure_contention(optimizer, device, host_threads=updates.host_threads)
            machine = _alone(machine, contention)
    return MeasuredMachine(machine, updates, contention)


def _alone(machine: HardwareProfile, contention: Contention) -> HardwareProfile:
    # Speeds beside the other direction have its slowdown in them, which `contention` would count a second time.
    h2d, d2h = machine.h2d_alone_bytes_per_s, machine.d2h_alone_bytes_per_s
    if not contention.slowdowns or not h2d or not d2h:
        return machine
    return replace(machine, h2d_bytes_per_s=h2d, d2h_bytes_per_s=d2h)


def _with_model(machine: HardwareProfile, model: nn.Module, optimizer: Optimizer) -> HardwareProfile:
    """Return ``machine`` without the RAM that weights and optimizer states take already: plans count them anyway."""
    held = (tensor for state in states.of_parameters(optimizer) for tensor in states.tensors_of(state).values())
    on_host = [tensor for tensor in (*tensors_of(model), *held) if tensor.device.type == "cpu"]
    storages = [part.untyped_storage() for part in tensors_in(on_host)]
    counted = resident_bytes({storage.data_ptr(): storage.nbytes() for storage in storages})
    return replace(machine, process_bytes=max(0, taken_host_bytes().all - counted))


# -- lanes beside each other ------------------------------------------------------------------------------------------

SHARING: tuple[LaneName, ...] = ("compute", "h2d", "d2h", "host")
"""The lanes that have a share."""
SETS: tuple[tuple[LaneName, ...], ...] = (*itertools.combinations(SHARING, 2), ("h2d", "d2h", "host"))
"""Lanes that run together: every two, and copies both ways beside updates."""

_COPY_BYTES = 16 << 20
"""Bytes of a copy; as few as the smallest matrix has where there is little room."""
_ROUNDS = 2
"""Number of measurements; iterations correct them anyway, so that more would gain nothing."""
_EQUAL = 0.04
"""A factor that is not farther from 1 than this, or than its scatter, counts as 1."""

Rates = Callable[[Sequence[LaneName]], Mapping[LaneName, float]]
"""Runs lanes at the same time and returns pieces per second for each."""


def measure_contention(optimizer: Optimizer, device: torch.device, *, host_threads: int = 0) -> Contention:
    """Measure how copies, updates and computations slow each other down on this machine, in half a second.

    Copies and products are smaller than usual if the device has little memory left. ``host_threads``: threads of an
    update on the host; 0: as many as torch uses. The CPU as ``device`` stands for the emulated one.
    """
    node = memory_node_of(device)
    # Together more memory than caches hold.
    updates = itertools.cycle(trial_updates(optimizer, mapped=device.type == "cuda"))

    def measure(size: int) -> Contention:
        with ExitStack() as stack:
            # Copies first: products are as large as they find room beside them.
            copies = copies_beside(device, node, stack, min(_COPY_BYTES, size * size * torch.float32.itemsize))
            products = products_beside(device, size)
            pieces: dict[LaneName, Piece] = {"compute": products, **copies, "host": lambda: next(updates)()}
            return contention_of(
                lambda lanes: paces({lane: pieces[lane] for lane in lanes}, node, host_threads=host_threads)
            )

    return in_what_room(measure, MOST_SIZE, least=LEAST_SIZE)


def contention_of(rates: Rates) -> Contention:
    """Return the slowdowns that ``rates`` shows, and the shares that explain them."""
    measured: defaultdict[tuple[LaneName, tuple[LaneName, ...]], list[float]] = defaultdict(list)
    for _ in range(_ROUNDS):
        alone = {lane: rates([lane])[lane] for lane in SHARING}
        for lanes in SETS:
            for lane, rate in rates(lanes).items():
                measured[lane, tuple(other for other in lanes if other != lane)].append(alone[lane] / rate)
    slowdowns = []
    for (lane, beside), factors in measured.items():
        factor = statistics.median(factors)
        scatter = (max(factors) - min(factors)) / 2 / factor
        slowdowns.append(Slowdown(lane=lane, beside=beside, factor=factor, scatter=scatter))
    return fitted(slowdowns)


# -- fitting ----------------------------------------------------------------------------------------------------------


def fitted(slowdowns: Sequence[Slowdown]) -> Contention:
    """Return the contention with the shares that come nearest to ``slowdowns``, in the squares of their logarithms.

    Where several do equally well, the smallest are taken: lanes that nothing slows down share nothing.
    """
    # What is about 1 counts as 1.
    differ = [slowdown.factor - 1 > max(_EQUAL, slowdown.scatter) for slowdown in slowdowns]
    targets = np.array([math.log(s.factor) if far else 0.0 for s, far in zip(slowdowns, differ, strict=True)])
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


def factors(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the slowdown of each of several lanes that run together: max-min fairness on a resource of 1.

    ``shares`` are those of each lane at full speed, one row per case.
    """
    # The most that one lane is granted: what the more modest ones leave is shared equally by the others.
    modest = np.sort(shares, axis=1)
    left = 1 - (np.cumsum(modest, axis=1) - modest)
    most = (left / np.arange(shares.shape[1], 0, -1)).max(axis=1)
    slow: NDArray[np.float64] = np.maximum(1.0, shares / most[:, None])
    return slow
