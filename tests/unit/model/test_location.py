"""What models say about where they are, and what is brought there; ``meta`` stands for a GPU."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lt_offload.model.blocks import Block, BlockKind
from lt_offload.model.location import brought, located
from tests.support import models

HOST, GPU = torch.device("cpu"), torch.device("meta")


def properties(cls: type) -> list[Any]:
    return [vars(base)["device"] for base in cls.__mro__ if "device" in vars(base)]


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.asked = 0

    @property
    def device(self) -> torch.device:
        self.asked += 1
        return self.inner.weight.device

    @device.setter
    def device(self, value: str) -> None:
        self.inner.to(value)


class Heir(Own):
    @property
    def device(self) -> torch.device:
        return super().device


@pytest.mark.parametrize("lora", [False, True])
def test_models_and_their_parts(lora: bool) -> None:
    model, other = models.build("llama", lora=lora), models.build("llama", lora=lora)
    inner = model.get_base_model() if lora else model
    cls, before = type(inner), properties(type(inner))
    with located(model, GPU):
        assert model.device == inner.device == inner.model.device == GPU
        assert other.device == HOST
        assert type(inner) is cls
        assert isinstance(cls.device, property)
        assert [twin.device for twin in (copy.deepcopy(inner), pickle.loads(pickle.dumps(inner)))] == [HOST, HOST]
    assert model.device == inner.device == HOST
    assert properties(cls) == before


@pytest.mark.parametrize("cls", [Own, Heir])
def test_properties_of_ones_own(cls: type[Own]) -> None:
    model, before = cls(), properties(cls)
    with located(model, GPU):
        assert model.device == GPU
        asked = model.asked
        assert model.device == GPU
        assert model.asked == asked + 1  # it is the property's own answer that is translated
        model.inner.to("meta")
    assert model.device == GPU
    assert properties(cls) == before


def test_a_nested_lightning_module() -> None:
    class Outer(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = LightningModule()

    outer = Outer()
    with located(outer, GPU):
        assert outer.teacher.device == GPU
    assert outer.teacher.device == HOST


# -- what blocks are given ---------------------------------------------------------------------------------------------


def block(kind: BlockKind = "layer") -> Block:
    return Block(name="b", module=nn.Linear(1, 1), kind=kind, tensors=())


@pytest.mark.parametrize(
    ("tensor", "kind", "moves"),
    [
        (torch.zeros(2, 3), "layer", True),
        (torch.zeros(2, 3, dtype=torch.long), "layer", True),
        (torch.zeros(3, dtype=torch.bool), "layer", True),
        (torch.zeros(3, dtype=torch.long), "layer", False),
        (torch.zeros(3, dtype=torch.long), "embedding", True),
        (torch.tensor(1.0), "layer", False),
        (torch.zeros(2, 3, device="meta"), "layer", False),
    ],
)
def test_which_tensors_are_brought(tensor: Tensor, kind: BlockKind, moves: bool) -> None:
    (found,), _ = brought(block(kind), (tensor,), {}, GPU)
    assert (found is not tensor) == moves
    assert found.is_meta == (moves or tensor.is_meta)


def test_they_are_found_in_what_arguments_hold() -> None:
    class Cache:
        def __init__(self) -> None:
            self.key = torch.zeros(2, 2)

    x, there, cache = torch.zeros(2, 2), torch.zeros(2, 2, device="meta"), Cache()
    args, kwargs = brought(block(), ((x, there), [x], cache), {"mask": {"full": x}, "flag": True}, GPU)
    assert args[0][0].is_meta
    assert args[0][1] is there
    assert args[1][0].is_meta
    assert args[2] is cache
    assert not cache.key.is_meta
    assert kwargs["mask"]["full"].is_meta
    assert kwargs["flag"] is True
