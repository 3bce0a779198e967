"""How much Python the engine runs per step: what a GPU waits for when blocks are small."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lt_offload
from lt_offload.execute.engine import Engine
from lt_offload.model.blocks import find_blocks
from lt_offload.schema.plan import UpdatePlace
from lt_offload.schema.profile import OptionName
from tests.support import models, plans
from tests.support.hostile.device import HostileDevice

PACKAGE = str(Path(lt_offload.__file__).parent)


@pytest.mark.parametrize(
    ("option", "place", "calls"),
    [("keep", "host", 3250), ("offload", "paged", 4450), ("keep", "device", 2900), ("recompute", "device", 3250)],
)
def test_a_step_calls_no_more_functions_than_it_did(
    option: OptionName, place: UpdatePlace, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``calls`` are of 6 blocks with 30 tensors, a few percent above what there are; newer Pythons count fewer."""
    monkeypatch.setattr("lt_offload.optim.torch_adam._LEAST", 1 << 15)
    model = models.build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    plan = plans.streamed(find_blocks(model), optimizer, options=(option,), places=(place,))
    device = HostileDevice(1 << 30, "lazy", check=False, poison=False)
    engine = Engine(model, optimizer, plan, device)
    engine.install()
    engine.follow(optimizer)
    batch = models.batch(model)
    found = 0

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def count(frame: Any, event: str, _: object) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    for _ in range(3):  # what the first steps make is there afterwards
        step()
    gc.collect()
    gc.disable()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(before)
        gc.enable()
    engine.remove()
    device.close()
    assert 0 < found <= calls
