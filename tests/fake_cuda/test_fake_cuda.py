"""Does the fake device do what it is for? Each fault that it is to show is made here once."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.fake_cuda import build, runtime

CUDA = torch.device("cuda", 0)
ROOT = Path(__file__).parents[2]
LAZY = os.environ.get("FAKE_CUDA") == "lazy"


def child(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process of its own with the device."""
    environment = os.environ | environment
    command = [sys.executable, "-X", "faulthandler", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd=ROOT, env=environment)


@pytest.fixture
def pinned() -> Iterator[Callable[[int], torch.Tensor]]:
    """Make page-locked floats."""
    yield lambda size: torch.empty(size, pin_memory=True).fill_(1.0)
    torch.cuda.synchronize()


# -- what torch says ---------------------------------------------------------------------------------------------------


def test_torch_takes_it_for_a_gpu() -> None:
    tensor = torch.ones(3, device="cuda")
    assert torch.cuda.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert tensor.device == CUDA
    assert tensor.is_cuda
    assert torch.cuda.get_device_name() == runtime.NAME
    assert "cuda:0" in repr(tensor)
    with pytest.raises(RuntimeError, match="same device, but found at least two devices"):
        tensor + torch.ones(3)
    assert (tensor + torch.tensor(1.0)).tolist() == [2, 2, 2], "a number on the host is given by value"


def test_the_backward_has_a_thread_of_its_own() -> None:
    threads: list[int] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            threads.append(threading.get_ident())
            return x * 2

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            threads.append(threading.get_ident())
            return gradient * 2

    x = torch.ones(3, device=CUDA, requires_grad=True)
    Look.apply(x).sum().backward()
    assert threads[0] == threading.get_ident() != threads[1]
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    """Forward, backward and update of a small network, bit for bit; norms, which torch takes apart, aside."""

    def trained(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 50))
        net = net.to(device, dtype)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
        ids = torch.arange(24).remainder(7).reshape(2, 12).to(device)
        losses = []
        for _ in range(3):
            logits = net(ids)
            heads = logits.view(2, 12, 5, 10).transpose(1, 2)
            with sdpa_kernel(SDPBackend.MATH):
                logits = logits + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).mean()
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *(parameter.detach() for parameter in net.parameters())]

    assert all(torch.equal(a, b.cpu()) for a, b in zip(trained("cpu"), trained("cuda"), strict=True))


def test_random_numbers_are_the_devices() -> None:
    torch.manual_seed(3)
    host = torch.rand(4)
    state = torch.cuda.get_rng_state()
    one = torch.rand(4, device=CUDA)
    torch.cuda.set_rng_state(state)
    assert torch.equal(one, torch.rand(4, device=CUDA))
    torch.manual_seed(3)
    assert torch.equal(host, torch.rand(4)), "drawing on the device leaves the host's generator alone"


# -- what must not be done ---------------------------------------------------------------------------------------------


def test_host_code_cannot_touch_device_memory() -> None:
    code = "import ctypes, torch; x = torch.ones(4, device='cuda'); ctypes.string_at(x.data_ptr(), 4)"
    done = child(code)
    assert done.returncode == -signal.SIGSEGV, done.stderr


def test_kernels_cannot_touch_pageable_memory() -> None:
    """As a tensor that shows host memory to kernels after it is not page-locked any more."""
    code = """
import torch
from lt_offload.machine import zero_copy
from lt_offload.machine.pages import map_pages
memory = map_pages(1 << 16).bytes()
assert zero_copy.register(memory.data_ptr(), memory.nbytes) == 0
seen = zero_copy.zero_copy_view(memory, torch.device("cuda", 0))
assert int(seen.sum()) == 0
assert zero_copy.unregister(memory.data_ptr()) == 0
seen.sum()
"""
    done = child(code)
    assert done.returncode == 1
    assert "an illegal memory access was encountered" in done.stderr


def test_a_pageable_copy_can_be_forbidden() -> None:
    stream = torch.cuda.Stream()
    there, here = torch.empty(8, device=CUDA), torch.ones(8)
    torch.cuda.synchronize()
    runtime.forbid_pageable(stream)
    try:
        with torch.cuda.stream(stream), pytest.raises(RuntimeError, match="pageable memory on a stream that has to be"):
            there.copy_(here, non_blocking=True)
        with torch.cuda.stream(stream):
            there.copy_(here.pin_memory(), non_blocking=True)
        stream.synchronize()
        assert torch.equal(there.cpu(), here)
    finally:
        runtime.forbid_pageable(stream, False)


# -- streams and events ------------------------------------------------------------------------------------------------


