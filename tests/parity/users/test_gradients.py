"""Loops of one's own: what they read between steps is plain PyTorch's; uses of consumed gradients are refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lt_offload.errors import UnsupportedError
from tests import sampling
from tests.support.engines import differences
from tests.support.profiles.budgets import BUDGETS
from tests.support.user_nets import (
    HIDDEN,
    RUNS,
    Loop,
    Net,
    between,
    by_budget,
    fault,
    in_every_run,
    ordinary,
    ours,
    plain,
    recorded_or_run_again,
    refusal,
    rows,
    seed,
    with_every_budget,
)


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    scaler = torch.amp.GradScaler("cpu")
    for batch in batches:
        scaler.scale(model(**batch)["loss"]).backward()
        scaler.step(optimizer)
        scaler.update()
    return []


def accumulating(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    for at, batch in enumerate(batches):
        model(**batch)["loss"].backward()
        if at % 2:
            optimizer.step()
            optimizer.zero_grad()
    return []


def skipping(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    for batch in batches:
        model(**batch)["loss"].backward()
        optimizer.zero_grad()
    return []


def twice(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    loss = model(**batches[0])["loss"]
    loss.backward(retain_graph=True)
    loss.backward()
    return []


def stepping_twice(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]
) -> list[Tensor]:
    model(**batches[0])["loss"].backward()
    optimizer.step()
    optimizer.step()
    return []


def not_zeroing(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    for batch in batches:
        model(**batch)["loss"].backward()
        optimizer.step()
    return []


def each(act: Callable[[nn.Parameter], Any]) -> Loop:
    return between(lambda model, optimizer: [act(p) for p in model.parameters()])


def removed(parameter: nn.Parameter) -> None:
    parameter.grad = None


def replaced(parameter: nn.Parameter) -> None:
    parameter.grad = torch.zeros_like(parameter)


GRADIENTS: dict[str, Loop] = {
    "norm": between(lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
    "value": between(lambda model, optimizer: nn.utils.clip_grad_value_(model.parameters(), 1.0)),
    "read": each(lambda p: p.grad.norm()),  # type: ignore[union-attr]
    "edited": each(lambda p: p.grad.mul_(2)),  # type: ignore[union-attr]
    "removed": each(removed),
    "replaced": each(replaced),
    "scaler": scaled,
    "accumulated": accumulating,
    "skipped": skipping,
    "backward twice": twice,
    "step twice": stepping_twice,
    "not zeroed": not_zeroing,
    "weights read": each(lambda p: p.norm()),
    "weights written": each(lambda p: p.data.mul_(2)),
    "state_dict": between(lambda model, optimizer: model.state_dict()),
    "optimizer": between(lambda model, optimizer: optimizer.state_dict()),
}


@recorded_or_run_again
@pytest.mark.parametrize("name", GRADIENTS)
def test_what_cannot_be_done_with_gradients_is_refused_at_once(name: str, options: tuple[str, ...]) -> None:
    message = fault(options, GRADIENTS[name])
    assert "weight" in message or "backward" in message


def test_gradients_may_be_looked_at_without_using_them() -> None:
    shapes: list[Any] = []

    def look(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        shapes.extend((p.grad is not None, p.grad.shape == p.shape, f"{p.grad}") for p in model.parameters())  # type: ignore[union-attr]

    expected = plain(Net)
    found = ours(Net, RUNS["both"], between(look))
    assert {pair[:2] for pair in shapes} == {(True, True)}
    assert "ConsumedGradient(weight embed.weight" in shapes[0][2]
    found.losses = expected.losses
    assert differences(expected, found) == []


@with_every_budget
def test_a_loop_that_goes_on_without_the_engine_clears_gradients(budget: str) -> None:
    """Plain ones stay after the last step, and the next backward would add to them."""
    expected, found = plain(Net, uncleared), by_budget(Net, budget, uncleared)
    for result in (expected, found):
        assert all(p.grad is not None for p in result.model.parameters())
    with pytest.raises(UnsupportedError, match=r"the gradient of weight .* was used by add_.* optimizer.zero_grad\(\)"):
        ordinary(found.model, found.optimizer, rows())
    for result in (expected, found):
        result.optimizer.zero_grad()
        seed()
        result.losses += ordinary(result.model, result.optimizer, rows())
    assert differences(expected, found) == []
    assert all(p.grad is None for p in by_budget(Net, budget).model.parameters())


def uncleared(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return losses


def by_closure(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    def closure(batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**batch)["loss"]
        loss.backward()
        return loss

    return [optimizer.step(lambda batch=batch: closure(batch)).detach().clone() for batch in batches]  # type: ignore[misc]


@with_every_budget
def test_a_step_with_a_closure(budget: str) -> None:
    assert differences(plain(Net, by_closure), by_budget(Net, budget, by_closure)) == []


def other(act: Callable[[nn.Module, Tensor], Any]) -> Loop:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        for batch in batches:
            act(model, model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        return []

    return loop


PARTIAL: dict[str, Loop] = {
    "grad of weights": other(lambda model, loss: torch.autograd.grad(loss, list(model.parameters()))),
    "inputs": other(lambda model, loss: loss.backward(inputs=[model.between])),
    "grad of an input": other(lambda model, loss: torch.autograd.grad(loss, model.between)),
    "create_graph": other(lambda model, loss: loss.backward(create_graph=True)),
}


class Between(Net):
    """Keeps a tensor from before the layers, for adversarial training."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        self.__dict__["between"] = x
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@recorded_or_run_again
@pytest.mark.parametrize("name", PARTIAL)
def test_other_ways_to_differentiate_are_refused(name: str, options: tuple[str, ...]) -> None:
    assert "call loss.backward()" in fault(options, PARTIAL[name], Between)


