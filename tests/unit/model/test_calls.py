"""What blocks are called with: outputs recognised among the next inputs, and generation caches switched off."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lt_offload.model.calls import BlockOutput, plainly, tensors_of
from tests.support import models


def test_the_same_tensor_is_recognised() -> None:
    a, b = torch.zeros(2, 3), torch.zeros(3)
    output = BlockOutput({"hidden": a, "rest": (None, b)})
    assert tensors_of({"hidden": a, "rest": (None, b)}) == [a, b]
    assert output.sources([a]) == (0,)
    assert output.sources([b, a, b]) == (1, 0, 1)
    assert output.sources([a.detach(), b.view(3)]) == (0, 1)


def test_anything_else_is_not() -> None:
    a = torch.zeros(2, 3)
    output = BlockOutput(a)
    for other in (a.clone(), a.t(), a[:1], a.view(6), a.view(torch.int32), a + 0):
        assert output.sources([other]) is None
        assert output.sources([a, other]) is None
    assert output.sources([]) is None


def test_a_tensor_that_was_written_to_is_not() -> None:
    a = torch.zeros(2, 3)
    output = BlockOutput(a)
    a[0].add_(1)
    assert output.sources([a]) is None


def test_a_storage_that_returns_at_the_same_address_is_another() -> None:
    output = BlockOutput(torch.zeros(1000))
    for _ in range(100):
        assert output.sources([torch.zeros(1000)]) is None


def test_nothing_is_kept_alive() -> None:
    a = torch.zeros(1000)
    died = weakref.ref(a.untyped_storage())
    output = BlockOutput(a)
    del a
    gc.collect()
    assert died() is None
    assert output.sources([torch.zeros(1000)]) is None


@pytest.mark.parametrize("fake", [False, True])
def test_outputs_of_an_autograd_function(fake: bool) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    def check() -> None:
        out = Twice.apply(torch.zeros(3, requires_grad=True))
        output = BlockOutput(out)
        assert output.sources([out]) == (0,)
        out.mul_(2)
        assert output.sources([out]) is None

    if fake:
        with FakeTensorMode():
            check()
    else:
        check()


def test_caches_are_off_inside_and_as_before_outside() -> None:
    on, off = models.build(use_cache=True), models.build()
    with plainly(torch.nn.ModuleList([on, off])):
        assert not on.config.use_cache
        assert not off.config.use_cache
    assert on.config.use_cache
    assert not off.config.use_cache
