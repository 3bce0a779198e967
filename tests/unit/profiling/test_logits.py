"""When the last block may compute the loss, too: only if nobody else wants the logits, and the loss is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lt_offload.model import head
from lt_offload.profiling.hardware import load_hardware
from lt_offload.profiling.measure import profile
from tests.support import models

Run = Callable[[nn.Module, Any], Any]


def offered(model: nn.Module, run: Run | None) -> set[str]:
    """The options of the last block with which it computes the loss."""
    batch = models.batch(model)
    found = profile(
        model,
        batch,
        optimizer=torch.optim.SGD,
        device="cpu",
        hardware=load_hardware("rtx-3060"),
        run=None if run is None else lambda given: run(model, given),
    )
    assert not any({o.name for o in block.options} & {"fused", "chunked"} for block in found.blocks[:-1])
    return {option.name for option in found.blocks[-1].options} & {"fused", "chunked"}


@pytest.mark.parametrize("family", [*models.FAMILIES, "gemma2", "cohere", "granite"])
def test_offered_where_only_the_loss_is_returned(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build(family)
    before = dict(vars(model))
    assert offered(model, lambda model, batch: model(**batch).loss) == {"fused"}  # the batch is no larger than a chunk
    monkeypatch.setattr(head, "_LEAST_TOKENS", 4)
    monkeypatch.setattr(head, "_PART_BYTES", 4 * 4 * models.VOCAB)
    assert offered(model, lambda model, batch: model(**batch).loss) == {"fused", "chunked"}
    assert vars(model) == before


def accuracy(model: nn.Module, batch: Any) -> Tensor:
    out = model(**batch)
    assert out.logits.argmax(-1).shape == batch["labels"].shape
    return out.loss


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def both(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    out = model(**batch)
    return {"loss": out.loss, "logits": out.logits}


def in_a_mode(model: nn.Module, batch: Any) -> Tensor:
    with torch.device("cpu"):  # is on the stack before the watch, and leaves it first
        out = model(**batch)
    assert out.logits.sum().isfinite()
    return out.loss


@pytest.mark.parametrize("run", [accuracy, own_loss, both, in_a_mode, None])
def test_not_offered_where_somebody_wants_logits(run: Run | None) -> None:
    assert offered(models.build("llama"), run) == set()
    from torch.overrides import _get_current_function_mode

    assert _get_current_function_mode() is None


def capped_only(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss


def rescaled(model: nn.Module, batch: Any) -> Tensor:
    out = model(**batch)
    return out.loss + 0 * (out.logits / 2).sum()


def test_not_offered_where_logits_are_used_beside_their_scaling() -> None:
    assert offered(models.build("gemma2"), rescaled) == set()
    kept: list[Tensor] = []
    model = models.build("gemma2")
    model.lm_head.register_forward_hook(lambda _module, _args, out: kept.append(out))

    def raw(model: nn.Module, batch: Any) -> Tensor:
        loss = model(**batch).loss
        return loss + 0 * kept.pop().sum()

    assert offered(model, raw) == set()


def test_not_offered_where_the_model_changes_logits_otherwise() -> None:
    class Shifted(type(models.build("llama"))):  # type: ignore[misc]
        def forward(self, labels: Tensor, **others: Any) -> Any:
            out = super().forward(**others)
            out.loss = self.loss_function(out.logits + 1, labels, models.VOCAB)
            return out

    model = models.build("llama")
    model.__class__ = Shifted
    assert offered(model, capped_only) == set()


def test_not_offered_for_another_loss_or_projection() -> None:
    def loss_only(model: nn.Module, batch: Any) -> Any:
        return model(**batch).loss

    model = models.build("llama")
    model.loss_function = lambda logits, labels, vocab_size, **_others: logits.float().logsumexp(-1).mean()
    assert offered(model, loss_only) == set()

    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model = models.build("llama")
    model.lm_head = Scaled(models.HIDDEN, models.VOCAB, bias=False)
    assert offered(model, loss_only) == set()