class Penalized(Between):
    """Penalizes the gradient of the layers' input within the step."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = super().forward(ids, labels)["loss"]
        (gradient,) = torch.autograd.grad(loss, self.between, retain_graph=True)
        return {"loss": loss + gradient.norm()}


def test_differentiating_within_the_step_is_refused_before_training() -> None:
    assert "the step calls torch.autograd.grad: a block's backward" in refusal(Penalized)


class Outside(nn.Module):
    """Has weights outside the blocks, one of which is used between all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.position = nn.Parameter(torch.zeros(HIDDEN))
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.net.embed(ids) + self.position
        for layer in self.net.layers:
            x = layer(x) * self.gain
        return {"loss": F.cross_entropy(self.net.head(x).flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize("run", [*RUNS, *BUDGETS])
def test_hooks_of_parameters_with_common_state(run: str) -> None:
    """They are called in the order of plain PyTorch, whatever runs in turn and where updates are."""
    called: list[str] = []

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        def count(name: str, gradient: Tensor) -> Tensor:
            called.append(name)
            return gradient.mul_(1 + 0.01 * (len(called) % 7))

        for name, parameter in model.named_parameters():
            parameter.register_hook(partial(count, name))
        return ordinary(model, optimizer, batches)

    make = Outside if run in RUNS else Net
    expected = plain(make, loop)
    order, called = called, []
    found = ours(make, RUNS[run], loop) if run in RUNS else by_budget(make, run, loop)
    assert differences(expected, found) == []
    assert order == called


# -- weights and states between steps ----------------------------------------------------------------------------------


@with_every_budget
def test_an_ordinary_loop(budget: str) -> None:
    assert differences(plain(Net), by_budget(Net, budget)) == []


def evaluating(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """Forwards with a graph that nobody uses, reading and saving in between."""
    found = []
    for batch in batches:
        found.append(model(**batch)["loss"].detach().clone())
        found += [value.clone() for value in model.state_dict().values()]
        found += ordinary(model, optimizer, [batch])
        found += [state["exp_avg"].clone() for state in optimizer.state.values()]
        found += [copy.deepcopy(model)(**batch)["loss"].detach()]
        found += [p.clone() for p in pickle.loads(pickle.dumps(model.layers)).parameters()]
    return found


@pytest.mark.sampled("recorded")
@in_every_run
def test_reading_saving_and_copying_between_steps(options: tuple[str, ...]) -> None:
    assert differences(plain(Net, evaluating), ours(Net, options, evaluating)) == []


def holding(hold: Callable[[nn.Module], list[Any]]) -> tuple[Callable[[], Net], Loop]:
    """A net whose memory somebody else holds before training, and a loop that reads and writes through that."""

    def make() -> Net:
        net = Net()
        net.__dict__["kept"] = hold(net)
        return net

    def loop(model: Any, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        found = []
        for batch in batches:
            found += ordinary(model, optimizer, [batch])
            found += [torch.tensor(np.asarray(kept)) for kept in model.kept]
            for kept in model.kept[::3]:
                kept *= 0.9
        return found

    return make, loop


HOLDERS: dict[str, Callable[[nn.Module], list[Any]]] = {
    "state dict": lambda net: list(net.state_dict().values()),
    "arrays": lambda net: [p.detach().numpy() for p in net.parameters()],
    "a view": lambda net: [net.layers[1].linear.weight.detach()[3]],  # type: ignore[union-attr, index]
    "dlpack": lambda net: [torch.from_dlpack(p.detach()) for p in net.parameters()],
    "shared memory": lambda net: [p.detach() for p in net.share_memory().parameters()],
}


@pytest.mark.parametrize(("name", "options"), sampling.grid(HOLDERS, RUNS.values(), count=7))
@pytest.mark.sampled("arrays")
def test_memory_that_somebody_holds_before_training(name: str, options: tuple[str, ...]) -> None:
    make, loop = holding(HOLDERS[name])
    expected, found = plain(make, loop), ours(make, options, loop)
    assert differences(expected, found) == []
    for left, right in zip(expected.model.kept, found.model.kept, strict=True):
        assert np.array_equal(np.asarray(left), np.asarray(right))
