from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lt_offload.model.saving import SMALL, for_replay, is_activation, is_costly, travels
from tests.support import models

aten = torch.ops.aten


class Traced(TorchDispatchMode):
    """Notes operations, which of them are costly, and the storages of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, bool, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor)]
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        aliases = any(t.untyped_storage()._cdata in given for t in tensors)
        self.calls.append((func, is_costly(func, args, kwargs or {}), aliases))
        return out


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_what_is_cached_is_new_pure_and_without_random_numbers(family: str, dropout: float) -> None:
    model = models.build(family, dropout=dropout)
    with torch.no_grad(), Traced() as trace:
        model(**models.batch(model))
    costly = [(func, aliases) for func, is_one, aliases in trace.calls if is_one]
    assert len(costly) >= 3 * 4
    assert not any(aliases or func._schema.is_mutable for func, aliases in costly)
    assert not any(
        torch.Tag.nondeterministic_seeded in func.tags and "scaled_dot" not in str(func) for func, _ in costly
    )
    names = {str(func) for func, _ in costly}
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert (attention in names) == (family != "bloom" and dropout == 0)


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "costly"),
    [
        (aten.mm.default, (), {}, True),
        (aten.addmm.default, (), {}, True),
        (aten.bmm.default, (), {}, True),
        (aten.addmm_.default, (), {}, False),
        (aten.mm.out, (), {}, False),
        (aten.gelu.default, (), {}, False),
        (aten.bernoulli_.float, (), {}, False),
        (aten.native_dropout.default, (), {}, False),
        (aten._scaled_dot_product_flash_attention.default, (1, 2, 3), {}, True),
        (aten._scaled_dot_product_flash_attention.default, (1, 2, 3, 0.0, True), {"scale": 1.0}, True),
        (aten._scaled_dot_product_flash_attention.default, (1, 2, 3, 0.1), {}, False),
        (aten._scaled_dot_product_efficient_attention.default, (1, 2, 3, None, True), {}, True),
        (aten._scaled_dot_product_efficient_attention.default, (1, 2, 3, None, True, 0.1), {}, False),
        (aten._scaled_dot_product_cudnn_attention.default, (1, 2, 3, None, True, 0.0), {}, True),
        (aten._scaled_dot_product_cudnn_attention.default, (1, 2, 3, None, True), {"dropout_p": 0.5}, False),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (1, 2, 3, 0.5), {}, False),
    ],
)
def test_costly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], costly: bool) -> None:
    assert is_costly(func, args, kwargs) is costly


def test_cached_attention_carries_what_its_backward_needs() -> None:
    efficient = aten._scaled_dot_product_efficient_attention.default
    cudnn = aten._scaled_dot_product_cudnn_attention.default
    flash = aten._scaled_dot_product_flash_attention.default
    assert for_replay(efficient, (1, 2, 3, None, False, 0.0, True)) == (1, 2, 3, None, True, 0.0, True)
    assert for_replay(cudnn, (1, 2, 3, None, False)) == (1, 2, 3, None, True)
    assert for_replay(flash, (1, 2, 3, 0.0, False)) == (1, 2, 3, 0.0, False)
    assert for_replay(aten.mm.default, (1, 2)) == (1, 2)


def test_what_travels() -> None:
    large = torch.zeros(SMALL // 4)
    assert travels(large)
    assert travels(large[:1])  # its storage is what would travel
    assert not travels(torch.zeros(SMALL // 4 - 1))
    assert not travels(torch.zeros(SMALL, dtype=torch.bool))
    assert not travels(torch.zeros(SMALL, dtype=torch.long))


def test_activations_are_told_from_masks() -> None:
    hidden, ids = torch.zeros(2), torch.zeros(2, dtype=torch.long)
    assert is_activation(hidden, positional=True)
    assert not is_activation(hidden, positional=False)
    assert not is_activation(ids, positional=True)
    assert is_activation(torch.zeros(2, requires_grad=True), positional=False)
