"""Forwards without a plan in an arena that is as small as it may be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lt_offload.errors import OverBudget
from lt_offload.execute.memory.groups import Layout
from lt_offload.execute.memory.streaming import Streaming
from lt_offload.execute.memory.tensors import Weight
from tests.support.hostile.device import HostileDevice

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
