"""Optimizer states in eight bits: the values are those of the definition, and a number becomes the nearest of them."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lt_offload.optim import blockwise, native, plain
from lt_offload.optim.plain import Entry, Options

BOTH = pytest.mark.parametrize("signed", [True, False])


def exact(signed: bool) -> list[Fraction]:
    """The values that are not negative, by the words of the definition."""
    found = [Fraction(0)]
    for decade in range(7):
        parts = 2 ** (decade + (not signed))
        ten = Fraction(10) ** (decade - 6)
        edges = [ten * (Fraction(1, 10) + Fraction(9, 10) * k / parts) for k in range(parts + 1)]
        found += [(low + high) / 2 for low, high in zip(edges, edges[1:], strict=False)]
    return [*found, Fraction(1)]


def nearest(size: float, values: list[Fraction]) -> set[int]:
    """The nearest of ``values``; both, where a number is in the middle but for a millionth of the distance."""
    distances = [abs(Fraction(size) - value) for value in values]
    least = min(distances)
    return {rank for rank, distance in enumerate(distances) if distance <= least + values[rank] / 10**6}


@BOTH
def test_values(signed: bool) -> None:
    expected = exact(signed)
    found = torch.tensor(blockwise.values(signed))
    assert found.shape == (256,)
    assert (found.diff() > 0).all()
    upper = found[127:] if signed else found
    assert upper.tolist() == pytest.approx([float(value) for value in expected], rel=2.5e-7, abs=0)
    if signed:
        assert torch.equal(found[:127], -upper[1:128].flip(0)), "all but -1"


@BOTH
def test_values_are_those_of_bitsandbytes(signed: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    theirs = functional.create_dynamic_map(signed=signed)
    assert torch.allclose(torch.tensor(blockwise.values(signed)), theirs, rtol=2.5e-7, atol=0)


@BOTH
def test_a_number_becomes_the_nearest_value(signed: bool) -> None:
    torch.manual_seed(0)
    numbers = torch.randn(4, 256) * torch.randn(4, 256).mul_(4).exp_()
    numbers = numbers if signed else numbers.abs()
    codes, scales = blockwise.encode(numbers, signed=signed)
    assert torch.equal(scales, numbers.abs().amax(1))
    values = exact(signed)
    for row, of_row, scale in zip(numbers.tolist(), codes.tolist(), scales.tolist(), strict=True):
        for number, code in zip(row[:16], of_row[:16], strict=True):
            rank, size = (abs(code - 127), abs(number)) if signed else (code, number)
            # There is no -1.
            known = values[:-1] if number < 0 else values
            assert rank in nearest(float(Fraction(size) / Fraction(scale)), known)
            assert not signed or (code < 127) == (number < 0) or rank == 0


@BOTH
@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000, (3, 7, 50)])
def test_there_and_back(signed: bool, size: int | tuple[int, ...]) -> None:
    torch.manual_seed(0)
    numbers = torch.randn(size) if signed else torch.rand(size)
    codes, scales = blockwise.encode(numbers, signed=signed)
    assert codes.shape == numbers.shape
    assert scales.shape == (blockwise.blocks(numbers.numel()),)
    found = blockwise.decode(codes, scales, signed=signed)
    most = scales.repeat_interleave(256)[: numbers.numel()].view(numbers.shape)
    assert ((found - numbers).abs() <= 0.00704 * most).all(), "half of the largest distance"
    assert torch.equal(found.abs() == 0, (numbers.abs() / most) < float(blockwise.bounds(signed)[0]))


@BOTH
def test_blocks_without_numbers(signed: bool) -> None:
    numbers = torch.ones(5, 256)
    numbers[0, 3], numbers[1, 200], numbers[2], numbers[3] = torch.nan, torch.inf, 0.0, 1e-42
    codes, scales = blockwise.encode(numbers, signed=signed)
    found = blockwise.decode(codes, scales, signed=signed)
    assert found[:2].isnan().all()
    assert (found[2:4] == 0).all()
    assert (found[4] == 1).all()


def moments(exp_avg: Tensor, exp_avg_sq: Tensor) -> Entry:
    """Moments in bytes of weights that an update leaves as they are, because there is no gradient and no decay."""
    made = Entry(torch.zeros_like(exp_avg), torch.zeros_like(exp_avg), None, exp_avg, exp_avg_sq, 1.0)
    return plain.with_moments(made, torch.uint8)


STILL = Options(lr=0.0, beta1=0.0, beta2=1.0, eps=1.0, weight_decay=0.0)


def test_the_kernel_knows_every_code_and_every_bound() -> None:
    """With beta1 = 0 first moments become the gradient, with beta2 = 1 second ones stay: both are coded anew."""
    kernel = native.kernel()
    if kernel is None:
        pytest.skip("no C++ compiler")
    for signed in (True, False):
        edges = torch.tensor(blockwise.bounds(signed)).repeat_interleave(3).view(torch.int32)
        edges[0::3] -= 1
        edges[2::3] += 1
        sizes = edges.view(torch.float32)
        # The first of each block is its scale: sizes are numbers from 0 to 1, up to powers of two.
        for scale in (1.0, 2.0**-70, 2.0**60):
            rows = torch.cat([torch.ones(-(-sizes.numel() // 255), 1), _rows(sizes)], dim=1) * scale
            for sign in (1, -1) if signed else (1,):
                ours = Entry(
                    torch.zeros_like(rows),
                    sign * rows if signed else torch.zeros_like(rows),
                    None,
                    torch.zeros_like(rows, dtype=torch.uint8),
                    torch.arange(rows.numel()).remainder(256).to(torch.uint8).view(rows.shape),
                    1.0,
                    exp_avg_scale=torch.zeros(len(rows)),
                    exp_avg_sq_scale=torch.full((len(rows),), 3.0),
                )
                theirs = plain.converted(ours, Tensor.clone)
                kernel.update([ours], STILL)
                plain.update([theirs], STILL)
                assert torch.equal(ours.exp_avg, theirs.exp_avg)
                assert torch.equal(ours.exp_avg_sq, theirs.exp_avg_sq)
                assert torch.equal(ours.exp_avg_sq.view(-1), torch.arange(rows.numel()).remainder(256).to(torch.uint8))
                if signed:
                    expected = blockwise.encode(sign * rows, signed=True)
                    assert ours.exp_avg_scale is not None
                    assert torch.equal(ours.exp_avg, expected[0])
                    assert torch.equal(ours.exp_avg_scale, expected[1])


def _rows(sizes: Tensor) -> Tensor:
    """Rows of 255, the last one filled up."""
    return torch.nn.functional.pad(sizes, (0, -sizes.numel() % 255)).view(-1, 255)


def test_fake_tensors_have_shapes_and_leave_nothing_behind() -> None:
    for cached in (blockwise.ladder, blockwise.values, blockwise.bounds, blockwise._on):
        cached.cache_clear()  # type: ignore[attr-defined]
    with FakeTensorMode() as mode:
        numbers = mode.from_tensor(torch.zeros(7, 100))
        codes, scales = blockwise.encode(numbers, signed=True)
        assert (codes.shape, codes.dtype, scales.shape) == ((7, 100), torch.uint8, (3,))
        assert blockwise.decode(codes, scales, signed=True).shape == (7, 100)
    test_there_and_back(True, 1000)
