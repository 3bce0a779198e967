"""Saved tensors on their way to the host and back, exactly as they were; forwards in the smallest arena."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lt_offload.errors import OverBudget, UnsupportedError
from lt_offload.execute.memory.activations import ActivationOffloader, HostPool, Moved, SavedTensors
from lt_offload.execute.memory.groups import Layout
from lt_offload.execute.memory.streaming import Streaming
from lt_offload.execute.memory.tensors import Weight
from tests.support.hostile.device import HostileDevice

MODES = ["lazy", "random", "thread"]


@pytest.fixture(params=MODES)
def device(request: pytest.FixtureRequest):
    device = HostileDevice(1 << 20, request.param, check=True)
    device.reserve(0)
    yield device
    device.close()


def saved() -> dict[str, torch.Tensor]:
    """Tensors of three storages: whole ones, views, and one with the strides of a dimension that has one element."""
    torch.manual_seed(0)
    whole, other, large = torch.randn(8, 16), torch.randn(40).bfloat16(), torch.randn(32, 12)
    return {
        "whole": whole,
        "the same again": whole.view(8, 16),
        "transposed": whole.t(),
        "odd stride": other.as_strided((1, 40), (7, 1)),
        "other": other,
        "rows of a larger one": large[3:9],
        "another dtype": whole.view(torch.int32).view(torch.float32)[::2],
    }


def travel(
    device: HostileDevice, pool: HostPool, tensors: dict[str, torch.Tensor]
) -> tuple[ActivationOffloader, list[Moved]]:
    """Have ``tensors`` copied to the host and back; return what stands for them."""
    offloader = ActivationOffloader(device, pool, "0")
    moved = [offloader.take(tensor) for tensor in tensors.values()]
    assert offloader.leave(1) is not None
    offloader.released()
    offloader.fetch(2)
    return offloader, moved


@pytest.mark.parametrize("own", [False, True])
def test_tensors_come_back_as_they_were(device: HostileDevice, own: bool) -> None:
    pool = HostPool(device)
    for _ in range(3):  # the same host memory is used again
        tensors = saved()
        offloader, moved = travel(device, pool, tensors)
        for each, (name, tensor) in zip(moved, tensors.items(), strict=True):
            back = each.restore() if own else each()
            assert back.data_ptr() != tensor.data_ptr()
            assert (back.dtype, back.shape, back.stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
            assert torch.equal(back, tensor), name
        offloader.close()
    assert pool.nbytes == 4096, "storages stand side by side in one buffer"


def test_no_mode_sees_how_tensors_are_saved() -> None:
    seen: list[Any] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode(), SavedTensors([], None, []):
        torch.ones(3, requires_grad=True).sin()
    assert seen == [torch.ops.aten.ones.default, torch.ops.aten.sin.default]


def test_memory_is_let_go_of_when_its_copy_is_over(device: HostileDevice) -> None:
    """Whoever is given it next, here by writing where the saved tensors were, comes after the copy."""
    offloader, tensors = ActivationOffloader(device, HostPool(device), "0"), saved()
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    moved = [offloader.take(tensor) for tensor in tensors.values()]
    offloader.leave(1)
    offloader.released()
    for name in ("whole", "other", "rows of a larger one"):
        tensors[name].zero_()
    offloader.fetch(2)
    for each, (name, tensor) in zip(moved, expected.items(), strict=True):
        assert torch.equal(each(), tensor), name
    offloader.close()


def test_host_memory_is_taken_over_when_the_copies_of_who_had_it_are_over(device: HostileDevice) -> None:
    """Nothing has waited for these: their backward broke off while they were on their way back."""
    pool = HostPool(device)
    travel(device, pool, saved())[0].close()
    tensors = saved()
    _, moved = travel(device, pool, tensors)
    for each, (name, tensor) in zip(moved, tensors.items(), strict=True):
        assert torch.equal(each(), tensor), name
    assert pool.nbytes == 4096


def test_nothing_is_left_of_who_is_gone_without_a_word(device: HostileDevice) -> None:
    """A forward whose loss is dropped: its memory comes back, and the copies that it began are over before."""
    pool = HostPool(device)
    offloader, moved = travel(device, pool, saved())
    storages = [weakref.ref(each.storage) for each in moved]
    gc.disable()
    try:
        del offloader, moved
        assert not any(storage() for storage in storages)
    finally:
        gc.enable()
    tensors = saved()
    offloader, moved = travel(device, pool, tensors)
    for each, (name, tensor) in zip(moved, tensors.items(), strict=True):
        assert torch.equal(each(), tensor), name
    assert pool.nbytes == 4096
    del offloader
    with pytest.raises(UnsupportedError, match="from inside block 0"):
        moved[0]()


def test_memory_for_many_is_held_against_the_budget(device: HostileDevice) -> None:
    parts = [(torch.Size([1 << 16]), torch.float32)] * 4
    with device.accounting():
        first = device.empty_all(parts)
        with pytest.raises(OverBudget, match="shape"):
            device.empty_all(parts[:1])
        assert [tensor.numel() for tensor in first] == [1 << 16] * 4
    device.empty_all(parts)  # outside of iterations nobody counts


ROOM = 512
"""What each of the weights takes of an arena."""


@pytest.mark.parametrize("blocks", [0.5, 1, 1.5, 2, 3])
def test_what_is_computed_with_stays_until_then(blocks: float) -> None:
    """The next block is fetched where there is room beside the one that runs, and takes nothing from that."""
    device = HostileDevice(1 << 16, "lazy", check=True)
    weights = [Weight(i, f"w{i}", nn.Parameter(torch.full((ROOM // 4,), float(i)))) for i in range(3)]
    sequence = [[weight] for weight in weights]
    residency: Any = SimpleNamespace(run_releases=lambda: None, unsettle=lambda: None)
    streaming = Streaming(device, sequence, Layout(device, weights, sequence, None), residency)
    device.reserve(int(blocks * ROOM))
    try:
        for index in (0, 1, 2, 0, 1):
            if blocks < 1:
                with pytest.raises(OverBudget, match=f"block {index} needs 512 B of weights, more than"):
                    streaming.forward(index, lambda: None, (), {})
                continue
            found = streaming.forward(index, lambda index=index: weights[index].param.detach().clone(), (), {})
            assert torch.equal(found, torch.full((ROOM // 4,), float(index)))
    finally:
        device.close()