@pytest.mark.skipif("not LAZY", reason="nothing is certain to be late in another order")
class TestLateness:
    def test_the_host_is_ahead(self, pinned: Callable[[int], torch.Tensor]) -> None:
        here = pinned(4)
        there = torch.zeros(4, device=CUDA)
        torch.cuda.synchronize()
        there.copy_(here, non_blocking=True)
        here.fill_(7.0)  # before the device has read it
        assert there.tolist() == [7, 7, 7, 7]

    def test_a_pageable_copy_has_read_its_source(self) -> None:
        here = torch.ones(4)
        there = here.to(CUDA, non_blocking=True)
        here.fill_(7.0)
        assert there.tolist() == [1, 1, 1, 1]

    @pytest.mark.parametrize(
        ("calls", "seen"),
        [("write", 0), ("write record wait", 1), ("wait write record", 0), ("record wait write record", 0)],
    )
    def test_streams_are_ordered_by_what_an_event_was_when_it_was_waited_for(self, calls: str, seen: int) -> None:
        side, value, event = torch.cuda.Stream(), torch.zeros(4, device=CUDA), torch.cuda.Event()
        torch.cuda.synchronize()
        does = {"write": lambda: value.fill_(1.0), "record": event.record, "wait": lambda: side.wait_event(event)}
        for call in calls.split():
            does[call]()
        with torch.cuda.stream(side):
            found = value.clone()
        side.synchronize()
        assert found.tolist() == [seen] * 4

    @pytest.mark.parametrize(("recorded", "largest"), [(False, 5), (True, 1)])
    def test_memory_that_is_freed_early_is_written_by_others(self, recorded: bool, largest: int) -> None:
        """While another stream reads it, of which the allocator has not heard."""
        side = torch.cuda.Stream()
        value = torch.ones(1000, device=CUDA)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            seen = value * 1
        if recorded:
            value.record_stream(side)
        del value
        other = torch.full((1000,), 5.0, device=CUDA)
        torch.cuda.current_stream().synchronize()
        side.synchronize()
        assert seen.max().item() == largest
        assert other.max().item() == 5

    def test_polling_ends(self) -> None:
        event = torch.cuda.Event()
        torch.ones(4, device=CUDA).mul_(2)
        event.record()
        assert any(event.query() for _ in range(1000))

    def test_launching_blocks_when_much_is_under_way(self) -> None:
        value, event = torch.zeros(1, device=CUDA), torch.cuda.Event()
        event.record()
        for _ in range(3000):
            value += 1
        assert event.query()
        assert value.item() == 3000


@pytest.mark.skipif("LAZY", reason="kernels run late")
def test_the_other_orders_work_by_themselves() -> None:
    value = torch.zeros(1, device=CUDA)
    event = torch.cuda.Event()
    event.record()
    for _ in range(200):
        value += 1
    assert event.query()


def test_what_nobody_has_written_is_not_a_number() -> None:
    assert torch.empty(100, device=CUDA).isnan().all()


def test_times_are_in_order() -> None:
    first, second = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    second.record()
    torch.cuda.synchronize()
    assert first.elapsed_time(second) >= 0


# -- memory ------------------------------------------------------------------------------------------------------------


def test_the_allocators_figures() -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    small, large = torch.empty(1000, device=CUDA), torch.empty(10 << 20, dtype=torch.uint8, device=CUDA)
    assert torch.cuda.memory_reserved() - before in (20 << 20, 22 << 20), "in pieces of 2 and 20 MiB, as torch takes it"
    free, total = torch.cuda.mem_get_info()
    assert total - free >= torch.cuda.memory_reserved() + runtime.figures()["beside"]
    del small, large
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


def test_the_cap_is_hard_and_unused_pieces_are_given_back_first() -> None:
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + (50 << 20)
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info()[1])
    try:
        held = torch.empty(30 << 20, dtype=torch.uint8, device=CUDA)
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(30 << 20, dtype=torch.uint8, device=CUDA)
        del held
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # whose pool has nothing
            torch.empty(30 << 20, dtype=torch.uint8, device=CUDA)
        assert torch.cuda.memory_stats()["num_alloc_retries"] >= retries + 2
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def test_a_gap_is_unmapped_and_mapped_elsewhere() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    pieces = [torch.empty(20 << 20, dtype=torch.uint8, device=CUDA) for _ in range(5)]
    del pieces[1::2]
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before == 60 << 20
    whole = torch.empty(40 << 20, dtype=torch.uint8, device=CUDA).fill_(3)
    assert torch.cuda.memory_reserved() - before == 100 << 20
    assert bool((whole == 3).all())


def test_others_may_take_it() -> None:
    free, _ = torch.cuda.mem_get_info()
    runtime.occupy(1 << 30)
    try:
        assert torch.cuda.mem_get_info()[0] == free - (1 << 30)
    finally:
        runtime.occupy(0)


