"""Measurements of a GPU, its links and its host, and profiles made on it."""

from __future__ import annotations

import gc
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import lt_offload
from lt_offload.errors import UnsupportedError
from lt_offload.machine import dispatch, driver, forked, zero_copy
from lt_offload.machine.accounting import Account
from lt_offload.machine.numa import memory_node_of
from lt_offload.profiling import assemble, hardware, host_reads, machine, optimizer, rates
from lt_offload.profiling.machine import measure_contention
from lt_offload.profiling.meters import Stopwatch, Watch
from lt_offload.profiling.optimizer import measure_optimizer
from tests.gpu.measuring.tiny import MIB, profiled, tiny_model
from tests.gpu.target import Target

pytestmark = pytest.mark.only("cuda")


# -- measurements ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("pinned", [True, False])
def test_links(pinned: bool, device: torch.device, found: Callable[..., None]) -> None:
    links = rates.measure_links(device, pinned=pinned, node=memory_node_of(device))
    found(**links)
    assert len(links) == 5
    assert min(links.values()) > 1e6


@pytest.mark.usefixtures("short")
def test_a_machine(target: Target, device: torch.device) -> None:
    said: list[str] = []
    machine = hardware.measure_machine(device, on_progress=said.append)
    assert machine.name == torch.cuda.get_device_name(device)
    assert machine.device_bytes == torch.cuda.get_device_properties(device).total_memory
    assert machine.context_bytes == pytest.approx(driver.context_bytes(device), rel=0.02)
    assert 0 < machine.pinnable_bytes <= machine.host_bytes <= hardware.total_host_bytes()
    assert set(machine.flops_per_s) == {"float32", "bfloat16"}
    assert min(machine.device_memory_bytes_per_s, machine.host_memory_bytes_per_s, machine.staged_bytes_per_s) > 0
    assert "page-locked memory" in machine.source
    assert said == ["measuring copies between host and device", "measuring matrix products", "measuring memory"]
    if target.real:
        assert machine.flops_per_s["bfloat16"] > machine.flops_per_s["float32"] > 1e11
        assert machine.device_memory_bytes_per_s > machine.host_memory_bytes_per_s


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_long_enough_to_be_timed(dtype: torch.dtype, device: torch.device, target: Target) -> None:
    size, times = rates.product_size(dtype, device)
    assert rates.LEAST_SIZE <= size <= rates.MOST_SIZE
    assert times == 1 or size == rates.MOST_SIZE
    a = torch.ones(size, size, dtype=dtype, device=device)
    watch = Stopwatch(device)
    laps = []
    for _ in range(3):
        watch.lap()
        a @ a
        laps.append(watch.lap())
    if target.real:
        assert times > 1 or max(lap.seconds for lap in laps) > rates._LONG_ENOUGH / 2
    assert all(0 < lap.launch_s <= lap.seconds for lap in laps)


def test_the_host_is_ahead_of_what_is_timed(device: torch.device, target: Target) -> None:
    """Then many small kernels take what the device needs for them, and not what their launches take."""
    watch, x = Stopwatch(device), torch.ones(256, device=device)

    def small() -> None:
        for _ in range(200):
            x.add_(1)

    small()
    found = []
    for behind in (0.0, 0.0, 0.02, 0.0):
        watch.lap(behind)
        small()
        found.append(watch.lap())
    assert x.tolist() == [1001.0] * 256
    assert found[2].seconds >= 0
    if target.real:
        driver.occupy(device, 0.01)
        assert not torch.cuda.current_stream(device).query()
        assert found[2].seconds < 0.9 * found[1].seconds
        assert found[3].seconds == pytest.approx(found[1].seconds, rel=0.5), "it holds for one lap only"


@contextmanager
def only(room: int, device: torch.device) -> Iterator[None]:
    """Let torch's allocator have ``room`` bytes more than it holds."""
    driver.warm_up(device)
    gc.collect()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + room) / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@pytest.mark.parametrize("room", [80 * MIB, 24 * MIB])
