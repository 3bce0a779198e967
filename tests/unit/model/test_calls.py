"""What blocks are called with: outputs recognised among the next inputs, and generation caches switched off."""

from __future__ import annotations

import torch

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


def test_caches_are_off_inside_and_as_before_outside() -> None:
    on, off = models.build(use_cache=True), models.build()
    with plainly(torch.nn.ModuleList([on, off])):
        assert not on.config.use_cache
        assert not off.config.use_cache
    assert on.config.use_cache
    assert not off.config.use_cache
