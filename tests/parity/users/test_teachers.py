"""A frozen teacher in eval mode beside the model: torch's fast paths of attention are taken as in plain PyTorch."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lt_offload.machine.dispatch import WatchingMode
from tests.support.engines import differences
from tests.support.user_nets import HIDDEN, RUNS, VOCAB, Net, by_budget, in_every_run, ours, plain, with_every_budget


class Attention(nn.MultiheadAttention):
    """Self-attention, called as a layer is."""

    def forward(self, x: Tensor, src_key_padding_mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, key_padding_mask=src_key_padding_mask, need_weights=False)[0]


class Distilled(Net):
    """Learns from a teacher that is a part of it, or from one that is not."""

    def __init__(self, *, part: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(HIDDEN, 4, 64, batch_first=True)
        middle = nn.ModuleList([Attention(HIDDEN, 4, batch_first=True), layer, nn.TransformerEncoder(layer, 2)])
        teacher = nn.ModuleList([nn.Embedding(VOCAB, HIDDEN), middle, nn.Linear(HIDDEN, VOCAB)])
        teacher.requires_grad_(False).eval()
        self.teacher: Any = teacher if part else tuple(teacher)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        embed, layers, head = self.teacher
        with torch.no_grad():
            x = embed(ids)
            for layer in layers:
                x = layer(x, src_key_padding_mask=ids > 50)
            target = head(x).softmax(-1)
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.kl_div(self.head(x).log_softmax(-1), target, reduction="batchmean")}


class InLowPrecision(Distilled):
    """The same, with products in bfloat16: torch's fast paths call operations that autocast has to see."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return super().forward(ids, labels)


BESIDE = partial(Distilled, part=False)
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


@with_every_budget
def test_a_frozen_teacher_gives_plain_numbers(budget: str) -> None:
    assert differences(plain(BESIDE), by_budget(BESIDE, budget)) == []


def test_a_teacher_under_autocast_gives_plain_numbers() -> None:
    make = partial(InLowPrecision, part=False)
    assert differences(plain(make), ours(make, RUNS["both"])) == []


@in_every_run
def test_a_teacher_that_is_part_of_the_model(options: tuple[str, ...]) -> None:
    make = partial(Distilled, part=True)
    assert differences(plain(make), ours(make, options)) == []


class Theirs(TorchFunctionMode):
    """A user's own mode, which does count."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_only_the_engines_modes_are_left_out() -> None:
    original, x = torch.overrides.has_torch_function, (torch.ones(1),)
    seen: list[bool] = []
    one, two = Theirs(), Theirs()
    watching = WatchingMode()
    with one:
        watching.place()
        with two:
            assert torch.overrides.has_torch_function(x)
        assert torch.overrides.has_torch_function(x)
        assert watching.lift() == 0
    assert not original(x)
    assert torch.overrides.has_torch_function is original
    watching.place()
    thread = threading.Thread(target=lambda: seen.append(torch.overrides.has_torch_function(x)))
    thread.start()
    thread.join()
    assert original(x)
    assert not torch.overrides.has_torch_function(x)
    assert seen == [False]
    assert watching.lift() == 0
    assert watching.lift() is None
    assert torch.overrides.has_torch_function is original


def test_nothing_is_left_behind() -> None:
    original = torch.overrides.has_torch_function
    ours(Net, RUNS["both"])
    assert torch.overrides.has_torch_function is original