def test_registering() -> None:
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    address, cudart = memory.data_ptr(), torch.cuda.cudart()
    beside, locked = runtime.figures()["beside"], runtime.figures()["locked"]
    assert cudart.cudaHostRegister(address, memory.nbytes, 0) == 0
    try:
        assert memory.is_pinned()
        assert runtime.figures()["locked"] == locked + memory.nbytes
        assert runtime.figures()["beside"] - beside in (128, 127, 129), "8 bytes of page tables for 4 KiB"
        assert cudart.cudaHostRegister(address + 4096, 4096, 0) == 712
        pointer = ctypes.c_void_p()
        found = ctypes.CDLL(build.SONAME).cudaHostGetDevicePointer(ctypes.byref(pointer), ctypes.c_void_p(address), 0)
        assert (found, pointer.value) == (0, address)
    finally:
        assert cudart.cudaHostUnregister(address) == 0
    assert cudart.cudaHostUnregister(address) == 713
    assert not memory.is_pinned()


def test_a_limit_of_what_may_be_locked() -> None:
    code = """
import torch
memory = torch.zeros(1 << 20, dtype=torch.uint8)
print([torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0) for size in (1 << 20, 1 << 19)])
"""
    done = child(code, FAKE_CUDA_PIN_BYTES=str(1 << 19))
    assert done.stdout.strip() == "[2, 0]", done.stderr


def test_pinned_memory_is_not_used_again_too_early() -> None:
    """Torch keeps it until the copies from it are done."""
    there = torch.zeros(1000, device=CUDA)
    torch.cuda.synchronize()
    here = torch.full((1000,), 1.0).pin_memory()
    there.copy_(here, non_blocking=True)
    del here
    torch.full((1000,), 2.0).pin_memory()
    assert there.max().item() == 1


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_two_devices() -> None:
    code = """
import torch
one, two = (torch.full((4,), float(i + 1), device=f"cuda:{i}", requires_grad=True) for i in range(2))
assert torch.cuda.device_count() == 2
assert torch.empty(2, device="cuda").device.index == 0
with torch.cuda.device(1):
    assert torch.empty(2, device="cuda").device.index == 1 == torch.cuda.current_device()
    stream = torch.cuda.Stream()
    assert stream.device.index == 1
try:
    one + two
except RuntimeError as error:
    assert "at least two devices" in str(error)
else:
    raise AssertionError
(one.to("cuda:1") * two).sum().backward()
assert (one.grad.device.index, one.grad.tolist()) == (0, [2, 2, 2, 2])
assert (two.grad.device.index, two.grad.tolist()) == (1, [1, 1, 1, 1])
assert torch.cuda.memory_allocated(0) > 0 < torch.cuda.memory_allocated(1)
torch.cuda.synchronize(1)
"""
    done = child(code, FAKE_CUDA_DEVICES="2")
    assert done.returncode == 0, done.stderr


def test_a_forked_child_has_no_device() -> None:
    """It may drop what it has inherited; to use the device is the error that it is with CUDA."""
    code = """
import os, torch
held, pinned = torch.ones(1000, device="cuda"), torch.ones(1000).pin_memory()
child = os.fork()
if child == 0:
    del held, pinned
    try:
        torch.ones(3, device="cuda")
    except RuntimeError as error:
        os._exit(17 if "forked" in str(error) else 18)
    os._exit(19)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
assert held.sum().item() == 1000
"""
    done = child(code)
    assert done.returncode == 0, done.stderr


def test_none_is_visible() -> None:
    done = child("import torch; print(torch.cuda.is_available(), torch.cuda.device_count())", CUDA_VISIBLE_DEVICES="")
    assert done.stdout.split() == ["False", "0"], done.stderr


def test_a_driver_that_cannot_map_page_by_page() -> None:
    code = """
import torch
from lt_offload.machine import driver
assert not driver.use_expandable_segments(torch.device("cuda", 0))
print(torch.ones(3, device="cuda").sum().item())
"""
    assert child(code, FAKE_CUDA_EXPANDABLE="0").stdout.strip() == "3.0"


def test_processes_that_import_no_torch_do_not_load_it() -> None:
    code = "import sys, lt_offload.units; print([m for m in sys.modules if 'fake_cuda.runtime' in m or m == 'torch'])"
    assert child(code).stdout.strip() == "[]"


def test_what_cannot_be_built_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "_key", lambda torch: "none")
    monkeypatch.setattr(build.sys, "prefix", str(tmp_path))
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(build.BuildError, match="does not build with torch"):
        build.library.__wrapped__()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match=r"needs a C\+\+ compiler: install g\+\+"):
        build.library.__wrapped__()
