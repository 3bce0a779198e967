"""Buffers that a block writes by another reference than their name count what plain PyTorch counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lt_offload import OffmateStrategy
from tests.support.trainers import Forced, Stepping, stepped


class _Listed(nn.Module):
    """Writes its buffer in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(()))
        self.all = [self.steps]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.all[0].add_(1)
        return x + torch.tanh(self.linear(x))


class _Shared(nn.Module):
    """Writes the buffer of one module, and reads it from another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.one, self.other = nn.Linear(8, 8), nn.Module(), nn.Module()
        steps = torch.zeros(())
        self.one.register_buffer("steps", steps)
        self.other.register_buffer("steps", steps)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.one.get_buffer("steps").add_(1)
        return x + torch.tanh(self.linear(x)) / (1 + self.other.get_buffer("steps"))


class _Net(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


@pytest.mark.parametrize("block", [_Listed, _Shared])
@pytest.mark.parametrize("strategy", [OffmateStrategy, Forced])
def test_they_end_as_in_plain_pytorch(block: type[nn.Module], strategy: type[OffmateStrategy]) -> None:
    torch.manual_seed(1)
    batches = [{"x": torch.randn(4, 8)} for _ in range(4)]

    def run(strategy: object) -> list[Tensor]:
        torch.manual_seed(2)
        module = Stepping(_Net(block), lambda model: torch.optim.AdamW(model.parameters(), fused=True))
        stepped(strategy, module, batches)
        return [*module.losses, *module.model.state_dict().values()]

    plain, ours = run("auto"), run(strategy(memory="1GB"))
    assert all(map(torch.equal, plain, ours))
