"""Emulated devices that are closed after the test."""

import pytest

from tests.support.hostile.device import HostileDevice

MODES = ["lazy", "random", "thread"]
"""How an emulated device runs its tasks: as late as possible, in a random order, on threads."""
KB = 1024


@pytest.fixture
def opened():
    """Makes devices and closes them; errors that nobody asked for fail the test."""
    devices = []

    def make(mode="lazy", budget=1 << 20, arena=64 * KB, **options):
        device = HostileDevice(budget, mode, **options)
        device.reserve(arena)
        devices.append(device)
        return device

    yield make
    for device in devices:
        device.close()
