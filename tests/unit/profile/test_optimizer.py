from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer

from lt_offload.errors import ConfigError
from lt_offload.profile.hardware import load_hardware
from lt_offload.profile.optimizer import StateSizes, build_optimizer, estimate_optimizer, measure_optimizer

CPU = torch.device("cpu")


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((30, 50), (7,), (3, 5, 2), (30, 50))]


def real_bytes(optimizer: Optimizer, parameter: nn.Parameter) -> int:
    """Size after a real step, each tensor rounded up to 8 bytes."""
    tensors = [v for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor) and v.numel() > 1]
    return sum((t.nbytes + 7) // 8 * 8 for t in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (AdamW, {}),
        (AdamW, {"fused": True}),
        (AdamW, {"foreach": True}),
        (AdamW, {"amsgrad": True}),
        (Adam, {"lr": torch.tensor(1e-3)}),
        (SGD, {}),
        (SGD, {"momentum": 0.9, "fused": True}),
        (Adafactor, {}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.1}),
        (torch.optim.Adagrad, {}),
        (torch.optim.NAdam, {}),
    ],
)
def test_state_bytes_equal_those_after_a_real_step(
    cls: type[Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    found = parameters(dtype)
    optimizer = cls(found, **options)
    sizes = StateSizes(optimizer)
    predicted = [sizes.of(parameter) for parameter in found]
    for parameter in found:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert predicted == [real_bytes(optimizer, parameter) for parameter in found]


def test_frozen_and_foreign_tensors_have_no_state() -> None:
    mine, frozen = parameters()[:2]
    optimizer = AdamW([mine, frozen])
    frozen.requires_grad_(False)
    sizes = StateSizes(optimizer)
    assert [sizes.of(p) for p in (mine, frozen, nn.Parameter(torch.ones(5)))] == [2 * mine.nbytes, 0, 0]


def test_groups_may_differ() -> None:
    first, second = parameters()[0], parameters()[3]
    optimizer = SGD([{"params": [first], "momentum": 0.9}, {"params": [second]}], lr=0.1)
    assert [StateSizes(optimizer).of(p) for p in (first, second)] == [first.nbytes, 0]


class Python(Optimizer):
    """Asks for numbers in its update and keeps odd state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if float(parameter.grad.norm()) > 0:
                state = self.state[parameter]
                state["sign"] = torch.zeros(parameter.shape, dtype=torch.int8)
                state["count"] = 1
                parameter.sub_(parameter.grad * self.param_groups[0]["lr"])


def test_foreign_optimizers_are_asked_with_real_tensors() -> None:
    parameter = nn.Parameter(torch.ones(10, 11))
    assert StateSizes(Python([parameter])).of(parameter) == 112


def test_measuring_leaves_optimizer_and_scheduler_alone() -> None:
    found = parameters()
    optimizer = AdamW(found, lr=1e-3, fused=True)
    stepped: list[int] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = [parameter.detach().clone() for parameter in found]
    result = measure_optimizer(optimizer, CPU)
    StateSizes(optimizer).of(found[0])
    assert result.name == "AdamW"
    assert result.host_bytes_per_s == result.device_bytes_per_s > 0
    assert result.scratch_ratio == 0
    assert not stepped
    assert not optimizer.state
    assert not getattr(optimizer, "_opt_called", False)
    assert scheduler.last_epoch == 0
    assert all(torch.equal(old, new) for old, new in zip(before, found, strict=True))
    assert all(parameter.grad is None for parameter in found)


def test_scratch_of_an_update() -> None:
    assert measure_optimizer(SGD(parameters(), lr=0.1), CPU).scratch_ratio == 0
    assert 0.9 < measure_optimizer(AdamW(parameters(), foreach=True), CPU).scratch_ratio < 3


def test_estimates_count_what_an_update_moves() -> None:
    machine = load_hardware("rtx-3060")
    fused = estimate_optimizer(AdamW(parameters(), fused=True), machine)
    assert machine.device_memory_bytes_per_s / fused.device_bytes_per_s == pytest.approx(8, rel=0.01)  # p, g, m, v
    # OFFMATE (2024), Table 2: un-fused Adam at 1.1 GB/s on the host, 16.6 GB/s on the device
    loop = estimate_optimizer(AdamW(parameters(), foreach=False), machine)
    assert loop.host_bytes_per_s == pytest.approx(1.1e9, rel=0.1)
    assert loop.device_bytes_per_s == pytest.approx(16.6e9, rel=0.1)
    assert estimate_optimizer(Adafactor(parameters()), machine).host_bytes_per_s > 0
    assert estimate_optimizer(torch.optim.Adagrad(parameters()), machine).host_bytes_per_s > 0


def test_build() -> None:
    made = build_optimizer(AdamW, parameters())
    assert build_optimizer(made, []) is made
    with pytest.raises(ConfigError, match="no trainable parameter"):
        build_optimizer(AdamW, [])
