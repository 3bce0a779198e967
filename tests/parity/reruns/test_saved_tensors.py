"""Users' hooks for saved tensors: those that change no number are harmless under every plan, others are refused."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lt_offload.execute.blocks import runs
from lt_offload.model.blocks import find_blocks
from tests.support import plans
from tests.support.engines import Result, differences, installed
from tests.support.user_nets import Net, adamw, fault, in_every_run, ordinary, ours, plain, refusal, rows, seed


class Checkpointed(Net):
    """Checkpoints its blocks itself."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        logits = checkpoint(self.head, x, use_reentrant=False)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize("steady", [(), (0,), (1,), (2, 3), (5,), range(6)], ids=str)
def test_own_checkpointing_of_blocks(steady: Collection[int], monkeypatch: pytest.MonkeyPatch) -> None:
    # Plans decide by measured times whose weights stay in their places: no set of such blocks may matter.
    monkeypatch.setattr(runs, "_steady", lambda structure, plan: {*steady})
    model = Checkpointed()
    optimizer = adamw(model)
    layout = {"options": ("keep", "keep", "recompute"), "places": ("device",), "resident": True}
    plan = plans.streamed(find_blocks(model), optimizer, **layout)
    with installed(model, optimizer, plan):
        seed()
        losses = ordinary(model, optimizer, rows())
    assert differences(plain(Checkpointed), Result(losses, model, optimizer)) == []


def in_few_bits() -> AbstractContextManager[Any]:
    return saved_tensors_hooks(lambda x: x.bfloat16() if x.is_floating_point() else x, lambda x: x.float())


@in_every_run
def test_hooks_that_keep_the_numbers(options: tuple[str, ...]) -> None:
    make = partial(Net, context=save_on_cpu)
    assert differences(plain(make), ours(make, options)) == []


def test_hooks_that_change_numbers_are_refused_before_training() -> None:
    assert "saved_tensors_hooks(in_few_bits.<lambda>, ...) around block embed" in refusal(
        partial(Net, context=in_few_bits)
    )


def test_hooks_that_come_later_are_refused_at_the_blocks_call() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        ordinary(model, optimizer, batches[:1])
        return ordinary(model, optimizer, batches[1:], around_forward=in_few_bits)

    assert "saved_tensors_hooks(in_few_bits.<lambda>, ...) around block embed" in fault(("keep",), loop)
