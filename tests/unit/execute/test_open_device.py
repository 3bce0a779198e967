"""Which device is opened for which setting. GPUs are a model of CUDA."""

import pytest
import torch

from lt_offload.errors import ConfigError
from lt_offload.execute import find_device, open_device
from lt_offload.execute.device import cuda
from lt_offload.execute.device.emulated import EmulatedDevice
from tests.support.gpu_model import Gpu


@pytest.fixture
def two(monkeypatch):
    """Two GPUs, of which the second is the current one; those that were opened."""
    opened = []

    def runtime(index):
        opened.append(Gpu(index=index))
        return opened[-1]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(cuda, "CudaRuntime", runtime)
    return opened


@pytest.mark.parametrize(
    ("accelerator", "index"), [("cuda:0", 0), ("cuda:1", 1), ("cuda", 1), ("auto", 1), (torch.device("cuda", 1), 1)]
)
def test_the_gpu_that_was_asked_for(two, accelerator, index):
    device = open_device(1 << 20, str(accelerator), host_threads=3, context=5)
    assert [gpu.index for gpu in two] == [index]
    assert find_device(str(accelerator)) == torch.device("cuda", index)
    device.close()


def test_updates_leave_cores_to_the_threads_that_launch(two, monkeypatch):
    """Where neither plan nor profile says with how many threads the host updates; never more than there are cores."""
    monkeypatch.setattr(cuda.os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(cuda.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    seen = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    for given, expected in ((None, 14), (5, 5), (99, 16)):
        device = open_device(1 << 20, "cuda", host_threads=given)
        device.synchronize(device.submit("host", lambda: None))
        device.close()
        assert expected in seen
        seen.clear()


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
    assert two == []


@pytest.mark.parametrize("accelerator", ["gpu", "cuda:", "cuda:x", "cpu:1", "tpu", ""])
def test_what_is_not_known_is_refused_and_not_taken_for_the_emulated_device(two, accelerator):
    with pytest.raises(ConfigError, match=f"accelerator={accelerator!r} is not known; 'auto', 'cuda', 'cuda:1'"):
        open_device(1 << 20, accelerator)
