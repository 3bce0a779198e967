"""The machine that profiles are of: measured once per process, or, where times mean nothing, read from a file."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lt_offload
from lt_offload.machine.driver import context_bytes
from lt_offload.profiling import rates
from lt_offload.profiling.hardware import load_hardware, measure_hardware
from lt_offload.profiling.machine import measure_contention
from lt_offload.schema.profile import Contention, HardwareProfile, Profile
from tests.gpu.target import Target
from tests.support.profiles.budgets import least

FILE = Path(__file__).parents[1] / "fake_cuda/machine.yaml"


@functools.cache
def machine(target: Target) -> HardwareProfile:
    """The machine with ``target``."""
    if target.kind != "fake":
        return measure_hardware(target.torch_device)
    return replace(load_hardware(FILE), context_bytes=context_bytes(target.torch_device))


SHARED: list[Contention] = []
"""How the machine's lanes slow each other down, once that was measured."""


def contention(optimizer: Any, device: Any, **options: Any) -> Contention:
    """Measure it with the first optimizer that comes; what each takes alone is measured for each."""
    if not SHARED:
        SHARED.append(measure_contention(optimizer, device, **options))
    return SHARED[0]


@contextmanager
def known_machine(target: Target) -> Iterator[None]:
    """Let profiles be of :func:`machine`; what lanes share is measured on hardware only."""
    with patch("lt_offload.profiling.machine.measure_hardware", lambda device, **_: machine(target)):
        if target.real:
            with patch("lt_offload.profiling.machine.measure_contention", contention):
                yield
            return
        with (
            patch("lt_offload.profiling.machine.measure_contention", lambda *args, **kwargs: Contention()),
            patch.object(rates, "_DIRECT_BYTES", 4 << 20),
        ):
            yield


def between(profile: Profile, share: float, **settings: Any) -> int:
    """A budget, ``share`` of the way from the smallest one to that in which everything stays."""
    smallest = least(profile, **settings)
    resident = lt_offload.solve(profile, memory=profile.hardware.device_bytes, planner="resident", host_update=False)
    return int(smallest + share * (resident.predicted.device_peak_bytes - smallest))
