"""Host memory as a CUDA tensor, without CUDA: what is asked of driver and torch, and what becomes of the answers."""

import ctypes
from contextlib import contextmanager

import pytest
import torch

from lt_offload.errors import UnsupportedError
from lt_offload.machine import zero_copy as mapped


class Runtime:
    """Stands in for libcudart: memory is where it is, if it is page-locked."""

    def __init__(self, locked):
        self.locked, self.errors = locked, 0

    def cudaHostGetDevicePointer(self, result, address, flags):  # noqa: N802
        if address.value not in self.locked:
            return 1
        result._obj.value = address.value
        return 0

    def cudaGetLastError(self):  # noqa: N802
        self.errors += 1


def as_tensor(memory, device):
    interface = memory.__cuda_array_interface__
    (count,), (address, read_only) = interface["shape"], interface["data"]
    assert interface["typestr"] == "|u1"
    assert interface["strides"] is None
    assert not read_only
    tensor = torch.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype=torch.uint8)
    tensor.kept_alive = memory
    return tensor


@pytest.fixture
def locked(monkeypatch):
    addresses = set()
    runtime = Runtime(addresses)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: runtime)
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    return runtime


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn])
def test_shape_and_dtype_are_those_of_the_host_tensor(locked, dtype):
    host = torch.arange(24).view(4, 6).to(dtype)
    locked.locked.add(host.data_ptr())
    seen = mapped.zero_copy_view(host, torch.device("cpu"))
    assert seen.shape == host.shape
    assert seen.dtype == dtype
    assert seen.data_ptr() == host.data_ptr()
    assert torch.equal(seen.view(torch.uint8), host.view(torch.uint8))


def test_pageable_memory_is_refused_and_the_error_fetched(locked):
    with pytest.raises(UnsupportedError, match=r"not page-locked, or the driver does not map it \(error 1\)"):
        mapped.zero_copy_view(torch.zeros(4), torch.device("cpu"))
    assert locked.errors == 1


def test_a_copy_made_by_torch_is_refused(locked, monkeypatch):
    monkeypatch.setattr(torch, "as_tensor", lambda memory, device: as_tensor(memory, device).clone())
    host = torch.zeros(4)
    locked.locked.add(host.data_ptr())
    with pytest.raises(UnsupportedError, match="copied"):
        mapped.zero_copy_view(host, torch.device("cpu"))


def test_empty_tensors_need_no_address(locked):
    assert mapped.zero_copy_view(torch.zeros(0, 3, dtype=torch.bfloat16), torch.device("cpu")).shape == (0, 3)


def test_other_layouts_are_refused(locked):
    with pytest.raises(UnsupportedError, match="contiguous"):
        mapped.zero_copy_view(torch.zeros(3, 2).T, torch.device("cpu"))


def test_without_the_cuda_runtime(monkeypatch):
    def fail(name):
        raise OSError("no such file")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    with pytest.raises(UnsupportedError, match="cannot be asked for addresses"):
        mapped.zero_copy_view(torch.zeros(4), torch.device("cpu"))


def probe():
    return torch.empty(64, dtype=torch.int32)


def test_memory_that_both_sides_share_is_accepted():
    waited = []
    assert mapped.refusal(lambda host: host.view_as(host), probe(), lambda: waited.append(1)) == ""
    assert waited


def fail(host):
    raise RuntimeError("invalid device pointer\nCUDA kernel errors might be reported later")


@pytest.mark.parametrize(
    ("view_of", "reason"),
    [
        (torch.zeros_like, "kernels read something else there than the host has written"),
        (torch.clone, "the host reads something else there than kernels have written"),
        (fail, "invalid device pointer"),
    ],
)
def test_memory_that_they_do_not_share_is_refused(view_of, reason):
    assert mapped.refusal(view_of, probe(), lambda: None) == reason


def shared(host):
    return host.view_as(host)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_that_integers_pass_and_other_types_do_not_is_refused(dtype):
    def view_of(host):
        return host.clone() if host.dtype is dtype else shared(host)

    reason = mapped.refusal(view_of, probe(), lambda: None)
    assert reason == f"what is copied there does not arrive ({str(dtype).removeprefix('torch.')})"


@pytest.mark.parametrize(
    ("function", "name"),
    [("embedding", "an embedding"), ("layer_norm", "a layer norm"), ("rms_norm", "an RMS norm")],
)
def test_a_kernel_that_reads_something_else_is_named(monkeypatch, function, name):
    real, calls = getattr(mapped.F, function), []

    def wrong(*args):
        calls.append(1)
        return real(*args) + len(calls)

    monkeypatch.setattr(mapped.F, function, wrong)
    reason = mapped.refusal(shared, probe(), lambda: None)
    assert reason == f"{name} reads something else there than the host has written (float32)"


def test_speeds_are_those_of_the_memory(monkeypatch):
    @contextmanager
    def locked(host):
        yield host

    monkeypatch.setattr(mapped, "locked", locked)
    monkeypatch.setattr(mapped, "_SPEED_BYTES", 1 << 16)
    waited = []
    speeds = mapped.measure_speeds(torch.device("cpu"), lambda: waited.append(1), shared)
    assert min(speeds.copy_in, speeds.read, speeds.write) > 0
    assert len(waited) == 3 * 4 * 2


def test_slow_reads_are_no_use():
    assert mapped.Speeds(copy_in=40e9, read=20e9, write=1e9).too_slow == ""
    assert mapped.Speeds(copy_in=40e9, read=19e9, write=40e9).too_slow == (
        "kernels read it at 19 GB/s, less than 50% of the 40 GB/s of copies"
    )


class Cudart:
    def __init__(self, code):
        self.code, self.calls = code, []

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
        self.calls.append(("register", address, nbytes, flags))
        return self.code

    def cudaHostUnregister(self, address):  # noqa: N802
        self.calls.append(("unregister", address))
        return 0


def test_memory_is_page_locked_for_as_long_as_it_is_needed(monkeypatch):
    cudart = Cudart(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: cudart.calls.append(("synchronize",)))
    host = torch.zeros(8)
    with pytest.raises(KeyError), mapped.locked(host):
        raise KeyError
    address = host.data_ptr()
    assert cudart.calls == [("register", address, 32, 3), ("synchronize",), ("unregister", address)]


def test_memory_that_may_not_be_page_locked_is_refused(monkeypatch):
    cudart = Cudart(2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch, "zeros", lambda *args, **options: None)
    with pytest.raises(UnsupportedError, match=r"page-locked \(error 2\)"), mapped.locked(torch.ones(8)):
        pass
    assert len(cudart.calls) == 1
