"""Torch's Adam and AdamW on the host: by the kernel, bit for bit what their own step does, whatever compiled it."""

from __future__ import annotations

import itertools
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lt_offload import compiling
from lt_offload.execute.updates.optimizer import functional_update
from lt_offload.optim import native, plain, torch_adam
from lt_offload.optim.plain import Entry, Options, converted

SIZES: list[Any] = [1, 7, 15, 16, 17, 31, 32, 33, 1013, 16384 + 5, (300, 77)]
LOW = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *LOW]
SETS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no decay": {"weight_decay": 0.0},
    "maximize": {"maximize": True, "weight_decay": 0.3},
    "low betas": {"betas": (0.3, 0.8), "eps": 3e-4},
    "late": {"step": 2000.0, "lr": 1e-5, "eps": 1e-6},
    "no eps": {"eps": 0.0},
}
FORMS = {"fused": {"fused": True}, "one by one": {}, "foreach": {"foreach": True}}


@pytest.fixture(autouse=True)
def kernel() -> Iterator[native.Kernel]:
    before, found = torch.get_num_threads(), native.kernel()
    if found is None:
        assert not shutil.which("g++"), "there is a compiler, and no kernel"
        pytest.skip("no C++ compiler")
    yield found
    torch.set_num_threads(before)


def numbers(size: Any, dtype: torch.dtype, spread: float = 3.0) -> Tensor:
    return (torch.randn(size) * torch.randn(size).mul_(spread).exp_()).to(dtype)


def same(left: Tensor, right: Tensor) -> bool:
    """Equal bits; one that is not a number is as good as another."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    number = ~left.isnan()
    bits = [tensor.view(kind)[number] if tensor.ndim else tensor for tensor in (left, right)]
    return left.dtype == right.dtype and torch.equal(left.isnan(), right.isnan()) and torch.equal(*bits)


def every(dtype: torch.dtype) -> Tensor:
    """All numbers of two bytes."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


def options(step: float = 3.0, betas: tuple[float, float] = (0.9, 0.999), **changes: Any) -> tuple[Options, float]:
    common: dict[str, Any] = {"lr": 1e-2, "eps": 1e-8, "weight_decay": 0.1} | changes
    return Options(beta1=betas[0], beta2=betas[1], **common), step


