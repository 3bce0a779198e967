"""What the CUDA device takes for granted, one thing at a time, a second or so each; run first on a new machine.

Most of it runs on every device, so that the tests themselves are known to work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lt_offload
from lt_offload.errors import OverBudget
from tests.gpu.target import Target
from tests.support import models

Found = Callable[..., None]
MB = 1 << 20


def seconds(target: Target, work: Callable[[], object], repeat: int = 5) -> float:
    """The shortest of some runs."""
    times = []
    for _ in range(repeat):
        target.synchronize()
        start = time.perf_counter()
        work()
        target.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.quick
def test_1_a_parameter_may_change_its_device(target: Target) -> None:
    """Its data is a view of a slab in the computation, host memory before and after; a hook takes the gradients."""
    layer = nn.Linear(64, 64)
    slab = torch.empty(1 * MB, dtype=torch.uint8, device=target.torch_device)
    came: list[tuple[torch.device, torch.Tensor]] = []

    def take(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        came.append((parameter.grad.device, parameter.grad))
        parameter.grad = None

    layer.weight.register_post_accumulate_grad_hook(take)
    layer.bias.requires_grad_(False)
    host = {parameter: parameter.data for parameter in layer.parameters()}
    x = torch.ones(8, 64, device=target.torch_device)
    for offset in (0, 128 * 1024, 0):
        for parameter, data in host.items():
            view = slab[offset : offset + data.nbytes].view(data.dtype).view(data.shape)
            view.copy_(data)
            parameter.data = view
            offset += 64 * 1024
        layer(x).sum().backward()
        for parameter, data in host.items():
            parameter.data = data
    assert [device.type for device, _ in came] == [target.torch_device.type] * 3
    assert all(torch.equal(came[0][1], gradient) for _, gradient in came)


def test_2_copies_run_both_ways_at_once(target: Target, found: Found) -> None:
    device = target.open(mode="thread", check=False) if target.kind == "cpu" else target.open()
    size = (256 if target.real else 16) * MB
    try:
        device.reserve(2 * size)
        there = [device.place(i * size, size) for i in range(2)]
        here = [device.host_empty((size,), torch.uint8) for _ in range(2)]
        for tensor in here:
            tensor.fill_(7)

        def down() -> Any:
            return device.submit("h2d", lambda: device.copy(there[0].bytes, here[0]), writes=[there[0]])

        def up() -> Any:
            return device.submit("d2h", lambda: device.copy(here[1], there[1].bytes), reads=[there[1]])

        device.synchronize(down())
        one = seconds(target, lambda: device.synchronize(down()))
        other = seconds(target, lambda: device.synchronize(up()))
        both = seconds(target, lambda: device.synchronize(down(), up()))
        launched = time.perf_counter()
        event = down()
        launched = time.perf_counter() - launched
        device.synchronize(event)
        assert torch.equal(there[0].bytes.cpu(), here[0])
        found(h2d=size / one, d2h=size / other, both_ways=2 * size / both, launch_s=launched)
        if target.real:
            assert launched < one / 2, "the launching thread waits for copies: the memory is not page-locked"
            assert both < 0.9 * (one + other), "copies in one direction wait for those in the other"
        device.drain()
    finally:
        device.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_3_attention_is_the_same_every_time(dtype: torch.dtype, target: Target, found: Found) -> None:
    """Under deterministic algorithms: running a forward again gives the bits of the first."""
    torch.use_deterministic_algorithms(True)
    results: dict[str, str] = {}
    try:
        for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
            runs = []
            try:
                for _ in range(3):
                    torch.manual_seed(0)
                    q, k, v = (
                        torch.randn(2, 4, 256, 64, device=target.torch_device, dtype=dtype, requires_grad=True)
                        for _ in range(3)
                    )
                    with sdpa_kernel(backend):
                        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                    out.float().square().sum().backward()
                    runs.append([out, q.grad, k.grad, v.grad])
            except (RuntimeError, UserWarning) as error:  # torch warns about why it has no kernel
                results[backend.name] = f"not available ({type(error).__name__})"
                continue
            same = all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
            results[backend.name] = "same" if same else "differs"
    finally:
        torch.use_deterministic_algorithms(False)
    found(**results)
    assert "differs" not in results.values()
    assert "same" in results.values()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_4_products_with_views_of_a_slab(dtype: torch.dtype, target: Target, found: Found) -> None:
    """Weights in the arena give the same bits at the same speed as tensors of the allocator."""
    rows, width = (2048, 4096) if target.real else (64, 256)
    torch.manual_seed(0)
    x = torch.randn(rows, width, device=target.torch_device, dtype=dtype)
    normal = torch.randn(width, width, device=target.torch_device, dtype=dtype)
    slab = torch.empty(2 * normal.nbytes, dtype=torch.uint8, device=target.torch_device)
    view = slab[512 : 512 + normal.nbytes].view(dtype).view(normal.shape).copy_(normal)
    assert torch.equal(F.linear(x, normal), F.linear(x, view))
    plain = seconds(target, lambda: [F.linear(x, normal) for _ in range(20)])
    slabs = seconds(target, lambda: [F.linear(x, view) for _ in range(20)])
    found(ratio=slabs / plain, flops_per_s=20 * 2 * rows * width * width / plain)
    if target.real:
        assert slabs < 1.2 * plain


@pytest.mark.only("cuda", "cpu")
def test_4_the_cap_is_hard(target: Target) -> None:
    device = target.open(3 << 30, mode="lazy") if target.kind == "cpu" else target.open(3 << 30)
    try:
        device.reserve(1 << 20)
        with pytest.raises(OverBudget), device.accounting():
            torch.empty(4 << 30, dtype=torch.uint8, device=target.torch_device)
        with device.accounting():
            torch.empty(64 * MB, dtype=torch.uint8, device=target.torch_device)
    finally:
        device.close()


def test_5_fused_updates(target: Target, found: Found) -> None:
    """One tensor at a time gives what all at once give; how far the host's kernel is from the device's."""

    def updated(device: torch.device, apart: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(97, 33).to(device)) for _ in range(6)]
        groups = [[weight] for weight in weights] if apart else [weights]
        optimizers = [torch.optim.AdamW(group, lr=1e-2, fused=True) for group in groups]
        for _ in range(5):
            for weight in weights:
                weight.grad = torch.randn(97, 33).to(device)
            for optimizer in optimizers:
                optimizer.step()
        return [weight.detach().cpu() for weight in weights]

    together, apart = updated(target.torch_device, False), updated(target.torch_device, True)
    on_host = updated(torch.device("cpu"), False)
    far = max((a - b).abs().max().item() for a, b in zip(together, on_host, strict=True))
    found(largest_difference_to_host=far)
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))
    assert far < 1e-4


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_6_computations_in_host_memory(dtype: torch.dtype, target: Target, found: Found) -> None:
    device = target.open(check=False) if target.kind == "cpu" else target.open()
    try:
        torch.manual_seed(0)
        host = device.host_adopt(torch.randn(1000, 256).to(dtype))
        normal, seen = host.to(target.torch_device, copy=True), device.zero_copy_view(host)
        ids = torch.randint(1000, (4, 64), device=target.torch_device)
        x = torch.randn(8, 256, device=target.torch_device, dtype=dtype)
        assert seen.device.type == target.torch_device.type
        assert torch.equal(F.embedding(ids, seen), F.embedding(ids, normal))
        assert torch.equal(F.linear(x, seen), F.linear(x, normal))
        found(
            embedding_ratio=seconds(target, lambda: F.embedding(ids, seen))
            / seconds(target, lambda: F.embedding(ids, normal)),
            linear_ratio=seconds(target, lambda: F.linear(x, seen)) / seconds(target, lambda: F.linear(x, normal)),
        )
        seen.copy_(normal * 2)
        target.synchronize()
        assert torch.equal(host, normal.cpu() * 2)
        device.drain()
    finally:
        device.close()


def test_8_bytes_counted_and_bytes_of_the_allocator(target: Target, found: Found) -> None:
    """A block's activations as the CPU's account has them, and as the device's allocator does."""
    config = {"hidden_size": 256, "intermediate_size": 704, "layers": 2}
    model = models.build(**config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = models.batch(model, batch_size=4, sequence_length=48, padding=False)
    profiles = [lt_offload.profile(model, batch, optimizer=optimizer, device=d) for d in ("cpu", target.torch_device)]
    counted, allocated = ([o for o in profile.blocks[1].options if o.name == "keep"][0] for profile in profiles)
    found(
        saved=allocated.saved_bytes / counted.saved_bytes,
        forward_peak=allocated.forward_peak_bytes / counted.forward_peak_bytes,
        backward_peak=allocated.backward_peak_bytes / counted.backward_peak_bytes,
        context=profiles[1].hardware.context_bytes,
        slack=profiles[1].slack_bytes,
    )
    assert 0.8 < allocated.saved_bytes / counted.saved_bytes < 1.25


@pytest.mark.quick
def test_9_computations_wait_for_copies_behind_the_host(target: Target) -> None:
    """The copy's event is recorded long after the computation has asked for it, by another thread."""
    device = target.open(check=False) if target.kind == "cpu" else target.open()
    try:
        device.reserve(64 * 1024)
        buffer = device.place(0, 4096)
        host = device.host_empty((1024,), torch.float32)
        for round_ in range(1, 6):
            late = threading.Event()

            def update(value: float = float(round_), late: threading.Event = late) -> None:
                late.wait(20)
                host.fill_(value)

            updated = device.submit("host", update)
            view = buffer.view(torch.float32, (1024,))
            copied = device.submit("h2d", lambda view=view: device.copy(view, host), after=[updated], writes=[buffer])
            threading.Timer(0.02, late.set).start()
            device.wait(copied)
            result = view * 1
            assert torch.equal(result.cpu(), torch.full((1024,), float(round_)))
            device.synchronize(device.mark())
        device.drain()
    finally:
        device.close()
