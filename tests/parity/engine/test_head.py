"""Projection and loss as one block: the numbers of plain PyTorch, or, in chunks, those of a written order of sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lt_offload import chunked_loss_reference
from lt_offload.errors import PlanError, UnsupportedError
from lt_offload.model.blocks import find_blocks
from tests.support import models
from tests.support.engines import Case, changed, differences, installed, make_optimizer, offloaded, plain, planned

CHUNK = 7
"""Tokens: the last chunk of two rows of 12 is smaller."""

CASES = [
    Case(family="llama", places=("host",)),
    Case(family="llama-tied", places=("device", "host"), mode="thread"),
    Case(family="llama-tied", places=("paged",), dtype="bfloat16", mode="random"),
    Case(family="phi", places=("paged", "host"), dtype="bfloat16", dropout=0.1),  # its projection has a bias
    Case(family="phi", places=("device",), lag=0, lead=0),
    Case(family="mistral", places=("host",), optimizer="sgd"),
    Case(family="bloom", places=("device", "paged", "host"), mode="thread"),
    Case(family="llama", places=("host",), lora=True, dropout=0.1),
    Case(family="phi3", places=("paged",), roomy=True),  # weights are at other addresses in the backward
    Case(family="gemma2", places=("paged", "host")),  # its logits are capped softly
    Case(family="gemma2", places=("device",), dtype="bfloat16", lora=True),
    Case(family="cohere", places=("host",)),  # and multiplied
]


def with_last(case: Case, option: str, chunk: int = 0) -> Case:
    options = ("recompute", "keep", "offload", "mixed")
    return Case(**{**vars(case), "options": options, "last_option": option, "chunk_tokens": chunk})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fused_is_equal_to_plain_pytorch(case: Case) -> None:
    expected = plain(case)
    actual = offloaded(with_last(case, "fused"))
    assert differences(expected, actual) == []
    assert changed(case, actual)


class _Reference(torch.autograd.Function):
    """The reference as a loss that can be trained with."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk: int, scale: Any
    ) -> Tensor:
        loss, *grads = chunked_loss_reference(hidden, weight, labels, bias=bias, chunk_tokens=chunk, scale=scale)
        ctx.grads = grads
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        found = [None if grad is None else (grads[0] * grad.float()).to(grad.dtype) for grad in ctx.grads]
        wanted = (grad if need else None for grad, need in zip(found, ctx.needs_input_grad, strict=False))
        return *wanted, None, None, None


def use_reference(model: nn.Module, chunk: int = CHUNK) -> None:
    """Let ``model`` compute its loss by the reference, in plain PyTorch."""
    structure = find_blocks(model)
    head: Any = structure.blocks[-1].module
    owner: Any = structure.owner
    cap, scale = getattr(owner.config, "final_logit_softcapping", None), getattr(owner.config, "logit_scale", None)
    # The model does to hidden states here what it does to logits: not then, but in the reference.
    owner.config.final_logit_softcapping = None
    owner.logit_scale = 1.0

    def of_logits(logits: Tensor) -> Tensor:
        logits = logits if cap is None else torch.tanh(logits / cap) * cap
        return logits if scale is None else logits * scale

    def loss(logits: Tensor, labels: Tensor, *_size: int, **_others: Any) -> Tensor:
        following = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
        return _Reference.apply(logits, head.weight, head.bias, following, chunk, of_logits)  # type: ignore[no-any-return]

    head.forward = lambda hidden: hidden
    owner.loss_function = loss


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunked_is_equal_to_its_reference(case: Case) -> None:
    expected = plain(case, use_reference)
    actual = offloaded(with_last(case, "chunked", CHUNK))
    assert differences(expected, actual) == []
    assert changed(case, actual)


def test_chunked_differs_from_plain_pytorch_in_last_bits() -> None:
    """Which is why no plan takes it where another one fits."""
    case = CASES[0]
    expected, actual = plain(case), offloaded(with_last(case, "chunked", CHUNK))
    assert differences(expected, actual)
    for one, other in zip(expected.losses, actual.losses, strict=True):
        assert float(one) == pytest.approx(float(other), rel=1e-4)


@pytest.mark.parametrize(("option", "chunk"), [("fused", 0), ("chunked", CHUNK)])
@pytest.mark.parametrize("others", [{"num_items_in_batch": torch.tensor(31)}, {"ignore_index": 5}, {}])
def test_what_a_model_tells_its_loss(option: str, chunk: int, others: dict[str, Any]) -> None:
    case = CASES[0]
    model = models.build(case.family)
    batch = models.batch(model, padding=False)
    expected = model(**batch, **others).loss
    copied = models.build(case.family)
    optimizer = make_optimizer(copied, "sgd")
    with installed(copied, optimizer, planned(with_last(case, option, chunk))):
        found = copied(**batch, **others).loss
        found.backward()
        optimizer.step()
    assert torch.equal(expected, found)


@pytest.mark.parametrize("option", ["fused", "chunked"])
def test_logits_of_a_training_forward(option: str) -> None:
    model = models.build("llama")
    optimizer = make_optimizer(model, "sgd")
    batch = models.batch(model)
    case = with_last(CASES[0], option, CHUNK if option == "chunked" else 0)
    with torch.no_grad():
        expected = model(**batch)
    with installed(model, optimizer, planned(case)):
        out = model(**batch)
        assert out.logits.shape == expected.logits.shape
        assert (out.logits.dtype, out.logits.device) == (torch.float32, expected.logits.device)
        for use in (
            lambda: out.logits.argmax(-1),
            lambda: out.logits[0],
            lambda: out.logits + 1,
            lambda: torch.stack([out.logits]),
            lambda: out.logits.tolist(),
            lambda: out.logits.numpy(),
            lambda: out.logits.detach(),
            lambda: model.loss_function(out.logits, batch["labels"], models.VOCAB),
        ):
            with pytest.raises(UnsupportedError, match="logits of a training forward.*recompute=False"):
                use()
        assert "DeferredLogits" in repr(out.logits)
        out.loss.backward()
        optimizer.step()
        with torch.no_grad():
            again = model(**batch)
        assert torch.equal(again.loss, model.loss_function(again.logits, batch["labels"], models.VOCAB))
        with pytest.raises(UnsupportedError, match="logits of a training forward"):
            out.logits.sum()


def test_a_copy_of_the_model_has_its_own_loss() -> None:
    import copy

    model = models.build("llama")
    optimizer = make_optimizer(model, "sgd")
    batch = models.batch(model)
    before = model.loss_function
    with installed(model, optimizer, planned(with_last(CASES[0], "fused"))):
        twin = copy.deepcopy(model)
        assert twin.loss_function is before
        assert torch.equal(twin(**batch).logits.argmax(-1), twin(**batch).logits.argmax(-1))
    assert model.loss_function is before
    assert "_loss_function" not in vars(model)


def test_a_plan_for_another_loss() -> None:
    model = models.build("llama")
    model.loss_function = lambda logits, labels, **_others: logits.float().mean()
    optimizer = make_optimizer(model, "sgd")
    with (
        pytest.raises(PlanError, match="computes the loss in block lm_head.*'fused'.*plan again"),
        installed(model, optimizer, planned(with_last(CASES[0], "fused"))),
    ):
        pass
