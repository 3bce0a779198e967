"""A batch is cut in parts and put together again; what a block returns is recognised among the next inputs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lt_offload.errors import UnsupportedError
from lt_offload.model.calls import BlockOutput, plainly, tensors_of
from lt_offload.model.parts import Cutter, Joint, Outputs, in_parts, sizes_of
from tests.support import models


@pytest.mark.parametrize(("samples", "count"), [(8, 4), (7, 4), (5, 4), (3, 4), (1, 4), (9, 2), (6, 1)])
def test_parts_are_those_of_tensor_split(samples: int, count: int) -> None:
    parts = torch.arange(samples).tensor_split(count)
    assert sizes_of(samples, count) == [len(part) for part in parts if len(part)]


def cut(args: tuple[Any, ...], count: int = 2, **kwargs: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]] | None:
    return calls_of(Cutter("layer", count), args, kwargs)


def calls_of(cutter: Cutter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    leaves, spec = tree_flatten((args, kwargs))
    found = cutter.cut(leaves, spec)
    return None if found is None else [tree_unflatten(part, spec) for part in found.parts(leaves)]


def test_a_bias_per_sample_and_head_is_cut_with_its_samples() -> None:
    """Bloom's; MPT's, of heads alone, has the same form and another name."""
    x, alibi = torch.randn(3, 5, 2), torch.arange(4 * 3 * 5.0).view(12, 1, 5)
    calls = cut((x,), mask=torch.ones(3, 1, 5, 5), alibi=alibi, position_bias=alibi)
    assert calls is not None
    (_, first), (_, second) = calls
    assert torch.equal(first["alibi"], alibi[:8])
    assert torch.equal(second["alibi"], alibi[8:])
    assert first["position_bias"] is second["position_bias"] is alibi
    assert [len(first["mask"]), len(second["mask"])] == [2, 1]
    odd = cut((x,), alibi=alibi[:11])
    assert odd is not None
    assert len(odd[0][1]["alibi"]) == 11


def test_as_many_tokens_as_samples_are_told_apart_once_other_numbers_were_seen() -> None:
    cutter, positions = Cutter("layer", 2), torch.arange(4)
    with pytest.raises(UnsupportedError, match="4 samples of 4 tokens"):
        calls_of(cutter, (torch.randn(4, 4, 2),), {"positions": positions})
    calls_of(cutter, (torch.randn(3, 4, 2),), {"positions": positions})
    found = calls_of(cutter, (torch.randn(4, 4, 2),), {"positions": positions})
    assert found is not None
    assert [call["positions"].shape for _, call in found] == [(4,), (4,)]
    assert calls_of(cutter, (torch.randn(4, 4, 2),), {}) is not None


def channels_last(*shape: int) -> Tensor:
    return torch.randn(*shape).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    "parts",
    [
        (torch.randn(2, 3), torch.randn(1, 3)),
        (torch.randn(3, 2).t(), torch.randn(3, 1).t()),
        (torch.randn(2, 3), torch.randn(3, 1).t()),
        (torch.randn(2, 3, dtype=torch.float64), torch.randn(1, 3)),
        (channels_last(2, 3, 4, 4), channels_last(1, 3, 4, 4)),
        (torch.randn(2), torch.randn(1)),
    ],
)
def test_rows_are_what_cat_gives(parts: tuple[Tensor, Tensor], order: tuple[int, int]) -> None:
    joint = Joint([2, 1])
    for part in order:
        joint.put(part, [parts[part]])
    (found,), wanted = joint.results(), torch.cat(parts)
    assert torch.equal(found, wanted)
    assert (found.dtype, found.stride()) == (wanted.dtype, wanted.stride())


@pytest.mark.parametrize("given", [torch.randn(2, 3), torch.randn(3, 2).t()])
def test_rows_that_nobody_gave_are_zero(given: Tensor) -> None:
    joint = Joint([1, 2])
    joint.put(0, [None, None])
    joint.put(1, [given, None])
    found, nothing = joint.results()
    assert nothing is None
    assert torch.equal(found, torch.cat([torch.zeros(1, 3), given]))


@pytest.mark.parametrize(
    ("outs", "words"),
    [
        ((torch.zeros(2), torch.zeros(2)), r"of shape \[2\] for 1 samples"),
        ((torch.tensor(1.0), torch.tensor(1.0)), r"of shape \[\] for 2 samples"),
        (((torch.zeros(2), 1), (torch.zeros(1), 2)), "something else for one part"),
        (((torch.zeros(2),), [torch.zeros(1)]), "something else for one part"),
    ],
)
def test_outputs_that_cannot_be_put_together(outs: tuple[Any, Any], words: str) -> None:
    outputs = Outputs([2, 1], Cutter("layer", 2))
    outputs_of_both = partial(list, (outputs.put(part, out) for part, out in enumerate(outs)))
    with pytest.raises(UnsupportedError, match=words):
        outputs_of_both()
    given = iter(outs)
    with pytest.raises(UnsupportedError, match=words):
        in_parts(lambda x: next(given), Cutter("layer", 2))(torch.zeros(3, 2))


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
