"""Copies of a model that is being trained: deep ones, averages, pickles. They are what plain PyTorch would make."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lt_offload.model.compiled import cover
from tests.support.engines import differences
from tests.support.user_nets import (
    HIDDEN,
    RUNS,
    VOCAB,
    engine_of,
    in_every_run,
    ours,
    plain,
    rows,
)


class Attending(nn.Module):
    """Its layers take torch's fast path of attention in eval mode, if nobody has hooks there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        layers = [nn.TransformerEncoderLayer(HIDDEN, 4, 64, 0.0, batch_first=True) for _ in range(3)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "average": lambda model: AveragedModel(model).module,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


def kept(module: nn.Module) -> list[tuple[str, str, Any]]:
    """Every attribute and hook of a module and of those below it."""
    found = []
    for path, inner in module.named_modules():
        for name, value in vars(inner).items():
            size = len(value) if name.endswith(("_hooks", "_with_kwargs", "_always_called")) else None
            found.append((path, name, value if size is None and not callable(value) else (type(value).__name__, size)))
    return [item for item in found if item[1] not in ("_parameters", "_buffers", "_modules")]


def copying(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """Copy the model after every step, and compare what copies compute."""
    found = []
    for batch in batches:
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for make in WAYS.values():
            made = make(model)
            assert kept(made) == kept(Attending())
            assert all(p.grad is None and not p._backward_hooks for p in made.parameters())
            with torch.no_grad():
                found.append(made.eval()(**batch)["loss"])
        found.append(loss.detach().clone())
    return found


@in_every_run
def test_copies_beside_every_option(options: tuple[str, ...]) -> None:
    assert differences(plain(Attending, copying), ours(Attending, options, copying)) == []


def test_a_copy_is_trained_while_the_model_is() -> None:
    """As a target network is: with gradients, in the middle of a forward."""
    model = Attending()
    optimizer = torch.optim.AdamW(model.parameters())
    with engine_of(model, optimizer, RUNS["both"]):
        loss = model(**rows()[0])["loss"]
        copied = copy.deepcopy(model)
        copied(**rows()[1])["loss"].backward()
        loss.backward()
        optimizer.step()
    assert all(p.grad is not None for p in copied.parameters())
    assert kept(model) == kept(Attending())


class Own(nn.Linear):
    """Has a way of its own to be copied."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"note": "copied"}


@pytest.mark.parametrize("kind", [nn.Linear, Own])
def test_what_is_covered_is_of_no_copy(kind: type[nn.Linear]) -> None:
    module = kind(2, 2)
    module.mark = "own"
    before = dict(vars(module))
    undo = [cover(module, name, name) for name in ("mark", "other", "mark")]
    assert (module.mark, module.other) == ("mark", "other")
    for made in (copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))):
        assert vars(made).keys() - {"note"} == before.keys()
        assert made.mark == "own"
        assert hasattr(made, "note") == (kind is Own)
    for end in reversed(undo):
        end()
    assert vars(module) == before
