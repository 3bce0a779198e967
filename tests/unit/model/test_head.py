"""The loss from hidden states: bit for bit that of Hugging Face, or that of the reference in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from lt_offload.machine.accounting import Account
from lt_offload.model import head
from lt_offload.model.head import HeadLoss, chunked_loss_reference

SHAPES = [(97, 32, 2, 12), (1000, 64, 3, 50), (5003, 16, 2, 129)]


def gradients(
    projection: nn.Linear, hidden: Tensor, loss: Callable[[Tensor], Tensor], factor: float = 2.0
) -> list[Tensor]:
    projection.zero_grad()
    given = hidden.clone().requires_grad_()
    found = loss(given)
    (factor * found).backward()
    return [found.detach(), given.grad, *(parameter.grad.clone() for parameter in projection.parameters())]


def case(vocabulary: int, features: int, rows: int, columns: int, dtype: torch.dtype, bias: bool) -> Any:
    torch.manual_seed(0)
    projection = nn.Linear(features, vocabulary, bias=bias).to(dtype)
    hidden = 3 * torch.randn(rows, columns, features).to(dtype)
    labels = torch.randint(0, vocabulary, (rows, columns))
    labels[0, :5] = -100
    return projection, hidden, labels


@pytest.mark.parametrize("items", [None, 77, torch.tensor(77)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_fused_is_the_loss_of_hugging_face(
    shape: tuple[int, int, int, int], dtype: torch.dtype, bias: bool, items: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "_PART_BYTES", 7 * 4 * shape[0])  # seven tokens at a time, and a rest
    projection, hidden, labels = case(*shape, dtype, bias)
    expected = gradients(
        projection,
        hidden,
        lambda given: ForCausalLMLoss(projection(given), labels, shape[0], num_items_in_batch=items),
    )
    found = gradients(projection, hidden, lambda given: HeadLoss(projection)(given, labels, num_items_in_batch=items))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize("items", [None, 77, torch.tensor(77)])
@pytest.mark.parametrize("factor", [1.0, 0.25, 1 / 3, 2.0**16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_loss_that_is_multiplied(dtype: torch.dtype, factor: float, items: Any) -> None:
    """They are rounded once, from fp32: a third would be 0.13 % off in bf16."""
    projection, hidden, labels = case(*SHAPES[1], dtype, bias=True)
    following = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    loss, *grads = chunked_loss_reference(
        hidden, projection.weight, following, bias=projection.bias, chunk_tokens=64, num_items_in_batch=items
    )
    found = gradients(
        projection, hidden, lambda given: HeadLoss(projection, 64)(given, labels, num_items_in_batch=items), factor
    )
    expected = [loss, *((factor * grad.float()).to(dtype) for grad in grads if grad is not None)]
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    fused = gradients(
        projection, hidden, lambda given: HeadLoss(projection)(given, labels, num_items_in_batch=items), factor
    )
    for one, other in zip(fused, found, strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=0, atol=0.02 * float(one.float().abs().max()))


def test_only_wanted_gradients_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """None for a weight that is frozen, and none at all without a backward."""
    vocabulary, tokens = 5003, 64
    monkeypatch.setattr(head, "_PART_BYTES", 16 * 4 * vocabulary)
    projection, hidden, labels = case(vocabulary, 64, 1, tokens, torch.float32, False)
    projection.requires_grad_(False)
    loss = HeadLoss(projection, 16)
    given = hidden.clone().requires_grad_()
    with Account() as frozen:
        loss(given, labels).backward()
    assert frozen.peak < projection.weight.nbytes + 5 * 16 * 4 * vocabulary
    assert given.grad is not None
    projection.requires_grad_(True)
    with torch.no_grad(), Account() as none:
        value = loss(given, labels)
    assert none.peak < projection.weight.nbytes
    assert not value.requires_grad


def test_a_second_backward_is_refused() -> None:
    projection, hidden, labels = case(*SHAPES[0], torch.float32, False)
    loss = HeadLoss(projection, 10)(hidden.requires_grad_(), labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward.*call the model again"):
        loss.backward()
