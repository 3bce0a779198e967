from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer

import lt_offload
from lt_offload.machine.accounting import Account
from lt_offload.optim import native
from lt_offload.profiling.hardware import load_hardware
from lt_offload.profiling.optimizer import (
    UpdateSizes,
    estimate_optimizer,
    measure_optimizer,
)

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
        (lt_offload.AdamW, {}),
        (lt_offload.AdamW, {"state_dtype": "8bit", "min_8bit_size": 257}),
        (lt_offload.AdamW, {"state_dtype": "bfloat16"}),
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
    sizes = UpdateSizes(optimizer, CPU)
    predicted = [sizes.state(parameter) for parameter in found]
    for parameter in found:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert predicted == [real_bytes(optimizer, parameter) for parameter in found]


def test_frozen_and_foreign_tensors_have_no_state() -> None:
    mine, frozen = parameters()[:2]
    optimizer = AdamW([mine, frozen])
    frozen.requires_grad_(False)
    sizes = UpdateSizes(optimizer, CPU)
    assert [sizes.state(p) for p in (mine, frozen, nn.Parameter(torch.ones(5)))] == [2 * mine.nbytes, 0, 0]


def test_factored_states_of_a_tensor_of_any_size_take_no_memory_to_count() -> None:
    rows, columns = 1 << 20, 4096
    parameter = nn.Parameter(torch.empty(rows, columns, device="meta"))
    assert UpdateSizes(Adafactor([parameter]), CPU).state(parameter) == 4 * (rows + columns)


class Uneven(Optimizer):
    """Takes most in its fourth step, of matrices; some ask for a number, which fake tensors do not have."""

    def __init__(self, params: Any, *, asks: bool) -> None:
        super().__init__(params, {"lr": 0.1, "asks": asks})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        for parameter in group["params"]:
            state = self.state[parameter]
            if not state:
                state.update(step=0, begin=parameter.clone(), mean=torch.zeros_like(parameter))
            state["step"] += 1
            if state["step"] == 4 and parameter.ndim == 2 and (not group["asks"] or parameter.grad.sum() > 0):
                parameter.add_(parameter @ (parameter.mT @ parameter))


@pytest.mark.parametrize("asks", [False, True])
def test_scratch_is_that_of_the_worst_of_the_first_steps_of_each_kind(asks: bool) -> None:
    matrix, vector = nn.Parameter(torch.ones(10, 6)), nn.Parameter(torch.ones(7))
    # a copy of each, which is not made in the place of the state; a square and its product with the matrix
    sizes = UpdateSizes(Uneven([matrix, vector], asks=asks), CPU)
    assert [sizes.scratch(p) for p in (matrix, vector)] == [4 * (6 * 6 + 10 * 6), 4 * 7]
    assert UpdateSizes(AdamW([matrix]), CPU).scratch(matrix) is None
    assert UpdateSizes(Uneven([vector], asks=asks), CPU, scratch_ratio=9).scratch(vector) == 9 * vector.nbytes


def test_scratch_of_muon_depends_on_the_shape_of_a_matrix() -> None:
    square, wide, tall = (nn.Parameter(torch.ones(*shape)) for shape in ((32, 32), (8, 128), (128, 8)))
    sizes = UpdateSizes(torch.optim.Muon([square, wide, tall]), CPU)
    most, wide_bytes, tall_bytes = (sizes.scratch(p) for p in (square, wide, tall))
    assert most is not None
    assert wide_bytes == tall_bytes
    assert most > (wide_bytes or 0) > wide.nbytes  # the square of the shorter side comes to the copies


