"""What a profile says about an option is what the engine then does."""

from typing import Any

import pytest
import torch

from lt_offload.execute.device.emulated import EmulatedDevice
from lt_offload.execute.engine import Engine
from lt_offload.model.blocks import find_blocks
from lt_offload.profiling.hardware import load_hardware
from lt_offload.profiling.measure import profile
from tests.support import models, plans


@pytest.mark.parametrize("option", ["offload", "mixed", "reload"])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_activations_that_travel(family: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build(family, dropout=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    structure = find_blocks(model)
    batch = models.batch(model)
    found = profile(
        model, batch, optimizer=optimizer, device="cpu", hardware=load_hardware("h200"), structure=structure
    )
    device = EmulatedDevice(1 << 30, mode="lazy")
    moved: dict[int, int] = {}
    submit = device.submit

    def watch(lane: Any, task: Any, *, label: str = "", nbytes: int = 0, **options: Any) -> Any:
        if label.startswith("offload activation"):
            moved[int(label.split()[-1])] = nbytes
        return submit(lane, task, label=label, nbytes=nbytes, **options)

    monkeypatch.setattr(device, "submit", watch)
    plan = plans.streamed(structure, optimizer, options=(option,), places=("device",))
    engine = Engine(model, optimizer, plan, device, structure=structure)
    engine.install()
    try:
        with engine.iteration():
            model(**batch).loss.backward()
            optimizer.step()
        engine.drain()
    finally:
        engine.remove()
        device.close()
    offered = [i for i, block in enumerate(found.blocks) if option in [o.name for o in block.options]]
    assert len(offered) >= 4
    assert {i: moved[i] for i in offered} == {i: found.blocks[i].option(option).offload_bytes for i in offered}
