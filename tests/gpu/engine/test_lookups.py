"""Frozen embeddings that are larger than what the device has left are read where they are, in host memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lt_offload
from tests.support import models
from tests.support.engines import Result, differences, make_optimizer


def start() -> nn.Module:
    model = models.build(layers=4)
    embedding = nn.Embedding(2_000_000, models.HIDDEN)
    model.set_input_embeddings(embedding.requires_grad_(False))  # type: ignore[operator]
    return model


def trained(memory: str | None, **settings: bool) -> Result:
    torch.manual_seed(0)
    model = start()
    model = model if memory else model.cuda()
    optimizer, losses = make_optimizer(model, "adamw-fused"), []

    def steps() -> None:
        for seed in range(3):
            loss = model(**models.batch(model, seed=seed)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())

    if memory is None:
        steps()
        return Result(losses, model.cpu(), optimizer)
    with lt_offload.offloaded(model, optimizer, models.batch(model), memory=memory, **settings) as engine:
        steps()
        table = engine.structure.tensors.index(("model.embed_tokens.weight", model.get_input_embeddings().weight))
        assert any(table in engine.plan.zero_copy(op) for op in engine.plan.ops)
    return Result(losses, model, optimizer)


@pytest.mark.parametrize("settings", [{}, {"activation_offload": False}], ids=str)
def test_they_need_no_room_on_the_device(settings: dict[str, bool]) -> None:
    assert differences(trained(None), trained("300MB", **settings)) == []