class Stacking(Optimizer):
    """Stacks gradients, as Muon does in the versions for many matrices of one shape."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        grads = [parameter.grad for parameter in self.param_groups[0]["params"]]
        if len(grads) > 1:
            torch.stack(grads)


def test_scratch_is_that_of_several_tensors_at_a_time() -> None:
    matrix = nn.Parameter(torch.ones(10, 6))
    assert UpdateSizes(Stacking([matrix]), CPU).scratch(matrix) == matrix.nbytes


def test_measuring_leaves_optimizer_and_scheduler_alone() -> None:
    found = parameters()
    optimizer = AdamW(found, lr=1e-3, fused=True)
    stepped: list[int] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = [parameter.detach().clone() for parameter in found]
    result = measure_optimizer(optimizer, CPU)
    UpdateSizes(optimizer, CPU).state(found[0])
    assert result.name == "AdamW"
    assert result.host_bytes_per_s == result.device_bytes_per_s > 0
    assert result.scratch_ratio == 0
    assert not stepped
    assert not optimizer.state
    assert not getattr(optimizer, "_opt_called", False)
    assert scheduler.last_epoch == 0
    assert all(torch.equal(old, new) for old, new in zip(before, found, strict=True))
    assert all(parameter.grad is None for parameter in found)


def test_estimates_count_what_an_update_moves() -> None:
    machine = load_hardware("rtx-3060")
    fused = estimate_optimizer(AdamW(parameters(), fused=True), machine)
    assert machine.device_memory_bytes_per_s / fused.device_bytes_per_s == pytest.approx(8, rel=0.01)  # p, g, m, v
    # OFFMATE (2024), Table 2: un-fused Adam at 1.1 GB/s on the host, 16.6 GB/s on the device. Memory alone would let
    # the host be a quarter faster: its loop waits for more than that.
    with native.left_out():
        loop = estimate_optimizer(AdamW(parameters(), foreach=False), machine)
    assert loop.host_bytes_per_s == pytest.approx(1.25 * 1.1e9, rel=0.1)
    assert loop.device_bytes_per_s == pytest.approx(16.6e9, rel=0.1)
    if native.kernel() is None:
        return
    one_pass = estimate_optimizer(AdamW(parameters(), foreach=False), machine)
    assert one_pass == replace(fused, device_bytes_per_s=loop.device_bytes_per_s, scratch_ratio=loop.scratch_ratio)
    assert one_pass.host_kernel
    assert not loop.host_kernel


def test_the_trial_of_the_kernel_when_it_is_loaded_is_no_update() -> None:
    machine = load_hardware("rtx-3060")
    native.kernel.cache_clear()
    first = estimate_optimizer(AdamW(parameters(), foreach=False), machine)
    assert first == estimate_optimizer(AdamW(parameters(), foreach=False), machine)


def test_estimates_of_optimizers_of_all_kinds() -> None:
    machine = load_hardware("rtx-3060")
    assert estimate_optimizer(Adafactor(parameters()), machine).host_bytes_per_s > 0
    assert estimate_optimizer(torch.optim.Adagrad(parameters()), machine).host_bytes_per_s > 0


@pytest.mark.parametrize("state_dtype", ["8bit", "bfloat16", None])
def test_a_device_with_enough_memory_updates_by_one_kernel(state_dtype: Any) -> None:
    """States of fewer bits take operations of their own on a device here, which others have as one kernel."""
    machine = load_hardware("rtx-3060")
    weights = [nn.Parameter(torch.zeros(256, 256))]
    found = estimate_optimizer(lt_offload.AdamW(weights, state_dtype=state_dtype), machine)
    # Weights and both moments, each read and written, and gradients, which are read; scales are little.
    moved = {"8bit": 3 + 4 / 4, "bfloat16": 3 + 4 / 2, None: 3 + 4}[state_dtype]
    fastest = max(found.fused_bytes_per_s, found.device_bytes_per_s)
    assert fastest == pytest.approx(machine.device_memory_bytes_per_s / moved, rel=0.01)
    assert (found.fused_bytes_per_s > found.device_bytes_per_s) == (state_dtype is not None)


def test_options_of_single_tensors_are_those_of_their_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept by bitsandbytes' manager: an embedding with 32 bits beside a matrix of the same shape with 8."""
    optim = pytest.importorskip("bitsandbytes").optim
    monkeypatch.setattr(optim.GlobalOptimManager, "_instance", None)
    embedding, matrix = nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)
    optimizer = optim.AdamW([matrix.weight, embedding.weight], optim_bits=8)
    optim.GlobalOptimManager.get_instance().register_module_override(embedding, "weight", {"optim_bits": 32})
    sizes = UpdateSizes(optimizer, CPU)
    for parameter in (matrix.weight, embedding.weight):
        parameter.grad = torch.ones_like(parameter)
    found = {parameter: sizes.state(parameter) for parameter in (matrix.weight, embedding.weight)}
    optimizer.step()
    expected = {parameter: real_bytes(optimizer, parameter) for parameter in found}
    assert found[embedding.weight] == expected[embedding.weight] == 2 * embedding.weight.nbytes
    assert found[matrix.weight] == expected[matrix.weight]
    # The step has registered them, with places in the groups: elsewhere they are those of other tensors.
    assert UpdateSizes(optimizer, CPU).state(embedding.weight) == expected[embedding.weight]


def test_a_step_takes_for_all_at_once_what_each_takes() -> None:
    shapes = ((100, 64), (300, 64), (50,))
    made = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = AdamW(made, foreach=True)
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with Account() as account:
        optimizer.step()
    said = UpdateSizes(optimizer, CPU).scratch_of_all(made, 1.0)
    assert 0.99 * said < account.peak <= said
