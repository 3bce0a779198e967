"""This machine, measured once: that is most of a tiny model's profile."""

from __future__ import annotations

import functools

from lt_offload.profiling.hardware import measure_hardware
from lt_offload.schema.profile import HardwareProfile


@functools.cache
def this_machine() -> HardwareProfile:
    return measure_hardware("cpu")