def test_updates_are_timed_with_what_finds_room(
    room: int, device: torch.device, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a gigabyte is what they are timed with otherwise, an eighth of that where times mean nothing."""
    if not target.real:
        monkeypatch.setitem(optimizer._ELEMENTS, "cuda", 1 << 23)
    weights = [torch.nn.Parameter(torch.zeros(1 << 22)) for _ in range(8)]
    with only(room, device):
        found = measure_optimizer(torch.optim.AdamW(weights, fused=True), device)
    assert found.device_bytes_per_s > 0


def test_what_is_measured_is_halved_until_it_finds_room(device: torch.device) -> None:
    tried: list[int] = []

    def measured(size: int) -> int:
        tried.append(size)
        torch.empty(size, dtype=torch.uint8, device=device)
        return size

    with only(24 * MIB, device):
        assert driver.in_what_room(measured, 64 * MIB, least=4 * MIB) == 16 * MIB
        assert tried == [64 * MIB, 32 * MIB, 16 * MIB]
        with pytest.raises(torch.OutOfMemoryError):
            driver.in_what_room(measured, 64 * MIB, least=32 * MIB)


def test_a_model_is_measured_in_little_memory(
    device: torch.device, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However fast the device is: it would multiply matrices of a quarter of a gigabyte, were there room."""
    monkeypatch.setattr(rates, "_LONG_ENOUGH", math.inf)
    monkeypatch.setattr(rates, "_MOST_TIMES", 1)
    monkeypatch.setattr(machine, "_ROUNDS", 1)
    monkeypatch.setattr("lt_offload.profiling.machine.measure_hardware", hardware.measure_hardware)
    monkeypatch.setattr("lt_offload.profiling.machine.measure_contention", measure_contention)
    if not target.real:
        monkeypatch.setitem(optimizer._ELEMENTS, "cuda", 1 << 22)
    with only(45 * MIB, device):
        assert rates.product_size(torch.float32, device) == (1024, 1)
        found = profiled(*tiny_model(), device)
    assert found.contention.slowdowns
    assert min(found.hardware.h2d_bytes_per_s, found.optimizer.device_bytes_per_s) > 0
    assert any(tensor.zero_copy for tensor in found.tensors)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("most", [0, 8 * MIB, 76 * MIB], ids=["nothing", "a little", "not enough"])
def test_a_machine_that_locks_little_memory_is_measured(
    most: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container, for example; copies are slower then, and plans know how much."""
    locked: dict[int, int] = {}
    register, unregister = zero_copy.register, zero_copy.unregister

    def limited(address: int, nbytes: int) -> int:
        if sum(locked.values()) + nbytes > most:
            return 2
        locked[address] = nbytes
        return register(address, nbytes)

    def freed(address: int) -> int:
        locked.pop(address, None)
        return unregister(address)

    monkeypatch.setattr(rates, "_COPY_BYTES", 32 * MIB)
    monkeypatch.setattr(zero_copy, "register", limited)
    monkeypatch.setattr(zero_copy, "unregister", freed)
    monkeypatch.setattr("lt_offload.profiling.machine.measure_hardware", hardware.measure_hardware)
    monkeypatch.setattr("lt_offload.profiling.machine.measure_contention", measure_contention)
    profile = profiled(*tiny_model(), device)
    assert profile.hardware.pinnable_bytes <= most
    assert min(profile.hardware.h2d_bytes_per_s, profile.hardware.staged_bytes_per_s) > 1e6
    assert profile.contention.slowdowns
    assert locked == {}


@pytest.mark.usefixtures("short")
def test_what_lanes_share(target: Target, device: torch.device) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(64, 64))])
    found = measure_contention(optimizer, device, host_threads=1)
    assert {(s.lane, s.beside) for s in found.slowdowns} == {
        (lane, tuple(other for other in lanes if other != lane)) for lanes in machine.SETS for lane in lanes
    }
    assert all(0 <= found.of(lane) <= 1 for lane in machine.SHARING)
    if target.real:
        assert found.compute < 0.5, "computations of a GPU hardly use the host's memory"


def test_updates_on_either_side(device: torch.device) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(256, 256))], fused=False, foreach=True)
    before = torch.cuda.memory_allocated(device)
    found = measure_optimizer(optimizer, device)
    assert min(found.host_bytes_per_s, found.device_bytes_per_s) > 0
    assert found.host_speeds[found.host_threads] == found.host_bytes_per_s
    assert 0 < found.scratch_ratio < 8
    assert torch.cuda.memory_allocated(device) == before


def test_device_memory_of_a_phase(device: torch.device) -> None:
    watch = Watch(device)
    with watch:
        kept = torch.ones(8 * MIB, dtype=torch.uint8, device=device)
        passing = torch.ones(4 * MIB, dtype=torch.uint8, device=device)
        del passing
    assert watch.current == 8 * MIB
    assert 12 * MIB <= watch.peak() <= 14 * MIB
    with watch:
        gradient = torch.ones(2 * MIB, dtype=torch.uint8, device=device)
        watch.leave_out(gradient)
    assert watch.peak() < watch.whole_peak() == watch.held_peak()
    assert watch.slack >= 0
    del kept, gradient


def test_an_account_of_the_device_counts_nothing_of_the_host(device: torch.device) -> None:
    with Account(device_type="cuda") as account:
        there, here = torch.ones(1000, device=device), torch.ones(5000)
        view = there[5:]
        out = dispatch._empty_strided_on("cuda")((10,), (1,), torch.float32)  # as compiled code allocates
    assert account.current == 4000 + 40
    del there, view, here, out
    assert account.current == 0


def test_no_tensor_leaves_a_forked_process_on_the_device(device: torch.device) -> None:
    outcome, why = pickle.loads(forked._answer(lambda: {"x": torch.zeros(2, device=device)}))
    assert outcome == "failed"
    assert "tensor on cuda" in why

    def fails() -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    assert pickle.loads(forked._answer(fails))[0] == "failed"


# -- profiles --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short")
def test_a_profile_leaves_no_trace(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lt_offload.profiling.machine.measure_hardware", hardware.measure_hardware)
    monkeypatch.setattr("lt_offload.profiling.machine.measure_contention", measure_contention)
    model, optimizer = tiny_model()
    weights = [(p, p.data_ptr(), p.detach().clone()) for p in model.parameters()]
    torch.manual_seed(3)
    torch.cuda.manual_seed(4)
    states = torch.get_rng_state(), torch.cuda.get_rng_state(device)
    driver.warm_up(device)
    gc.collect()  # of tests before
    torch.cuda.empty_cache()  # and what streams have used is not counted as free before that
    before = torch.cuda.memory_allocated(device)
    profile = profiled(model, optimizer, device)
    gc.collect()
    assert torch.cuda.memory_allocated(device) <= before, "less: of what tests before left to a lane"
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.cuda.get_rng_state(device), states[1])
    for parameter, address, value in weights:
        assert parameter.data_ptr() == address
        assert parameter.grad is None
        assert torch.equal(parameter, value)
    assert not profile.estimated
    assert profile.slack_share == assemble.ALLOCATOR_SLACK
    assert profile.page_table_bytes > 0
    assert profile.contention.slowdowns
    assert profile.hardware.context_bytes >= driver.beside_bytes(device)[0] * 0.9
    machine = profile.hardware
    assert (machine.h2d_bytes_per_s, machine.d2h_bytes_per_s) == (
        machine.h2d_alone_bytes_per_s,
        machine.d2h_alone_bytes_per_s,
    )
    assert [t.name for t in profile.tensors if t.zero_copy is None] == []
    assert all(block.launch_s > 0 for block in profile.blocks)


def test_sizes_are_those_of_the_emulated_device(device: torch.device) -> None:
    """Kernels of the device may take something beside; what is saved and what travels are the model's."""
    found = [profiled(*tiny_model(), where) for where in (device, torch.device("cpu"))]
    for ours, theirs in zip(*(profile.blocks for profile in found), strict=True):
        assert (ours.input_bytes, ours.output_bytes) == (theirs.input_bytes, theirs.output_bytes)
        assert [option.name for option in ours.options] == [option.name for option in theirs.options]
        assert ours.option("recompute" if ours.kind == "layer" else "keep").saved_bytes == (
            theirs.option("recompute" if theirs.kind == "layer" else "keep").saved_bytes
        )
    assert not any(block.graphed for profile in found for block in profile.blocks)


class ComputedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.dropout(x, 0.2, self.training)
        return x + (y.transpose(0, 1) @ (self.linear.weight * 2)).transpose(0, 1)


class ByMode(ComputedWeight):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(F.dropout(x, 0.2, self.training))
        return x + out + (0.0 if torch.is_grad_enabled() else 1e-3)


class Same(ComputedWeight):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(F.dropout(x, 0.2, self.training))
        return x + out


@pytest.mark.parametrize("layer", [ComputedWeight, ByMode, Same])
def test_blocks_that_differ_without_gradients_are_found_without_deterministic_algorithms(
    layer: type[nn.Module], device: torch.device
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(61, 32), nn.Linear(32, 61)
            self.layers = nn.ModuleList(layer() for _ in range(2))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for each in self.layers:
                x = each(x)
            return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    assert not torch.are_deterministic_algorithms_enabled()
    model = Net().train()
    optimizer = torch.optim.AdamW(model.parameters())
    profile = lt_offload.profile(model, (torch.arange(12).view(2, 6),), optimizer=optimizer, device=device)
    differs = layer is not Same
    for block in profile.blocks[1:-1]:
        assert block.graphed is differs
        assert ("mixed" in {option.name for option in block.options}) is not differs


def test_a_device_that_cannot_read_host_memory_has_no_figures_for_it(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(host: Tensor, device: torch.device) -> Tensor:
        raise UnsupportedError("the driver does not map this memory")

    monkeypatch.setattr(host_reads, "zero_copy_view", refuse)
    said: list[str] = []
    profile = profiled(*tiny_model(), device, on_progress=said.append)
    assert all(tensor.zero_copy is None for tensor in profile.tensors)
    assert any("weights cannot be read in host memory: the driver does not map" in line for line in said)