def both(kernel: native.Kernel, entry: Entry, how: Options) -> bool:
    """Return whether the kernel and torch agree about ``entry``; the kernel takes it."""
    assert kernel.kind(entry, how) is not None
    right = converted(entry, Tensor.clone)
    kernel.update([entry], how)
    plain.update([right], how)
    return all(
        same(a, b) for a, b in zip(entry.tensors[:5], right.tensors[:5], strict=True) if a is not None and b is not None
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_a_step_is_that_of_the_optimizer(kind: Any, dtype: torch.dtype, form: str) -> None:
    """Weights, states and options, with sizes that are no multiple of anything, and a scheduler."""
    for changes, threads in itertools.product([*SETS.values(), {"amsgrad": True}], (1, 3)):
        torch.set_num_threads(threads)
        arguments = {name: value for name, value in changes.items() if name != "step"}
        torch.manual_seed(1)
        values = [numbers(size, dtype, 1.0) for size in SIZES]
        runs = []
        for update in (lambda optimizer: optimizer.step(), torch_adam.update):
            torch.manual_seed(2)
            parameters = [nn.Parameter(value.clone()) for value in values]
            optimizer = kind(parameters, **({"lr": 1e-2, "weight_decay": 0.1} | FORMS[form] | arguments))
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            for i in range(3):
                for parameter in parameters:
                    parameter.grad = numbers(parameter.shape, dtype, 2.0) * 1e-2
                # The first makes the states.
                optimizer.step() if i == 0 else update(optimizer)
                scheduler.step()
            runs.append((parameters, optimizer.state_dict()))
        (left, state), (right, other) = runs
        assert all(same(a.detach(), b.detach()) for a, b in zip(left, right, strict=True)), changes
        assert state["param_groups"] == other["param_groups"]
        for index, own in state["state"].items():
            assert own.keys() == other["state"][index].keys()
            assert all(same(value, other["state"][index][name]) for name, value in own.items()), changes


@pytest.mark.parametrize("each", [False, True], ids=["fused", "one by one"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("operand", ["param", "grad", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("name", SETS)
def test_every_number_of_an_operand(
    kernel: native.Kernel, dtype: torch.dtype, each: bool, operand: str, name: str
) -> None:
    """Those below the normal ones, infinities and what is no number included, each with others of many magnitudes."""
    torch.manual_seed(0)
    how, step = options(**SETS[name], each=each)
    for corrects in (False, True):
        param, grad, exp_avg, exp_avg_sq = (numbers(1 << 16, dtype) for _ in range(4))
        entry = Entry(param, grad, None, exp_avg, exp_avg_sq.abs(), step)._replace(**{operand: every(dtype)})
        before, kernel.corrects = kernel.corrects, corrects
        try:
            assert both(kernel, entry, how)
        finally:
            kernel.corrects = before


@pytest.mark.parametrize("each", [False, True], ids=["fused", "one by one"])
def test_any_bits_of_four_bytes(kernel: native.Kernel, each: bool) -> None:
    torch.manual_seed(0)
    for values in SETS.values():
        how, step = options(**values, each=each)
        bits = torch.randint(-(1 << 31), 1 << 31, (4, 1 << 16)).to(torch.int32).view(torch.float32)
        param, grad, exp_avg, exp_avg_sq = bits.clone()
        assert both(kernel, Entry(param, grad, None, exp_avg, exp_avg_sq.abs(), step), how)
        roots = numbers(1 << 16, torch.float32).abs()
        assert both(kernel, Entry(param, torch.zeros_like(param), None, exp_avg, roots, step), how)


@pytest.mark.parametrize("each", [False, True], ids=["fused", "one by one"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slices_that_are_not_aligned(kernel: native.Kernel, dtype: torch.dtype, each: bool) -> None:
    how, step = options(each=each)
    for begin, size in ((1, 33), (3, 16384), (5, 4096 * 9 + 3)):
        tensors = [numbers(size + begin, dtype)[begin:] for _ in range(4)]
        assert both(kernel, Entry(tensors[0], tensors[1], None, tensors[2], tensors[3].abs_(), step), how)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Libraries of a wheel for machines like this one, and one of a processor without any of these instructions."""
    if platform.machine() not in compiling.WHEEL:
        pytest.skip(f"no wheel for {platform.machine()}")
    folder = tmp_path_factory.mktemp("wheel") / "built"
    folder.mkdir()
    others = compiling.build(native._SOURCE, folder, ["-march=x86-64-v2"]) if platform.machine() == "x86_64" else None
    return [*compiling.build_for_wheel(native._SOURCE, folder), *filter(None, [others])]


@pytest.mark.slow
def test_every_library_of_a_wheel_gives_the_same_bits(wheel: list[Path]) -> None:
    """Those that this processor runs: lanes in a loop, AVX2, AVX-512, with divisions and without."""
    capability = torch.backends.cpu.get_cpu_capability()
    usable = [library for library in wheel if "avx512" not in library.name or capability == "AVX512"]
    assert compiling.shipped(wheel[0].parent.with_name("adamw.cpp"), capability) in usable
    for library in usable:
        same_bits(native.Kernel(library))


def same_bits(other: native.Kernel) -> None:
    for other.corrects in (False, True):
        assert native.agrees(other)
        for dtype, each in itertools.product(LOW, (False, True)):
            test_every_number_of_an_operand(other, dtype, each, "exp_avg_sq", "low betas")
        test_any_bits_of_four_bytes(other, False)


def test_what_the_kernel_does_not_take_is_left_to_torch(kernel: native.Kernel) -> None:
    def group(**changes: Any) -> dict[str, Any]:
        parameter = nn.Parameter(torch.zeros(4))
        return torch.optim.AdamW([parameter], **changes).param_groups[0]

    full, low = torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)
    assert torch_adam.kernel_options(group(), low) is not None
    assert torch_adam.kernel_options(group(foreach=True), full) is not None
    assert torch_adam.kernel_options(group(foreach=True), low) is None
    assert torch_adam.kernel_options(group(amsgrad=True), full) is None
    assert torch_adam.kernel_options(group(), torch.zeros(4, device="meta")) is None
    coupled = torch.optim.Adam([nn.Parameter(full)], weight_decay=0.1).param_groups[0]
    assert torch_adam.kernel_options(coupled, full) is not None
    assert torch_adam.kernel_options(coupled, low) is None
    for dtype in (torch.float64, torch.complex64):
        tensor = torch.zeros(4, dtype=dtype)
        assert kernel.kind(Entry(tensor, tensor, None, tensor, tensor, 1.0), options()[0]) is None


@pytest.mark.parametrize("first", DTYPES, ids=str)
def test_a_group_of_several_dtypes(first: torch.dtype) -> None:
    """Weight decay in the gradient, which torch rounds in another way in sixteen bits."""
    dtypes, runs = [first, *(dtype for dtype in DTYPES if dtype != first)], []
    for update in (lambda optimizer: optimizer.step(), torch_adam.update):
        torch.manual_seed(2)
        parameters = [nn.Parameter(numbers(1013, dtype)) for dtype in dtypes]
        optimizer = torch.optim.Adam(parameters, weight_decay=0.1)
        for i in range(2):
            for parameter in parameters:
                parameter.grad = numbers(1013, parameter.dtype)
            optimizer.step() if i == 0 else update(optimizer)
        runs.append([parameter.detach() for parameter in parameters])
    assert all(same(*pair) for pair in zip(*runs, strict=True))


def test_numbers_of_numpy_and_moments_of_another_dtype_are_torchs() -> None:
    parameter = nn.Parameter(torch.ones(8))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(8)
    optimizer.step()
    [group], state = optimizer.param_groups, optimizer.state[parameter]
    assert torch_adam.kernel_options(group | {"lr": np.float64(1e-3)}, parameter) is not None
    assert torch_adam.kernel_options(group | {"lr": np.float32(1e-3)}, parameter) is None
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg"].bfloat16(), state["exp_avg_sq"].bfloat16()
    with pytest.raises(RuntimeError, match="dtype"):
        torch_adam.update(optimizer)


def test_the_kernel_is_loaded_whatever_the_default_device() -> None:
    native.kernel.cache_clear()
    try:
        with torch.device("meta"):
            assert native.kernel() is not None
    finally:
        native.kernel.cache_clear()


def test_the_engine_updates_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.ones(8))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(8)
    optimizer.step()
    monkeypatch.setattr(torch_adam, "adam", lambda *args, **kwargs: pytest.fail("by torch"))
    [group], state = optimizer.param_groups, optimizer.state[parameter]
    run = functional_update(optimizer, group, [parameter.detach()], [torch.ones(8)], [state])
    assert run is not None
    run()
    assert state["step"] == 2


def test_where_roots_are_not_torchs_it_updates_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what takes them: without the library of torch, fp32 weights whose operations are rounded one by one."""
    monkeypatch.setattr(native, "_library_root", lambda: (None, None))
    native.kernel.cache_clear()
    try:
        found = native.kernel()
        assert found is not None
        assert found.unlike <= {(0, native._OWN, native._EACH)}
        for dtype in DTYPES:
            test_a_step_is_that_of_the_optimizer(torch.optim.AdamW, dtype, "one by one")
    finally:
        native.kernel.cache_clear()


def test_a_graph_notices_an_update_by_the_kernel() -> None:
    parameter = nn.Parameter(torch.ones(8))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(8)
    optimizer.step()
    assert torch_adam.by_kernel(optimizer)
    saved = (parameter**2).sum()
    torch_adam.update(optimizer)
    assert optimizer.state[parameter]["step"] == 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()
