"""Containers and objects that a model hands to its blocks: the caller's own, with what blocks write into them."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lt_offload
from lt_offload.errors import UnsupportedError
from tests.support.engines import differences
from tests.support.user_nets import (
    HIDDEN,
    Layer,
    Net,
    adamw,
    by_budget,
    engine_of,
    fault,
    in_every_run,
    ordinary,
    ours,
    plain,
    refusal,
    rows,
    with_every_budget,
)


class Handing(nn.Module):
    """Hands a container of its own to every layer; ``loss`` adds something of it to the loss."""

    def __init__(
        self,
        layer: type[Layer],
        make: Callable[[], Any],
        loss: Callable[[Tensor, Any], Tensor] = lambda loss, given: loss,
        *,
        named: bool = False,
    ) -> None:
        super().__init__()
        self.net = Net(layer)
        self.make, self.loss, self.named = make, loss, named
        self.seen: list[Any] = []

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        given, x = self.make(), self.net.embed(ids)
        for layer in self.net.layers:
            x = layer(x, given=given) if self.named else layer(x, given)
        loss = F.cross_entropy(self.net.head(x).flatten(0, 1), labels.flatten())
        loss = self.loss(loss, given)
        self.seen.append(plainly(given))
        return {"loss": loss}


def plainly(given: Any) -> Any:
    """What a container holds, to be compared; the graphs of its tensors are let go of."""
    if isinstance(given, Tensor):
        return given.detach().tolist()
    if isinstance(given, dict):
        return [(key, plainly(value)) for key, value in given.items()]
    if isinstance(given, (list, tuple, deque)):
        return [plainly(item) for item in given]
    return plainly(vars(given)) if hasattr(given, "__dict__") else given


class CountsInDict(Layer):
    def forward(self, x: Tensor, given: Any) -> Tensor:
        given["i"] += 1
        return super().forward(x) * (1 + 0.1 * given["i"])


class CountsInList(Layer):
    def forward(self, x: Tensor, given: Any) -> Tensor:
        given.append(0.1 * len(given))
        return super().forward(x) * (1 + sum(given))


class CountsInside(Layer):
    def forward(self, x: Tensor, given: Any) -> Tensor:
        given["stats"][0]["n"].append(len(given["stats"]))
        given.setdefault("new", {"m": []})["m"].append(1)
        return super().forward(x) * (1 + 0.1 * len(given["stats"][0]["n"]) + 0.01 * len(given["new"]["m"]))


class CountsInTuple(Layer):
    def forward(self, x: Tensor, given: Any) -> Tensor:
        scale, counts = given
        counts["i"] += 1
        return super().forward(x) * scale * (1 + 0.1 * counts["i"])


class CountsInObject(Layer):
    def forward(self, x: Tensor, given: Any) -> Tensor:
        given.i += 1
        return super().forward(x) * (1 + 0.1 * given.i)


class Own:
    def __init__(self) -> None:
        self.i = 0


@dataclass
class Counter:
    i: int = 0


COUNTING: dict[str, Callable[[], nn.Module]] = {
    "dict": lambda: Handing(CountsInDict, lambda: {"i": 0}),
    "keyword": lambda: Handing(CountsInDict, lambda: {"i": 0}, named=True),
    "defaultdict": lambda: Handing(CountsInDict, lambda: defaultdict(int)),
    "user dict": lambda: Handing(CountsInDict, lambda: UserDict(i=0)),
    "user list": lambda: Handing(CountsInList, UserList),
    "ordered": lambda: Handing(CountsInDict, lambda: OrderedDict(i=0)),
    "list": lambda: Handing(CountsInList, list),
    "deque": lambda: Handing(CountsInList, lambda: deque([0.5], maxlen=3)),
    "nested": lambda: Handing(CountsInside, lambda: {"stats": ({"n": [0]}, 1)}),
    "tuple": lambda: Handing(CountsInTuple, lambda: (torch.full((HIDDEN,), 0.9), {"i": 0})),
    "namespace": lambda: Handing(CountsInObject, lambda: SimpleNamespace(i=0)),
    "object": lambda: Handing(CountsInObject, Own),
    "dataclass": lambda: Handing(CountsInObject, Counter),
}


def weighted(loss: Tensor, given: Any) -> Tensor:
    return loss + 0.1 * given["aux"]


class AddsLoss(Layer):
    def forward(self, x: Tensor, given: Any) -> Tensor:
        y = super().forward(x)
        given["aux"] = given["aux"] + y.square().mean()
        return y


class AppendsLosses(Layer):
    def forward(self, x: Tensor, given: Any) -> Tensor:
        y = super().forward(x)
        given.append((y.square().mean(), {"of": y.abs().mean()}))
        return y


class AddsStatistics(Layer):
    """Adds to a tensor in its place, and collects others."""

    def forward(self, x: Tensor, given: Any) -> Tensor:
        y = super().forward(x)
        given["load"] += y.detach().mean((0, 1))
        given["means"].append(y.mean().detach())
        return y + given["load"]


class Shares(Layer):
    """The first leaves keys that all later ones use."""

    def forward(self, x: Tensor, given: Any) -> Tensor:
        if "keys" not in given:
            given["keys"] = self.linear(x).tanh(), x.mean()
        keys, mean = given["keys"]
        return super().forward(x) + keys * mean


class Taking(Layer):
    """Takes what the last one has left, uses it and leaves another."""

    def forward(self, x: Tensor, given: Any) -> Tensor:
        last = given.pop() if given else x
        given.append(self.linear(last))
        return super().forward(x) + last


class Once(Layer):
    """Uses its input once, and leaves its output."""

    def forward(self, x: Tensor, given: Any) -> Tensor:
        y = self.inner(x)
        given.append(y)
        return y


class Residual(Layer):
    def forward(self, x: Tensor, given: Any) -> Tensor:
        given.append(super().forward(x))
        return given[-1]


def of_losses(loss: Tensor, given: Any) -> Tensor:
    return loss + sum(0.1 * aux + 0.2 * more["of"] for aux, more in given)


def supervised(loss: Tensor, given: Any) -> Tensor:
    return loss + sum(hidden.square().mean() for hidden in given)


WITH_TENSORS: dict[str, Callable[[], nn.Module]] = {
    "loss": lambda: Handing(AddsLoss, lambda: {"aux": 0.0}, weighted),
    "loss of a tensor": lambda: Handing(AddsLoss, lambda: {"aux": torch.zeros(())}, weighted),
    "loss by keyword": lambda: Handing(AddsLoss, lambda: {"aux": 0.0}, weighted, named=True),
    "losses": lambda: Handing(AppendsLosses, list, of_losses),
    "statistics": lambda: Handing(AddsStatistics, lambda: {"load": torch.zeros(HIDDEN), "means": []}),
    "keys": lambda: Handing(Shares, dict),
    "keys in a user dict": lambda: Handing(Shares, UserDict),
    "loss in a user dict": lambda: Handing(AddsLoss, lambda: UserDict(aux=0.0), weighted),
    "taking": lambda: Handing(Taking, list),
    "supervised": lambda: Handing(Once, list, supervised),
    "supervised residuals": lambda: Handing(Residual, list, supervised),
}


@in_every_run
@pytest.mark.parametrize("name", [*COUNTING, *(name for name in WITH_TENSORS if name != "statistics")])
def test_what_blocks_write_to_the_callers_containers(name: str, options: tuple[str, ...]) -> None:
    make = (COUNTING | WITH_TENSORS)[name]
    expected, found = plain(make), ours(make, options)
    assert differences(expected, found) == []
    assert expected.model.seen == found.model.seen  # type: ignore[union-attr]


def test_a_plan_that_repeats_what_adds_in_place_is_refused() -> None:
    """A measured plan runs such blocks once."""
    assert "was written to" in fault(("recompute",), ordinary, WITH_TENSORS["statistics"])


def counting() -> nn.Module:
    return COUNTING["dict"]()


def losses() -> nn.Module:
    return WITH_TENSORS["losses"]()


def statistics() -> nn.Module:
    return WITH_TENSORS["statistics"]()


@with_every_budget
@pytest.mark.parametrize("make", [counting, losses, statistics])
def test_containers_by_budget(make: Callable[[], nn.Module], budget: str) -> None:
    expected, found = plain(make), by_budget(make, budget)
    assert differences(expected, found) == []
    assert expected.model.seen == found.model.seen[-len(expected.model.seen) :]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["dict", "losses"])
def test_containers_that_blocks_would_write_to_once_per_part(name: str) -> None:
    model = (COUNTING | WITH_TENSORS)[name]()
    with pytest.raises(UnsupportedError, match="micro_batches=2: block net.layers.0 "):
        lt_offload.profile(model, rows()[0], optimizer=adamw(model), micro_batches=2)


class AddsLossInPlace(Layer):
    def forward(self, x: Tensor, given: Any) -> Tensor:
        y = super().forward(x)
        (given["aux"] if isinstance(given, dict) else given).add_(y.square().mean())
        return y


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (lambda: {"aux": torch.zeros(())}, weighted),
        (lambda: torch.zeros(()), lambda loss, given: loss + 0.1 * given),
    ],
    ids=["container", "argument"],
)
def test_losses_that_blocks_add_in_place_are_refused_before_training(make: Callable[[], Any], loss: Any) -> None:
    """The number would be right, and its gradient nowhere."""
    text = refusal(lambda: Handing(AddsLossInPlace, make, loss))
    assert "block net.layers.0 has written to an argument in place" in text
    assert "write out of place" in text


@dataclass
class State:
    x: Tensor
    aux: Any
    i: int = 0


class Replaced(Layer):
    def forward(self, state: State) -> State:  # type: ignore[override]
        y = super().forward(state.x)
        return replace(state, x=y * (1 + 0.1 * state.i), aux=state.aux + y.square().mean(), i=state.i + 1)


class Written(Layer):
    def forward(self, state: State) -> State:  # type: ignore[override]
        state.x = super().forward(state.x) * (1 + 0.1 * state.i)
        state.aux = state.aux + state.x.square().mean()
        state.i += 1
        return state


class Silent(Written):
    def forward(self, state: State) -> None:  # type: ignore[override]
        super().forward(state)


class Through(Handing):
    """Hands a state from layer to layer."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        state: Any = self.make()
        state.x = self.net.embed(ids)
        for layer in self.net.layers:
            state = layer(state) or state
        loss = F.cross_entropy(self.net.head(state.x).flatten(0, 1), labels.flatten())
        return {"loss": loss + 0.1 * state.aux + 0.0 * state.i}


