"""What a profile says about an option is what the engine then does."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lt_offload.execute.engine import Engine
from lt_offload.model.blocks import find_blocks
from lt_offload.profiling.hardware import load_hardware
from lt_offload.profiling.measure import profile
from tests.support import models, plans, user_nets
from tests.support.hostile.device import HostileDevice


@pytest.mark.slow
@pytest.mark.parametrize("option", ["offload", "mixed", "reload"])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_activations_that_travel(family: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build(family, dropout=0.1)
    said, moved = said_and_moved(model, models.batch(model), option, monkeypatch)
    assert len(said) >= 4
    assert moved == said


class Sparse(user_nets.Layer):
    """Multiplies with a sparse matrix that it makes of its input, a kilobyte of numbers, which autograd saves."""

    def inner(self, x: Tensor) -> Tensor:
        made = 2 * x[:, 0].repeat(1, 5).flatten()
        where = torch.stack([torch.arange(len(made)) % user_nets.HIDDEN, torch.arange(len(made)) // 10])
        shape = torch.Size((user_nets.HIDDEN, user_nets.HIDDEN))
        matrix = torch.sparse_coo_tensor(where, made, shape, check_invariants=False)
        return torch.tanh(torch.sparse.mm(matrix, x.flatten(0, 1).t()).t().view_as(x))


def test_what_travels_of_sparse_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    said, moved = said_and_moved(user_nets.Net(Sparse), user_nets.rows()[0], "offload", monkeypatch)
    assert min(list(said.values())[1:5]) > 0
    assert moved == said


def said_and_moved(
    model: nn.Module, batch: dict[str, Tensor], option: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[int, int], dict[int, int]]:
    """Return by block the bytes that travel under an option, as the profile says and as the engine does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    structure = find_blocks(model)
    found = profile(
        model, batch, optimizer=optimizer, device="cpu", hardware=load_hardware("h200"), structure=structure
    )
    device = HostileDevice(1 << 30, mode="lazy")
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
            loss = model(**batch)["loss"]
            loss.backward()
            optimizer.step()
        engine.drain()
    finally:
        engine.remove()
        device.close()
    offered = [i for i, block in enumerate(found.blocks) if option in [o.name for o in block.options]]
    said = {i: found.blocks[i].option(option).offload_bytes for i in offered}
    return said, {i: moved.get(i, 0) for i in offered}
