from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lt_offload.model.saving import for_replay, is_costly
from tests.support import models

aten = torch.ops.aten


class Traced(TorchDispatchMode):
    """Notes operations, which of them are costly, and the storages of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, bool, bool]] = []
        self.products: list[tuple[int, bool]] = []
        """Inner dimensions of products of two matrices, and whether they are costly."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor)]
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        aliases = any(t.untyped_storage()._cdata in given for t in tensors)
        self.calls.append((func, is_costly(func, args, kwargs or {}), aliases))
        if func in (aten.mm.default, aten.addmm.default):
            self.products.append((args[-1].shape[0], self.calls[-1][1]))
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


def test_of_a_layer_with_an_adapter_one_wide_result_is_kept() -> None:
    """The adapter's second product has the rank as its inner dimension, and takes as long as a cheap operation."""
    rank, layers = 4, 3
    model = models.build("llama", lora=True, layers=layers, num_key_value_heads=4)
    with torch.no_grad(), Traced() as trace:
        model(**models.batch(model))
    adapters = sum("lora_B" in name for name, _ in model.named_parameters())
    products = [costly for inner, costly in trace.products if inner == rank]
    assert products == [False] * adapters
    assert sum(costly for _, costly in trace.products) == 2 * adapters + 1  # the frozen weights', the first ones, head


def _matrices(rows: int, inner: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(rows, inner, device="meta"), torch.empty(inner, columns, device="meta")


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "costly"),
    [
        (aten.mm.default, _matrices(512, 4096, 1024), {}, True),
        (aten.mm.default, _matrices(512, 256, 4096), {}, False),
        (aten.mm.default, _matrices(512, 512, 8192), {}, True),
        (aten.mm.default, _matrices(512, 4096, 16), {}, True),
        (aten.mm.default, _matrices(512, 64, 128), {}, True),
        (aten.addmm.default, (torch.empty(64, device="meta"), *_matrices(12, 16, 64)), {}, True),
        (aten.addmm.default, (torch.empty(64, device="meta"), *_matrices(12, 8, 64)), {}, False),
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