@in_every_run
@pytest.mark.parametrize("layer", [Replaced, Written, Silent])
def test_a_state_that_goes_through_the_blocks(layer: type[Layer], options: tuple[str, ...]) -> None:
    def make() -> nn.Module:
        return Through(layer, lambda: State(torch.zeros(()), 0.0))

    assert differences(plain(make), ours(make, options)) == []


def through() -> nn.Module:
    return Through(Replaced, lambda: State(torch.zeros(()), 0.0))


@with_every_budget
def test_a_state_by_budget(budget: str) -> None:
    assert differences(plain(through), by_budget(through, budget)) == []


@dataclass(slots=True)
class Slotted:
    x: Tensor
    aux: Any
    i: int = 0


def test_objects_that_nobody_can_look_into_are_refused_before_training() -> None:
    class Opaque(Layer):
        def forward(self, state: Any) -> Any:
            return Slotted(super().forward(state.x), 0.0)

    text = refusal(lambda: Through(Opaque, lambda: Slotted(torch.zeros(()), 0.0)))
    assert "Slotted" in text


@in_every_run
def test_containers_live_no_longer_than_in_plain_training(options: tuple[str, ...]) -> None:
    """A container has tensors of the outer graph, which has the runs of blocks, which have had the container."""
    made: list[weakref.ref[Own]] = []

    def make() -> Own:
        own: Any = Own()
        own.aux = 0.0
        made.append(weakref.ref(own))
        return own

    class Adds(Layer):
        def forward(self, x: Tensor, given: Any) -> Tensor:
            y = super().forward(x)
            given.aux = given.aux + y.mean()
            return y

    model = Handing(Adds, make, lambda loss, given: loss + given.aux)
    optimizer = adamw(model)
    with engine_of(model, optimizer, options):
        ordinary(model, optimizer, rows())
        gc.collect()
        assert [own() for own in made] == [None] * len(made)
