"""The device that is opened for a setting."""

import pytest
import torch

from lt_offload.errors import ConfigError
from lt_offload.execute import open_device
from lt_offload.execute.device.emulated import EmulatedDevice
from lt_offload.machine.driver import find_device


@pytest.fixture
def two(monkeypatch):
    """Two GPUs, of which the second is the current one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.mark.parametrize(("accelerator", "index"), [("cuda:0", 0), ("cuda", 1), ("auto", 1)])
def test_the_gpu_that_was_asked_for(two, accelerator, index):
    assert find_device(accelerator) == torch.device("cuda", index)


def test_without_a_gpu_automatic_is_the_emulated_device():
    device = open_device(1 << 20)
    assert isinstance(device, EmulatedDevice)
    device.close()


def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="accelerator='cuda:1': torch finds no GPU here; accelerator='cpu' carries"):
        open_device(1 << 20, "cuda:1")


def test_a_gpu_beyond_the_last_is_refused(two):
    with pytest.raises(ConfigError, match="accelerator='cuda:2': torch finds 2 GPUs, the first is cuda:0"):
        open_device(1 << 20, "cuda:2")


@pytest.mark.parametrize("accelerator", ["gpu", "cuda:", "cuda:x", "cpu:1", "tpu", ""])
def test_what_is_not_known_is_refused_and_not_taken_for_the_emulated_device(two, accelerator):
    with pytest.raises(ConfigError, match=f"accelerator={accelerator!r} is not known; 'auto', 'cuda', 'cuda:1'"):
        open_device(1 << 20, accelerator)
