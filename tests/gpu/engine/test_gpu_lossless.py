"""The lossless form on a GPU: closed on the host or there, opened there by whatever is installed, bit for bit."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from lt_offload.model.forms.lossless import Lossless, has_kernel
from tests.gpu.target import Target

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("numbers", [1, 5000, 1 << 16, (1 << 20) + 3])
def test_every_bit_comes_back(numbers: int, target: Target) -> None:
    generator = torch.Generator().manual_seed(numbers)
    weight = torch.randn(numbers, generator=generator).mul_(0.02).to(torch.bfloat16)
    patterns = torch.randint(-(1 << 15), 1 << 15, (numbers // 20,), generator=generator).to(torch.int16)
    weight.view(torch.int16)[: len(patterns)] = patterns
    closed = Lossless().close(weight)
    on_device = tuple(piece.to(target.torch_device) for piece in closed)
    out = Lossless().open(on_device, (numbers,), torch.bfloat16)
    assert torch.equal(out.cpu().view(torch.int16), weight.view(torch.int16))
    there = Lossless().close(weight.to(target.torch_device))
    assert all(torch.equal(one.cpu(), other) for one, other in zip(there, closed, strict=True))


@pytest.mark.only("cuda", fake=False)
@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
def test_the_kernel_is_used(target: Target) -> None:
    assert has_kernel(target.torch_device)
