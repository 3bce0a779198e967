"""Devices, short measurements, and a tiny model, for tests of what is measured."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from lt_offload.profiling import machine, optimizer, rates
from tests.gpu.measuring.tiny import MIB
from tests.gpu.target import Target


@pytest.fixture
def device(target: Target) -> Iterator[torch.device]:
    gc.collect()
    torch.cuda.empty_cache()
    yield target.torch_device
    torch.cuda.synchronize()


@pytest.fixture
def short(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where times mean nothing, copies and updates may be short."""
    if not target.real:
        monkeypatch.setattr(rates, "_COPY_BYTES", 4 * MIB)
        monkeypatch.setattr(machine, "_COPY_BYTES", 4 * MIB)
        monkeypatch.setattr(machine, "_ROUNDS", 1)
        monkeypatch.setitem(optimizer._ELEMENTS, "cuda", 1 << 22)
        monkeypatch.setattr(rates, "_DIRECT_BYTES", 4 * MIB)


@pytest.fixture
def occupied(target: Target) -> Iterator[Callable[[int], None]]:
    """Lets others have some of the device; on a real one nobody can be asked to."""
    if target.kind != "fake":
        pytest.skip("others on a GPU are not ours")
    from tests.fake_cuda import runtime

    yield runtime.occupy
    runtime.occupy(0)
